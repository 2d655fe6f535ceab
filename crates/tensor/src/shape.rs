//! The extents of a tensor, kept inline.

use std::fmt;
use std::ops::Deref;

use crate::TensorError;

/// The largest number of dimensions a tensor may have.
pub const MAX_RANK: usize = 8;

/// The size of a tensor in each dimension, in elements, outermost first. Derefs to a slice.
///
/// No dimensions at all is a scalar, with one element. A size of 0 makes the tensor empty. The product of the other
/// sizes always fits an `isize`, so element counts and row-major strides never overflow.
///
/// ```
/// use antiphon_tensor::Shape;
///
/// let shape = Shape::new(&[4, 2, 3])?;
/// assert_eq!((shape.len(), shape[0], shape.numel()), (3, 4, 24));
/// assert_eq!(*shape.row_major(), [6, 3, 1]);
/// # Ok::<(), antiphon_tensor::TensorError>(())
/// ```
// Unused places are 0, so that derived equality and hashing are right. `numel` is always the product of `sizes`: views
// are asked for it more often than they are made.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    sizes: [usize; MAX_RANK],
    numel: usize,
    rank: usize,
}

impl Shape {
    /// The shape without dimensions.
    pub(crate) const SCALAR: Shape = Shape { sizes: [0; MAX_RANK], numel: 1, rank: 0 };

    /// A shape of these sizes.
    ///
    /// # Errors
    ///
    /// [`TensorError::RankTooHigh`] beyond [`MAX_RANK`] sizes, [`TensorError::ShapeOverflow`] if even one-byte
    /// elements would not fit an address space.
    #[inline]
    pub fn new(sizes: &[usize]) -> Result<Shape, TensorError> {
        let mut shape = Shape::SCALAR;
        shape.fill(sizes)?;
        Ok(shape)
    }

    /// [`new`](Shape::new) in place of [`SCALAR`](Shape::SCALAR). What `self` is after an error does not matter.
    #[inline]
    pub(crate) fn fill(&mut self, sizes: &[usize]) -> Result<(), TensorError> {
        let rank = check_rank(sizes)?;
        let (mut numel, mut extent) = (1_usize, 1_usize);
        for (place, &size) in self.sizes.iter_mut().zip(sizes) {
            *place = size;
            numel = numel.wrapping_mul(size); // at most `extent`, unless that is refused
            extent = match extent.checked_mul(size.max(1)) {
                Some(extent) if extent <= isize::MAX as usize => extent,
                _ => return Err(too_large(sizes, 1)),
            };
        }
        (self.numel, self.rank) = (numel, rank);
        Ok(())
    }

    /// The shape of a slice, whose length the language already bounds.
    #[inline]
    pub(crate) const fn vector(len: usize) -> Shape {
        let mut shape = Shape { numel: len, rank: 1, ..Shape::SCALAR };
        shape.sizes[0] = len;
        shape
    }

    /// The number of elements.
    #[inline]
    pub const fn numel(&self) -> usize {
        self.numel
    }

    /// The strides of this shape in contiguous memory, the last dimension varying fastest. A size of 0 counts as 1.
    #[inline]
    pub fn row_major(&self) -> Strides {
        let mut strides = Strides::SCALAR;
        strides.fill_row_major(self);
        strides
    }

    /// The shape with a dimension, which it has, made no larger.
    pub(crate) fn shrunk(mut self, dim: usize, size: usize) -> Shape {
        self.sizes[dim] = size;
        self.numel = self.iter().product();
        self
    }

    /// The shape with two dimensions, which it has, exchanged.
    pub(crate) fn swapped(mut self, first: usize, second: usize) -> Shape {
        self.sizes.swap(first, second);
        self
    }

    /// The shape without a dimension, which it has with size 1.
    pub(crate) fn without(mut self, dim: usize) -> Shape {
        close_gap(&mut self.sizes, dim);
        self.rank -= 1;
        self
    }
}

/// The step between neighbours in each dimension of a tensor, in elements, outermost first. Derefs to a slice.
///
/// A step of 0 repeats the same elements (broadcasting); a negative one walks backwards.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Strides {
    steps: [isize; MAX_RANK],
    rank: usize,
}

impl Strides {
    /// The strides without dimensions.
    pub(crate) const SCALAR: Strides = Strides { steps: [0; MAX_RANK], rank: 0 };

    /// Strides of these steps.
    ///
    /// # Errors
    ///
    /// [`TensorError::RankTooHigh`] beyond [`MAX_RANK`] steps.
    #[inline]
    pub fn new(steps: &[isize]) -> Result<Strides, TensorError> {
        let mut strides = Strides::SCALAR;
        strides.fill(steps)?;
        Ok(strides)
    }

    /// [`new`](Strides::new) in place of [`SCALAR`](Strides::SCALAR).
    #[inline]
    pub(crate) fn fill(&mut self, steps: &[isize]) -> Result<(), TensorError> {
        self.rank = check_rank(steps)?;
        self.steps[..steps.len()].copy_from_slice(steps);
        Ok(())
    }

    /// [`Shape::row_major`] in place of [`SCALAR`](Strides::SCALAR).
    #[inline]
    pub(crate) fn fill_row_major(&mut self, shape: &Shape) {
        self.rank = shape.rank;
        let mut step = 1;
        for (place, &size) in self.steps.iter_mut().zip(shape.iter()).rev() {
            *place = step;
            step *= size.max(1) as isize;
        }
    }

    /// The stride of a slice.
    #[inline]
    pub(crate) const fn vector() -> Strides {
        let mut strides = Strides { rank: 1, ..Strides::SCALAR };
        strides.steps[0] = 1;
        strides
    }

    /// The steps, to change.
    #[inline]
    pub(crate) fn steps_mut(&mut self) -> &mut [isize] {
        &mut self.steps[..self.rank]
    }

    /// The strides with two dimensions, which they have, exchanged.
    pub(crate) fn swapped(mut self, first: usize, second: usize) -> Strides {
        self.steps.swap(first, second);
        self
    }

    /// The strides without a dimension, which they have.
    pub(crate) fn without(mut self, dim: usize) -> Strides {
        close_gap(&mut self.steps, dim);
        self.rank -= 1;
        self
    }
}

/// The number of dimensions, if it is supported.
#[inline]
fn check_rank<T>(values: &[T]) -> Result<usize, TensorError> {
    let rank = values.len();
    if rank <= MAX_RANK { Ok(rank) } else { Err(TensorError::RankTooHigh { rank }) }
}

/// The error for a shape that cannot be addressed, kept out of the functions that are inlined.
#[cold]
pub(crate) fn too_large(shape: &[usize], element_size: usize) -> TensorError {
    TensorError::ShapeOverflow { shape: shape.to_vec(), element_size }
}

/// Moves what is behind `dim` onto it, filling up with a zero.
fn close_gap<T: Copy + Default>(values: &mut [T; MAX_RANK], dim: usize) {
    values.copy_within(dim + 1.., dim);
    values[MAX_RANK - 1] = T::default();
}

/// Makes one of the two a slice with the usual conversions, shown as one.
macro_rules! as_slice {
    ($type:ident, $field:ident, $item:ty) => {
        impl Deref for $type {
            type Target = [$item];

            #[inline]
            fn deref(&self) -> &[$item] {
                &self.$field[..self.rank]
            }
        }

        impl AsRef<[$item]> for $type {
            #[inline]
            fn as_ref(&self) -> &[$item] {
                self
            }
        }

        impl TryFrom<&[$item]> for $type {
            type Error = TensorError;

            #[inline]
            fn try_from(values: &[$item]) -> Result<Self, TensorError> {
                $type::new(values)
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.deref().fmt(f)
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(self, f)
            }
        }
    };
}

as_slice!(Shape, sizes, usize);
as_slice!(Strides, steps, isize);

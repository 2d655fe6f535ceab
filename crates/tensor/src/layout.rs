//! Index arithmetic: which element of memory an index means.

use crate::shape::too_large;
use crate::{MAX_RANK, Shape, Strides, TensorError};

/// A shape with strides.
///
/// Promised of every layout: shape and strides have the same rank, and for the element size it was made with, the
/// bytes of all elements and the byte distance between any two fit an `isize`. Every method keeps this, since each
/// result reaches a part of what `self` reaches.
#[derive(Clone, Copy)]
pub(crate) struct Layout {
    shape: Shape,
    strides: Strides,
    /// Decided once, because views are asked for it on every call.
    contiguous: bool,
}

/// The lowest and highest element that a layout reaches, relative to index zero.
pub(crate) struct Reach {
    pub(crate) lowest: isize,
    pub(crate) highest: isize,
}

/// A part of a layout, and how many elements its index zero lies behind the whole's. The offset is 0 if the part is
/// empty: a pointer must not move where no element is.
pub(crate) struct Part {
    pub(crate) layout: Layout,
    pub(crate) offset: isize,
}

impl Layout {
    /// The layout of a single element.
    pub(crate) const SCALAR: Layout =
        Layout { shape: Shape::SCALAR, strides: Strides::SCALAR, contiguous: true };

    /// The layout of a slice.
    #[inline]
    pub(crate) const fn vector(len: usize) -> Layout {
        Layout { shape: Shape::vector(len), strides: Strides::vector(), contiguous: true }
    }

    /// Makes [`SCALAR`](Layout::SCALAR) a layout of this shape, row-major unless strides are given, checked for
    /// elements of `element_size` bytes. What `self` is after an error does not matter.
    ///
    /// In place, because views are made on every call and moving a layout costs more than filling it in.
    #[inline]
    pub(crate) fn fill(
        &mut self,
        shape: &[usize],
        strides: Option<&[isize]>,
        element_size: usize,
    ) -> Result<(), TensorError> {
        self.shape.fill(shape)?;
        if self.numel().checked_mul(element_size).is_none_or(|bytes| bytes > isize::MAX as usize) {
            return Err(too_large(shape, element_size));
        }
        match strides {
            None => {
                self.strides.fill_row_major(&self.shape);
                Ok(())
            }
            Some(steps) => self.fill_strides(steps, element_size),
        }
    }

    /// The strided case of [`fill`](Layout::fill), after the shape.
    fn fill_strides(&mut self, steps: &[isize], element_size: usize) -> Result<(), TensorError> {
        if steps.len() != self.shape.len() {
            return Err(TensorError::StrideCount { shape: self.shape.to_vec(), strides: steps.to_vec() });
        }
        self.strides.fill(steps)?;
        self.contiguous = in_order(&self.shape, &self.strides);
        // 128 bits are enough: the sizes' product fits 63 bits, so their sum does, and each stride fits 64.
        let (lowest, highest) = self.reach_wide();
        if highest - lowest >= isize::MAX as i128 / element_size as i128 {
            return Err(TensorError::StrideOverflow { shape: self.shape.to_vec(), strides: steps.to_vec() });
        }
        Ok(())
    }

    /// The layout of this shape without gaps.
    fn row_major(shape: Shape) -> Layout {
        Layout { shape, strides: shape.row_major(), contiguous: true }
    }

    /// A shape with strides of the same rank, which keep the promise of the type.
    #[inline]
    fn from_parts(shape: Shape, strides: Strides) -> Layout {
        Layout { shape, strides, contiguous: in_order(&shape, &strides) }
    }

    /// The size in each dimension.
    #[inline]
    pub(crate) fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The step in each dimension.
    #[inline]
    pub(crate) fn strides(&self) -> &Strides {
        &self.strides
    }

    /// The number of elements.
    #[inline]
    pub(crate) fn numel(&self) -> usize {
        self.shape.numel()
    }

    /// Whether the elements lie in row-major order without gaps.
    #[inline]
    pub(crate) fn is_contiguous(&self) -> bool {
        self.contiguous
    }

    /// The outermost elements, or `None` if there are no elements.
    pub(crate) fn reach(&self) -> Option<Reach> {
        let (lowest, highest) = self.reach_wide();
        // The casts are exact by the promise of the type.
        (self.numel() > 0).then_some(Reach { lowest: lowest as isize, highest: highest as isize })
    }

    /// The outermost elements of strides that have not been checked yet; (0, 0) if there are no elements.
    fn reach_wide(&self) -> (i128, i128) {
        let (mut lowest, mut highest) = (0, 0);
        if self.numel() == 0 {
            return (lowest, highest);
        }
        for (&size, &stride) in self.shape.iter().zip(self.strides.iter()) {
            let end = (size - 1) as i128 * stride as i128;
            *(if end < 0 { &mut lowest } else { &mut highest }) += end;
        }
        (lowest, highest)
    }

    /// Whether two indices may mean the same element.
    ///
    /// Deciding this exactly is a knapsack problem. The test here is that every dimension, taken by growing stride,
    /// steps over all that the former ones reach: true of anything cut out of row-major memory, but interleavings
    /// such as strides [2, 3] over shape [3, 2] count as overlapping though they are not.
    pub(crate) fn may_overlap(&self) -> bool {
        if self.numel() == 0 {
            return false;
        }
        let mut dims = [(0, 0); MAX_RANK];
        for (dim, (&size, &stride)) in dims.iter_mut().zip(self.shape.iter().zip(self.strides.iter())) {
            *dim = (if size == 1 { 0 } else { stride.unsigned_abs() }, size - 1);
        }
        dims.sort_unstable();
        let mut reach = 0;
        dims.iter().filter(|&&(_, steps)| steps > 0).any(|&(stride, steps)| {
            let overlaps = stride <= reach;
            reach += stride * steps;
            overlaps
        })
    }

    /// The element that an index means, relative to index zero.
    #[inline]
    pub(crate) fn offset(&self, index: &[usize]) -> Result<isize, TensorError> {
        let inside = index.len() == self.shape.len()
            && index.iter().zip(self.shape.iter()).all(|(at, size)| at < size);
        if !inside {
            return Err(TensorError::IndexOutOfBounds { index: index.to_vec(), shape: self.shape.to_vec() });
        }
        Ok(index.iter().zip(self.strides.iter()).map(|(&at, &stride)| at as isize * stride).sum())
    }

    /// The part with indices `start..start + len` of a dimension.
    pub(crate) fn narrow(self, dim: usize, start: usize, len: usize) -> Result<Part, TensorError> {
        let size = self.size(dim)?;
        if start.checked_add(len).is_none_or(|end| end > size) {
            return Err(TensorError::RangeOutOfBounds { dim, start, len, size });
        }
        let layout = Layout::from_parts(self.shape.shrunk(dim, len), self.strides);
        let offset = if layout.numel() == 0 { 0 } else { start as isize * self.strides[dim] };
        Ok(Part { layout, offset })
    }

    /// The part at one index of a dimension, without that dimension.
    pub(crate) fn select(self, dim: usize, index: usize) -> Result<Part, TensorError> {
        let Part { layout, offset } = self.narrow(dim, index, 1)?;
        let layout = Layout::from_parts(layout.shape.without(dim), layout.strides.without(dim));
        Ok(Part { layout, offset })
    }

    /// The layout with two dimensions exchanged.
    pub(crate) fn transpose(self, first: usize, second: usize) -> Result<Layout, TensorError> {
        self.size(first)?;
        self.size(second)?;
        Ok(Layout::from_parts(self.shape.swapped(first, second), self.strides.swapped(first, second)))
    }

    /// The same elements in the same row-major order under another shape.
    pub(crate) fn reshape(&self, shape: &[usize]) -> Result<Layout, TensorError> {
        let to = Shape::new(shape)?;
        if to.numel() != self.numel() {
            return Err(TensorError::ReshapeCount { shape: self.shape.to_vec(), to: shape.to_vec() });
        }
        if self.is_contiguous() {
            return Ok(Layout::row_major(to));
        }
        let strides = self.split_runs(&to).ok_or_else(|| TensorError::ReshapeNeedsCopy {
            shape: self.shape.to_vec(),
            strides: self.strides.to_vec(),
            to: shape.to_vec(),
        })?;
        Ok(Layout::from_parts(to, strides))
    }

    /// The strides for a shape with as many elements, or `None` if one of its dimensions would cross from one run
    /// of evenly spaced elements into the next.
    fn split_runs(&self, to: &Shape) -> Option<Strides> {
        let (runs, count) = self.runs();
        let mut runs = runs[..count].iter().copied();
        let mut run = Run { len: 1, stride: 1 };
        let mut strides = to.row_major();
        for (stride, &size) in
            strides.steps_mut().iter_mut().zip(to.iter()).rev().filter(|(_, size)| **size > 1)
        {
            if run.len == 1 {
                run = runs.next()?;
            }
            if !run.len.is_multiple_of(size) {
                return None;
            }
            *stride = run.stride;
            run.len /= size;
            run.stride = run.stride.wrapping_mul(size as isize); // can wrap only when the run is used up
        }
        Some(strides)
    }

    /// The dimensions, innermost first, with those merged that together are evenly spaced; and their number.
    fn runs(&self) -> ([Run; MAX_RANK], usize) {
        let mut runs = [Run { len: 1, stride: 1 }; MAX_RANK];
        let mut count = 0;
        for (&size, &stride) in
            self.shape.iter().zip(self.strides.iter()).rev().filter(|(size, _)| **size > 1)
        {
            match runs[..count].last_mut() {
                Some(run) if run.stride.checked_mul(run.len as isize) == Some(stride) => run.len *= size,
                _ => {
                    runs[count] = Run { len: size, stride };
                    count += 1;
                }
            }
        }
        (runs, count)
    }

    /// The size of a dimension.
    fn size(&self, dim: usize) -> Result<usize, TensorError> {
        let rank = self.shape.len();
        self.shape.get(dim).copied().ok_or(TensorError::DimOutOfBounds { dim, rank })
    }
}

/// Evenly spaced elements.
#[derive(Clone, Copy)]
struct Run {
    len: usize,
    stride: isize,
}

/// Whether elements lie in row-major order without gaps. Where a size is 1 the stride is never stepped, and where one
/// is 0 there is nothing to order.
#[inline]
fn in_order(shape: &Shape, strides: &Strides) -> bool {
    let mut step = 1_isize;
    let mut in_order = true;
    for (&size, &stride) in shape.iter().zip(strides.iter()).rev() {
        in_order &= size == 1 || stride == step;
        step = step.wrapping_mul(size as isize); // a shape's product fits, and of 0 nothing is compared
    }
    in_order || shape.numel() == 0
}

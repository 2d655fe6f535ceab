//! What a collective moves: element types, the one rounding that ends every reduction, and borrowed views of
//! memory that somebody else owns.
//!
//! Nothing here allocates, copies or knows a device's driver. A [`TensorView`] is a pointer with a [`DType`], a
//! shape, strides and a [`Device`], all inline: making one from a slice costs a few stores, so an operation can
//! take `impl Into<TensorView<'_>>` and be called with a plain slice.
//!
//! ```
//! use antiphon_tensor::{DType, TensorView, TensorViewMut, bf16};
//!
//! // Any slice, vector or array of elements is a one-dimensional view.
//! let weights = [1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0];
//! let row: TensorView<'_> = (&weights).into();
//! assert_eq!((row.dtype(), row.shape()), (DType::F32, &[6][..]));
//!
//! // A shape gives it more; select, narrow, transpose and reshape move no data.
//! let matrix = TensorView::new(&weights, &[2, 3])?;
//! let columns = matrix.transpose(0, 1)?;
//! assert_eq!(columns.shape(), [3, 2]);
//! assert_eq!(columns.get_f64(&[2, 1])?, 6.0);
//!
//! // What needs row-major memory says so instead of guessing.
//! assert_eq!(
//!     columns.contiguous().unwrap_err().to_string(),
//!     "a tensor of shape [3, 2] with strides [1, 3] is not contiguous: make it contiguous (row-major) first",
//! );
//!
//! // A mutable view is exclusive, and narrows with exactly one rounding.
//! let mut sums = vec![bf16::ZERO; 4];
//! let mut view = TensorViewMut::new(&mut sums, &[2, 2])?;
//! view.set_f64(&[1, 0], 1.0 + 1.0 / 256.0)?; // halfway between two bf16 values: to the even one
//! assert_eq!(view.as_slice::<bf16>()?[2], bf16::from_f32(1.0));
//! # Ok::<(), antiphon_tensor::TensorError>(())
//! ```
//!
//! # Same bits everywhere
//!
//! A reduction accumulates in a wide type and rounds once, so its result does not depend on who computed it. That
//! holds only if the final conversion is the same function on every CPU and GPU: [`round`] defines it, to nearest
//! with ties to even, subnormals kept, and *one* NaN, since hardware disagrees about NaN payloads.
//!
//! # Where things are
//!
//! | concept | items |
//! | --- | --- |
//! | element types | [`DType`] at run time, [`Element`] at compile time, [`with_dtype!`] from one to the other |
//! | conversions | [`round`] |
//! | extents | [`Shape`], [`Strides`], [`MAX_RANK`] |
//! | memory | [`TensorView`], [`TensorViewMut`], [`Device`] |
//! | refusals | [`TensorError`] |

mod device;
mod dtype;
mod element;
mod error;
mod layout;
pub mod round;
mod shape;
mod view;

pub use device::Device;
pub use dtype::DType;
pub use element::Element;
pub use error::TensorError;
pub use half::{bf16, f16};
pub use shape::{MAX_RANK, Shape, Strides};
pub use view::{TensorView, TensorViewMut};

//! Tensors and number formats: element types, the rounding at the end of every reduction, borrowed views of
//! memory, and quantised formats.
//!
//! This crate copies no data and uses no device's driver; only an export to [`dlpack`] allocates. A [`TensorView`] is a
//! pointer with a [`DType`], a shape, strides and a [`Device`], all inline: making one from a slice costs a few stores,
//! so an operation can take `impl Into<TensorView<'_>>` and be called with a plain slice.
//!
//! ```
//! use antiphon_tensor::{DType, TensorView, TensorViewMut, bf16};
//!
//! // Any slice, vector or array of elements is a one-dimensional view.
//! let weights = [1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0];
//! let row: TensorView<'_> = (&weights).into();
//! assert_eq!((row.dtype(), row.shape()), (DType::F32, &[6][..]));
//!
//! // A shape gives it more dimensions; select, narrow, transpose and reshape move no data.
//! let matrix = TensorView::new(&weights, &[2, 3])?;
//! let columns = matrix.transpose(0, 1)?;
//! assert_eq!(columns.shape(), [3, 2]);
//! assert_eq!(columns.get_f64(&[2, 1])?, 6.0);
//!
//! // Operations that need row-major memory refuse other layouts.
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
//! A reduction accumulates in a wide type and rounds once, so its result does not depend on the device that computed it. This
//! holds only if the final conversion is the same function on every CPU and GPU: [`round`] defines it, to nearest
//! with ties to even, subnormals kept, and *one* NaN, since hardware disagrees about NaN payloads.
//!
//! # Formats of eight and four bits
//!
//! This crate defines the scalar formats of FP8 and FP4 and the quantisation of rows bit by bit, because the kernels of all
//! backends must agree on them. Codes and scales are bytes, in tensors of [`DType::U8`]: operations can move them, but
//! codes cannot be reduced without their scales.
//!
//! ```
//! use antiphon_tensor::{E4M3, ScaleLayout, quantize::{NvFp4, fp8_static}};
//!
//! let row: Vec<f32> = (0..64).map(|i| i as f32 / 8.0).collect();
//!
//! let mut fp8 = vec![0; 64];
//! fp8_static(&row, 1.0, &mut fp8)?;
//! assert_eq!(E4M3::from_bits(fp8[20]).to_f32(), 2.5);
//!
//! let format = NvFp4::new(1, 64, ScaleLayout::Swizzled128x4)?;
//! let (mut fp4, mut scales) = (vec![0; format.code_bytes()], vec![0; format.scale_grid().size()]);
//! format.quantize(&row, 448.0 * 6.0 / 7.875, &mut fp4, &mut scales)?;
//! assert_eq!((fp4.len(), scales.len()), (32, 512));
//! # Ok::<(), antiphon_tensor::TensorError>(())
//! ```
//!
//! # Contents
//!
//! | concept | items |
//! | --- | --- |
//! | element types | [`DType`] at run time, [`Element`] at compile time, [`with_dtype!`] from one to the other |
//! | conversions | [`round`] |
//! | extents | [`Shape`], [`Strides`], [`MAX_RANK`] |
//! | memory | [`TensorView`], [`TensorViewMut`], [`Device`] |
//! | formats of eight and four bits | [`E4M3`], [`E5M2`], [`E2M1`], [`UE8M0`] |
//! | quantised rows | [`quantize`] |
//! | the order of scales | [`ScaleLayout`], [`ScaleGrid`], [`PackedScales`], [`compute_fp4_swizzled_layout_sf_size`] |
//! | tensors from and to PyTorch, NumPy and others | [`dlpack`] |
//! | refusals | [`TensorError`] |

mod device;
pub mod dlpack;
mod dtype;
mod element;
mod error;
mod float4;
mod float8;
mod layout;
pub mod quantize;
pub mod round;
mod scale;
mod scale_layout;
mod shape;
mod small_float;
mod view;

pub use device::Device;
pub use dtype::DType;
pub use element::Element;
pub use error::TensorError;
pub use float4::E2M1;
pub use float8::{E4M3, E5M2};
pub use half::{bf16, f16};
pub use scale::UE8M0;
pub use scale_layout::{PackedScales, ScaleGrid, ScaleLayout, compute_fp4_swizzled_layout_sf_size};
pub use shape::{MAX_RANK, Shape, Strides};
pub use view::{TensorView, TensorViewMut};

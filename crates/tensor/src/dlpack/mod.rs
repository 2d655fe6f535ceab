//! Tensors to and from other libraries, without a copy: DLPack.
//!
//! [DLPack](https://dmlc.github.io/dlpack) is how PyTorch, JAX, CuPy, NumPy and others lend each other memory: a C
//! struct with an address, an element type, a shape and strides, and a *deleter* that its consumer finally calls
//! once. In Python the pointer to the struct travels in a capsule; this module knows the struct and no Python.
//!
//! [`Exported`] lends memory: it binds an owner, whatever keeps the memory alive, to a description. [`Imported`]
//! borrows memory: it checks a struct from another library, gives [views](crate::TensorView), and calls the
//! deleter when it is dropped.
//!
//! ```
//! use std::sync::Arc;
//!
//! use antiphon_tensor::dlpack::{Exported, Imported};
//! use antiphon_tensor::{DType, Device, TensorError};
//!
//! let data = Arc::new(vec![1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0]);
//! let (owner, address) = (Arc::clone(&data), data.as_ptr().cast_mut().cast());
//!
//! // SAFETY: the owner keeps the vector alive and where it is, and shared memory is lent to read only.
//! let exported = unsafe { Exported::new(owner, address, DType::F32, &[2, 3], None, Device::Host) }?;
//! let lent = exported.read_only().into_versioned(); // for a capsule named "dltensor_versioned"
//!
//! // SAFETY: the struct is fresh, this is its only consumer, and no other code writes the vector.
//! let mut imported = unsafe { Imported::from_versioned(lent) }?;
//! assert_eq!(imported.view()?.shape(), [2, 3]);
//! assert_eq!(imported.view()?.get_f64(&[1, 2])?, 6.0);
//! assert_eq!(imported.view_mut().unwrap_err(), TensorError::ReadOnly);
//!
//! assert_eq!(Arc::strong_count(&data), 2);
//! drop(imported); // the deleter drops the owner
//! assert_eq!(Arc::strong_count(&data), 1);
//! # Ok::<(), TensorError>(())
//! ```
//!
//! # Versions
//!
//! The structs in [`sys`] are those of `dlpack.h` 1.3. Every 1.x has their layout: import takes any of them, and the
//! unversioned struct of before 1.0, which cannot say that a tensor is read-only. Export writes 1.3.
//!
//! # Where things are
//!
//! | concept | items |
//! | --- | --- |
//! | lending and borrowing | [`Exported`], [`Imported`] |
//! | types of elements, more than there are [`DType`](crate::DType)s | [`ElementType`] |
//! | segments at a stride in borrowed memory | [`strided_memory`] |
//! | the C structs | [`sys`] |

mod element_type;
mod export;
mod import;
mod strided;
pub mod sys;

pub use element_type::ElementType;
pub use export::Exported;
pub use import::Imported;
pub use strided::strided_memory;

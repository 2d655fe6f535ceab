//! The groups of ranks in a world.
//!
//! A *world* is a set of processes numbered `0..world_size`; one number is a *rank*. Parallel training and
//! inference divide the world into groups in several ways: the ranks that share a layer's weights (tensor
//! parallelism), a sequence (context parallelism), the layers (pipeline parallelism), the experts (expert
//! parallelism) or that work on different requests (data parallelism). This crate computes the
//! groups, the group of each rank and the rank's index in it, with plain integers and no I/O.
//!
//! # Meshes
//!
//! All these groupings have one form: the world is a [`Mesh`], a box whose axes are the factors of the
//! world size, and a [`Partition`] picks some of its axes. Ranks that agree on every other axis form a group.
//!
//! ```
//! use antiphon_topology::Mesh;
//!
//! // 8 ranks: 4 next to each other share the tensors, 2 stages share the layers.
//! let mesh = Mesh::new([4, 2])?;
//! let tensor = mesh.partition([true, false]);
//! let pipeline = mesh.partition([false, true]);
//! assert_eq!(tensor.to_vecs(), [[0, 1, 2, 3], [4, 5, 6, 7]]);
//! assert_eq!(pipeline.to_vecs(), [[0, 4], [1, 5], [2, 6], [3, 7]]);
//! # Ok::<(), antiphon_topology::TopologyError>(())
//! ```
//!
//! # Two layouts
//!
//! * [`Mapping`] is the layout of a model: tensor × context × pipeline parallelism, with the tensor ranks divided
//!   again for a mixture of experts. It has the attributes of `Mapping` in FlashInfer 0.6.18
//!   (comm/mapping.py), which comes from TensorRT-LLM.
//! * [`MixedLayout`] is the layout of one layer's communication where attention is data parallel and the rest
//!   tensor parallel, inside nodes and between them. It has the attributes of `ParallelInfo` in FlashInfer
//!   0.6.18 (comm/mixed_comm.py).
//!
//! ```
//! use antiphon_topology::{Mapping, MixedLayout, MixedOp};
//!
//! let mapping = Mapping::builder(16, 13).tp(4).pp(2).cp(2).build()?;
//! assert_eq!((mapping.tp_rank(), mapping.cp_rank(), mapping.pp_rank()), (1, 1, 1));
//! assert_eq!(mapping.cp_group(), [9, 13]);
//! assert_eq!(mapping.pp_layers(5), 3..5);
//!
//! let wrong = Mapping::builder(16, 0).tp(4).pp(2).build();
//! assert_eq!(
//!     wrong.unwrap_err().to_string(),
//!     "tp_size 4 × pp_size 2 × cp_size 1 = 8, but world_size is 16",
//! );
//!
//! let layout = MixedLayout::builder(8, 6).local_tp(2).build()?;
//! assert_eq!((layout.local_tp_size(), layout.local_dp_size()), (2, 4));
//! assert_eq!(layout.dp_group(), [0, 2, 4, 6]);
//! assert_eq!(layout.valid_ops(), [MixedOp::AllReduceAllGather, MixedOp::ReduceScatterAllReduce]);
//! # Ok::<(), antiphon_topology::TopologyError>(())
//! ```
//!
//! Every layout is consistent: a builder validates it, deserialisation
//! uses the same builder, and every error is a [`TopologyError`] that states the numbers.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod error;
mod mapping;
mod mesh;
mod mixed;
mod split;

pub use error::{Product, TopologyError};
pub use mapping::{GroupKind, Mapping, MappingBuilder};
pub use mesh::{Mesh, Partition};
pub use mixed::{MixedGroup, MixedLayout, MixedLayoutBuilder, MixedOp};

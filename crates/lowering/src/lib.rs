//! Rewrites of the collectives in a compiler's graph, with proofs: collectives are fused with the operations that follow
//! them, merged, ordered and placed in memory.
//!
//! A tensor-parallel layer sums over its ranks, adds a residual and computes a norm. Compilers treat these as a collective, a
//! wait and unrelated operations. This crate replaces them by one call ([`Kind::Fused`]) of `antiphon-collectives`.
//!
//! ```
//! use antiphon_lowering::{Costs, Graph, Options, World, check, lower};
//!
//! let graph = Graph::from_text("
//! group tp size 4
//! %x: bf16[16,4096] = input()
//! %residual: bf16[16,4096] = input()
//! %weight: bf16[4096] = input()
//! %partial: bf16[16,4096] = start(%x) prim=all_reduce group=tp red=sum token=0
//! %sum: bf16[16,4096] = wait(%partial) tokens=[0]
//! %add: bf16[16,4096] = binary(%sum, %residual) op=add
//! %wide: f32[16,4096] = cast(%add)
//! %square: f32[16,4096] = binary(%wide) op=pow scalar=2.0
//! %mean: f32[16,1] = reduce(%square) op=mean dims=[1] keepdim=true
//! %eps: f32[16,1] = binary(%mean) op=add scalar=1e-6
//! %rsqrt: f32[16,1] = unary(%eps) op=rsqrt
//! %scaled: f32[16,4096] = binary(%wide, %rsqrt) op=mul
//! %weighted: f32[16,4096] = binary(%scaled, %weight) op=mul
//! %norm: bf16[16,4096] = cast(%weighted)
//! return %norm, %add
//! ")?;
//! let world = World::default();
//! let lowered = lower(&graph, &world, &Costs::of(world.device), &Options::default());
//! assert_eq!(lowered.graph.ops.len(), 4); // three inputs, and one call
//! assert_eq!(check(&graph, &lowered.decisions, &lowered.graph), []);
//! println!("{}", lowered.report); // the rewrites, and the reasons for those that were not made
//! # Ok::<(), antiphon_lowering::LoweringError>(())
//! ```
//!
//! | | |
//! | --- | --- |
//! | a program | [`Graph`]: its [text](Graph::from_text), its [JSON](Graph::from_json), [torch's](Graph::from_torch) |
//! | its validity | [`verify()`] |
//! | its rewriting | [`lower()`], by [`Options`] and [`Costs`], with its [`Decisions`] and a [`Report`] |
//! | the proof that two programs are equal | [`check()`], [`race::detect`] |
//! | its results | [`interpret()`]; those of two programs: [`compare`], [`second_opinion`] |

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod analysis;
mod bag;
mod build;
mod costs;
mod decisions;
mod edits;
mod error;
#[cfg_attr(not(feature = "faults"), allow(dead_code))]
#[doc(hidden)]
pub mod faults;
#[doc(hidden)]
pub mod fuzz;
mod graph;
mod hash;
mod ids;
mod intern;
mod interpret;
mod json;
mod lists;
mod lower;
mod lowered;
mod numerics;
mod op;
mod options;
mod order;
mod places;
mod proof;
pub mod rules;
mod sym;
mod text;
mod torch;
mod types;
mod verify;

pub use analysis::{Analysis, Storage};
pub use build::MAX_TEXT_BYTES;
pub use costs::{Call, Costs, Device, Tables};
pub use decisions::{Choice, Completion, Decisions, PlannedCall, Slot};
pub use edits::{Edits, NewOp, NewValue};
pub use error::{Finding, FindingKind, LoweringError};
pub use graph::{Graph, Group, MAX_OPS, Names, Op, Value};
pub use ids::{OpId, StoreId, TokenId, ValueId};
pub use interpret::{Arithmetic, Difference, Opinion, Tensor, compare, interpret, second_opinion};
pub use lower::lower;
pub use lowered::{Lowered, Refusal, Report, Rewrite};
pub use numerics::Numerics;
pub use op::{
    Alias, Binary, Coll, Fused, FusedArg, FusedOutput, Kind, Prim, Quantize, Reduction, ResultMemory, Unary,
    View,
};
pub use options::{Options, Realize, World};
pub use proof::{check::check, race};
pub use sym::{Range, Sym, SymExpr};
pub use torch::spelled;
pub use types::{Class, CommReq, Element, Roles, Type};
pub use verify::verify;

//! # antiphon-executor: the execution of plans
//!
//! A [`Plan`](antiphon_plan::Plan) lists the operations of every thread block of every rank. A [`LoadedPlan`] executes them on
//! a communicator, any number of times, with tensors of every size and dtype that the plan supports. An
//! [`AlgorithmCollection`] has several plans, and chooses one that supports the call. [`cuda`] executes plans between GPUs; the rest
//! of this page is about the host.
//!
//! ```
//! use antiphon_executor::{ExecutorError, LoadedPlan, Options};
//! use antiphon_fabric::LocalWorld;
//! use antiphon_plan::{Plan, verify::{Options as Proof, VerifiedPlan}};
//!
//! // One rank, which copies its input.
//! let text = r#"{"name": "copy", "collective": "test", "gpus": [{
//!     "id": 0, "input_chunks": 1, "output_chunks": 1, "scratch_chunks": 0, "channels": [],
//!     "threadblocks": [{"id": 0, "channels": [], "remote_buffer_refs": [], "ops": [
//!         {"name": "copy", "src_buff": [{"type": "i", "index": 0, "size": 1}],
//!          "dst_buff": [{"type": "o", "index": 0, "size": 1}]}]}]}]}"#;
//! let proved = VerifiedPlan::new(Plan::from_json(text.as_bytes())?, &Proof::default()).expect("a plan that is right");
//! let outputs = LocalWorld::run(1, |comm| {
//!     let mut plan = LoadedPlan::load(&comm, &proved, Options::default())?;
//!     let mut output = [0f32; 4];
//!     plan.execute(&comm, &[1f32, 2.0, 3.0, 4.0], &mut output)?;
//!     Ok::<_, ExecutorError>(output)
//! });
//! assert_eq!(outputs[0].as_ref().unwrap(), &[1.0, 2.0, 3.0, 4.0]);
//! # Ok::<(), antiphon_plan::PlanError>(())
//! ```
//!
//! ## The cost of a call
//!
//! Loading compares the plan between ranks and allocates its signals. The first call of a size compiles the plan for this size
//! and allocates memory; later calls allocate nothing. Ranks synchronise once before a call and once after it (two rounds),
//! in which they detect calls that do not match. Between the rounds they execute only the plan's operations.
//!
//! All ranks access tensors in symmetric memory
//! ([`symmetric`](antiphon_fabric::Communicator::symmetric)) in place. Of other tensors, the
//! chunks that *other* ranks access are copied through symmetric memory, once before and once after the plan's operations. A
//! large message is divided into slices that stay in the cache.
//!
//! ## Numerics
//!
//! A plan determines the order in which contributions are combined. Each of its reductions combines its sources in the order in
//! which the plan lists them, in f32 (f64 for f64, wrapping for integers), and rounds once; a NaN result is the canonical NaN. So a plan that
//! reduces all contributions in one operation in rank order gives the bits of
//! `antiphon-collectives`; a plan that reduces along a ring rounds at every hop. In both cases all calls give the same bits.
//!
//! ## Failures
//!
//! Every wait has the communicator's deadline and detects lost peers: [`ExecutorError::Stuck`] names the rank, the thread
//! block and the operation, the awaited state and the observed state. Only proved plans run
//! ([`VerifiedPlan`](antiphon_plan::verify::VerifiedPlan)), in launches of sizes that the proof covers. In addition, no
//! access leaves its buffer: this is checked when a plan is loaded and when it is compiled for a size.

#![warn(missing_docs)]

mod arguments;
mod collection;
pub mod cuda;
mod error;
mod host;
mod layout;
mod waiting;

pub use collection::AlgorithmCollection;
pub use error::{ExecutorError, Result};
pub use host::{LoadedPlan, Options};
pub use layout::PacketKind;
pub use waiting::Waiting;

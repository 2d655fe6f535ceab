//! # antiphon-executor: plans at work
//!
//! A [`Plan`](antiphon_plan::Plan) says what every thread block of every rank does. [`LoadedPlan`] does it, on a
//! communicator, as often as it is told to, with tensors of any size and dtype that the plan serves. [`AlgorithmCollection`] has
//! several, and takes the one that serves a call.
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
//! ## What a call costs
//!
//! Loading compares the plan between ranks and allocates its signals; the first call of a size compiles the plan for it
//! and makes room. Later calls allocate nothing. Ranks meet once before a call and once after it (two rounds), in which
//! calls that do not match are noticed. Between the two they do what the plan says, and nothing else.
//!
//! Tensors in symmetric memory ([`create_shared_buffer`](antiphon_fabric::Communicator::create_shared_buffer)) are read
//! and written by all ranks where they are. Of other tensors, those chunks that the plan lets *other* ranks touch are
//! copied through symmetric memory, once on the way in and once on the way out; a large message goes in slices that stay in
//! the cache meanwhile.
//!
//! ## Numerics
//!
//! A plan decides in which order contributions are combined. Each of its reductions combines its sources in the order in
//! which the plan lists them, in f32 (f64 for f64, wrapping for integers), and rounds once; NaN is canonical. So a plan that
//! reduces all contributions in one operation in rank order gives the bits of
//! `antiphon-collectives`; one that goes round a ring rounds at every hop. Either way every call gives the same bits.
//!
//! ## What can go wrong
//!
//! Every wait has the communicator's deadline and looks for lost peers: [`ExecutorError::Stuck`] names the rank, the thread
//! block and the operation, what it waited for and what it saw. Only plans that are proved
//! run ([`VerifiedPlan`](antiphon_plan::verify::VerifiedPlan)), and launches are no larger than the proof; apart from that, no
//! access leaves its buffer, which is checked when a plan is loaded and when it is compiled for a size.

#![warn(missing_docs)]

mod collection;
mod error;
mod host;
mod waiting;

pub use collection::AlgorithmCollection;
pub use error::{ExecutorError, Result};
pub use host::{LoadedPlan, Options, PacketKind};
pub use waiting::Waiting;

//! What `antiphon bench` measures. The command parses arguments and prints; this crate verifies and times.
//!
//! What is compared is a [`Contender`]: an algorithm of Antiphon, or NCCL. A *family* of operations is a file that makes the
//! contenders of its cases, and a *driver* measures any contender: it prepares, calls and checks it, times batches of calls, and
//! checks it again. A contender on the host is given the communicator, one on a GPU the stream that takes its call.
//!
//! | family | host | GPUs |
//! | --- | --- | --- |
//! | operations of the table, messages | `host/collectives.rs` | `cuda/collectives.rs` |
//! | all-reduce with what follows it in a model | | `cuda/fused.rs` |
//! | operations of a mixed layout | `host/mixed.rs` | `cuda/mixed.rs` |
//! | dispatch and combine of a mixture of experts | `host/moe.rs` | `cuda/moe.rs`, `cuda/forms.rs` |
//! | messages by the engine between machines | `host/engine.rs` | |
//! | execution plans | `host/plan.rs` | `cuda/plan.rs` |
//!
//! The drivers are [`host::measure`] for the host's clock, `cuda/table.rs` for graphs of calls between GPUs, and `cuda/tail.rs` for
//! ranks that do not start together. [`Settings`] has the cases, and [`run`] is the work of a rank.
//!
//! ```
//! use antiphon::prelude::*;
//! use antiphon_bench::{Contender, Pace, Result, Wrong, host};
//!
//! /// Sums by all-reduce.
//! struct Sum(Vec<f32>);
//!
//! impl Contender<&Communicator> for Sum {
//!     fn name(&self) -> Result<String> {
//!         Ok("in place".into())
//!     }
//!
//!     fn prepare(&mut self, _: &Communicator) -> Result<()> {
//!         Ok(self.0.fill(1.0))
//!     }
//!
//!     fn call(&mut self, comm: &Communicator) -> Result<()> {
//!         Ok(comm.all_reduce_in_place(&mut self.0, ReduceOp::Avg)?)
//!     }
//!
//!     fn check(&mut self, _: &Communicator) -> Result<Wrong> {
//!         let elements = self.0.iter().filter(|&&element| element != 1.0).count() as u64;
//!         Ok(Wrong { elements, worst: 0.0 })
//!     }
//! }
//!
//! let measured = LocalWorld::run(2, |comm| {
//!     let pace = Pace { iterations: Some(10), ..Pace::default() };
//!     host::measure(&comm, &mut Sum(vec![0.0; 64]), pace).unwrap()
//! });
//! assert!(measured[0].latency_us() > 0.0);
//! assert_eq!(measured[0].wrong.elements, 0);
//! ```

mod case;
pub mod cuda;
mod error;
pub mod host;
mod pattern;
mod row;
mod settings;

pub use case::Collective;
pub use cuda::tail::{
    CALLS as TAIL_CALLS, DTYPE as TAIL_DTYPE, HIDDEN as TAIL_HIDDEN, MOST_ROWS as TAIL_MOST_ROWS,
};
pub use error::{BenchError, Result};
pub use host::{
    Pace,
    mixed::{Mixed, Shape},
};
pub use pattern::Wrong;
pub use row::{Found, OnGpu, Quantiles, Row, TailRow, algbw_gbs};
pub use settings::{Algorithms, Device, Settings, Subject, Tail};

/// One way of doing what is measured. All ranks do the same with theirs. `At` is where it is called: the communicator on the
/// host, a stream on GPUs, where a call may return before it is done.
pub trait Contender<At> {
    /// The algorithm's name in the table. All ranks ask for it together.
    fn name(&self) -> Result<String>;

    /// Puts into the output what is no result, so that [`check`](Self::check) sees only what calls have written.
    fn prepare(&mut self, _at: At) -> Result<()> {
        Ok(())
    }

    /// Does it once.
    fn call(&mut self, at: At) -> Result<()>;

    /// Compares every element of this rank's output with what it must be, when the calls are done.
    fn check(&mut self, at: At) -> Result<Wrong>;

    /// Gives back what ranks give back together.
    fn finish(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

/// The work of a rank that the environment names: measures everything, and gives rank 0's findings to `report`.
///
/// # Errors
/// As the operations that are measured; [`BenchError::TooFewRanks`] for messages of a rank alone.
pub fn run(settings: &Settings, report: &dyn Fn(Found)) -> Result<()> {
    match settings.device {
        Device::Host => host::run(settings, report),
        Device::Cuda => cuda::run(settings, report),
    }
}

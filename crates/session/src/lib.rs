//! # antiphon-session: a rank's GPUs, and what runs on them
//!
//! A [`Session`] is a communicator with the GPUs that it is used with. An inference engine makes one for each rank, and shares it among
//! its threads.
//!
//! * **A GPU is opened once.** The first call on a GPU opens it: memory and kernels are set up, together with the other ranks, and so in
//!   the order of the communicator's calls. If the first calls of two threads meet, one of them opens the GPU and the other one finds it
//!   open.
//! * **A capture opens nothing.** The first call on a GPU whose stream is being captured is refused before anything happens
//!   ([`SessionError::Captured`]), and says what to do: [`Session::prepare`] before the capture.
//! * **All kinds of calls come from it.** Collectives are its methods; [`moe`](Session::moe), [`moe_slots`](Session::moe_slots),
//!   [`mixed`](Session::mixed), [`load_plan`](Session::load_plan) and [`plan_collection`](Session::plan_collection) hand out the others.
//!   What is handed out may outlive the session, whose end it obeys.
//! * **One action after a failure, one end.** [`Session::on_failure`] and [`Session::check`] are about all kinds of calls on all GPUs, also
//!   those that are opened later. [`Session::close`] closes them all.
//!
//! ```no_run
//! use antiphon_device::{ReduceOp, cuda::{Context, DeviceMemory, Driver, Graph}};
//! use antiphon_fabric::Communicator;
//! use antiphon_operation::{Call, Operation};
//! use antiphon_session::{Session, SessionError};
//! use antiphon_tensor::DType;
//!
//! let comm = Communicator::from_env()?; // a process for each GPU
//! let device = comm.rank() as u32;
//! let session = Session::new(comm);
//! session.prepare(device, &[(DType::BF16, ReduceOp::Sum)], None)?; // as there is a capture before any call
//!
//! let context = Context::primary(Driver::load()?.device(device)?)?;
//! let stream = context.stream()?;
//! let mut memory = DeviceMemory::allocate(&context, 2 << 20)?;
//! let sum = Call::new(Operation::AllReduce);
//! let graph = Graph::capture(&stream, |stream| {
//!     let activations = memory.view_mut(DType::BF16, &[1 << 20]).expect("as large as the memory");
//!     // SAFETY: no other work uses the memory, which lives until the stream has finished.
//!     unsafe { session.call(stream, &sum, activations) }
//! })?
//! .instantiate()?;
//! // SAFETY: as above.
//! unsafe { graph.launch(&stream) }?;
//! stream.borrow().synchronize()?;
//! session.check()?; // reports a lost peer, a deadline or a mismatch, as the next call would
//! session.close(); // as the end of `session` would
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! ## Locks
//!
//! A warm collective takes one lock, which only other threads' collectives contend for, and allocates nothing. Each other kind of calls
//! has a lock of its own; a call of experts, a mixed collective and a plan take one lock more. A thread takes its turn in the queue before
//! it takes such a lock, if it needs both, and a thread with such a lock waits for no other thread of the process.

#![warn(missing_docs)]

mod collection;
mod error;
mod failure;
mod gpu;
mod mixed;
mod moe;
mod moe_tuning;
mod order;
mod parts;
mod plan;
mod registered;
mod session;
mod slots;
mod started;
mod stream;
mod tensors;

pub use collection::{PlanCollection, Said};
pub use error::{Result, SessionError};
pub use failure::FailureAction;
pub use gpu::REDUCED;
pub use mixed::MixedHandler;
pub use moe::{Moe, MoeStream};
pub use order::Order;
pub use plan::LoadedPlan;
pub use session::Session;
pub use slots::{MoeSlots, SlotRoutes};
pub use started::Started;
pub use stream::GpuStream;
pub use tensors::Tensors;

//! Plans between GPUs: a kernel does the steps of a plan, which are a table in device memory. It is compiled for the plan's steps, or
//! interprets those of any plan ([`Form`]).
//!
//! ```no_run
//! use antiphon_device::cuda::{Context, StreamRef};
//! use antiphon_executor::{ExecutorError, cuda::{CudaOptions, CudaPlan}};
//! use antiphon_fabric::Communicator;
//! use antiphon_plan::verify::VerifiedPlan;
//! use antiphon_tensor::{DType, TensorView, TensorViewMut};
//!
//! // All ranks do this together, once.
//! fn make_ready(comm: &Communicator, gpu: &Context, plan: &VerifiedPlan) -> Result<CudaPlan, ExecutorError> {
//!     let mut plan = CudaPlan::load(comm, gpu, plan, CudaOptions::default())?;
//!     plan.prepare(comm, DType::BF16, 1 << 20)?;
//!     Ok(plan)
//! }
//!
//! // And this as often as they like, with tensors of 1 MiB: eagerly, or while the stream is captured.
//! unsafe fn call(
//!     plan: &CudaPlan,
//!     input: TensorView<'_>,
//!     output: TensorViewMut<'_>,
//!     stream: StreamRef<'_>,
//! ) -> Result<(), ExecutorError> {
//!     // SAFETY: the caller of this function keeps the tensors until the stream has passed the call.
//!     unsafe { plan.execute(input, output, stream) }
//! }
//! ```
//!
//! ## What a call does
//!
//! The plans of a communicator are one tenant of its GPUs ([`antiphon_fabric::gpu`]): their calls come one after the other on whatever
//! streams they are made, and beside calls of other tenants. A call copies what peers touch of its tensors into staging, launches the
//! kernel, and copies what they wrote back. Nothing else of a tensor is moved. The call allocates nothing, does not wait, and takes
//! no lock for which another thread competes.
//!
//! A message whose chunks are larger than what is proved, or that needs more than [`CudaOptions::most_scratch`], takes several
//! launches. Each does one slice of every chunk, as on the host: a plan that is right for chunks is right for equal parts of them. Tensors
//! and staging have the whole message, so it is copied once; scratch has a slice of each chunk, and is used again.
//!
//! ## Registered tensors
//!
//! A call by [`CudaPlan::execute_registered`] stages nothing: peers read and write the tensors where they are, in memory that all
//! ranks have [registered](CudaPlan::register). Its tensors are at one offset of that memory on all ranks, so each rank knows where
//! those of its peers are. The places are a part of the tag, so ranks that disagree get an error. One table serves staged and registered
//! calls: its addresses count from bases that are passed to each launch.
//!
//! The order of accesses is that of a staged call, whose tensors are the staging:
//!
//! * *Before a launch* a rank owns its tensors: its stream writes the input, and reads what the launch before has left in the output.
//!   Where ranks do not meet, it is proved that peers access them behind a signal of the rank's launch, which publishes what was ahead of
//!   it. When ranks have met, the streams of all have come to the launch, so that is over. The meeting publishes it: what was done ahead of a
//!   kernel in its stream is visible to the kernel, block 0 has a fence ahead of the number of its call, which peers acquire.
//! * *Behind a launch* the rank owns them again, although peers may still be in theirs. That is proved: all accesses to a rank's input
//!   and output happen before the rank has ended ([`verify`](antiphon_plan::verify#what-is-proved)), writes in the order of data
//!   and reads in that of execution. A plan of which a rank may end earlier is rejected
//!   ([`Kind::Late`](antiphon_plan::verify::Kind::Late)), so the kernel needs no meeting at its end. A rank has ended when its
//!   blocks have, which do the work of its ports themselves or wait for it, and that is what the end of its kernel says. A peer's write is
//!   ahead of a release that a block of this rank has acquired, and so of the end of the kernel and of what follows in the stream. A
//!   peer's read may be ahead of no more than a packet, which releases nothing; but every value that is loaded is stored by the same
//!   thread in the same step, so the load is over before the threads meet and one of them sends that packet.
//!
//! A launch that gave up has no such end: peers may access what is registered until they have given up, too.
//!
//! What advances from launch to launch is in device memory: the flags of packets, the counts of signals, semaphores and barriers. So
//! a graph may be replayed between other calls.
//!
//! ## How blocks wait, and why they come to an end
//!
//! * **Ranks meet before a launch**, by the tags of fabric's slots. Block 0 sends a tag to each peer; every block waits for the tags of
//!   all peers. A rank's tag tells that its earlier launches are over and its input is staged, and what it calls, so ranks that
//!   disagree get an error. Blocks of one GPU need not meet for that: a block sends to a peer only what the peer is ready for. They do not
//!   meet in [launches back to back](self#launches-back-to-back).
//! * **Signals and semaphores** are counters: how many were sent, and how many were taken. Whoever waits takes a number, once, and
//!   waits until as many were sent. Both only grow, and a proved plan takes in a launch what it sends, so no count is ever reset.
//! * **Barriers** are counters too. The number of arrivals is a multiple of the blocks that meet, before each launch and behind it;
//!   a block waits for the next multiple.
//! * **Packets** carry the number of the launch as their flag. They lie where nothing else is ever written. There are 2^32 - 1
//!   flags. Behind the last one, and behind the first one of the next round, the blocks of a rank meet and clear all packets.
//!
//! Every wait of the kernel is one of these. The proof of a plan says that all its runs end in which a block does one operation
//! after the other, if all blocks run. Here a block's warps may be ahead of each other between two meetings of its threads, which
//! only lets more be done; and ranks meet, or packets are cleared, where no operation of a launch is under way. All blocks run:
//! a grid takes at most half of the GPU's room, all grids that wait fit ([`Occupancy`](crate::ExecutorError::Occupancy) is the
//! error of a plan that does not), and each block keeps its place until it ends.
//!
//! A wait that is in vain ends at the communicator's deadline, or when a peer is lost: it is fabric's wait. The warp that gives up
//! sends nothing more, its block leaves at the next meeting of its threads, and later launches end at once.
//! [`CudaPlan::check`] tells which operation waited for what.
//!
//! ## Launches back to back
//!
//! If a plan is [proved for it](antiphon_plan::verify#launches-back-to-back), its ranks do not meet in a launch behind one of the same size, with
//! registered tensors in the same places ([`CudaPlan::meets`] tells of the plan). Such a launch waits for nothing but what the plan waits for, and
//! its ranks may be any number of launches apart, as far as the plan lets them. With double scratch, launches take turns between two halves,
//! by the parity of their flag: the table has the steps for each.
//!
//! * **All ranks decide alike.** What decides is in device memory, so it holds for graphs, too: the size of the tenant's launch before, beside the
//!   control words of each block, and the flag. Ranks make the same calls in the same order, so each finds the same, however far apart they are. Another
//!   size, plan or place has a meeting before it and behind it. So have flags that begin anew: the launches of flags 1 and 2 meet, since
//!   packets are cleared ahead of them, and since flags 2^32 - 1 and 1 have one half.
//! * **Meetings keep to the rules of slots**, as a launch without one takes no slot: no tag is sent, and none is removed. A rank's tag in a
//!   meeting tells that all launches before are over, whether they met or not.
//! * **Every launch ends.** The proof says that nothing of a launch depends on a later one: signals of a peer that is ahead are counted, and
//!   its packets have another flag. So the earliest launch that some rank is in ends as it would behind a meeting, and with it all.
//! * **Tensors and staging** are the rank's own between its launches, and it writes them then. The proof has this step, so peers access them
//!   behind a signal of the launch and before its end. A signal that the plan has relaxed releases in such a launch: it publishes what the
//!   stream did ahead of it, for which a meeting has its fence.
//! * **Ranks that disagree.** One of them calls something else, and so meets. Beside its tag stands the number of its call. A rank that waits in
//!   a launch without a meeting looks now and then whether another meets in this call or an earlier one, and then both get the error.
//!   A rank that is ahead meets in a later call. A rank that waits for nothing goes on to its next meeting, where the numbers differ. A
//!   rank that is absent or lost is found by the waits of the plan, or at the next meeting.
//!
//! `tests/meeting.rs` is a model of the decision and of the tags, for 2, 3, 4 and 8 ranks.
//!
//! ## The order of memory
//!
//! The proof's order is kept as follows. A *signal* is an atomic addition with release, at the scope of the system (of the GPU for
//! semaphores and barriers), behind the meeting of the block's threads that the plan asks for; a *wait* loads with acquire, ahead of such
//! a meeting. Relaxed waits acquire as well, and relaxed signals release, unless nothing but signals is ahead of them in their block:
//! PTX does not promise that a load is over before a relaxed store that follows. All data moves by strong accesses, 16 bytes at a time where
//! operands lie alike. A packet is one word of eight bytes, or two that are one vector of 16: only a vector's elements are certain to
//! be whole. So a packet publishes its own data, and nothing else.
//!
//! What a port does, its block does, in the port's order: the block's threads meet ahead of each of the port's operations, signals and
//! flushes. Or [copy engines](Ports::Engines) do it: the block requests each copy and each signal behind such a meeting, in a FIFO
//! of the host's memory, and waits for its requests where the plan flushes and ahead of its end (`engines.rs` has the order of all this, and why it comes to an end).
//! What goes through a port as packets, its block stores in any case, as a copy may take a packet apart. A switch channel is loads from its members in rank order, and stores to all; no multicast object is made.
//!
//! ## Limits
//!
//! A plan is proved for device memory ([`verify::Memory`](antiphon_plan::verify::Memory)): on a host a packet also publishes what its writer
//! did before.
//!
//! Between up to 8 ranks of one machine. All numeric dtypes, whose tensors may begin at any element.

mod bases;
mod call;
mod collection;
mod compiled;
mod engines;
mod family;
mod kernel;
mod listing;
#[cfg(test)]
mod machine_code;
mod memory;
mod plan;
mod prepared;
mod registered;
mod report;
mod size;
mod table;
mod tenants;
mod writer;

pub use collection::{AlgorithmCollection, Choice, Explained};
pub use compiled::Form;
pub use kernel::{KernelNeeds, PlanKernel};
pub use plan::{CudaOptions, CudaPlan};

pub use crate::layout::Ports;

//! The engine of the GPUs: it runs kernels that exchange data through the memory of all ranks.
//!
//! Higher crates define *families* of kernels. This module compiles them, enqueues them in streams, and ends them when a peer is
//! lost. All families include slots.cuh ([`SLOTS`]), which transports data that shows by itself whether it has arrived;
//! docs/design/cuda.md explains it.
//!
//! * A [`Family`] is a program: its sources, its kernels, the macros that distinguish its variants, and the kernels' arguments.
//! * A [`Tenant`] is one user of a communicator's GPUs, with memory and an order of calls of its own. Its
//!   [`run`](Tenant::run) launches a call, in pieces if it is larger than the memory for staging.
//! * All tenants of one communicator on one GPU share an engine: one thread that watches the peers, and one failure state. A
//!   kernel stops waiting for its peers at the communicator's timeout. It then ends without its result, and the next call of
//!   any tenant returns the error. [`OnFailure`] sets the further action.
//!
//! Two grids, of any tenants and communicators, fit on a GPU at once. More of them could wait for multiprocessors that they keep
//! from each other. So a call on a third stream comes behind an earlier call, of whatever tenant and communicator of the process.
//! Ranks that share a GPU each use a part of its multiprocessors.
//!
//! ## Writing a family
//!
//! The kernel, in CUDA C++ behind the prelude and slots.cuh. It rotates vectors of 16 bytes to the next rank; the vectors must
//! have no word of which all bits are set (`EMPTY`):
//!
//! ```text
//! // Sends this rank's vectors to the next rank, and receives those of the rank before.
//! KERNEL(rotate) {
//!     const u32 vectors = a.count / 16, start = grid_thread(), step = grid_threads();
//!     const u32 from = (a.rank + WORLD - 1) % WORLD;
//!     const auto load = [&](u32 i) { return load16(a.input + i * 16); };
//!     const auto send = [&](const turn& t, u32 i, uint4 v) {
//!         store16_volatile(a.peer[0] + lane_at(a, t.slot, a.rank) + i * 16, v);
//!     };
//!     turn t;
//!     if (!begin_and_send<1, 1, false>(a, t, start, step, vectors, load, send)) return;
//!     advance(a, t, vectors, 0); // the lanes that the call after the next one finds empty
//!     reader r(a, t);
//!     for (u32 i = start; is_warp_before(i, vectors); i += step) {
//!         uint4 got[1];
//!         if (!collect_from(r, from, from, i, step, vectors, got)) return;
//!         if (i < vectors) store16(a.output + i * 16, got[0]);
//!     }
//!     r.finish();
//! }
//! ```
//!
//! The Rust code that launches it:
//!
//! ```no_run
//! use antiphon_device::cuda::{DevicePointer, StreamRef};
//! use antiphon_fabric::{
//!     Communicator, FabricError, Operation, Signature,
//!     gpu::{Family, Grid, Launch, NoArguments, Pieces, Source, Tenant, Work, kernels},
//! };
//!
//! kernels! {
//!     enum Rotate { Rotate = "rotate" }
//! }
//!
//! #[derive(Debug, Clone, Copy, PartialEq, Eq)]
//! struct Rotation;
//!
//! impl Family for Rotation {
//!     type Kernel = Rotate;
//!     type Arguments = NoArguments;
//!     const NAME: &'static str = "rotation.cuh";
//!     const SOURCES: &'static [Source] = &[Source::new("rotate.cuh", "/* include_str!(\"rotate.cuh\") */")];
//! }
//!
//! /// # Safety
//! /// Both addresses are valid for `bytes` bytes, a multiple of 16, until the stream has passed this call.
//! unsafe fn rotate(
//!     tenant: &Tenant,
//!     [input, output]: [DevicePointer; 2],
//!     bytes: usize,
//!     stream: StreamRef<'_>,
//! ) -> Result<(), FabricError> {
//!     let loaded = tenant.ready(Rotation, stream)?;
//!     let signature = Signature { count: bytes as u64, ..Signature::new(Operation::AllToAll) };
//!     let launch = |start: usize, len: usize, _channels| {
//!         let (input, output) = (input.0 as usize + start, output.0 as usize + start);
//!         let work = Work { input, output, count: len, ..Work::new(signature) };
//!         Launch { kernel: Rotate::Rotate, grid: Grid::Items(len / 16), work, arguments: NoArguments }
//!     };
//!     // SAFETY: the caller's promise; a launch sends what fits a lane.
//!     unsafe { tenant.run(&loaded, Pieces::bytes(bytes, tenant.lane_bytes()), stream, launch) }
//! }
//! ```

mod engine;
mod family;
mod idle;
mod kernel_call;
mod launch;
mod order;
mod pipeline;
mod rails;
mod reduction;
mod room;
mod staging;
mod tenant;
mod used;
mod watch;

pub use crate::{gpu_kernel_call as kernel_call, gpu_kernels as kernels};
pub use family::{
    FORMATS, Family, Kernel, Loaded, NoArguments, ROWS, SLOTS, Source, THREADS, most_registers,
    most_shared_bytes, program,
};
pub use idle::UntilIdle;
pub use launch::{Grid, Launch, Pieces, Work};
pub use pipeline::{LINE, PIPELINE, Rings, Stages, Staging};
pub use rails::{Rails, Runtime};
pub use reduction::{REDUCE, Reduction};
pub use staging::MAX_BLOCKS;
pub use tenant::Tenant;
pub use watch::OnFailure;

/// The most ranks whose arenas fit a kernel's arguments; all of one NVLink domain.
pub const MAX_WORLD: usize = 8;

/// Blocks of a grid for each multiprocessor, at most, unless a [`Family`] says otherwise. Blocks wait for those of other GPUs,
/// so they must not wait for room: twice as many fit, for those of another grid.
pub const fn most_blocks(world_size: usize) -> u32 {
    if world_size <= 4 { 4 } else { 2 } // with more ranks a thread needs more registers
}

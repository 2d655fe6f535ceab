//! Memory of all ranks that kernels of any rank write, also between nodes: NVSHMEM's symmetric heap.
//!
//! NVSHMEM has one state for each process: a process is one of its ranks, a PE, and has one GPU. The PE of a rank is its number in the
//! communicator. NVSHMEM's calls in which all ranks take part have no deadline, so the ranks agree that they can make each before they do:
//! a rank that is not able to, or is gone, is an error on all of them. A rank that is killed inside such a call leaves the others there.
//!
//! Which ranks share a node is for [`Communicator::nodes`] to say. NVSHMEM knows which GPUs reach each other, and that is asked of it for
//! each peer ([`Rails::peer`]): GPUs of one machine may be two nodes here.

use std::process;

use antiphon_device::cuda::{Context, CudaError, DevicePointer, NvJitLink, Nvrtc, Nvshmem, UniqueId, memory};

use crate::{Communicator, FabricError};

/// What makes NVSHMEM ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Runtime {
    /// It is initialised with the ranks of the communicator, unless this process has done so before. It stays until the process ends.
    Initialize,
    /// The program has initialised it, with the same numbers of the ranks.
    Join,
}

/// Memory on every rank that the kernels of all ranks write.
///
/// Dropping it leaks the memory, as giving it back needs all ranks: see [`free`](Self::free).
#[derive(Debug)]
pub struct Rails {
    context: Context,
    nvshmem: &'static Nvshmem,
    memory: DevicePointer,
    /// Where this rank's GPU reaches the memory of each rank, if it does.
    peers: Vec<Option<DevicePointer>>,
}

impl Rails {
    /// Opens NVSHMEM, and allocates `bytes` bytes on each rank, which begin as zeros. Not while a stream is being captured. All ranks call
    /// it together, with the same numbers.
    ///
    /// # Errors
    /// On every rank, if one fails: [`FabricError::Nvshmem`] for a library that is missing, was not tested, refuses, or was initialised
    /// with other ranks, and for ranks that share a process. As [`Communicator::barrier`].
    pub fn new(
        comm: &Communicator,
        context: &Context,
        bytes: usize,
        runtime: Runtime,
    ) -> Result<Self, FabricError> {
        // A kernel that puts is compiled and linked later, and finds then that a compiler is missing: better now.
        let found = Nvshmem::load().and_then(|nvshmem| {
            nvshmem.device_library()?;
            Nvrtc::load().and(NvJitLink::load())?;
            Ok(nvshmem)
        });
        let nvshmem = together(comm, found.map_err(FabricError::from))?;
        check_processes(comm)?;
        together(comm, check_room(context, bytes))?;
        start(comm, context, nvshmem, runtime)?;
        let memory = together(comm, nvshmem.allocate(context, bytes).map_err(FabricError::from))?;
        let clear = || -> Result<(), CudaError> {
            let stream = context.stream()?;
            // SAFETY: as large, and no kernel uses it yet.
            unsafe { memory::fill(stream.borrow(), memory, 0, bytes) }?;
            stream.borrow().synchronize()
        };
        // No rank writes before all of them have cleared theirs.
        together(comm, clear().map_err(FabricError::from))?;
        let peers = (0..comm.world_size()).map(|rank| nvshmem.peer_pointer(memory, rank)).collect();
        Ok(Self { context: context.clone(), nvshmem, memory, peers })
    }

    /// This rank's memory.
    pub fn pointer(&self) -> DevicePointer {
        self.memory
    }

    /// Where this rank's GPU reaches the memory of a rank by its own loads and stores. `None` for a rank to which NVSHMEM carries what
    /// kernels put.
    ///
    /// # Panics
    /// When there is no such rank.
    pub fn peer(&self, rank: usize) -> Option<DevicePointer> {
        self.peers[rank]
    }

    /// Gives the memory back, on all ranks. All ranks call it together, when no kernel uses it, on any rank.
    ///
    /// # Errors
    /// As [`Communicator::barrier`]: then the memory is leaked, as a rank that is lost does not come.
    pub fn free(self, comm: &Communicator) -> Result<(), FabricError> {
        self.context.synchronize()?;
        comm.barrier()?;
        // SAFETY: the caller's promise; all ranks are here.
        unsafe { self.nvshmem.free(&self.context, self.memory)? };
        Ok(())
    }
}

/// Tells all ranks whether this one can, and makes errors of the library those of NVSHMEM.
fn together<T>(comm: &Communicator, mine: Result<T, FabricError>) -> Result<T, FabricError> {
    comm.agree("cannot use it", mine).map_err(|error| match error {
        FabricError::Device(_) | FabricError::InvalidArgument(_) => FabricError::Nvshmem(error.to_string()),
        other => other,
    })
}

/// Checks that the GPU has room for so many bytes, as NVSHMEM ends the process where it has not.
fn check_room(context: &Context, bytes: usize) -> Result<(), FabricError> {
    let free = context.memory()?.free_bytes;
    match bytes as u64 <= free {
        true => Ok(()),
        false => {
            Err(FabricError::Nvshmem(format!("it needs {bytes} bytes, and the GPU has {free} bytes left")))
        }
    }
}

/// Checks that each rank has a process of its own.
fn check_processes(comm: &Communicator) -> Result<(), FabricError> {
    // Processes of other machines have numbers of their own. Threads of one process may be on two nodes, by name.
    let machine = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    let mine = (machine, namespace, process::id());
    let all = comm.exchange_objects(&mine)?;
    // Each rank finds the same pair.
    let pair = (0..all.len())
        .find_map(|rank| Some((all[..rank].iter().position(|other| *other == all[rank])?, rank)));
    match pair {
        None => Ok(()),
        Some((first, second)) => Err(FabricError::Nvshmem(format!(
            "it serves one rank of a process, and ranks {first} and {second} are in one"
        ))),
    }
}

/// Makes this process the PE of the rank's number.
fn start(
    comm: &Communicator,
    context: &Context,
    nvshmem: &'static Nvshmem,
    runtime: Runtime,
) -> Result<(), FabricError> {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let is_there = nvshmem.is_initialized();
    let checked = match (is_there, runtime) {
        (true, _) if nvshmem.pe() != (rank, world_size) => {
            let (pe, count) = nvshmem.pe();
            Err(format!("it was initialised as PE {pe} of {count}, and this is rank {rank} of {world_size}"))
        }
        (false, Runtime::Join) => Err("the program has not initialised it".to_owned()),
        _ => Ok(()),
    };
    together(comm, checked.map_err(FabricError::invalid))?;
    let all = comm.exchange_objects(&is_there)?;
    if let Some(other) = all.iter().position(|theirs| *theirs != is_there) {
        let word = |is_there: bool| if is_there { "is" } else { "is not" };
        let (mine, theirs) = (word(is_there), word(!is_there));
        let text = format!("it {mine} initialised on rank {rank}, and {theirs} on rank {other}");
        return Err(FabricError::Nvshmem(text));
    }
    if is_there {
        return Ok(());
    }
    let made = if rank == 0 { nvshmem.unique_id().map(Some) } else { Ok(None) };
    let id = together(comm, made.map_err(FabricError::from))?;
    let all = comm.exchange_bytes(&id.map(|id| id.to_bytes().to_vec()).unwrap_or_default())?;
    let id = together(comm, UniqueId::from_bytes(&all[0]).map_err(FabricError::from))?;
    together(comm, nvshmem.initialize(context, &id, rank, world_size).map_err(FabricError::from))
}

//! Memory of the ranks' GPUs that was there before: a framework's, registered once.

use std::sync::Arc;

use antiphon_device::{
    cuda::{Context, CudaError, DevicePointer, IpcExport, IpcMemory, PointerInfo},
    host::process::pid_namespace,
};
use serde::{Deserialize, Serialize};

use super::CudaArena;
use crate::{Communicator, FabricError};

/// As many bytes on the GPU of every rank, wherever they lie there, which every rank's GPU reads and writes over NVLink (or
/// PCIe).
///
/// Either symmetric memory ([`CudaArena`]), or memory of another library, opened with CUDA IPC by other processes and as it
/// is by threads of the same. A clone is the same memory, which is kept until the last one is dropped. A caller that drops it must know that this rank's work with the peers' memory is over; a caller that frees
/// memory, that the peers' is.
#[derive(Debug, Clone)]
pub struct RegisteredMemory {
    context: Context,
    pointers: Vec<DevicePointer>,
    len: u64,
    _kept: Kept,
}

/// The owner of the memory, which must live as long as the addresses.
#[derive(Debug, Clone)]
enum Kept {
    Arena(#[allow(dead_code)] Arc<CudaArena>),
    Opened(#[allow(dead_code)] Arc<Vec<IpcMemory>>),
}

/// The description of a rank's memory, which it sends to the others.
#[derive(Serialize, Deserialize)]
struct Offer {
    process: (u32, u64),
    device: u32,
    pointer: u64,
    len: u64,
    export: Vec<u8>,
}

impl RegisteredMemory {
    /// Registers `len` bytes at `pointer`, in memory of cuMemAlloc (cudaMalloc, and PyTorch's by default), on every rank. All
    /// ranks call it together, with the same `len`.
    ///
    /// # Errors
    /// On every rank, if one fails: its own error there, [`FabricError::InvalidArgument`] that names it elsewhere.
    /// [`FabricError::Device`] for memory of another kind, saying which, and for devices without a link;
    /// [`FabricError::InvalidArgument`] for more bytes than the allocation has, and when ranks pass different lengths; as
    /// [`Communicator::barrier`].
    pub fn new(
        comm: &Communicator,
        context: &Context,
        pointer: DevicePointer,
        len: u64,
    ) -> Result<Self, FabricError> {
        const PROBLEM: &str = "cannot register its memory";
        comm.check_one_node("RegisteredMemory")?;
        let export = comm.agree(PROBLEM, export(context, pointer, len))?;
        let offer = Offer {
            process: (std::process::id(), pid_namespace()),
            device: context.device().ordinal(),
            pointer: pointer.0,
            len,
            export: export.to_bytes().to_vec(),
        };
        let offers = comm.exchange_objects(&offer)?;
        if let Some(rank) = offers.iter().position(|theirs| theirs.len != offers[0].len) {
            let text = format!(
                "rank 0 registers {} bytes, but rank {rank} {}: all must pass the same",
                offers[0].len, offers[rank].len
            );
            return Err(FabricError::invalid(text));
        }
        let mut opened = Vec::new();
        let mut reach = |(rank, theirs): (usize, &Offer)| -> Result<DevicePointer, CudaError> {
            if rank == comm.rank() {
                return Ok(pointer);
            }
            if theirs.process == offer.process {
                let peer = Context::primary(context.device().driver().device(theirs.device)?)?;
                context.enable_peer_access(&peer)?;
                return Ok(DevicePointer(theirs.pointer));
            }
            let memory = IpcMemory::open(context, IpcExport::from_bytes(&theirs.export)?)?;
            opened.push(memory);
            Ok(opened.last().expect("just pushed").pointer())
        };
        let pointers = offers.iter().enumerate().map(&mut reach).collect::<Result<_, _>>();
        let pointers =
            comm.agree("cannot open the memory of its peers", pointers.map_err(FabricError::from))?;
        Ok(Self { context: context.clone(), pointers, len, _kept: Kept::Opened(opened.into()) })
    }

    /// Where the memory of `rank` begins, for this rank's device.
    ///
    /// # Panics
    /// When there is no such rank.
    pub fn pointer(&self, rank: usize) -> DevicePointer {
        self.pointers[rank]
    }

    /// How many ranks have some.
    pub fn world_size(&self) -> usize {
        self.pointers.len()
    }

    /// Bytes on each rank.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The context of this rank's device.
    pub fn context(&self) -> &Context {
        &self.context
    }
}

/// All of the arena.
impl From<Arc<CudaArena>> for RegisteredMemory {
    fn from(arena: Arc<CudaArena>) -> Self {
        let pointers = (0..arena.world_size()).map(|rank| arena.pointer(rank)).collect();
        Self {
            context: arena.context().clone(),
            pointers,
            len: arena.len() as u64,
            _kept: Kept::Arena(arena),
        }
    }
}

fn export(context: &Context, pointer: DevicePointer, len: u64) -> Result<IpcExport, FabricError> {
    let export = IpcExport::of(context, pointer)?;
    let on = PointerInfo::of(context, pointer)?.device;
    if on != Some(context.device().ordinal()) {
        let text = format!(
            "the memory at {:#x} is of device {on:?}, and this rank's is {}",
            pointer.0,
            context.device().ordinal()
        );
        return Err(FabricError::invalid(text));
    }
    if len > export.len {
        let text = format!(
            "{len} bytes at {:#x} reach beyond their allocation, which has {} from there on",
            pointer.0, export.len
        );
        return Err(FabricError::invalid(text));
    }
    Ok(export)
}

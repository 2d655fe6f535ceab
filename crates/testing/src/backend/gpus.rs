//! Ranks that have a GPU each, as threads.

use std::{
    cell::RefCell,
    ops::Deref,
    rc::Rc,
    sync::{Arc, Barrier},
    time::Duration,
};

use antiphon_device::cuda::{Context, DeviceMemory, Stream, StreamRef};
use antiphon_fabric::{Communicator, LocalWorld};
use antiphon_tensor::Device;

use super::{Backend, TIMEOUT, world_size};
use crate::{device_of, gpus_for, ranks_per_gpu, sized};

/// Calls the behaviour with the number in the name of a test, `world_<size>`, if there are as many GPUs.
pub fn on_gpus(name: &str, behaviour: fn(usize)) {
    let world_size = world_size(name);
    if gpus_for(world_size).is_some() {
        behaviour(world_size);
    }
}

/// What a suite has on the GPU of each rank, or of a rank of a group, beside what [`Gpus`] has.
pub trait OnGpu: Sized + 'static {
    /// All ranks make it together.
    fn new(comm: &Communicator, context: &Context) -> Self;
}

impl OnGpu for () {
    fn new(_comm: &Communicator, _context: &Context) -> Self {}
}

/// A rank with tensors in the memory of its GPU, and one stream.
pub struct Gpus<T = ()> {
    comm: Communicator,
    context: Context,
    stream: Rc<Stream>,
    pool: Pool,
    all: Arc<Barrier>,
    own: T,
}

/// Memory that is free to be used again: making and freeing it waits for the whole GPU.
type Pool = Rc<RefCell<Vec<DeviceMemory>>>;

/// Memory of a GPU that goes back to the rank's pool.
pub struct GpuMemory {
    /// There until it goes back.
    memory: Option<DeviceMemory>,
    len: usize,
    stream: Rc<Stream>,
    pool: Pool,
}

impl GpuMemory {
    fn device(&self) -> &DeviceMemory {
        self.memory.as_ref().expect("it has not gone back")
    }
}

impl Drop for GpuMemory {
    fn drop(&mut self) {
        self.pool.borrow_mut().extend(self.memory.take());
    }
}

impl<T: OnGpu> Gpus<T> {
    fn new(comm: Communicator, context: &Context, all: Arc<Barrier>) -> Self {
        let own = T::new(&comm, context);
        let (stream, pool) = (Rc::new(context.stream().unwrap()), Pool::default());
        Self { comm, context: context.clone(), stream, pool, all, own }
    }

    /// What the suite has on the GPU.
    pub fn own(&self) -> &T {
        &self.own
    }

    /// The context of the rank's GPU.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The stream of the rank's calls.
    pub fn stream(&self) -> StreamRef<'_> {
        self.stream.borrow()
    }

    /// Waits for the other ranks where [ranks share a GPU](ranks_per_gpu): between calls and what waits for the whole context.
    pub fn meet_on_gpu(&self) {
        if ranks_per_gpu() > 1 {
            self.comm.barrier().unwrap();
        }
    }
}

impl<T> Deref for Gpus<T> {
    type Target = Communicator;

    fn deref(&self) -> &Communicator {
        &self.comm
    }
}

impl<T: OnGpu> Backend for Gpus<T> {
    type Memory = GpuMemory;

    fn run_ranks(world_size: usize, rank: &(dyn Fn(Self) + Sync)) {
        let driver = gpus_for(world_size).expect("on_gpus has seen that there are enough");
        let all = Arc::new(Barrier::new(world_size));
        // The emulator compiles a kernel in seconds, one after the other: a rank may compile all of its own while its peer waits.
        let timeout = sized(TIMEOUT, Duration::from_secs(180));
        LocalWorld::run_with(world_size, timeout, |comm| {
            let context = Context::primary(device_of(driver, comm.rank()).unwrap()).unwrap();
            rank(Self::new(comm, &context, all.clone()));
        });
    }

    fn meet(&self) {
        self.all.wait();
    }

    fn group(&self, color: Option<u64>, key: i64) -> Option<Self> {
        let comm = self.comm.split(color, key).unwrap()?;
        Some(Self::new(comm, &self.context, self.all.clone()))
    }

    fn device(&self) -> Device {
        Device::Cuda(self.context.device().ordinal())
    }

    fn allocate(&self, bytes: usize) -> GpuMemory {
        let mut pool = self.pool.borrow_mut();
        let fits = pool.iter().position(|memory| (bytes..=4 * bytes.max(1 << 14)).contains(&memory.len()));
        let memory = fits.map(|index| pool.swap_remove(index)).unwrap_or_else(|| {
            DeviceMemory::allocate(&self.context, bytes.max(1 << 14).next_power_of_two()).unwrap()
        });
        GpuMemory { memory: Some(memory), len: bytes, stream: self.stream.clone(), pool: self.pool.clone() }
    }

    fn address(memory: &GpuMemory) -> *const u8 {
        memory.device().pointer().0 as usize as *const u8
    }

    fn address_mut(memory: &mut GpuMemory) -> *mut u8 {
        memory.device().pointer().0 as usize as *mut u8
    }

    fn write(memory: &mut GpuMemory, bytes: &[u8]) {
        memory.device().write(&*memory.stream, 0, bytes).unwrap();
    }

    fn read(memory: &GpuMemory) -> Vec<u8> {
        let mut bytes = vec![0; memory.len];
        memory.device().read(&*memory.stream, 0, &mut bytes).unwrap();
        bytes
    }
}

//! Ranks that have a GPU each, as threads.

use std::{
    cell::RefCell,
    ops::Deref,
    rc::Rc,
    sync::{Arc, Barrier},
    time::Duration,
};

use antiphon_collectives::{
    Call, Communicator, ReduceOp, Result, StreamCollectives,
    all_reduce::{Algorithm, AllReduceOptions},
    cuda::CudaCollectives,
    mixed::CudaMixedHandler,
};
use antiphon_device::{
    DeviceError,
    cuda::{Context, CudaError, DeviceMemory, Stream, StreamRef},
};
use antiphon_fabric::{FabricError, LocalWorld};
use antiphon_operation::Operation;
use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};
use antiphon_testing::{device_of, gpus_for, ranks_per_gpu};

use super::{Alignment, Backend, Like, Loose, TIMEOUT};
use crate::values::Values;

/// A rank with tensors in the memory of its GPU.
pub struct Gpus {
    comm: Communicator,
    collectives: CudaCollectives,
    stream: Rc<Stream>,
    pool: Pool,
    all: Arc<Barrier>,
}

/// Memory that is free to be used again: making and freeing it waits for the whole GPU.
type Pool = Rc<RefCell<Vec<DeviceMemory>>>;

/// Memory of a GPU that goes back to the rank's pool.
pub struct Memory {
    /// There until it goes back.
    memory: Option<DeviceMemory>,
    len: usize,
    stream: Rc<Stream>,
    pool: Pool,
}

impl Memory {
    fn device(&self) -> &DeviceMemory {
        self.memory.as_ref().expect("it has not gone back")
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.pool.borrow_mut().extend(self.memory.take());
    }
}

/// Calls the behaviour if there are as many GPUs.
pub fn on_gpus(name: &str, behaviour: fn(usize)) {
    let world_size = super::world_size(name);
    if gpus_for(world_size).is_some() {
        behaviour(world_size);
    }
}

impl Gpus {
    fn new(comm: Communicator, context: &Context, all: Arc<Barrier>) -> Self {
        let collectives = CudaCollectives::new(&comm, context).unwrap();
        let stream = Rc::new(context.stream().unwrap());
        Self { comm, collectives, stream, pool: Pool::default(), all }
    }

    pub fn collectives(&self) -> &CudaCollectives {
        &self.collectives
    }

    pub fn stream(&self) -> StreamRef<'_> {
        self.stream.borrow()
    }

    /// Waits until the GPU has done what was queued.
    pub fn over(&self, queued: Result<()>) -> Result<()> {
        queued?;
        let failed = |error: CudaError| FabricError::from(DeviceError::from(error));
        self.stream.borrow().synchronize().map_err(failed)?;
        self.collectives.check()
    }

    /// Loads the kernels of reductions to parts, which a call of no elements does.
    fn load_parts(&self, dtype: DType, op: ReduceOp) {
        let counts = vec![0; self.comm.world_size()];
        let call = Call::reduce_scatter_v(counts, op);
        let [mut input, mut output] = [(); 2].map(|()| Loose::new(self, Like::of(dtype, 0)));
        self.call(&call, Some(input.view()), Some(output.view_mut())).unwrap();
    }

    /// Ranks that share a GPU share a context, in which making and freeing memory or loading kernels waits for all that is under
    /// way: so they meet between that and calls.
    fn meet_on_gpu(&self) {
        if ranks_per_gpu() > 1 {
            self.comm.barrier().unwrap();
        }
    }
}

impl Deref for Gpus {
    type Target = Communicator;

    fn deref(&self) -> &Communicator {
        &self.comm
    }
}

impl Backend for Gpus {
    type Memory = Memory;
    type Mixed = CudaMixedHandler;
    // A row of what moves; a block's; where kernels and algorithms change. Lanes, which are larger, have a test of GPUs alone.
    const SEAMS: &'static [usize] = &[496, 14_336, 512 << 10, 3 << 20];

    fn run_ranks(world_size: usize, rank: &(dyn Fn(Self) + Sync)) {
        let driver = gpus_for(world_size).expect("on_gpus has seen that there are enough");
        let all = Arc::new(Barrier::new(world_size));
        LocalWorld::run_with(world_size, TIMEOUT, |comm| {
            let context = Context::primary(device_of(driver, comm.rank()).unwrap()).unwrap();
            rank(Self::new(comm, &context, all.clone()));
        });
    }

    fn meet(&self) {
        self.all.wait();
    }

    fn group(&self, color: Option<u64>, key: i64) -> Option<Self> {
        let comm = self.comm.split(color, key).unwrap()?;
        Some(Self::new(comm, self.collectives.context(), self.all.clone()))
    }

    fn device(&self) -> Device {
        Device::Cuda(self.collectives.context().device().ordinal())
    }

    fn allocate(&self, bytes: usize) -> Memory {
        let mut pool = self.pool.borrow_mut();
        let fits = pool.iter().position(|memory| (bytes..=4 * bytes.max(1 << 14)).contains(&memory.len()));
        let memory = fits.map(|index| pool.swap_remove(index)).unwrap_or_else(|| {
            let len = bytes.max(1 << 14).next_power_of_two();
            DeviceMemory::allocate(self.collectives.context(), len).unwrap()
        });
        Memory { memory: Some(memory), len: bytes, stream: self.stream.clone(), pool: self.pool.clone() }
    }

    fn address(memory: &mut Memory) -> *mut u8 {
        memory.device().pointer().0 as usize as *mut u8
    }

    fn write(memory: &mut Memory, bytes: &[u8]) {
        memory.device().write(&*memory.stream, 0, bytes).unwrap();
    }

    fn read(memory: &Memory) -> Vec<u8> {
        let mut bytes = vec![0; memory.len];
        memory.device().read(&*memory.stream, 0, &mut bytes).unwrap();
        bytes
    }

    /// A rank that is alone copies, and so keeps the payload of a NaN.
    fn reduced(op: ReduceOp, contributions: &[Values], nodes: &[u32]) -> Values {
        match contributions {
            [alone] => alone.clone(),
            several => Values::reduced(op, several, nodes),
        }
    }

    fn operators(dtype: DType) -> &'static [ReduceOp] {
        match dtype {
            DType::F32 => &ReduceOp::ARITHMETIC,
            DType::F16 => &[ReduceOp::Sum, ReduceOp::Max],
            _ => &[ReduceOp::Sum],
        }
    }

    fn refusal(dtype: DType, op: ReduceOp, alignment: Alignment) -> Option<&'static str> {
        match dtype {
            _ if op.is_bitwise() && dtype.is_float() => Some("combines the bits of integers"),
            DType::F32 | DType::F16 | DType::BF16 => (alignment == Alignment::Odd).then_some("a multiple of"),
            _ => Some("cannot be reduced"),
        }
    }

    fn before(&self, dtype: DType, reduces: Option<ReduceOp>) {
        if let Some(op) = reduces.filter(|&op| Self::refusal(dtype, op, Alignment::Aligned).is_none()) {
            self.collectives.prepare(dtype, op).unwrap();
            if ranks_per_gpu() > 1 {
                self.load_parts(dtype, op);
            }
        }
        self.meet_on_gpu();
    }

    fn behind(&self) {
        self.meet_on_gpu();
    }

    fn call(
        &self,
        call: &Call<'_>,
        input: Option<TensorView<'_>>,
        mut output: Option<TensorViewMut<'_>>,
    ) -> Result<()> {
        // SAFETY: the call is over before the tensors go.
        self.over(unsafe {
            self.collectives.call(call, input.as_ref(), output.as_mut(), self.stream.borrow())
        })
    }

    fn call_in_place(&self, call: &Call<'_>, mut buffer: TensorViewMut<'_>) -> Result<()> {
        // SAFETY: as above.
        self.over(unsafe { self.collectives.call_in_place(call, &mut buffer, self.stream.borrow()) })
    }

    fn by_name(
        &self,
        call: &Call<'_>,
        input: Option<TensorView<'_>>,
        output: Option<TensorViewMut<'_>>,
    ) -> Result<()> {
        // SAFETY: as above.
        self.over(unsafe { by_name!(&self.collectives, call, input, output, &*self.stream) })
    }

    fn by_name_in_place(&self, call: &Call<'_>, buffer: TensorViewMut<'_>) -> Result<()> {
        // SAFETY: as above.
        self.over(unsafe { by_name_in_place!(&self.collectives, call, buffer, &*self.stream) })
    }

    fn all_reduce_with(
        &self,
        input: TensorView<'_>,
        output: TensorViewMut<'_>,
        op: ReduceOp,
        options: AllReduceOptions,
    ) -> Result<()> {
        // SAFETY: as above.
        self.over(unsafe { self.collectives.all_reduce_with(input, output, op, options, &*self.stream) })
    }

    fn algorithm_for(&self, bytes: usize) -> Algorithm {
        self.collectives.algorithm_for(bytes)
    }

    fn send_recv(
        &self,
        input: TensorView<'_>,
        to: usize,
        mut output: TensorViewMut<'_>,
        from: usize,
    ) -> Result<()> {
        // SAFETY: as above.
        self.over(unsafe { self.collectives.send_recv(&input, to, &mut output, from, self.stream.borrow()) })
    }

    fn told(&self) -> Result<()> {
        // A kernel that needed nothing from the peer that disagrees has ended well.
        for _ in 0..200 {
            self.collectives.check()?;
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

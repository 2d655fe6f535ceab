//! Ranks on GPUs, and the comparison with the host.

use antiphon_collectives::{
    CollectiveError, Collectives, ReduceOp, StreamCollectives,
    cuda::{Algorithm, AllReduceOptions, CudaCollectives},
};
use antiphon_device::cuda::{Context, DeviceMemory, Stream};
use antiphon_fabric::{Communicator, LocalWorld, RegisteredMemory};
use antiphon_tensor::{DType, Device, Element, TensorView, TensorViewMut};
use antiphon_testing::{device_of, gpus_for, ranks_per_gpu};

pub type Outcome<T = ()> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// What a rank of a test has.
pub struct Rank {
    pub comm: Communicator,
    pub stream: Stream,
    pub collectives: CudaCollectives,
}

/// Runs `body` on as many GPUs; skips where there are fewer.
pub fn on_gpus(world_size: usize, body: impl Fn(&Rank) -> Outcome + Sync) {
    let Some(driver) = gpus_for(world_size) else { return };
    let timeout = std::time::Duration::from_secs(20);
    let outcomes = LocalWorld::run_with(world_size, timeout, |comm| -> Outcome {
        let context = Context::primary(device_of(driver, comm.rank())?)?;
        let collectives = CudaCollectives::new(&comm, &context)?;
        let stream = context.stream()?;
        let rank = Rank { comm, stream, collectives };
        body(&rank)?;
        rank.stream.borrow().synchronize()?;
        Ok(rank.collectives.check()?)
    });
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        outcome.unwrap_or_else(|error| panic!("rank {rank}: {error}"));
    }
}

/// An operation, on either backend.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum What {
    AllReduce(ReduceOp, Option<Algorithm>),
    /// All-reduce of registered memory.
    Registered(ReduceOp, Algorithm),
    AllGather,
    ReduceScatter(ReduceOp),
    AllToAll,
    Broadcast(usize),
}

impl What {
    /// Elements of input and output, where a rank's block has `count`.
    pub fn counts(self, count: usize, world_size: usize) -> (usize, usize) {
        match self {
            Self::AllReduce(..) | Self::Registered(..) | Self::Broadcast(_) => (count, count),
            Self::AllGather => (count, world_size * count),
            Self::ReduceScatter(_) => (world_size * count, count),
            Self::AllToAll => (world_size * count, world_size * count),
        }
    }

    pub fn on_host<T: Element>(
        self,
        comm: &Communicator,
        input: &[T],
        output: &mut [T],
    ) -> Result<(), CollectiveError> {
        match self {
            Self::AllReduce(op, _) | Self::Registered(op, _) => comm.all_reduce(input, output, op),
            Self::AllGather => comm.all_gather(input, output),
            Self::ReduceScatter(op) => comm.reduce_scatter(input, output, op),
            Self::AllToAll => comm.all_to_all(input, output),
            Self::Broadcast(root) => comm.broadcast_from(Some(TensorView::from(input)), output, root),
        }
    }
}

/// Elements on the device: where, which type, how many.
#[derive(Debug, Clone, Copy)]
pub struct At(pub u64, pub DType, pub usize);

impl Rank {
    pub fn upload<T: Element>(&self, values: &[T]) -> Outcome<DeviceMemory> {
        let memory = self.allocate(size_of_val(values))?;
        memory.write(&self.stream, 0, TensorView::from(values).as_bytes()?)?;
        Ok(memory)
    }

    pub fn allocate(&self, bytes: usize) -> Outcome<DeviceMemory> {
        Ok(DeviceMemory::allocate(self.collectives.context(), bytes.max(16))?)
    }

    /// Registers some memory; all ranks do.
    pub fn register(&self, memory: &DeviceMemory) -> Outcome {
        let (context, len) = (self.collectives.context(), memory.len() as u64);
        let memory = RegisteredMemory::new(&self.comm, context, memory.pointer(), len)?;
        Ok(self.collectives.register(memory)?)
    }

    pub fn download(&self, memory: &DeviceMemory, offset: usize, bytes: usize) -> Outcome<Vec<u8>> {
        let mut read = vec![0; bytes];
        memory.read(&self.stream, offset, &mut read)?;
        self.collectives.check()?; // the kernel's own error explains more than wrong results
        Ok(read)
    }

    /// Where ranks share a GPU, they share a context, in which making and freeing memory or loading kernels waits for all that
    /// is under way: so they meet between that and calls.
    pub fn meet(&self) -> Outcome {
        if ranks_per_gpu() > 1 {
            self.comm.barrier()?;
        }
        Ok(())
    }

    /// Queues an operation. A broadcast uses the output alone.
    pub fn queue(&self, what: What, from: At, to: At) -> Result<(), CollectiveError> {
        self.queue_on(what, from, to, &self.stream)
    }

    /// As `queue`, in a stream.
    pub fn queue_on(&self, what: What, from: At, to: At, stream: &Stream) -> Result<(), CollectiveError> {
        let device = Device::Cuda(self.collectives.context().device().ordinal());
        let at = |address: u64| address as usize as *mut u8;
        // SAFETY: the tests keep the memory until they have synchronised with the stream.
        unsafe {
            let input = TensorView::from_raw_parts(at(from.0), from.1, &[from.2], None, device).unwrap();
            let mut output = TensorViewMut::from_raw_parts(at(to.0), to.1, &[to.2], None, device).unwrap();
            let (collectives, stream) = (&self.collectives, stream.borrow());
            match what {
                What::AllReduce(op, None) => collectives.all_reduce(input, &mut output, op, stream),
                What::AllReduce(op, Some(algorithm)) => {
                    collectives.all_reduce_with(input, &mut output, op, algorithm, stream)
                }
                What::Registered(op, algorithm) => {
                    let options = AllReduceOptions::registered(algorithm);
                    collectives.all_reduce_with(input, &mut output, op, options, stream)
                }
                What::AllGather => collectives.all_gather(input, &mut output, stream),
                What::ReduceScatter(op) => collectives.reduce_scatter(input, &mut output, op, stream),
                What::AllToAll => collectives.all_to_all(input, &mut output, stream),
                What::Broadcast(root) => collectives.broadcast(&mut output, root, stream),
            }
        }
    }

    /// Does the same on GPUs and on the host, and compares the bits. `values` has the input, behind `offset` elements.
    pub fn compare<T: Element>(&self, what: What, values: &[T], offset: usize) -> Outcome {
        let world_size = self.comm.world_size();
        let blocks = if matches!(what, What::ReduceScatter(_) | What::AllToAll) { world_size } else { 1 };
        let (from, to) = what.counts((values.len() - offset) / blocks, world_size);
        let input = &values[offset..offset + from];
        let mut expected = vec![T::from_f64(7.0); to];
        what.on_host(&self.comm, input, &mut expected)?;
        let size = size_of::<T>();
        let (device_in, device_out) = (self.upload(values)?, self.allocate((offset + to) * size)?);
        let registered = match what {
            What::Registered(_, Algorithm::OneShot) => vec![&device_in],
            What::Registered(_, Algorithm::TwoShot) => vec![&device_in, &device_out],
            _ => Vec::new(),
        };
        registered.iter().try_for_each(|memory| self.register(memory))?;
        if let What::Broadcast(root) = what
            && root == self.comm.rank()
        {
            device_out.write(&self.stream, offset * size, TensorView::from(input).as_bytes()?)?;
        }
        let at =
            |memory: &DeviceMemory, count| At(memory.pointer().0 + (offset * size) as u64, T::DTYPE, count);
        if let What::AllReduce(op, _) | What::Registered(op, _) | What::ReduceScatter(op) = what {
            self.collectives.prepare(T::DTYPE, op)?;
        }
        self.meet()?;
        self.queue(what, at(&device_in, from), at(&device_out, to))?;
        let got = self.download(&device_out, offset * size, to * size)?;
        self.meet()?;
        for memory in registered {
            self.collectives.unregister(&self.comm, memory.pointer())?;
        }
        self.same::<T>(&format!("{what:?} of {from} behind {offset}"), &got, &expected)
    }

    pub fn same<T: Element>(&self, what: &str, got: &[u8], expected: &[T]) -> Outcome {
        let expected = TensorView::from(expected).as_bytes()?.to_vec();
        let size = size_of::<T>();
        match got.chunks(size).zip(expected.chunks(size)).position(|(a, b)| a != b) {
            None => Ok(()),
            Some(at) => {
                let of = |bytes: &[u8]| bytes[at * size..][..size].to_vec();
                let (got, expected) = (of(got), of(&expected));
                Err(format!("{} {what}: element {at} is {got:x?}, on the host {expected:x?}", T::DTYPE)
                    .into())
            }
        }
    }
}

/// Numbers that look random and are the same on all ranks.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, range: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % range
    }

    /// Lets one rank be late by up to 300 µs, once in 500 times.
    pub fn delay(&mut self, comm: &Communicator) {
        self.delay_once_in(500, comm);
    }

    /// Delays one rank by up to 300 µs, in one of `times` calls on average.
    pub fn delay_once_in(&mut self, times: usize, comm: &Communicator) {
        let (late, often, delay) = (self.below(comm.world_size()), self.below(times), self.below(300) as u64);
        if often == 0 && late == comm.rank() {
            std::thread::sleep(std::time::Duration::from_micros(delay));
        }
    }
}

/// Values of every size and sign that differ between ranks.
pub fn values<T: Element>(rank: usize, count: usize) -> Vec<T> {
    let value = |i: usize| {
        let mixed = (i * 2_654_435_761 + rank * 40_503) % 65_521;
        (mixed as f64 - 32_760.0) / 1024.0
    };
    (0..count).map(|i| <T as Element>::from_f64(value(i))).collect()
}

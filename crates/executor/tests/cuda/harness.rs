//! Ranks on GPUs, and what a plan gives there and on the host.

use std::time::Duration;

use antiphon_device::cuda::{Context, DeviceMemory, Stream, memory};
use antiphon_executor::{
    LoadedPlan, Options, PacketKind,
    cuda::{CudaOptions, CudaPlan, Form, Ports},
};
use antiphon_fabric::{Communicator, LocalWorld, RegisteredMemory};
use antiphon_plan::{
    Plan,
    verify::{Memory, Options as Proof, VerifiedPlan},
};
use antiphon_tensor::{Device, Element, TensorView};
use antiphon_testing::{device_of, gpus_for, ranks_per_gpu};

pub type Outcome<T = ()> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// The most elements ahead of tensors that are registered.
const MOST_OFFSET: usize = 8;

/// What a rank of a test has.
pub struct Rank {
    pub comm: Communicator,
    pub context: Context,
    pub stream: Stream,
}

impl Rank {
    /// Ranks that share a GPU meet between what makes memory or graphs and what they launch; see [`ranks_per_gpu`].
    pub fn meet(&self) -> Outcome {
        if ranks_per_gpu() > 1 {
            self.comm.barrier()?;
        }
        Ok(())
    }
}

pub const TIMEOUT: Duration = Duration::from_secs(30);

/// Runs `body` on as many ranks; skips where there are too few GPUs.
pub fn on_gpus(world_size: usize, body: impl Fn(&Rank) -> Outcome + Sync) {
    let outcomes = run(world_size, TIMEOUT, |rank| {
        body(rank)?;
        rank.stream.borrow().synchronize()?;
        Ok(rank.comm.barrier()?) // a rank that left while another one's kernel waits would be lost to that
    });
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        outcome.unwrap_or_else(|error| panic!("rank {rank}: {error}"));
    }
}

/// What `body` returns on each of as many ranks; nothing where there are too few GPUs.
pub fn run<T: Send>(
    world_size: usize,
    timeout: Duration,
    body: impl Fn(&Rank) -> Outcome<T> + Sync,
) -> Vec<Outcome<T>> {
    let Some(driver) = gpus_for(world_size) else { return Vec::new() };
    LocalWorld::run_with(world_size, timeout, |comm| {
        let context = Context::primary(device_of(driver, comm.rank())?)?;
        let stream = context.stream()?;
        body(&Rank { comm, context, stream })
    })
}

/// A proof of a plan that is right.
pub fn proved(plan: Plan) -> VerifiedPlan {
    VerifiedPlan::new(plan, &Proof { memory: Memory::Device, ..Proof::default() })
        .unwrap_or_else(|report| panic!("{report}"))
}

/// Values of every size and sign, whose sums depend on their order. Some are special to floats: what they give has one form too.
pub fn values<T: Element>(rank: usize, count: usize, seed: usize) -> Vec<T> {
    let value = |i: usize| {
        let mixed = (i * 2_654_435_761 + rank * 40_503 + seed * 7_919) % 65_521;
        match mixed % 101 {
            3 => f64::NAN,
            5 => -0.0,
            7 => f64::INFINITY,
            11 => f64::NEG_INFINITY,
            13 => 1e-40, // subnormal in f32
            _ => (mixed as f64 - 32_760.0) / 1024.0,
        }
    };
    (0..count).map(|i| T::from_f64(value(i))).collect()
}

fn bytes_of<T: Element>(values: &[T]) -> Vec<u8> {
    TensorView::from(values).as_bytes().unwrap().to_vec()
}

/// Plans that are compiled, and plans that are interpreted.
pub const COMPILED: CudaOptions = of(Form::Compiled);
pub const INTERPRETED: CudaOptions = of(Form::Interpreted);

const fn of(form: Form) -> CudaOptions {
    CudaOptions { packets: PacketKind::LL16, form, ports: Ports::Blocks, most_scratch: 512 << 20 }
}

/// A plan on both backends.
pub struct Both<'a> {
    rank: &'a Rank,
    pub host: LoadedPlan,
    pub gpu: CudaPlan,
    /// Chunks of input and output.
    chunks: [usize; 2],
    /// Whether calls are in place.
    pub in_place: bool,
}

/// A call's memory on the GPU, and what it must hold behind the call.
pub struct Call<T> {
    pub input: DeviceMemory,
    pub output: DeviceMemory,
    counts: [usize; 2],
    /// Elements ahead of the tensors.
    offset: usize,
    expected: Vec<T>,
    /// Whether its memory is registered, and the call relies on it.
    pub registered: bool,
}

impl<'a> Both<'a> {
    pub fn load(rank: &'a Rank, plan: &VerifiedPlan, options: CudaOptions) -> Outcome<Self> {
        let host = LoadedPlan::load(&rank.comm, plan, Options { packets: options.packets })?;
        let gpu = CudaPlan::load(&rank.comm, &rank.context, plan, options)?;
        let first = &plan.plan().gpus[0];
        let chunks = [first.input_chunks, first.output_chunks].map(|chunks| chunks as usize);
        Ok(Self { rank, host, gpu, chunks, in_place: plan.plan().inplace })
    }

    /// Prepares the plan for chunks of some elements.
    pub fn prepare<T: Element>(&mut self, chunk: usize) -> Outcome {
        let message = if self.gpu.plan().collective == "allgather" { self.chunks[1] } else { self.chunks[0] };
        Ok(self.gpu.prepare(&self.rank.comm, T::DTYPE, message * chunk * size_of::<T>())?)
    }

    /// A call with chunks of some elements, `offset` elements behind the beginning of the memory; it has been done on the host.
    pub fn call<T: Element>(&mut self, chunk: usize, offset: usize, seed: usize) -> Outcome<Call<T>> {
        let comm = &self.rank.comm;
        let counts = self.chunks.map(|chunks| chunks * chunk);
        let given = values::<T>(comm.rank(), counts[0], seed);
        let mut before = vec![T::from_f64(99.0); counts[1]];
        let expected = if self.in_place {
            let larger = counts[0].max(counts[1]);
            let at = |count: usize| if count < larger { comm.rank() * count } else { 0 };
            before.resize(larger, T::from_f64(99.0));
            before[at(counts[0])..][..counts[0]].copy_from_slice(&given);
            let mut both = before.clone();
            self.host.execute_in_place(comm, &mut both)?;
            // What is not this rank's part of a larger input is as the plan left it, on either backend.
            both[at(counts[1])..][..counts[1]].to_vec()
        } else {
            let mut output = before.clone();
            self.host.execute(comm, &given, &mut output)?;
            output
        };
        let (input, output) = (self.upload(&given, offset)?, self.upload(&before, offset)?);
        self.rank.meet()?;
        Ok(Call { input, output, counts, offset, expected, registered: false })
    }

    /// A call with chunks of some elements, which the host does not do. Other than by [`call`](Self::call), the ranks have not met behind it.
    pub fn unchecked<T: Element>(&self, chunk: usize) -> Outcome<Call<T>> {
        let counts = self.chunks.map(|chunks| chunks * chunk);
        let [input, output] = counts.map(|count| self.upload(&vec![T::from_f64(1.0); count], 0));
        let (input, output, expected) = (input?, output?, Vec::new());
        Ok(Call { input, output, counts, offset: 0, expected, registered: false })
    }

    fn upload<T: Element>(&self, values: &[T], offset: usize) -> Outcome<DeviceMemory> {
        // So that ranks may have it behind different numbers of elements, and the same number of bytes.
        let bytes = (values.len() + offset.max(MOST_OFFSET)) * size_of::<T>();
        let memory = DeviceMemory::allocate(&self.rank.context, bytes.max(16))?;
        memory.write(&self.rank.stream, offset * size_of::<T>(), &bytes_of(values))?;
        Ok(memory)
    }

    /// Registers the memory of a call, together with the other ranks.
    pub fn register<T>(&self, mut call: Call<T>) -> Outcome<Call<T>> {
        let Rank { comm, context, .. } = self.rank;
        for memory in [&call.input, &call.output] {
            let memory = RegisteredMemory::new(comm, context, memory.pointer(), memory.len() as u64)?;
            CudaPlan::register(comm, memory)?;
        }
        call.registered = true;
        self.rank.meet()?;
        Ok(call)
    }

    /// Takes the memory of a call back, together with the other ranks.
    pub fn unregister<T>(&self, call: &Call<T>) -> Outcome {
        let Rank { comm, context, .. } = self.rank;
        for memory in [&call.input, &call.output] {
            CudaPlan::unregister(comm, context, memory.pointer())?;
        }
        Ok(())
    }

    /// Puts a call into the rank's stream.
    pub fn queue<T: Element>(&self, call: &Call<T>) -> antiphon_executor::Result<()> {
        self.queue_on(call, &self.rank.stream)
    }

    /// Puts a call into a stream.
    pub fn queue_on<T: Element>(&self, call: &Call<T>, stream: &Stream) -> antiphon_executor::Result<()> {
        let device = Device::Cuda(self.rank.context.device().ordinal());
        let skipped = (call.offset * size_of::<T>()) as u64;
        let at = |memory: &DeviceMemory| (memory.pointer().0 + skipped) as usize as *mut u8;
        let [given, got] = call.counts;
        // SAFETY: the tests keep the memory until they have synchronised with the stream.
        unsafe {
            use antiphon_tensor::TensorViewMut;
            let output = |count: usize| {
                TensorViewMut::from_raw_parts(at(&call.output), T::DTYPE, &[count], None, device).unwrap()
            };
            let gpu = &self.gpu;
            if self.in_place {
                let buffer = output(given.max(got));
                return match call.registered {
                    true => gpu.execute_in_place_registered(buffer, stream),
                    false => gpu.execute_in_place(buffer, stream),
                };
            }
            let input =
                TensorView::from_raw_parts(at(&call.input), T::DTYPE, &[given], None, device).unwrap();
            match call.registered {
                true => gpu.execute_registered(input, output(got), stream),
                false => gpu.execute(input, output(got), stream),
            }
        }
    }

    /// Gives a call the input of another one of the same size, in the rank's stream.
    pub fn take_input<T: Element>(&self, call: &mut Call<T>, from: &Call<T>) -> Outcome {
        let (to, from_there) = (call.input.pointer(), from.input.pointer());
        // SAFETY: both have as many bytes, and the tests keep them until they have synchronised with the stream.
        unsafe { memory::copy(self.rank.stream.borrow(), to, from_there, from.input.len()) }?;
        call.expected.clone_from(&from.expected);
        Ok(())
    }

    /// Whether a call has left the bits of the host.
    pub fn check<T: Element>(&self, call: &Call<T>, what: &str) -> Outcome {
        let [given, got] = call.counts;
        let shift = if self.in_place && got < given { self.rank.comm.rank() * got } else { 0 };
        let mut read = vec![0; got * size_of::<T>()];
        call.output.read(&self.rank.stream, (call.offset + shift) * size_of::<T>(), &mut read)?;
        self.gpu.check()?; // the kernel's own error explains more than wrong results
        let (size, expected) = (size_of::<T>(), bytes_of(&call.expected));
        match read.chunks(size).zip(expected.chunks(size)).position(|(a, b)| a != b) {
            None => Ok(()),
            Some(at) => {
                let of = |bytes: &[u8]| bytes[at * size..][..size].to_vec();
                let (got, expected) = (of(&read), of(&expected));
                let name = self.gpu.plan().name.as_deref().unwrap_or_default();
                Err(format!(
                    "{name}, {what}, {}: element {at} is {got:x?}, on the host {expected:x?}",
                    T::DTYPE
                )
                .into())
            }
        }
    }

    /// A call on both, compared, whose tensors on the GPU are registered meanwhile.
    pub fn compare_registered<T: Element>(&mut self, chunk: usize, offset: usize, seed: usize) -> Outcome {
        self.prepare::<T>(chunk)?;
        let call = self.call::<T>(chunk, offset, seed)?;
        let call = self.register(call)?;
        self.queue(&call)?;
        self.check(&call, &format!("registered, {chunk} elements a chunk behind {offset}"))?;
        self.unregister(&call)
    }

    /// A call on both, compared.
    pub fn compare<T: Element>(&mut self, chunk: usize, offset: usize, seed: usize) -> Outcome {
        self.prepare::<T>(chunk)?;
        let call = self.call::<T>(chunk, offset, seed)?;
        self.queue(&call)?;
        self.check(&call, &format!("{chunk} elements a chunk behind {offset}"))
    }
}

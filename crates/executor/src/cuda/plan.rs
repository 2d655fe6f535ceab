//! Loading plans, making them ready and executing them.

use std::{
    cell::RefCell,
    sync::{Arc, MutexGuard, PoisonError},
};

use antiphon_device::{
    cuda::{Context, DeviceMemory, DevicePointer, GaveUp, StreamRef, memory},
    sync::Mutex,
};
use antiphon_fabric::{
    Communicator, CudaArena, FabricError, Operation, Signature,
    gpu::{Family as _, Grid, Launch, MAX_BLOCKS, Pieces, Tenant, UntilIdle, Work},
};
use antiphon_plan::{BufferType, Extent, Plan, Rank, Wiring, verify::VerifiedPlan};
use antiphon_tensor::{DType, Device, TensorError, TensorView, TensorViewMut};

use super::{
    family::{Interpreter, InterpreterKernel, PlanCall},
    memory::{Areas, Counters, Places, Workspace, Writers},
    report::waiting,
    table::{Base, Table},
};
use crate::{
    ExecutorError, PacketKind,
    arguments::Arguments,
    error::Result,
    layout::{Checked, Mode, Move, Program, Target, compile},
};

/// How a plan is executed on GPUs; the same on all ranks.
#[derive(Debug, Clone, Copy)]
pub struct CudaOptions {
    /// The form of packets.
    pub packets: PacketKind,
    /// The most bytes of scratch that the plan may take on a GPU, for plain data and packets together.
    pub most_scratch: usize,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self { packets: PacketKind::default(), most_scratch: 512 << 20 }
    }
}

/// The tenants that execute the plans of a communicator, by the ordinals of their GPUs. They live as long as the communicator.
#[derive(Default)]
struct Tenants(RefCell<Vec<(u32, Arc<Mutex<Tenant>>)>>);

impl Tenants {
    /// The tenant on the GPU of a context. All ranks call it together.
    fn of(comm: &Communicator, context: &Context) -> Result<Arc<Mutex<Tenant>>, FabricError> {
        let ordinal = context.device().ordinal();
        let tenants = comm.extension(|_| Ok::<_, FabricError>(Self::default()))?;
        let known =
            tenants.0.borrow().iter().find(|(gpu, _)| *gpu == ordinal).map(|(_, tenant)| tenant.clone());
        let all = comm.exchange_objects(&known.is_some())?;
        if let Some(rank) = all.iter().position(|&theirs| theirs != known.is_some()) {
            return Err(FabricError::invalid(format!(
                "rank {} has plans on GPU {ordinal} {}, and rank {rank} {}: each rank loads all of its plans on one GPU",
                comm.rank(),
                if known.is_some() { "already" } else { "for the first time" },
                if known.is_some() { "for the first time" } else { "already" },
            )));
        }
        if let Some(known) = known {
            return Ok(known);
        }
        let made = Tenant::with_one_channel(comm, context, Tenant::LEAST_STAGING_BYTES)?;
        let made = Arc::new(Mutex::new(made));
        tenants.0.borrow_mut().push((ordinal, made.clone()));
        Ok(made)
    }
}

/// A proved plan that is ready to run between the GPUs of a communicator's ranks; see [the module's page](super).
pub struct CudaPlan {
    plan: Plan,
    name: String,
    digest: u32,
    rank: usize,
    options: CudaOptions,
    /// Bytes of the largest chunk that is proved; if none, all are.
    largest_chunk: Option<u64>,
    wiring: Wiring,
    checked: Checked,
    writers: Writers,
    per_multiprocessor: u32,
    context: Context,
    memory: UntilIdle<Memory>,
    tenant: Arc<Mutex<Tenant>>,
}

/// What kernels use.
struct Memory {
    counters: Counters,
    workspace: Workspace,
    prepared: Vec<Prepared>,
}

/// A size for which the plan is ready.
struct Prepared {
    key: Key,
    signature: Signature,
    program: Program,
    origins: Vec<Option<(u32, u32)>>,
    call: PlanCall,
    /// Copies before and after the kernel.
    loads: Vec<Copy>,
    stores: Vec<Copy>,
    _table: DeviceMemory,
    _arenas: [Option<Arc<CudaArena>>; 2],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Key {
    dtype: DType,
    chunk: usize,
    in_place: bool,
}

/// Bytes to copy between tensors and staging.
#[derive(Debug, Clone, Copy)]
struct Copy {
    from: (Base, u64),
    to: (Base, u64),
    bytes: usize,
}

impl std::fmt::Debug for CudaPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaPlan {{ name: {:?}, digest: {:08x}, rank: {} }}", self.name, self.digest, self.rank)
    }
}

impl CudaPlan {
    /// Makes a proved plan ready between the GPUs of the ranks' contexts. All ranks load the same plan, with the same options, at
    /// the same place among their calls.
    ///
    /// # Errors
    /// On all ranks, whose communicator stays usable: [`ExecutorError::Plan`] if [`Plan::check`] refuses it,
    /// [`WorldSize`](ExecutorError::WorldSize), [`Buffers`](ExecutorError::Buffers), [`Operation`](ExecutorError::Operation) if it
    /// leaves a buffer, [`PlansDiffer`](ExecutorError::PlansDiffer), [`Occupancy`](ExecutorError::Occupancy) for too many thread
    /// blocks, and [`Fabric`](ExecutorError::Fabric) as [`Tenant::new`]: for more than 8 ranks, ranks on several machines, and
    /// GPUs without memory.
    pub fn load(
        comm: &Communicator,
        context: &Context,
        plan: &VerifiedPlan,
        options: CudaOptions,
    ) -> Result<Self> {
        // Here stands the check that the proof is for device memory, as soon as `VerifiedPlan::memory` says so.
        let (plan, largest_chunk) = (plan.plan().clone(), plan.report().largest_chunk);
        let call = Signature::new(Operation::LoadPlan);
        comm.as_part_of(&call, || Self::load_together(comm, context, plan, options, largest_chunk))
    }

    fn load_together(
        comm: &Communicator,
        context: &Context,
        plan: Plan,
        options: CudaOptions,
        largest_chunk: Option<u64>,
    ) -> Result<Self> {
        comm.check_one_node("a plan")?;
        let checked = Checked::new(comm, &plan, options.packets, largest_chunk);
        let checked = comm.agree("cannot load its plan", checked)?;
        checked.same_everywhere(comm, &plan)?;
        let tenant = Tenants::of(comm, context)?;
        let per_multiprocessor = per_multiprocessor(&plan, lock(&tenant).multiprocessors())?;
        let counters = Counters::new(comm, context, &plan)?;
        let memory = Memory { counters, workspace: Workspace::default(), prepared: Vec::new() };
        Ok(Self {
            name: name_of(&plan),
            digest: checked.short_digest(),
            rank: comm.rank(),
            options,
            largest_chunk,
            wiring: Wiring::new(&plan),
            checked,
            writers: Writers::new(&plan, comm.rank()),
            per_multiprocessor,
            context: context.clone(),
            memory: UntilIdle::new(context, memory),
            tenant,
            plan,
        })
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Makes the plan ready for messages of `bytes` bytes of a dtype: compiles the kernel, and allocates. A message is the output of
    /// an all-gather, else the input. All ranks call it together. A size that was prepared before costs nothing; sizes share memory
    /// if the largest one is prepared first.
    ///
    /// # Errors
    /// On all ranks: [`ExecutorError::Plan`] for a size that the plan does not serve, [`Tensor`](ExecutorError::Tensor) for a dtype
    /// without arithmetic, [`Operation`](ExecutorError::Operation), [`Buffers`](ExecutorError::Buffers) for chunks that are larger
    /// than the proof's and for more scratch than the options allow, and
    /// [`Fabric`](ExecutorError::Fabric) without memory or NVRTC.
    pub fn prepare(&mut self, comm: &Communicator, dtype: DType, bytes: usize) -> Result<()> {
        let call = Signature {
            dtype: Some(dtype),
            detail: self.digest,
            count: (bytes / dtype.size()) as u64,
            ..Signature::new(Operation::LoadPlan)
        };
        comm.as_part_of(&call, || self.prepare_together(comm, dtype, bytes))
    }

    fn prepare_together(&mut self, comm: &Communicator, dtype: DType, bytes: usize) -> Result<()> {
        let extent = comm.agree("cannot prepare its plan", self.extent(dtype, bytes))?;
        let family = self.family(dtype);
        lock(&self.tenant).load_together(comm, family)?;
        for in_place in [false, true] {
            let key = Key { dtype, chunk: extent.chunk() as usize, in_place };
            let is_known = self.memory.prepared.iter().any(|prepared| prepared.key == key);
            if self.checked.modes[usize::from(in_place)].is_none() || is_known {
                continue;
            }
            let program = comm.agree("cannot prepare its plan", self.program(&key, &extent))?;
            let areas = comm.agree("cannot prepare its plan", self.areas(&key))?;
            let arenas = self.memory.workspace.reserve(comm, &self.context, &areas)?;
            let prepared =
                comm.agree("cannot prepare its plan", self.prepared(key, program, areas, arenas))?;
            self.memory.prepared.push(prepared);
        }
        Ok(())
    }

    /// Executes the plan on an input and an output: contiguous tensors of one dtype on this rank's GPU, apart from each other. All
    /// ranks call it together, with tensors of the same sizes. It returns at once; the stream does the work, behind the plans of
    /// this communicator that were executed before, on whatever stream.
    ///
    /// # Errors
    /// See [`ExecutorError`]. Tensors that do not fit are refused before anything happens, as is a size that was not
    /// [prepared](Self::prepare). An earlier failure is returned as by [`check`](Self::check).
    ///
    /// # Safety
    /// The tensors' memory is valid until the stream has passed the call, and nothing else uses it until then but work of the
    /// stream's order. A framework's stream lives until the next plan of the communicator is executed.
    pub unsafe fn execute<'i, 'o, 's>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        stream: impl Into<StreamRef<'s>>,
    ) -> Result<()> {
        let (input, mut output) = (input.into(), output.into());
        let call = Arguments::apart(self.device(), &input, &mut output)?;
        // SAFETY: the caller's promise.
        unsafe { self.run(&call, stream.into()) }
    }

    /// [`execute`](Self::execute) with one buffer for input and output. If one is larger, the buffer is that one, and the other is
    /// this rank's own part of it.
    ///
    /// # Errors
    /// As [`execute`](Self::execute); [`Buffers`](ExecutorError::Buffers) if neither is a whole number of times the other.
    ///
    /// # Safety
    /// As [`execute`](Self::execute).
    pub unsafe fn execute_in_place<'o, 's>(
        &self,
        buffer: impl Into<TensorViewMut<'o>>,
        stream: impl Into<StreamRef<'s>>,
    ) -> Result<()> {
        let mode = self.checked.in_place(&self.name)?;
        let shift = |buffer| mode.placements.shift(Rank(self.rank as u32), buffer);
        let shifts = [shift(BufferType::Input), shift(BufferType::Output)];
        let call = Arguments::together(self.device(), &mut buffer.into(), self.chunks(), shifts)?;
        // SAFETY: the caller's promise.
        unsafe { self.run(&call, stream.into()) }
    }

    /// Whether all executions that are over have done what they should. It does not wait: synchronise with the stream first.
    ///
    /// # Errors
    /// [`ExecutorError::Stuck`], with the operation that waited in vain; [`Fabric`](ExecutorError::Fabric) for a rank that did not
    /// come, or did something else, and from then on.
    pub fn check(&self) -> Result<()> {
        let tenant = lock(&self.tenant);
        tenant.check().map_err(|error| self.explain(&tenant, error))
    }

    /// Gives the plan's memory back, when all work of the context is over. All ranks call it together, when no graph that has
    /// executions of the plan is launched any more. (A plan that is dropped does the same.)
    ///
    /// # Errors
    /// As [`Communicator::barrier`].
    pub fn free(self, comm: &Communicator) -> Result<()> {
        self.context.synchronize().map_err(FabricError::from)?;
        Ok(comm.barrier()?) // a peer's kernel may use this rank's memory until it has ended
    }

    /// Sets the flag of the last launch, for tests of flags that begin anew. All ranks do, and no call is under way.
    ///
    /// # Errors
    /// [`ExecutorError::Fabric`] as the copy's.
    #[doc(hidden)]
    pub fn set_flags(&self, flag: u32) -> Result<()> {
        let stream = self.context.stream().map_err(FabricError::from)?;
        for prepared in &self.memory.prepared {
            let (at, blocks) = (DevicePointer(prepared.call.flags), prepared.program.blocks.len().max(1));
            // SAFETY: the header has a flag for each block, and no kernel uses them now.
            unsafe { memory::fill_words(stream.borrow(), at, flag, blocks) }.map_err(FabricError::from)?;
        }
        Ok(stream.borrow().synchronize().map_err(FabricError::from)?)
    }

    fn device(&self) -> Device {
        Device::Cuda(self.context.device().ordinal())
    }

    /// Chunks of input and output.
    fn chunks(&self) -> [u64; 2] {
        self.plan.gpus.first().map_or([0, 0], |gpu| [gpu.input_chunks, gpu.output_chunks])
    }

    fn family(&self, dtype: DType) -> Interpreter {
        Interpreter::new(dtype, self.options.packets, self.per_multiprocessor)
    }

    /// The extent of a message, if it can be executed in one launch.
    fn extent(&self, dtype: DType, bytes: usize) -> Result<Extent> {
        if !DType::NUMERIC.contains(&dtype) {
            let source = TensorError::NotNumeric { dtype };
            return Err(ExecutorError::Tensor { which: "tensor", source });
        }
        let chunks = self.chunks();
        let message = if self.plan.collective == "allgather" { chunks[1] } else { chunks[0] };
        let part = |count: u64| match message {
            0 => bytes as u64,
            _ => (u128::from(count) * bytes as u128 / u128::from(message)) as u64,
        };
        let extent = Extent::new(&self.plan, part(chunks[0]), part(chunks[1]))?;
        match self.largest_chunk {
            Some(largest) if largest < extent.chunk() => Err(ExecutorError::Buffers {
                plan: self.name.clone(),
                what: format!(
                    "it is proved for chunks of up to {largest} bytes, those of the message have {}, and a message is done in one \
                     launch",
                    extent.chunk()
                ),
            }),
            _ => Ok(extent),
        }
    }

    fn mode(&self, key: &Key) -> &Mode {
        self.checked.modes[usize::from(key.in_place)].as_ref().expect("it was asked for")
    }

    fn program(&self, key: &Key, extent: &Extent) -> Result<Program> {
        compile(Target {
            plan: &self.plan,
            wiring: &self.wiring,
            placements: &self.mode(key).placements,
            rank: self.rank,
            packets: self.options.packets,
            element: key.dtype.size(),
            extent: *extent,
            sliced: false,
        })
    }

    fn areas(&self, key: &Key) -> Result<Areas> {
        let ([input, output], scratch) = (self.chunks(), self.checked.scratch_chunks);
        let stages = self.mode(key).may_stage;
        let areas = Areas::new(key.chunk, [input, output, scratch], stages, self.checked.uses_packets);
        let most = self.options.most_scratch;
        areas.filter(|areas| areas.scratch <= most).ok_or_else(|| ExecutorError::Buffers {
            plan: self.name.clone(),
            what: format!(
                "{scratch} chunks of scratch of {} bytes exceed the {most} bytes that are allowed",
                key.chunk
            ),
        })
    }

    fn prepared(
        &self,
        key: Key,
        program: Program,
        areas: Areas,
        arenas: [Option<Arc<CudaArena>>; 2],
    ) -> Result<Prepared> {
        let places = Places {
            rank: self.rank,
            counters: &self.memory.counters,
            writers: &self.writers,
            plain: arenas[0].as_deref(),
            packets: arenas[1].as_deref(),
            areas,
            chunk: key.chunk,
        };
        let table = Table::new(&program, &places).ok_or_else(|| ExecutorError::Buffers {
            plan: self.name.clone(),
            what: format!("too many steps for chunks of {} bytes", key.chunk),
        })?;
        let memory = DeviceMemory::allocate(&self.context, table.bytes.len()).map_err(FabricError::from)?;
        let stream = self.context.stream().map_err(FabricError::from)?;
        memory.write(&stream, 0, &table.bytes).map_err(FabricError::from)?;
        let at = memory.pointer().0;
        let [packets, packet_bytes] = places.packets();
        let call = PlanCall {
            starts: at,
            steps: at + table.steps_at as u64,
            items: at + table.items_at as u64,
            flags: places.flags(),
            cleared: places.cleared(),
            packets,
            packet_bytes,
        };
        let mode = self.mode(&key);
        let copies = |moves: &[Move]| moves.iter().map(|each| copy(each, &places)).collect::<Vec<_>>();
        let (loads, stores) = (copies(&mode.loads), copies(&mode.stores));
        let [input, _] = self.chunks();
        let signature = Signature {
            dtype: Some(key.dtype),
            algorithm: key.in_place.into(),
            detail: self.digest,
            count: input * key.chunk as u64 / key.dtype.size() as u64,
            ..Signature::new(Operation::ExecutePlan)
        };
        Ok(Prepared {
            key,
            signature,
            program,
            origins: table.origins,
            call,
            loads,
            stores,
            _table: memory,
            _arenas: arenas,
        })
    }

    /// # Safety
    /// As [`execute`](Self::execute).
    unsafe fn run(&self, call: &Arguments, stream: StreamRef<'_>) -> Result<()> {
        let element = call.dtype.size();
        for (which, address) in [("input", call.input as usize), ("output", call.output as usize)] {
            if !address.is_multiple_of(element) {
                let source = TensorError::Misaligned { address, dtype: call.dtype, align: element };
                return Err(ExecutorError::Tensor { which, source });
            }
        }
        let extent = Extent::new(&self.plan, call.input_bytes as u64, call.output_bytes as u64)?;
        let key = Key { dtype: call.dtype, chunk: extent.chunk() as usize, in_place: call.in_place };
        let prepared = self.memory.prepared.iter().find(|prepared| prepared.key == key);
        let prepared = prepared.ok_or_else(|| ExecutorError::Unprepared {
            plan: self.name.clone(),
            dtype: call.dtype,
            bytes: if self.plan.collective == "allgather" { call.output_bytes } else { call.input_bytes },
        })?;
        let tenant = lock(&self.tenant);
        // SAFETY: the caller's promise.
        unsafe { self.launch(&tenant, prepared, call, stream) }
    }

    /// # Safety
    /// As [`execute`](Self::execute).
    unsafe fn launch(
        &self,
        tenant: &Tenant,
        prepared: &Prepared,
        call: &Arguments,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let (family, explain) = (self.family(prepared.key.dtype), |error| self.explain(tenant, error));
        let blocks = prepared.program.blocks.len().max(1);
        let loaded = tenant.ready(family, stream).map_err(explain)?;
        // A stream may have some of the multiprocessors only.
        check_room(&self.plan, blocks, self.per_multiprocessor, tenant.multiprocessors_here())?;
        let copy_all = |copies: &[Copy]| {
            let outcome = copies.iter().try_for_each(|copy| {
                let [from, to] = [copy.from, copy.to].map(|(base, at)| match base {
                    Base::Absolute => DevicePointer(at),
                    Base::OfInput => DevicePointer(call.input as u64 + at),
                    Base::OfOutput => DevicePointer(call.output as u64 + at),
                });
                match from == to || copy.bytes == 0 {
                    true => Ok(()),
                    // SAFETY: both ends hold the chunks: the tensors are as long as the plan's buffers, and staging has room for them.
                    false => unsafe { memory::copy(stream, to, from, copy.bytes) },
                }
            });
            outcome.or_else(|error| tenant.fail(error.into())).map_err(explain)
        };
        copy_all(&prepared.loads)?;
        let launch = |_, _, _| {
            let (input, output) = (call.input as usize, call.output as usize);
            let work = Work { input, output, ..Work::new(prepared.signature) };
            let config = family.blocks(blocks as u32, tenant.world_size());
            Launch {
                kernel: InterpreterKernel::Interpret,
                grid: Grid::Exact { config, is_small: false },
                work,
                arguments: prepared.call,
            }
        };
        // SAFETY: the table's addresses are those of this plan's memory, which lives until the context is idle, and of the caller's
        // tensors; the blocks were found to fit.
        unsafe { tenant.run(&loaded, Pieces { total: 1, most: 1, unit: 1 }, stream, launch) }
            .map_err(explain)?;
        copy_all(&prepared.stores)
    }

    /// The error of a kernel of this plan that gave up, with the operation.
    fn explain(&self, tenant: &Tenant, error: FabricError) -> ExecutorError {
        let report = tenant.report().filter(|report| {
            let waited = matches!(report.reason, GaveUp::Deadline | GaveUp::Aborted) && report.seen[1] > 0;
            waited && !matches!(error, FabricError::Failed { .. })
        });
        let stuck = report.and_then(|report| {
            let mut prepared = self.memory.prepared.iter();
            let prepared = prepared.find(|prepared| prepared.signature.to_words() == report.doing)?;
            let origin = *prepared.origins.get(usize::try_from(report.seen[1] - 1).ok()?)?;
            waiting(&self.plan, Rank(self.rank as u32), &prepared.program, origin?, &report)
        });
        match stuck {
            Some((place, waiting)) => ExecutorError::Stuck { place, waiting, reason: error.into() },
            None => error.into(),
        }
    }
}

fn name_of(plan: &Plan) -> String {
    plan.name.clone().unwrap_or_default()
}

fn lock(tenant: &Mutex<Tenant>) -> MutexGuard<'_, Tenant> {
    tenant.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How many blocks of a plan each multiprocessor has, of `multiprocessors`.
fn per_multiprocessor(plan: &Plan, multiprocessors: u32) -> Result<u32> {
    let blocks = plan.gpus.iter().map(|gpu| gpu.threadblocks.len()).max().unwrap_or(0);
    let most = Interpreter::MOST_PER_MULTIPROCESSOR;
    let fits = |each: &u32| check_room(plan, blocks, *each, multiprocessors).is_ok();
    match [1, 2].into_iter().find(fits) {
        Some(each) => Ok(each),
        None => check_room(plan, blocks, most, multiprocessors).map(|()| most),
    }
}

/// Whether `blocks` blocks run at once, `each` on each multiprocessor.
fn check_room(plan: &Plan, blocks: usize, each: u32, multiprocessors: u32) -> Result<()> {
    let fit = (each * multiprocessors).min(MAX_BLOCKS) as usize;
    match blocks <= fit {
        true => Ok(()),
        false => Err(ExecutorError::Occupancy {
            plan: name_of(plan),
            blocks,
            threads: Interpreter::THREADS / each,
            fit,
        }),
    }
}

/// A move of chunks as a copy of bytes.
fn copy(each: &Move, places: &Places<'_>) -> Copy {
    let end = |(region, chunk): (crate::layout::Base, u64)| {
        let (base, at, stride) = places.region(places.rank, region);
        (base, at + chunk * stride as u64)
    };
    Copy { from: end(each.from), to: end(each.to), bytes: each.chunks as usize * places.chunk }
}

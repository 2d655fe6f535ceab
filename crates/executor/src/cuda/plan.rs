//! Loading plans, and making them ready.

use std::sync::Arc;

use antiphon_device::{
    cuda::{Context, DevicePointer, memory},
    sync::Mutex,
};
use antiphon_fabric::{
    Communicator, FabricError, Operation, Signature,
    gpu::{MAX_BLOCKS, OnFailure, UntilIdle},
};
use antiphon_plan::{
    Plan, Wiring,
    verify::{self, VerifiedPlan},
};
use antiphon_tensor::{DType, Device};

use super::{
    compiled::Form,
    engines::Engines,
    family::PlanFamily,
    memory::{Counters, Workspace, Writers},
    prepared::{Key, Prepared},
    registered::{Registries, SharedRegistry},
    tenants::{PlanTenant, Tenants, lock},
};
use crate::{
    ExecutorError, PacketKind,
    error::Result,
    layout::{Checked, Ports},
};

/// How a plan is executed on GPUs; the same on all ranks.
#[derive(Debug, Clone, Copy)]
pub struct CudaOptions {
    /// The form of packets.
    pub packets: PacketKind,
    /// Whether a kernel is compiled for the plan's steps.
    pub form: Form,
    /// What does the work of ports.
    pub ports: Ports,
    /// The most bytes of scratch that the plan may take on a GPU, for plain data and packets together. A message that needs more is
    /// done in several launches.
    pub most_scratch: usize,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self {
            packets: PacketKind::default(),
            form: Form::default(),
            ports: Ports::default(),
            most_scratch: 512 << 20,
        }
    }
}

/// A proved plan that is ready to run between the GPUs of a communicator's ranks; see [the module's page](super).
pub struct CudaPlan {
    pub(super) plan: Plan,
    pub(super) name: String,
    pub(super) digest: u32,
    pub(super) rank: usize,
    pub(super) options: CudaOptions,
    /// Bytes of the largest chunk that is proved; if none, all are.
    pub(super) largest_chunk: Option<u64>,
    /// Whether ranks meet before each launch.
    pub(super) meets: bool,
    pub(super) wiring: Wiring,
    pub(super) checked: Checked,
    pub(super) writers: Writers,
    pub(super) per_multiprocessor: u32,
    pub(super) context: Context,
    pub(super) memory: UntilIdle<Memory>,
    pub(super) tenant: Arc<Mutex<PlanTenant>>,
    pub(super) registry: SharedRegistry,
}

/// What kernels use.
pub(super) struct Memory {
    /// First, as its thread ends ahead of the memory that it uses.
    pub(super) engines: Option<Engines>,
    pub(super) counters: Counters,
    pub(super) workspace: Workspace,
    pub(super) prepared: Vec<Prepared>,
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
    /// On all ranks, whose communicator stays usable: [`ExecutorError::Proof`] for a plan that is proved for the memory of a host alone,
    /// [`Plan`](ExecutorError::Plan) if [`Plan::check`] refuses it,
    /// [`WorldSize`](ExecutorError::WorldSize), [`Buffers`](ExecutorError::Buffers), [`Operation`](ExecutorError::Operation) if it
    /// leaves a buffer, [`PlansDiffer`](ExecutorError::PlansDiffer), [`Occupancy`](ExecutorError::Occupancy) for too many thread
    /// blocks, and [`Fabric`](ExecutorError::Fabric) as [`Tenant::new`](antiphon_fabric::gpu::Tenant::new): for more than 8 ranks, ranks on several machines, and
    /// GPUs without memory.
    pub fn load(
        comm: &Communicator,
        context: &Context,
        plan: &VerifiedPlan,
        options: CudaOptions,
    ) -> Result<Self> {
        let call = Signature::new(Operation::LoadPlan);
        comm.as_part_of(&call, || Self::load_together(comm, context, plan, options))
    }

    fn load_together(
        comm: &Communicator,
        context: &Context,
        plan: &VerifiedPlan,
        options: CudaOptions,
    ) -> Result<Self> {
        comm.check_one_node("a plan")?;
        let (memory, report, plan) = (plan.memory(), plan.report(), plan.plan().clone());
        let (largest_chunk, meets) = (report.largest_chunk, !report.back_to_back);
        let checked = match memory {
            verify::Memory::Device => {
                Checked::new(comm, &plan, options.packets, largest_chunk, options.most_scratch)
            }
            verify::Memory::Host => Err(ExecutorError::Proof { plan: name_of(&plan) }),
        };
        let checked = comm.agree("cannot load its plan", checked)?;
        let checked = checked.with_ports(options.ports);
        checked.same_everywhere(comm, &plan)?;
        let tenant = Tenants::of(comm, context)?;
        let per_multiprocessor = per_multiprocessor(&plan, lock(&tenant).multiprocessors())?;
        let counters = Counters::new(comm, context, &plan)?;
        let engines = match options.ports {
            Ports::Blocks => Ok(None),
            Ports::Engines => {
                Engines::start(context, counters.requests(comm.rank()), tenant.clone()).map(Some)
            }
        };
        let engines = comm.agree("cannot have copy engines do the work of ports", engines)?;
        let memory = Memory { engines, counters, workspace: Workspace::default(), prepared: Vec::new() };
        Ok(Self {
            name: name_of(&plan),
            digest: checked.short_digest(),
            rank: comm.rank(),
            options,
            largest_chunk,
            meets,
            wiring: Wiring::new(&plan),
            checked,
            writers: Writers::new(&plan, comm.rank()),
            per_multiprocessor,
            context: context.clone(),
            memory: UntilIdle::new(context, memory),
            tenant,
            registry: Registries::of(comm, context)?,
            plan,
        })
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Whether its ranks meet before each launch. Those of a plan that is proved for launches back to back
    /// ([`Report::back_to_back`](verify::Report::back_to_back)) do so only where the launch before was of another size, plan or place.
    pub fn meets(&self) -> bool {
        self.meets
    }

    /// Has ranks meet before each launch or not, whatever is proved: for tests that what is proved is needed. All ranks do so, before they
    /// prepare any size.
    #[doc(hidden)]
    pub fn set_meets(&mut self, meets: bool) {
        self.meets = meets;
    }

    /// The context of this rank's GPU.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Sets the action after a kernel has given up, of this plan or of any other call of the communicator on this GPU; see
    /// [`OnFailure`].
    pub fn on_failure(&self, action: OnFailure) {
        lock(&self.tenant).on_failure(action);
    }

    /// Whether kernels of plans let a kernel behind them that is launched programmatically start at once, instead of when they are certain to
    /// end, which only compiled ones know; at first they do not. It is for all plans of the communicator on this GPU.
    ///
    /// It is right only where no other communicator or tenant, of whatever library, has calls under way on the same GPUs; see
    /// [`Tenant::start_dependents_early`](antiphon_fabric::gpu::Tenant::start_dependents_early).
    pub fn start_dependents_early(&self, early: bool) {
        lock(&self.tenant).start_dependents_early(early);
    }

    /// Makes the plan ready for messages of `bytes` bytes of a dtype: compiles the kernel, and allocates. A message is the output of
    /// an all-gather, else the input. All ranks call it together. A size that was prepared before costs nothing; sizes share memory
    /// if the largest one is prepared first.
    ///
    /// # Errors
    /// On all ranks: [`ExecutorError::Plan`] for a size that the plan does not serve, [`Tensor`](ExecutorError::Tensor) for a dtype
    /// without arithmetic, [`Operation`](ExecutorError::Operation), [`Unproved`](ExecutorError::Unproved) for chunks that are larger
    /// than the proof's and have no parts that are not, [`Buffers`](ExecutorError::Buffers) if the options allow too little scratch for
    /// 1,024 launches, and
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
        for in_place in [false, true] {
            let key = Key { dtype, chunk: extent.chunk() as usize, in_place };
            let is_known = self.memory.prepared.iter().any(|prepared| prepared.key == key);
            if self.checked.modes[usize::from(in_place)].is_some() && !is_known {
                self.prepare_size(comm, key, &extent)?;
            }
        }
        Ok(())
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
        for part in self.memory.prepared.iter().flat_map(|prepared| &prepared.parts) {
            let (at, blocks) = (DevicePointer(part.call.flags), part.program.blocks.len().max(1));
            // SAFETY: the header has a flag for each block, and no kernel uses them now.
            unsafe { memory::fill_words(stream.borrow(), at, flag, blocks) }.map_err(FabricError::from)?;
        }
        Ok(stream.borrow().synchronize().map_err(FabricError::from)?)
    }

    /// Has requests to copy engines fail, for tests of that; nothing where blocks do the work of ports.
    #[doc(hidden)]
    pub fn fail_requests(&self) {
        if let Some(engines) = &self.memory.engines {
            engines.fail_requests();
        }
    }

    pub(super) fn device(&self) -> Device {
        Device::Cuda(self.context.device().ordinal())
    }

    /// Chunks of input and output.
    pub(super) fn chunks(&self) -> [u64; 2] {
        self.plan.gpus.first().map_or([0, 0], |gpu| [gpu.input_chunks, gpu.output_chunks])
    }
}

pub(super) fn name_of(plan: &Plan) -> String {
    plan.name.clone().unwrap_or_default()
}

/// How many blocks of a plan each multiprocessor has, of `multiprocessors`.
pub(super) fn per_multiprocessor(plan: &Plan, multiprocessors: u32) -> Result<u32> {
    let blocks = plan.gpus.iter().map(|gpu| gpu.threadblocks.len()).max().unwrap_or(0);
    let most = PlanFamily::MOST_PER_MULTIPROCESSOR;
    let fits = |each: &u32| check_room(plan, blocks, *each, multiprocessors).is_ok();
    match [1, 2].into_iter().find(fits) {
        Some(each) => Ok(each),
        None => check_room(plan, blocks, most, multiprocessors).map(|()| most),
    }
}

/// Whether `blocks` blocks run at once, `each` on each multiprocessor.
pub(super) fn check_room(plan: &Plan, blocks: usize, each: u32, multiprocessors: u32) -> Result<()> {
    let fit = (each * multiprocessors).min(MAX_BLOCKS) as usize;
    match blocks <= fit {
        true => Ok(()),
        false => Err(ExecutorError::Occupancy {
            plan: name_of(plan),
            blocks,
            threads: PlanFamily::THREADS / each,
            fit,
        }),
    }
}

//! The kernel of a plan by itself, compiled on a machine without a GPU.

use antiphon_device::cuda::{Architecture, CudaError, Nvrtc, Program};
use antiphon_fabric::gpu::{self, Family as _, most_registers};
use antiphon_plan::{
    Extent, Plan, Rank, Wiring,
    verify::{self, VerifiedPlan},
};
use antiphon_tensor::DType;

#[cfg(doc)]
use super::Form;
use super::{
    family::PlanFamily,
    plan::{CudaOptions, name_of, per_multiprocessor},
    prepared::ListedPlan,
    size::{check_dtype, message},
};
use crate::{
    ExecutorError,
    error::Result,
    layout::{Checked, Target},
};

/// The kernel that executes a rank's part of a plan on tensors of a dtype, specialised on the dtype, the form of packets, the number of ranks
/// and the size of its blocks. A [compiled](Form) one is specialised on the steps of the rank's blocks too; else it is the interpreter.
/// Plans and ranks that agree in these share it, and it equals theirs.
///
/// ```no_run
/// use antiphon_device::cuda::{Architecture, Nvrtc};
/// use antiphon_executor::cuda::{CudaOptions, PlanKernel};
/// use antiphon_plan::{Rank, verify::VerifiedPlan};
/// use antiphon_tensor::DType;
///
/// # fn show(plan: &VerifiedPlan) -> Result<(), Box<dyn std::error::Error>> {
/// let kernel = PlanKernel::new(plan, Rank(0), DType::BF16, CudaOptions::default(), 132)?;
/// let needs = kernel.compile(Nvrtc::load()?, Architecture::SM_90A)?.expect("ptxas tells");
/// assert!(needs.registers <= kernel.most_registers());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct PlanKernel {
    pub(super) family: PlanFamily,
    pub(super) world_size: usize,
    /// Shapes of blocks, and operations of these.
    cases: [usize; 2],
}

/// Two kernels are equal if their programs are.
impl PartialEq for PlanKernel {
    fn eq(&self, other: &Self) -> bool {
        (&self.family, self.world_size) == (&other.family, other.world_size)
    }
}

/// What a kernel needs of a multiprocessor, as the compiler says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelNeeds {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of a thread's stack.
    pub stack_bytes: u32,
    /// Bytes of registers that a thread stores to its stack and loads from there, as they stand in the code.
    pub spilled_bytes: [u32; 2],
}

impl PlanKernel {
    /// The kernel of a rank on GPUs that have so many multiprocessors, which says how large its blocks are. A compiled kernel is that for
    /// chunks which are a whole number of packets.
    ///
    /// # Errors
    /// [`ExecutorError::Proof`] for a plan that is proved for the memory of a host alone, [`Tensor`](ExecutorError::Tensor) for a dtype
    /// without arithmetic, [`Occupancy`](ExecutorError::Occupancy) for too many thread blocks, and otherwise as [`CudaPlan::load`] and
    /// [`CudaPlan::prepare`]. [`WorldSize`](ExecutorError::WorldSize) for a rank that the plan does not have.
    ///
    /// [`CudaPlan::load`]: super::CudaPlan::load
    /// [`CudaPlan::prepare`]: super::CudaPlan::prepare
    pub fn new(
        plan: &VerifiedPlan,
        rank: Rank,
        dtype: DType,
        options: CudaOptions,
        multiprocessors: u32,
    ) -> Result<Self> {
        let ListedPlan { shapes, family, .. } = Self::listed(plan, rank, dtype, options, multiprocessors)?;
        let world_size = plan.plan().num_ranks();
        Ok(Self { family, world_size, cases: [shapes.len(), shapes.operations()] })
    }

    pub(super) fn listed(
        plan: &VerifiedPlan,
        rank: Rank,
        dtype: DType,
        options: CudaOptions,
        multiprocessors: u32,
    ) -> Result<ListedPlan> {
        if plan.memory() == verify::Memory::Host {
            return Err(ExecutorError::Proof { plan: name_of(plan.plan()) });
        }
        check_dtype(dtype)?;
        let (largest, plan) = (plan.report().largest_chunk, plan.plan());
        let ranks = plan.num_ranks();
        if rank.index() >= ranks {
            let world_size = rank.index() + 1;
            return Err(ExecutorError::WorldSize { plan: name_of(plan), ranks, world_size });
        }
        let checked =
            Checked::of_rank(rank.index(), ranks, plan, options.packets, largest, options.most_scratch)?;
        let mode = checked.modes[0].as_ref().expect("two tensors are always possible");
        let target = Target {
            plan,
            wiring: &Wiring::new(plan),
            placements: &mode.placements,
            rank: rank.index(),
            packets: options.packets,
            ports: options.ports,
            element: dtype.size(),
            extent: extent(plan, largest, dtype)?,
            sliced: false,
        };
        let each = per_multiprocessor(plan, multiprocessors)?;
        ListedPlan::new(target, dtype, each, options.form)
    }

    /// `compiled` or `interpreted`.
    pub fn form(&self) -> &'static str {
        self.family.form()
    }

    /// How many different sequences of steps the rank's blocks have, each a case of a compiled kernel.
    pub fn cases(&self) -> usize {
        self.cases[0]
    }

    /// The operations in a compiled kernel's source.
    pub fn operations(&self) -> usize {
        self.cases[1]
    }

    /// Threads of a block.
    pub fn threads(&self) -> u32 {
        self.family.threads()
    }

    /// The most blocks of a grid on a multiprocessor.
    pub fn blocks_per_multiprocessor(&self) -> u32 {
        self.family.most_blocks(self.world_size)
    }

    /// The most registers of a thread, with which two grids fit a multiprocessor.
    pub fn most_registers(&self) -> u32 {
        most_registers(&self.family, self.world_size)
    }

    /// Its source, with the constants that it is specialised on.
    pub fn program(&self, architecture: Architecture) -> Program {
        gpu::program(&self.family, architecture, self.world_size)
    }

    /// Compiles it, and tells what it needs; none if the compiler does not say, as that of an emulator.
    ///
    /// # Errors
    /// [`CudaError::Compile`] with the compiler's messages.
    pub fn compile(
        &self,
        nvrtc: &Nvrtc,
        architecture: Architecture,
    ) -> Result<Option<KernelNeeds>, CudaError> {
        let program = self.program(architecture).option("--ptxas-options=-v");
        Ok(KernelNeeds::of_log(&nvrtc.compile(&program)?.log))
    }
}

/// The extent of chunks that are whole packets and vectors, if the plan serves any.
fn extent(plan: &Plan, largest: Option<u64>, dtype: DType) -> Result<Extent> {
    const WHOLE: u64 = 1 << 10;
    let chunks = plan.gpus.first().map_or([0, 0], |gpu| [gpu.input_chunks, gpu.output_chunks]);
    let alignment = plan.buffer_alignment.max(1);
    let unit = alignment.next_multiple_of(dtype.size() as u64);
    let least = plan.min_message_size.div_ceil(message(&plan.collective, chunks).max(1)).max(1);
    let chunk = match least.checked_next_multiple_of(unit.saturating_mul(WHOLE)) {
        Some(chunk) if largest.is_none_or(|largest| chunk <= largest) => chunk,
        _ => least.next_multiple_of(unit),
    };
    let [input, output] = chunks.map(|chunks| chunks.saturating_mul(chunk));
    Ok(Extent::new(plan, input, output)?)
}

impl KernelNeeds {
    /// What ptxas says of a program's only kernel.
    fn of_log(log: &str) -> Option<Self> {
        let before = |what: &str| {
            let (number, _) = log.split_once(what)?;
            number.split_whitespace().next_back()?.parse().ok()
        };
        Some(Self {
            registers: before(" registers")?,
            stack_bytes: before(" bytes stack frame")?,
            spilled_bytes: [before(" bytes spill stores")?, before(" bytes spill loads")?],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_compilers_log_tells_what_a_kernel_needs() {
        let log = "ptxas info    : 0 bytes gmem\n\
                   ptxas info    : Compiling entry function 'execute' for 'sm_90a'\n\
                   ptxas info    : Function properties for execute\n\
                   ptxas         .     208 bytes stack frame, 376 bytes spill stores, 356 bytes spill loads\n\
                   ptxas info    : Used 32 registers, used 1 barriers, 208 bytes cumulative stack size\n";
        let needs = KernelNeeds { registers: 32, stack_bytes: 208, spilled_bytes: [376, 356] };
        assert_eq!(KernelNeeds::of_log(log), Some(needs));
        assert_eq!(KernelNeeds::of_log("Used many registers"), None);
        assert_eq!(KernelNeeds::of_log(""), None);
    }
}

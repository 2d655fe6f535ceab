//! The kernel of a plan by itself, compiled on a machine without a GPU.

use antiphon_device::cuda::{Architecture, CudaError, Nvrtc, Program};
use antiphon_fabric::gpu::{self, Family as _, most_registers};
use antiphon_plan::verify::{self, VerifiedPlan};
use antiphon_tensor::DType;

use super::{
    family::Interpreter,
    plan::{name_of, per_multiprocessor},
    size::check_dtype,
};
use crate::{ExecutorError, PacketKind, error::Result};

/// The kernel that executes a plan on tensors of a dtype: the interpreter, specialised on the dtype, the form of packets, the number of ranks
/// and the size of its blocks. Plans that agree in these share it.
///
/// ```no_run
/// use antiphon_device::cuda::{Architecture, Nvrtc};
/// use antiphon_executor::{PacketKind, cuda::PlanKernel};
/// use antiphon_plan::verify::VerifiedPlan;
/// use antiphon_tensor::DType;
///
/// # fn show(plan: &VerifiedPlan) -> Result<(), Box<dyn std::error::Error>> {
/// let kernel = PlanKernel::new(plan, DType::BF16, PacketKind::LL16, 132)?;
/// let needs = kernel.compile(Nvrtc::load()?, Architecture::SM_90A)?.expect("ptxas tells");
/// assert!(needs.registers <= kernel.most_registers());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy)]
pub struct PlanKernel {
    family: Interpreter,
    world_size: usize,
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
    /// The kernel of a plan on GPUs that have so many multiprocessors, which says how large its blocks are.
    ///
    /// # Errors
    /// [`ExecutorError::Proof`] for a plan that is proved for the memory of a host alone, [`Tensor`](ExecutorError::Tensor) for a dtype
    /// without arithmetic, and [`Occupancy`](ExecutorError::Occupancy) for too many thread blocks.
    pub fn new(plan: &VerifiedPlan, dtype: DType, packets: PacketKind, multiprocessors: u32) -> Result<Self> {
        if plan.memory() == verify::Memory::Host {
            return Err(ExecutorError::Proof { plan: name_of(plan.plan()) });
        }
        check_dtype(dtype)?;
        let each = per_multiprocessor(plan.plan(), multiprocessors)?;
        let family = Interpreter::new(dtype, packets, each);
        Ok(Self { family, world_size: plan.plan().num_ranks() })
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
                   ptxas info    : Compiling entry function 'interpret' for 'sm_90a'\n\
                   ptxas info    : Function properties for interpret\n\
                   ptxas         .     208 bytes stack frame, 376 bytes spill stores, 356 bytes spill loads\n\
                   ptxas info    : Used 32 registers, used 1 barriers, 208 bytes cumulative stack size\n";
        let needs = KernelNeeds { registers: 32, stack_bytes: 208, spilled_bytes: [376, 356] };
        assert_eq!(KernelNeeds::of_log(log), Some(needs));
        assert_eq!(KernelNeeds::of_log("Used many registers"), None);
        assert_eq!(KernelNeeds::of_log(""), None);
    }
}

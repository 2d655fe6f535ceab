//! The family of the interpreter: one program for each dtype, form of packets and size of block.

use antiphon_device::cuda::{KernelArgument, Program};
use antiphon_fabric::gpu::{Family, Source, kernels};
use antiphon_plan::{REDUCE_OPS, ReduceOp};
use antiphon_tensor::DType;

use super::{bases::Bases, table::Kind};
use crate::PacketKind;

kernels! {
    /// The kernel of `interpreter.cuh`.
    pub(super) enum InterpreterKernel {
        Interpret = "interpret",
    }
}

/// `plan_call` of ops.cuh.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct PlanCall {
    pub(super) starts: u64,
    pub(super) steps: u64,
    pub(super) items: u64,
    pub(super) flags: u64,
    pub(super) cleared: u64,
    pub(super) packets: u64,
    pub(super) packet_bytes: u64,
    pub(super) bases: Bases,
}

// SAFETY: the layout of the kernel's struct: words of 64 bits.
unsafe impl KernelArgument for PlanCall {}

/// The operator of a step, as a number; steps that move bytes have 0.
pub(super) fn operator(op: Option<ReduceOp>) -> u32 {
    let place = op.map(|op| REDUCE_OPS.iter().position(|&known| known == op).expect("the plan was checked"));
    place.map_or(0, |place| place as u32 + 1)
}

/// The interpreter of plans, for tensors of a dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Interpreter {
    element: DType,
    packets: PacketKind,
    per_multiprocessor: u32,
}

impl Interpreter {
    /// The threads that the blocks of a grid on a multiprocessor have together.
    pub(super) const THREADS: u32 = 512;
    /// The most blocks of a grid on a multiprocessor.
    pub(super) const MOST_PER_MULTIPROCESSOR: u32 = 4;

    /// For grids of up to `per_multiprocessor` blocks on each multiprocessor: 1, 2 or 4. The more there are, the fewer threads they
    /// have; two grids leave a thread 64 registers.
    pub(super) fn new(element: DType, packets: PacketKind, per_multiprocessor: u32) -> Self {
        Self { element, packets, per_multiprocessor }
    }
}

impl Family for Interpreter {
    type Kernel = InterpreterKernel;
    type Arguments = PlanCall;
    const NAME: &'static str = "plan_interpreter.cuh";
    const SOURCES: &'static [Source] = &[
        Source { name: "executor/ops.cuh", text: include_str!("ops.cuh") },
        Source { name: "executor/interpreter.cuh", text: include_str!("interpreter.cuh") },
    ];

    fn define(&self, program: Program, _world_size: usize) -> Program {
        let element = match self.element {
            DType::F32 => "float",
            DType::F64 => "double",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::I64 => "i64",
            DType::I32 => "i32",
            DType::I8 => "i8",
            DType::U8 => "u8",
            other => unreachable!("{other} was refused"),
        };
        let program = program.define("ELEMENT", element).define("PAYLOAD", self.packets.payload());
        let program =
            Kind::ALL.iter().fold(program, |program, kind| program.define(kind.name(), *kind as u32));
        let operators = [None].into_iter().chain(REDUCE_OPS.map(Some));
        operators.fold(program, |program, op| {
            let name = op.map_or("NONE".to_owned(), |op| op.name().to_uppercase());
            program.define(&format!("OPERATOR_{name}"), operator(op))
        })
    }

    fn threads(&self) -> u32 {
        Self::THREADS / self.per_multiprocessor
    }

    fn most_blocks(&self, _world_size: usize) -> u32 {
        self.per_multiprocessor
    }

    fn least_blocks(&self, _world_size: usize) -> u32 {
        self.per_multiprocessor
    }
}

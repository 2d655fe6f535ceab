//! The family of the kernels that execute plans: one program for each dtype, form of packets and size of block, and for the shapes of a
//! plan's blocks if it is compiled.

use std::{fmt, sync::Arc};

use antiphon_device::cuda::Program;
use antiphon_fabric::gpu::{Family, MAX_WORLD, Source, kernel_call, kernels};
use antiphon_plan::{REDUCE_OPS, ReduceOp};
use antiphon_tensor::DType;

use super::{
    engines::REQUESTS,
    listing::Kind,
    table::{PlanBlock, PlanItem, PlanStep},
};
use crate::PacketKind;

kernels! {
    /// The kernel of a plan.
    pub(super) enum Entry {
        Execute = "execute",
    }
}

kernel_call! {
    /// What steps share.
    #[derive(Debug)]
    pub(super) struct PlanCall = "plan_call" {
        pub(super) blocks: *const plan_block,
        pub(super) steps: *const plan_step,
        pub(super) items: *const plan_item,
        /// Of the last launch: a copy for each block.
        pub(super) flags: *mut u32,
        /// Of the blocks that have cleared packets.
        pub(super) cleared: *mut plan_counter,
        /// All packets that come to this rank.
        pub(super) packets: *mut u8,
        pub(super) packet_bytes: u64,
        /// Of the scratch, which launches take in turn; the table has the blocks of each.
        pub(super) halves: u64,
        /// The number of the plan's size among all of the communicator; 0 if ranks meet before each launch.
        pub(super) size: u64,
        /// Of registered tensors: a digest.
        pub(super) places: u64,
        /// The FIFO of requests to copy engines, if these do the work of ports.
        pub(super) requests: *mut plan_request,
        /// How many of them are done, and how many were made.
        pub(super) requested: *mut plan_counter,
        /// Where tensors begin in this launch: this rank's, all ranks' shared ones, and all ranks' staging.
        pub(super) bases: [u64; 3 + 3 * MAX_WORLD],
    }
}

/// The operator of a step, as a number; steps that move bytes have 0.
pub(super) fn operator(op: Option<ReduceOp>) -> u32 {
    let place = op.map(|op| REDUCE_OPS.iter().position(|&known| known == op).expect("the plan was checked"));
    place.map_or(0, |place| place as u32 + 1)
}

/// The operator's name in the kernel.
pub(super) fn operator_name(operator: u32) -> String {
    let op = (operator as usize).checked_sub(1).map(|place| REDUCE_OPS[place]);
    format!("OPERATOR_{}", op.map_or("NONE".to_owned(), |op| op.name().to_uppercase()))
}

/// The program that executes plans, for tensors of a dtype.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct PlanFamily {
    element: DType,
    packets: PacketKind,
    per_multiprocessor: u32,
    /// What is compiled for a plan; none is the interpreter, which serves all.
    compiled: Option<Arc<str>>,
}

impl fmt::Debug for PlanFamily {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { element, packets, per_multiprocessor, .. } = self;
        let form = self.form();
        write!(f, "PlanFamily {{ {form}, {element}, {packets:?}, {per_multiprocessor} }}")
    }
}

impl PlanFamily {
    /// The threads that the blocks of a grid on a multiprocessor have together.
    pub(super) const THREADS: u32 = 512;
    /// The most blocks of a grid on a multiprocessor.
    pub(super) const MOST_PER_MULTIPROCESSOR: u32 = 4;

    /// For grids of up to `per_multiprocessor` blocks on each multiprocessor: 1, 2 or 4. The more there are, the fewer threads they
    /// have; two grids leave a thread 64 registers. The kernel is `compiled`, or else the interpreter.
    pub(super) fn new(
        element: DType,
        packets: PacketKind,
        per_multiprocessor: u32,
        compiled: Option<Arc<str>>,
    ) -> Self {
        Self { element, packets, per_multiprocessor, compiled }
    }

    /// Whether it is compiled for the steps of a plan.
    pub(super) fn is_compiled(&self) -> bool {
        self.compiled.is_some()
    }

    /// The name of its form.
    pub(super) fn form(&self) -> &'static str {
        if self.is_compiled() { "compiled" } else { "interpreted" }
    }
}

impl Family for PlanFamily {
    type Kernel = Entry;
    type Arguments = PlanCall;
    const NAME: &'static str = "plan.cuh";
    const SOURCES: &'static [Source] = &[
        PlanItem::SOURCE,
        PlanStep::SOURCE,
        PlanBlock::SOURCE,
        Source { name: "executor/table.cuh", text: include_str!("table.cuh") },
        PlanCall::SOURCE,
        Source { name: "executor/ops.cuh", text: include_str!("ops.cuh") },
        Source { name: "executor/steps.cuh", text: include_str!("steps.cuh") },
    ];

    fn source(&self) -> &str {
        self.compiled.as_deref().unwrap_or(include_str!("interpreter.cuh"))
    }

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
        let program = program.define("REQUESTS", REQUESTS);
        let program = program.define("ELEMENT", element).define("PAYLOAD", self.packets.payload());
        let program =
            Kind::ALL.iter().fold(program, |program, kind| program.define(kind.name(), *kind as u32));
        let operators = 0..=REDUCE_OPS.len() as u32;
        operators.fold(program, |program, operator| program.define(&operator_name(operator), operator))
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

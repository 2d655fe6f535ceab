//! The families of the kernels of `dispatch.cuh` and `combine.cuh`, and the kernels' arguments.

use antiphon_device::cuda::Program;
use antiphon_fabric::gpu::{FORMATS, Family, ROWS, Source, kernel_call, kernels};

use super::{CombineFormat, Sizes, SlotFormat};

kernels! {
    /// The kernel of `dispatch.cuh`, `slots::dispatch` as the compiler mangles it.
    pub(crate) enum DispatchKernel {
        Dispatch = "_ZN5slots8dispatchE9arguments9slot_call",
    }
}
kernels! {
    /// The kernel of `combine.cuh`, `slots::combine` as the compiler mangles it.
    pub(crate) enum CombineKernel {
        Combine = "_ZN5slots7combineE9arguments9slot_call",
    }
}

kernel_call! {
    /// A dispatch to slots, or a combine from them.
    #[derive(Debug, Default)]
    pub(crate) struct SlotCall = "slot_call" {
        /// Dispatch: bf16 `[tokens, hidden]`; combine: bf16 `[local, slots, hidden]`.
        pub(super) x: *const u8,
        /// `[tokens, top_k]`.
        pub(super) ids: *const u8,
        /// Combine: `[tokens, top_k]`.
        pub(super) weights: *const float,
        /// Dispatch: `[local, slots, hidden]` of codes or bf16; combine: bf16 `[tokens, hidden]`.
        pub(super) to_x: *mut u8,
        /// `[local, scales of a row, slots]`.
        pub(super) to_scales: *mut u32,
        /// `[local]`.
        pub(super) counts: *mut u32,
        /// `[local, slots]`.
        pub(super) source_tokens: *mut u32,
        /// `[local, WORLD]`.
        pub(super) layout_range: *mut u64,
        /// `[local]`; 0 if there are none.
        pub(super) statistics: *mut u32,
        /// `[WORLD]`: nanoseconds that this rank waited for each peer; 0 if they are not asked for.
        pub(super) waits: *mut u64,
        /// Of the routes: `[WORLD]`, how many tokens each rank has.
        pub(super) held_tokens: *mut u32,
        /// Of the routes: `[WORLD, most_tokens, top_k]`.
        pub(super) places: *mut i32,
        pub(super) tokens: u32,
        pub(super) most_tokens: u32,
        pub(super) hidden: u32,
        pub(super) top_k: u32,
        pub(super) id_bytes: u32,
        pub(super) experts: u32,
    }
}

const CHOICES: Source = Source { name: "slots/choices.cuh", text: include_str!("choices.cuh") };

const LOGFMT: Source = Source { name: "slots/logfmt.cuh", text: include_str!("logfmt.cuh") };

/// The part of a call that a kernel does; choices.cuh has the same numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phases {
    Send = 1,
    Receive = 2,
    Both = 3,
}

/// The words of marks in the shared memory of a block of `dispatch.cuh`: one for each expert and 32 tokens of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Marks {
    /// What decoding needs, 24 KiB.
    Few,
    /// As many as leave a multiprocessor room for a kernel of the other forms.
    Many,
}

impl Marks {
    /// The smallest that has room for the marks of a call; none for a call that has too many.
    pub(crate) fn of(num_experts: usize, max_tokens: usize) -> Option<Self> {
        let words = num_experts.saturating_mul(max_tokens.div_ceil(32));
        [Self::Few, Self::Many].into_iter().find(|marks| words <= marks.words() as usize)
    }

    pub(crate) const fn words(self) -> u32 {
        match self {
            Self::Few => 6144,
            Self::Many => 16384,
        }
    }
}

/// The kernel that moves tokens to the slots of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Dispatching {
    phases: Phases,
    format: SlotFormat,
    threads: u32,
    marks: Marks,
}

impl Dispatching {
    /// For rows of a format. With more than 4 ranks a thread needs more registers, so a block has fewer threads.
    pub(crate) fn new(phases: Phases, format: SlotFormat, world_size: usize, marks: Marks) -> Self {
        Self { phases, format, threads: if world_size <= 4 { 512 } else { 384 }, marks }
    }
}

impl Family for Dispatching {
    type Kernel = DispatchKernel;
    type Arguments = SlotCall;
    const NAME: &'static str = "moe_slots_dispatch.cuh";
    const SOURCES: &'static [Source] = &[
        ROWS,
        FORMATS,
        SlotCall::SOURCE,
        CHOICES,
        Source { name: "slots/dispatch.cuh", text: include_str!("dispatch.cuh") },
    ];

    fn define(&self, program: Program, _world_size: usize) -> Program {
        program.define("FORMAT", self.format as u32).define("PHASES", self.phases as u32)
    }

    fn threads(&self) -> u32 {
        self.threads
    }

    fn shared_bytes(&self, _world_size: usize) -> u32 {
        if self.phases == Phases::Send { 0 } else { self.marks.words() * 4 }
    }

    fn most_blocks(&self, _world_size: usize) -> u32 {
        1
    }
}

/// The kernel that moves rows back and sums them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Combining {
    pub(crate) phases: Phases,
    pub(crate) format: CombineFormat,
}

impl Family for Combining {
    type Kernel = CombineKernel;
    type Arguments = SlotCall;
    const NAME: &'static str = "moe_slots_combine.cuh";
    const SOURCES: &'static [Source] = &[
        SlotCall::SOURCE,
        CHOICES,
        LOGFMT,
        Source { name: "slots/combine.cuh", text: include_str!("combine.cuh") },
    ];

    fn define(&self, program: Program, _world_size: usize) -> Program {
        program.define("FORMAT", self.format as u32).define("PHASES", self.phases as u32)
    }

    fn threads(&self) -> u32 {
        320
    }

    fn most_blocks(&self, _world_size: usize) -> u32 {
        1
    }
}

/// A kernel of calls to or from slots.
pub(super) trait SlotFamily: Family<Arguments = SlotCall> + Copy {
    /// The kernel for other phases of the same call.
    fn with(self, phases: Phases) -> Self;

    /// Whether the kernel lets the one behind it start when it is certain to end, if it is small.
    fn is_released(self) -> bool;
}

impl SlotFamily for Dispatching {
    fn with(self, phases: Phases) -> Self {
        Self { phases, ..self }
    }

    fn is_released(self) -> bool {
        self.phases == Phases::Both
    }
}

impl SlotFamily for Combining {
    fn with(self, phases: Phases) -> Self {
        Self { phases, ..self }
    }

    fn is_released(self) -> bool {
        false
    }
}

impl SlotCall {
    /// The second half of a call that nobody wants any more: it empties the slot.
    pub(super) fn without_outputs(self) -> Self {
        let Self { held_tokens, places, tokens, most_tokens, hidden, top_k, id_bytes, experts, .. } = self;
        Self { held_tokens, places, tokens, most_tokens, hidden, top_k, id_bytes, experts, ..Self::default() }
    }

    /// A call of these numbers, without addresses.
    pub(super) fn of(sizes: &Sizes) -> Self {
        Self {
            tokens: sizes.tokens as u32,
            most_tokens: sizes.max_tokens as u32,
            hidden: sizes.hidden as u32,
            top_k: sizes.top_k as u32,
            experts: sizes.num_experts as u32,
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Marks;

    #[test]
    fn marks_are_for_each_expert_and_32_tokens() {
        assert_eq!(Marks::of(256, 128), Some(Marks::Few));
        assert_eq!(Marks::of(6144, 32), Some(Marks::Few));
        assert_eq!(Marks::of(6145, 32), Some(Marks::Many));
        assert_eq!(Marks::of(4096, 128), Some(Marks::Many));
        assert_eq!(Marks::of(4096, 129), None);
        assert_eq!(Marks::of(usize::MAX, 64), None);
    }
}

//! The families of the kernels of `list.cuh`, `place.cuh`, `dispatch.cuh` and `combine.cuh`, and the kernels' arguments.

use antiphon_device::cuda::Program;
use antiphon_fabric::gpu::{
    Family, PIPELINE, REDUCE, ROWS, Reduction, Rings, Source, Stages, Staging, kernel_call, kernels,
};
use antiphon_operation::ReduceOp;
use antiphon_tensor::DType;

use crate::{
    by_token::family::{HALF_ROWS, REGION, RegionCall, SUMS, Warps, family, senders},
    cuda::THREADS,
    layout::MAX_LOCAL_EXPERTS,
};

kernels! {
    /// The kernels of `list.cuh`.
    pub(crate) enum ListKernel {
        Count = "count_choices",
        List = "list_choices",
    }
}
kernels! {
    /// The kernel of `place.cuh`.
    pub(crate) enum PlaceKernel {
        Place = "place",
    }
}
kernels! {
    /// The kernel of `dispatch.cuh`.
    pub(crate) enum DispatchKernel {
        Dispatch = "by_expert_dispatch_kernel",
    }
}
kernels! {
    /// The kernel of `combine.cuh`.
    pub(crate) enum CombineKernel {
        Combine = "by_expert_combine_kernel",
    }
}

kernel_call! {
    /// Of a routing map, for the lists of its choices. A unit is 32 tokens, a chunk the units that a block has at a time.
    pub(crate) struct ListCall = "list_call" {
        /// `[tokens, experts]`.
        pub(super) map: *const u8,
        /// `[units, experts]`.
        pub(super) bits: *mut u32,
        /// `[chunks, experts]`: how many of a chunk's tokens choose each expert.
        pub(super) of_chunk: *mut u32,
        /// As in `choices` of choices.cuh.
        pub(super) all: *mut u32,
        pub(super) number: *mut u16,
        /// `[tokens, WORLD]`: whether there are any.
        pub(super) in_rank: *mut u8,
        /// `[experts]`: how many tokens choose each.
        pub(super) per_expert: *mut u32,
        /// The most choices of a token at one rank.
        pub(super) most: *mut u32,
        pub(super) tokens: u32,
        pub(super) experts: u32,
        /// Units of a chunk.
        pub(super) chunk: u32,
    }
}

kernel_call! {
    /// Where the rows of each expert are.
    pub(crate) struct PlaceCall = "place_call" {
        /// `[WORLD, local]`, as in [`NotifyCall`](crate::by_token::family::NotifyCall).
        pub(super) chosen_by: *const u32,
        /// `[WORLD, WORLD]`, as there.
        pub(super) counts: *const u32,
        /// `[WORLD, local]`: the row of the first token of each rank for each expert, room or not.
        pub(super) first: *mut u32,
        /// `[local]`: tokens that there is room for.
        pub(super) kept: *mut u32,
        /// `[local]`: the rows of these, with the padding.
        pub(super) padded: *mut u32,
        /// Whether there is no room for some.
        pub(super) overflow: *mut u32,
        /// How many tokens arrive.
        pub(super) received: *mut u32,
        /// How many rows there would be without a limit, with the padding.
        pub(super) needed: *mut u32,
        pub(super) local: u32,
        pub(super) multiple: u32,
        pub(super) limit: u32,
    }
}

kernel_call! {
    /// A dispatch by a routing map. `N` tokens arrive.
    pub(crate) struct ByExpertRowsCall = "by_expert_rows_call" {
        /// As in [`NotifyCall`](crate::by_token::family::NotifyCall), and so below.
        pub(super) counts: *const u32,
        pub(super) starts: *const u32,
        pub(super) heads: *const i32,
        pub(super) most: *const u32,
        /// As in `choices` of choices.cuh.
        pub(super) all: *const u32,
        pub(super) number: *const u16,
        /// As in [`PlaceCall`].
        pub(super) first: *const u32,
        pub(super) kept: *const u32,
        /// `[N, local]`: the row of a received token for each expert, or -1.
        pub(super) places: *mut i32,
        /// `[tokens, row_bytes]`.
        pub(super) x: *const u8,
        /// `[tokens, scales_of_row]`.
        pub(super) scales: *const u32,
        /// `[tokens, WORLD, local]`; 0 if there are none.
        pub(super) probs: *const u32,
        /// `[rows, row_bytes]`, and so on.
        pub(super) to_x: *mut u8,
        pub(super) to_scales: *mut u32,
        /// `[rows]`; by token `[rows, local]`.
        pub(super) to_probs: *mut u32,
        /// Without what lies beside a row.
        pub(super) region: RegionCall as region_call,
        pub(super) tokens: u32,
        pub(super) rows: u32,
        pub(super) row_bytes: u32,
        pub(super) scales_of_row: u32,
        pub(super) local: u32,
        /// The first warps of each block, which send and take by turns; the others only take.
        pub(super) senders: u32,
        pub(super) is_by_token: u32,
    }
}

kernel_call! {
    /// A combine by a routing map.
    pub(crate) struct ByExpertSumsCall = "by_expert_sums_call" {
        /// As in [`NotifyCall`](crate::by_token::family::NotifyCall), and so below.
        pub(super) counts: *const u32,
        pub(super) starts: *const u32,
        pub(super) heads: *const i32,
        pub(super) most: *const u32,
        /// As in `choices` of choices.cuh.
        pub(super) all: *const u32,
        pub(super) number: *const u16,
        /// As in [`ByExpertRowsCall`].
        pub(super) places: *const i32,
        /// `[rows, row_bytes]`.
        pub(super) rows: *const u8,
        /// `[rows]`; by token `[rows, local]`; 0 if there are none.
        pub(super) probs: *const u32,
        /// `[tokens, row_bytes]`.
        pub(super) output: *mut u8,
        /// `[tokens, WORLD, local]`.
        pub(super) to_probs: *mut u32,
        /// Without what lies beside a row.
        pub(super) region: RegionCall as region_call,
        pub(super) tokens: u32,
        pub(super) row_bytes: u32,
        pub(super) local: u32,
        pub(super) is_by_token: u32,
    }
}

/// The kernels that list the choices of a routing map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Listing;

impl Listing {
    /// The experts of whole ranks, or those of one, that a block looks at.
    const AT_ONCE: usize = 2 * MAX_LOCAL_EXPERTS;
    /// The words of units that a block has room for.
    const BITS: usize = 6144;

    /// The number of units that a block has at a time: its share of `units` units, as far as there is room.
    pub(super) fn chunk(units: usize, blocks: u32, local: usize, world_size: usize) -> usize {
        let experts = local * (Self::AT_ONCE / local).clamp(1, world_size);
        units.div_ceil(blocks as usize).clamp(1, Self::BITS / experts)
    }
}

/// The kernel that computes where the rows of each expert are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Placing;

/// How many experts a rank has at most, on which the shared memory of warps depends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Experts {
    /// So few that the lists of what is summed leave room for many warps.
    Few,
    /// As many experts as are served.
    Many,
}

impl Experts {
    pub(super) fn of(local: usize) -> Self {
        if local <= Self::Few.most() { Self::Few } else { Self::Many }
    }

    /// `MAX_LOCAL` of combine.cuh.
    const fn most(self) -> usize {
        match self {
            Self::Few => 191,
            Self::Many => MAX_LOCAL_EXPERTS,
        }
    }
}

/// The kernel that moves tokens to the rows of their experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ByExpertMoving {
    pub(crate) staging: Staging,
}

impl ByExpertMoving {
    /// Most warps send and take, one raises flags, one polls those of the peers, one empties rows.
    const WARPS: Warps =
        Warps { rings: Rings { count: 7, stages: HALF_ROWS }, all: 10, streams: 0, stream: 0 };

    /// How many warps of each of `blocks` blocks send: to one peer all that copy.
    pub(super) fn senders(world_size: usize, blocks: u32) -> u32 {
        let most = Self::WARPS.rings.count;
        if world_size <= 2 { most } else { senders(120, blocks, most) }
    }
}

/// The kernel that moves rows back and sums them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ByExpertSumming {
    reduction: Reduction,
    staging: Staging,
    experts: Experts,
}

impl ByExpertSumming {
    /// The kernel for rows of a dtype; none for a dtype that is not summed.
    pub(crate) fn new(dtype: DType, staging: Staging, experts: Experts) -> Option<Self> {
        Some(Self { reduction: Reduction::new(dtype, ReduceOp::Sum)?, staging, experts })
    }

    /// Half of the warps send, one raises flags, half sum. With many experts there are fewer, as the lists of what is summed leave less
    /// shared memory.
    fn warps(self) -> Warps {
        let (count, all) = match self.experts {
            Experts::Few => (5, 12),
            Experts::Many => (3, 8),
        };
        // Where a stage ends, so does a vector of each lane.
        let rings = Rings { count, stages: Stages { count: 2, bytes: 3072 } };
        Warps { rings, all, streams: all - 1, stream: 12 }
    }
}

const CHOICES: Source =
    Source { name: "by_expert/kernels/choices.cuh", text: include_str!("kernels/choices.cuh") };
const LIST: Source = Source { name: "by_expert/kernels/list.cuh", text: include_str!("kernels/list.cuh") };
const PLACE: Source = Source { name: "by_expert/kernels/place.cuh", text: include_str!("kernels/place.cuh") };
const ROWS_BY_MAP: Source =
    Source { name: "by_expert/kernels/dispatch.cuh", text: include_str!("kernels/dispatch.cuh") };
const SUMS_BY_MAP: Source =
    Source { name: "by_expert/kernels/combine.cuh", text: include_str!("kernels/combine.cuh") };

family!(
    Listing: ListKernel(ListCall), "list.cuh" of [CHOICES, ListCall::SOURCE, LIST],
    |_, program| program.define("AT_ONCE", Listing::AT_ONCE).define("BITS", Listing::BITS), |_| THREADS, |_| 0
);
family!(
    Placing: PlaceKernel(PlaceCall), "place.cuh" of [PlaceCall::SOURCE, PLACE],
    |_, program| program, |_| THREADS, |_| 0
);
family!(
    ByExpertMoving: DispatchKernel(ByExpertRowsCall),
    "dispatch_by_expert.cuh" of [
        ROWS, PIPELINE, RegionCall::SOURCE, REGION, CHOICES, ByExpertRowsCall::SOURCE, ROWS_BY_MAP
    ],
    |_, program| ByExpertMoving::WARPS.define(program), |_| ByExpertMoving::WARPS.threads(),
    |this| ByExpertMoving::WARPS.shared_bytes(this.staging)
);
family!(
    ByExpertSumming: CombineKernel(ByExpertSumsCall),
    "combine_by_expert.cuh" of [
        ROWS, REDUCE, PIPELINE, RegionCall::SOURCE, REGION, SUMS, CHOICES, ByExpertSumsCall::SOURCE, SUMS_BY_MAP
    ],
    |this, program| this.warps().define(this.reduction.define(program)).define("MAX_LOCAL", this.experts.most()),
    |this| this.warps().threads(), |this| this.warps().shared_bytes(this.staging)
);

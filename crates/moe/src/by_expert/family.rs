//! The families of the kernels of `list.cuh`, `place.cuh`, `dispatch.cuh` and `combine.cuh`, and the kernels' arguments.

use antiphon_device::cuda::Program;
use antiphon_fabric::gpu::{Family, REDUCE, ROWS, Reduction, Source, kernels};
use antiphon_operation::ReduceOp;
use antiphon_tensor::DType;

use crate::{
    by_token::cuda::{PIPELINE, REGION, RegionCall, SUMS, Stages, Staging, Warps, family, kernel_call},
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
    /// `list_call` of list.cuh.
    ListCall { map bits of_chunk all number in_rank per_expert most; tokens experts chunk }
}
kernel_call! {
    /// `place_call` of place.cuh.
    PlaceCall { chosen_by counts first kept padded overflow received needed; local multiple limit }
}
kernel_call! {
    /// `by_expert_rows_call` of dispatch.cuh.
    ByExpertRowsCall {
        counts starts heads most all number first kept places x scales probs to_x to_scales to_probs;
        [region: RegionCall] tokens rows row_bytes scales_of_row local is_by_token
    }
}
kernel_call! {
    /// `by_expert_sums_call` of combine.cuh.
    ByExpertSumsCall {
        counts starts heads most all number places rows probs output to_probs;
        [region: RegionCall] tokens row_bytes local is_by_token
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
    /// Most warps send and take by turns, one raises flags, one polls those of the peers, one empties rows.
    const WARPS: Warps = Warps { rings: 7, all: 10, stages: Stages::HALF_ROWS, streams: 0, stream: 0 };
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
        let (rings, all) = match self.experts {
            Experts::Few => (5, 12),
            Experts::Many => (3, 8),
        };
        // Where a stage ends, so does a vector of each lane.
        Warps { rings, all, stages: Stages { count: 2, bytes: 3072 }, streams: all - 1, stream: 12 }
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
    Listing: ListKernel(ListCall), "list.cuh" of [CHOICES, LIST],
    |_, program| program.define("AT_ONCE", Listing::AT_ONCE).define("BITS", Listing::BITS), |_| THREADS, |_| 0
);
family!(Placing: PlaceKernel(PlaceCall), "place.cuh" of [PLACE], |_, program| program, |_| THREADS, |_| 0);
family!(
    ByExpertMoving: DispatchKernel(ByExpertRowsCall), "dispatch_by_expert.cuh" of [ROWS, PIPELINE, REGION, CHOICES, ROWS_BY_MAP],
    |_, program| ByExpertMoving::WARPS.define(program), |_| ByExpertMoving::WARPS.threads(),
    |this| ByExpertMoving::WARPS.shared_bytes(this.staging)
);
family!(
    ByExpertSumming: CombineKernel(ByExpertSumsCall),
    "combine_by_expert.cuh" of [ROWS, REDUCE, PIPELINE, REGION, SUMS, CHOICES, SUMS_BY_MAP],
    |this, program| this.warps().define(this.reduction.define(program)).define("MAX_LOCAL", this.experts.most()),
    |this| this.warps().threads(), |this| this.warps().shared_bytes(this.staging)
);

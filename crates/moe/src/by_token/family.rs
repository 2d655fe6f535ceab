//! The families of the kernels of `notify.cuh`, `dispatch.cuh` and `combine.cuh`, and the kernels' arguments.

use antiphon_device::cuda::Program;
use antiphon_fabric::gpu::{
    Family, LINE, PIPELINE, REDUCE, ROWS, Reduction, Rings, Source, Stages, Staging, kernel_call, kernels,
};
use antiphon_operation::ReduceOp;
use antiphon_tensor::DType;

use crate::{
    cuda::{Plan, RouteWords, THREADS},
    tensors::VECTOR,
};

kernels! {
    /// The kernel of `notify.cuh`.
    pub(crate) enum NotifyKernel {
        Notify = "notify",
    }
}
kernels! {
    /// The kernel of `dispatch.cuh`.
    pub(crate) enum DispatchKernel {
        Dispatch = "dispatch",
    }
}
kernels! {
    /// The kernel of `combine.cuh`.
    pub(crate) enum CombineKernel {
        Combine = "combine",
    }
}

kernel_call! {
    /// How a call uses the region.
    pub(crate) struct RegionCall = "region_call" {
        /// From the start of the first channel.
        pub(crate) at: u64,
        pub(crate) lane_bytes: u64,
        /// A multiple of [`LINE`].
        pub(crate) record_bytes: u32,
        /// Places of half a ring.
        pub(crate) half: u32,
    }
}

kernel_call! {
    /// What ranks tell each other of a routing, and what follows from it.
    pub(crate) struct NotifyCall = "notify_call" {
        /// `[tokens, WORLD]`.
        pub(crate) in_rank: *const u8,
        /// `[WORLD, local]`.
        pub(crate) per_expert: *const u32,
        /// The most experts of one rank that a token has; 0 if nobody asks.
        pub(crate) own_most: *const u32,
        /// `[WORLD, WORLD]`: rows that go from rank to rank, as far as there is room.
        pub(crate) counts: *mut u32,
        /// `[WORLD]`: where the rows of each rank begin at this rank.
        pub(crate) starts: *mut u32,
        /// `[WORLD, WORLD]`: rows for a column's rank from the ranks up to and with the row's, room or not.
        pub(crate) prefix: *mut u32,
        /// `[WORLD]`: this rank's tokens for each.
        pub(crate) routed: *mut u32,
        /// Whether there is no room for some row of this rank.
        pub(crate) overflow: *mut u32,
        /// `[local]`: how often each of this rank's experts was chosen.
        pub(crate) chosen: *mut u32,
        /// `[WORLD, local]`: by the tokens of each rank; 0 if nobody asks.
        pub(crate) chosen_by: *mut u32,
        /// The largest of all ranks' `own_most`; 0 if nobody asks.
        pub(crate) most: *mut u32,
        /// `[tokens, WORLD]`: the number of a token among those for a rank, or -1.
        pub(crate) heads: *mut i32,
        /// On the host: `number`, `[WORLD, HEADER]`, `chosen`; 0 if nobody reads it there.
        pub(crate) result: *mut u32,
        pub(crate) tokens: u32,
        pub(crate) room: u32,
        pub(crate) local: u32,
        /// The number of the call, written last, which tells the host that the result is there.
        pub(crate) number: u32,
    }
}

/// The room of a rank without a capacity: a number of rows that no rank exceeds.
pub(crate) const UNBOUNDED: u32 = i32::MAX as u32;

impl NotifyCall {
    /// A call with all outputs that routes have, and without an input.
    pub(crate) fn leaving(plan: &Plan) -> Self {
        Self {
            in_rank: 0,
            per_expert: 0,
            own_most: 0,
            counts: plan.at(RouteWords::counts),
            starts: plan.at(RouteWords::starts),
            prefix: plan.at(RouteWords::rank_prefix_matrix),
            routed: plan.at(RouteWords::routed_to_each),
            overflow: plan.at(RouteWords::overflow),
            chosen: plan.at(RouteWords::tokens_per_expert),
            chosen_by: 0,
            most: 0,
            heads: plan.at(RouteWords::send_head),
            result: 0,
            tokens: 0,
            room: UNBOUNDED,
            local: 0,
            number: 0,
        }
    }
}

kernel_call! {
    /// A dispatch. `N` rows arrive.
    pub(crate) struct RowsCall = "rows_call" {
        /// As in [`NotifyCall`], and so below.
        pub(super) counts: *const u32,
        pub(super) starts: *const u32,
        pub(super) heads: *const i32,
        /// `[N]`: the token of each received row.
        pub(super) sources: *mut u32,
        /// `[tokens, row_bytes]`.
        pub(super) x: *const u8,
        /// `[tokens, scales_of_row]`.
        pub(super) scales: *const u32,
        /// `[tokens, top_k]`; 0 if there are none.
        pub(super) ids: *const u8,
        pub(super) weights: *const u32,
        /// `[N, row_bytes]`, and so on.
        pub(super) to_x: *mut u8,
        pub(super) to_scales: *mut u32,
        pub(super) to_ids: *mut u8,
        pub(super) to_weights: *mut u32,
        pub(super) region: RegionCall as region_call,
        pub(super) tokens: u32,
        pub(super) rows: u32,
        pub(super) row_bytes: u32,
        pub(super) scales_of_row: u32,
        pub(super) top_k: u32,
        pub(super) id_bytes: u32,
        pub(super) local: u32,
        /// The first warps of each block, which send and take by turns; the others only take.
        pub(super) senders: u32,
    }
}

kernel_call! {
    /// A combine of `N` rows.
    pub(crate) struct SumsCall = "sums_call" {
        /// As in [`NotifyCall`], and so below.
        pub(super) counts: *const u32,
        pub(super) starts: *const u32,
        pub(super) heads: *const i32,
        /// `[N, row_bytes]`.
        pub(super) rows: *const u8,
        /// `[N, top_k]`.
        pub(super) weights: *const u32,
        /// Each `[tokens, row_bytes]`; 0 if there is none.
        pub(super) bias: [*const u8; 2],
        /// `[tokens, row_bytes]`.
        pub(super) output: *mut u8,
        /// `[tokens, top_k]`.
        pub(super) to_weights: *mut u32,
        pub(super) region: RegionCall as region_call,
        pub(super) tokens: u32,
        pub(super) row_bytes: u32,
        pub(super) top_k: u32,
    }
}

/// The kernel that exchanges the counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Notifying;

/// The kernel that moves rows to where they belong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Moving {
    pub(crate) staging: Staging,
}

impl Moving {
    /// Most warps send and take, one raises flags, one polls those of the peers.
    const WARPS: Warps =
        Warps { rings: Rings { count: 7, stages: HALF_ROWS }, all: 9, streams: 0, stream: 0 };

    /// How many warps of each of `blocks` blocks send records of this size.
    pub(crate) fn senders(world_size: usize, blocks: u32, record_bytes: u32) -> u32 {
        let in_all = match world_size {
            ..=2 => 160,
            3..=4 => 96,
            _ => 64,
        };
        // Such a record has two stages, so as many bytes are under way.
        let is_long = record_bytes > HALF_ROWS.bytes;
        senders(if is_long { in_all * 3 / 4 } else { in_all }, blocks, Self::WARPS.rings.count)
    }
}

/// How many warps of each of `blocks` blocks send, `most` at most, where the peers' links take the copies of about `in_all` warps at
/// once: those of more only wait for each other, and for two or four ranks take up to half as long again.
pub(crate) fn senders(in_all: u32, blocks: u32, most: u32) -> u32 {
    ((in_all + blocks / 2) / blocks).clamp(1, most)
}

/// The kernel that moves rows back and sums them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Summing {
    reduction: Reduction,
    staging: Staging,
    warps: Warps,
}

impl Summing {
    /// The kernel for rows of a dtype, a number of ranks and of blocks; none for a dtype that is not summed.
    pub(crate) fn new(dtype: DType, staging: Staging, world_size: usize, blocks: u32) -> Option<Self> {
        let in_all = match world_size {
            ..=2 => 72,
            3..=4 => 48,
            _ => 32,
        };
        // Some warps send, one raises flags, the others sum.
        let rings = Rings { count: senders(in_all, blocks, 3), stages: HALF_ROWS };
        let (all, streams) = (12, 12 - 1 - rings.count);
        let warps = Warps { rings, all, streams, stream: 16 };
        Some(Self { reduction: Reduction::new(dtype, ReduceOp::Sum)?, staging, warps })
    }
}

/// What the warps of a block do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Warps {
    /// The first ones copy, each through a ring of stages. The next one raises their flags.
    pub(crate) rings: Rings,
    pub(crate) all: u32,
    /// Warps to which vectors stream that they sum, and how many a lane has room for.
    pub(crate) streams: u32,
    pub(crate) stream: u32,
}

/// Half a row of bf16 of 7168, or a row of FP8 with its scales: a warp needs about a microsecond for a stage, whatever its size.
pub(crate) const HALF_ROWS: Stages = Stages { count: 2, bytes: 7424 };

impl Warps {
    pub(crate) fn define(self, program: Program) -> Program {
        self.rings.define(program).define("STREAM", self.stream)
    }

    pub(crate) fn threads(self) -> u32 {
        self.all * 32
    }

    pub(crate) fn shared_bytes(self, staging: Staging) -> u32 {
        let stages = self.rings.shared_bytes(staging);
        let streams = self.streams * self.stream * 32 * VECTOR as u32;
        // The kernel begins at a line.
        if stages + streams == 0 { 0 } else { (LINE - VECTOR) as u32 + stages + streams }
    }
}

/// A family of one kernel, made of these sources, of which the last gives it its name.
macro_rules! family {
    ($Family:ident: $Kernel:ident($Call:ident), $name:literal of [$($source:expr),*],
     $define:expr, $threads:expr, $shared:expr) => {
        impl Family for $Family {
            type Kernel = $Kernel;
            type Arguments = $Call;
            const NAME: &'static str = concat!("moe_", $name);
            const SOURCES: &'static [Source] = &[$($source),*];

            fn define(&self, program: Program, _world_size: usize) -> Program {
                let define: fn(&Self, Program) -> Program = $define;
                define(self, program)
            }

            fn threads(&self) -> u32 {
                let threads: fn(&Self) -> u32 = $threads;
                threads(self)
            }

            fn shared_bytes(&self, _world_size: usize) -> u32 {
                let shared: fn(&Self) -> u32 = $shared;
                shared(self)
            }

            fn most_blocks(&self, _world_size: usize) -> u32 {
                1
            }
        }
    };
}

pub(crate) use family;

const NOTIFY: Source =
    Source { name: "by_token/kernels/notify.cuh", text: include_str!("kernels/notify.cuh") };
/// The rows' way between the tensors of the ranks.
pub(crate) const REGION: Source =
    Source { name: "by_token/kernels/region.cuh", text: include_str!("kernels/region.cuh") };
pub(crate) const SUMS: Source =
    Source { name: "by_token/kernels/sums.cuh", text: include_str!("kernels/sums.cuh") };
const DISPATCH: Source =
    Source { name: "by_token/kernels/dispatch.cuh", text: include_str!("kernels/dispatch.cuh") };
const COMBINE: Source =
    Source { name: "by_token/kernels/combine.cuh", text: include_str!("kernels/combine.cuh") };

family!(
    Notifying: NotifyKernel(NotifyCall), "notify.cuh" of [NotifyCall::SOURCE, NOTIFY],
    |_, program| program, |_| THREADS, |_| 0
);
family!(
    Moving: DispatchKernel(RowsCall),
    "dispatch.cuh" of [ROWS, PIPELINE, RegionCall::SOURCE, REGION, RowsCall::SOURCE, DISPATCH],
    |_, program| Moving::WARPS.define(program), |_| Moving::WARPS.threads(), |this| Moving::WARPS.shared_bytes(this.staging)
);
family!(
    Summing: CombineKernel(SumsCall),
    "combine.cuh" of [ROWS, REDUCE, PIPELINE, RegionCall::SOURCE, REGION, SUMS, SumsCall::SOURCE, COMBINE],
    |this, program| this.warps.define(this.reduction.define(program)), |this| this.warps.threads(),
    |this| this.warps.shared_bytes(this.staging)
);

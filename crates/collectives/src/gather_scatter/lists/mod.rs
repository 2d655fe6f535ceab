//! Lists of tensors in one launch, for sharded training; `lists.cuh` describes their order in a lane.

use antiphon_device::{
    ReduceOp,
    cuda::{Program, StreamRef},
};
use antiphon_fabric::{
    Signature,
    gpu::{Family, Grid, Launch, Pieces, REDUCE, ROWS, Reduction, Source, Work, kernel_call, kernels},
};
use antiphon_operation::{Call, digest};
use antiphon_tensor::{DType, TensorView, TensorViewMut};

use super::cuda::{BYTES, ROW_BYTES, ROW_DATA};
#[cfg(doc)]
use crate::CollectiveError;
use crate::{
    StreamCollectives,
    arguments::{CheckedCall, reduction},
    cuda::CudaCollectives,
    error::Result,
};

/// The most tensors of a launch.
const MAX_TENSORS: usize = 64;
/// The algorithm's number in the rows of the table.
const COALESCED: u8 = 1;
const LISTS: Source = Source::new("gather_scatter/lists/lists.cuh", include_str!("lists.cuh"));

kernels! {
    /// The kernel of `all_gather_list.cuh`.
    pub(crate) enum GatherKernel {
        AllGather = "all_gather_list",
    }
}

kernels! {
    /// The kernel of `reduce_scatter_list.cuh`.
    pub(crate) enum ReduceKernel {
        ReduceScatter = "reduce_scatter_list",
    }
}

/// The kernels that move lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MovingLists;

impl Family for MovingLists {
    type Kernel = GatherKernel;
    type Arguments = List;
    const NAME: &'static str = "movement_of_lists.cuh";
    const SOURCES: &'static [Source] = &[
        ROWS,
        BYTES,
        List::SOURCE,
        LISTS,
        Source::new("gather_scatter/lists/all_gather_list.cuh", include_str!("all_gather_list.cuh")),
    ];

    fn define(&self, program: Program, _world_size: usize) -> Program {
        program.define("MAX_TENSORS", MAX_TENSORS)
    }

    /// A thread needs more registers than for one tensor.
    fn most_blocks(&self, _world_size: usize) -> u32 {
        2
    }
}

/// The kernels that reduce lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReducingLists(pub(crate) Reduction);

impl Family for ReducingLists {
    type Kernel = ReduceKernel;
    type Arguments = List;
    const NAME: &'static str = "reduction_of_lists.cuh";
    const SOURCES: &'static [Source] = &[
        REDUCE,
        List::SOURCE,
        LISTS,
        Source::new("gather_scatter/lists/reduce_scatter_list.cuh", include_str!("reduce_scatter_list.cuh")),
    ];

    fn define(&self, program: Program, _world_size: usize) -> Program {
        self.0.define(program).define("MAX_TENSORS", MAX_TENSORS)
    }

    /// As for [`MovingLists`].
    fn most_blocks(&self, _world_size: usize) -> u32 {
        2
    }
}

kernel_call! {
    /// The tensors of a launch.
    pub(crate) struct List = "list" {
        input: [*const u8; MAX_TENSORS],
        output: [*mut u8; MAX_TENSORS],
        /// Bytes of a block, or elements where they are reduced.
        count: [u32; MAX_TENSORS],
        /// The first row, or vector, of each; then the number of all.
        first: [u32; MAX_TENSORS + 1],
        tensors: u32,
    }
}

impl List {
    /// The list of checked calls, whose blocks consist of rows or vectors of `unit` bytes.
    fn new(calls: &[CheckedCall<'_>], unit: usize, reduces: bool) -> Self {
        let mut list = Self {
            input: [0; MAX_TENSORS],
            output: [0; MAX_TENSORS],
            count: [0; MAX_TENSORS],
            first: [0; MAX_TENSORS + 1],
            tensors: calls.len() as u32,
        };
        for (index, call) in calls.iter().enumerate() {
            let (bytes, (input, output)) = (call.block_bytes(), call.addresses());
            list.input[index] = input as u64;
            list.output[index] = output as u64;
            list.count[index] = if reduces { call.block } else { bytes } as u32;
            list.first[index + 1] = list.first[index] + bytes.div_ceil(unit) as u32;
        }
        list
    }

    /// The rows, or vectors, of all tensors.
    fn items(&self) -> usize {
        self.first[self.tensors as usize] as usize
    }
}

impl CudaCollectives {
    /// [`all_gather`](StreamCollectives::all_gather) of each tensor of a list: in one launch if there are at most 64 of one dtype that fit the
    /// memory for staging together, else one after the other.
    ///
    /// # Errors
    /// As [`all_gather`](StreamCollectives::all_gather); [`CollectiveError::Refused`] if there is not an output for each input.
    ///
    /// # Safety
    /// As [`call`](StreamCollectives::call).
    pub unsafe fn all_gather_list(
        &self,
        inputs: &[TensorView<'_>],
        outputs: &mut [TensorViewMut<'_>],
        stream: StreamRef<'_>,
    ) -> Result<()> {
        // SAFETY: passed on.
        unsafe { self.call_list(&Call::all_gather(), inputs, outputs, stream) }
    }

    /// [`reduce_scatter`](StreamCollectives::reduce_scatter) of each tensor of a list, as [`all_gather_list`](Self::all_gather_list).
    ///
    /// # Errors
    /// As [`reduce_scatter`](StreamCollectives::reduce_scatter); [`CollectiveError::Refused`] if there is not an output for each input.
    ///
    /// # Safety
    /// As [`call`](StreamCollectives::call).
    pub unsafe fn reduce_scatter_list(
        &self,
        inputs: &[TensorView<'_>],
        outputs: &mut [TensorViewMut<'_>],
        op: ReduceOp,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        // SAFETY: passed on.
        unsafe { self.call_list(&Call::reduce_scatter(op), inputs, outputs, stream) }
    }

    /// # Safety
    /// As [`call`](StreamCollectives::call).
    unsafe fn call_list(
        &self,
        call: &Call<'_>,
        inputs: &[TensorView<'_>],
        outputs: &mut [TensorViewMut<'_>],
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let mut checked = CheckedCall::of_lists(self.serves(), call, self.ranks(), inputs, outputs)?;
        checked.retain(|one| one.block > 0);
        let reduces = call.operation.row().reduces;
        if reduces {
            checked.iter().try_for_each(CheckedCall::check_reduction)?;
        }
        let (unit, of_lane) = if reduces { (16, 16) } else { (ROW_DATA, ROW_BYTES) };
        let fits = |list: &List| list.items() * of_lane <= self.tenant.lane_bytes();
        let one_dtype = checked.first().map(|first| first.dtype);
        let list = (checked.len() <= MAX_TENSORS
            && checked.len() > 1
            && self.world_size() > 1
            && checked.iter().all(|one| Some(one.dtype) == one_dtype && one.block < 1 << 28))
        .then(|| List::new(&checked, unit, reduces))
        .filter(fits);
        let (Some(list), Some(dtype)) = (list, one_dtype) else {
            for (input, output) in inputs.iter().zip(outputs) {
                // SAFETY: passed on.
                unsafe { self.call(call, Some(input), Some(output), stream) }?;
            }
            return Ok(());
        };
        let blocks: Vec<usize> = checked.iter().map(|one| one.block).collect();
        let signature = Signature {
            algorithm: COALESCED,
            detail: digest(&blocks),
            count: blocks.iter().sum::<usize>() as u64,
            ..checked[0].signature
        };
        // SAFETY: the list's tensors are those of the checked calls; the rest is passed on.
        unsafe { self.launch_list(list, signature, dtype, call.op, stream) }
    }

    /// # Safety
    /// As [`call`](StreamCollectives::call), for the tensors of the list, which fit a lane.
    unsafe fn launch_list(
        &self,
        list: List,
        signature: Signature,
        dtype: DType,
        op: ReduceOp,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let (work, one) = (Work::new(signature), Pieces { total: 1, most: 1, unit: 1 });
        // SAFETY: passed on; a launch sends what fits a lane.
        unsafe {
            match signature.operation.row().reduces {
                true => {
                    let family = ReducingLists(reduction(signature.operation, dtype, op)?);
                    let loaded = self.tenant.ready(family, stream)?;
                    let grid = Grid::ItemsByPeer(list.items());
                    let kernel = ReduceKernel::ReduceScatter;
                    self.tenant.run(&loaded, one, stream, |_, _, _| Launch {
                        kernel,
                        grid,
                        work,
                        arguments: list,
                    })?;
                }
                false => {
                    let loaded = self.tenant.ready(MovingLists, stream)?;
                    let grid = Grid::Items(list.items() * 32);
                    let kernel = GatherKernel::AllGather;
                    self.tenant.run(&loaded, one, stream, |_, _, _| Launch {
                        kernel,
                        grid,
                        work,
                        arguments: list,
                    })?;
                }
            }
        }
        Ok(())
    }
}

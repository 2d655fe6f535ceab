//! What is measured.

use antiphon::{
    collectives::{CollectiveError, Collectives, Communicator, all_reduce::Algorithm},
    device::{ReduceOp, host::reduce::Reducer},
    operation::{Extent, Operation},
    tensor::{DType, Element, TensorView, TensorViewMut},
};

use super::moe;

/// A collective that can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
#[allow(missing_docs)] // named after what they are
pub enum Collective {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Broadcast,
    Reduce,
    Gather,
    Scatter,
    /// A tensor from rank 0 to rank 1 and back
    SendRecv,
    /// Tokens to the ranks of their experts: of 8 for each rank, two for each token; counts are exchanged in each call
    Dispatch,
    /// What those ranks made of tokens, back and summed
    Combine,
    /// The floor of any all-reduce: every rank reads its input and writes its output, all at once
    Memory,
}

impl Collective {
    /// The operation whose row says what is to be known of it; none of the memory's floor.
    pub fn operation(self) -> Option<Operation> {
        match self {
            Self::AllReduce => Some(Operation::AllReduce),
            Self::AllGather => Some(Operation::AllGather),
            Self::ReduceScatter => Some(Operation::ReduceScatter),
            Self::AllToAll => Some(Operation::AllToAll),
            Self::Broadcast => Some(Operation::Broadcast),
            Self::Reduce => Some(Operation::Reduce),
            Self::Gather => Some(Operation::Gather),
            Self::Scatter => Some(Operation::Scatter),
            Self::SendRecv => Some(Operation::Message),
            Self::Dispatch => Some(Operation::Dispatch),
            Self::Combine => Some(Operation::Combine),
            Self::Memory => None,
        }
    }

    /// The name in tables, as the Rust method is called.
    pub fn name(self) -> &'static str {
        match (self, self.operation()) {
            (Self::SendRecv, _) => "send_recv",
            (_, Some(operation)) => operation.name(),
            (_, None) => "memory",
        }
    }

    /// Whether an operator is applied.
    pub fn reduces(self) -> bool {
        self.operation().is_some_and(|operation| operation.row().reduces)
    }

    /// Whether it is of a mixture of experts, which `moe` measures.
    pub(super) fn is_of_experts(self) -> bool {
        matches!(self, Self::Dispatch | Self::Combine)
    }

    /// What turns its algorithm bandwidth into bus bandwidth.
    pub(super) fn bus_factor(self, ranks: usize) -> Option<f64> {
        self.operation().and_then(|operation| operation.row().bus_factor.among(ranks))
    }

    /// How many elements input and output have beside each other.
    pub(super) fn extents(self) -> (Extent, Extent) {
        self.operation().map_or((Extent::Block, Extent::Block), |operation| {
            let row = operation.row();
            (row.input, row.output)
        })
    }
}

/// One row of the table to be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Case {
    pub(super) collective: Collective,
    /// Of the larger buffer of a rank.
    pub(super) bytes: u64,
    pub(super) algorithm: Option<Algorithm>,
    pub(super) dtype: DType,
    pub(super) op: ReduceOp,
}

/// Where rank 0 is the one that gives or gets.
pub(super) const ROOT: usize = 0;

impl Case {
    /// Elements of a rank's input and output: the larger has as many as fit in the bytes, at least one per block.
    pub(super) fn counts(&self, world_size: usize) -> (usize, usize) {
        let whole = (self.bytes as usize / self.dtype.size()).max(1);
        let block = (whole / world_size).max(1);
        if self.collective.is_of_experts() {
            return moe::counts(self, world_size);
        }
        match self.collective.extents() {
            (Extent::Block, Extent::Block) => (whole, whole),
            (input, output) => {
                let count = |extent: Extent| extent.elements(block, world_size).unwrap_or(whole);
                (count(input), count(output))
            }
        }
    }

    /// Does it once.
    pub(super) fn run<T: Element>(
        &self,
        comm: &Communicator,
        input: &[T],
        output: &mut [T],
    ) -> Result<(), CollectiveError> {
        match (self.collective, self.algorithm) {
            (Collective::AllReduce, Some(algorithm)) => {
                comm.all_reduce_with(input, output, self.op, algorithm)
            }
            (Collective::AllReduce, None) => comm.all_reduce(input, output, self.op),
            (Collective::AllGather, _) => comm.all_gather(input, output),
            (Collective::ReduceScatter, _) => comm.reduce_scatter(input, output, self.op),
            (Collective::AllToAll, _) => comm.all_to_all(input, output),
            (Collective::Broadcast, _) => comm.broadcast_from(Some(TensorView::from(input)), output, ROOT),
            (Collective::Reduce, _) => comm.reduce(input, Some(TensorViewMut::from(output)), self.op, ROOT),
            (Collective::Gather, _) => comm.gather(input, Some(TensorViewMut::from(output)), ROOT),
            (Collective::Scatter, _) => comm.scatter(Some(TensorView::from(input)), output, ROOT),
            (Collective::SendRecv, _) => ping_pong(comm, input, output),
            (Collective::Dispatch | Collective::Combine, _) => unreachable!("`moe` measures these"),
            (Collective::Memory, _) => {
                read_and_write(input, output);
                Ok(())
            }
        }
    }
}

/// From rank 0 to rank 1 and back; the others watch.
fn ping_pong<T: Element>(comm: &Communicator, input: &[T], output: &mut [T]) -> Result<(), CollectiveError> {
    match comm.rank() {
        0 => {
            comm.send(input, 1)?;
            comm.recv(output, 1)?;
        }
        1 => {
            comm.recv(&mut *output, 0)?;
            comm.send(&*output, 0)?;
        }
        _ => {}
    }
    Ok(())
}

/// A reduction of one source: the same loop as an all-reduce's, without anybody else.
fn read_and_write<T: Element>(input: &[T], output: &mut [T]) {
    let reducer = Reducer::new(T::DTYPE, ReduceOp::Sum);
    // SAFETY: two separate slices of equal length.
    unsafe { reducer.run(output.as_mut_ptr().cast(), &[input.as_ptr().cast()], output.len()) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_are_those_of_nccl_tests() {
        use Collective::*;
        assert_eq!(AllReduce.bus_factor(4), Some(1.5));
        for collective in [AllGather, ReduceScatter, AllToAll, Gather, Scatter] {
            assert_eq!(collective.bus_factor(4), Some(0.75), "{collective:?}");
        }
        assert_eq!([Broadcast, Reduce, SendRecv].map(|of| of.bus_factor(4)), [Some(1.0); 3]);
        assert_eq!((AllReduce.bus_factor(1), Memory.bus_factor(4)), (Some(0.0), None));
    }

    #[test]
    fn the_larger_buffer_has_the_bytes_and_a_row_a_block_for_each_rank() {
        let case = |collective| Case {
            collective,
            bytes: 42,
            algorithm: None,
            dtype: DType::F32,
            op: ReduceOp::Sum,
        };
        use Collective::*;
        assert_eq!([AllReduce, SendRecv, Memory].map(|of| case(of).counts(4)), [(10, 10); 3]);
        assert_eq!([AllGather, Gather].map(|of| case(of).counts(4)), [(2, 8); 2]);
        assert_eq!([ReduceScatter, Scatter].map(|of| case(of).counts(4)), [(8, 2); 2]);
        assert_eq!(case(AllToAll).counts(4), (8, 8));
        assert_eq!(case(AllGather).counts(100), (1, 100), "at least one element in a block");
    }
}

//! What is measured.

use antiphon::{
    collectives::{CollectiveError, Collectives, Communicator, all_reduce::Algorithm},
    device::{ReduceOp, host::reduce::Reducer},
    tensor::{DType, Element, TensorView, TensorViewMut},
};

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
    /// The floor of any all-reduce: every rank reads its input and writes its output, all at once
    Memory,
}

impl Collective {
    /// The name in tables, as the Rust method is called.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllToAll => "all_to_all",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::SendRecv => "send_recv",
            Self::Memory => "memory",
        }
    }

    /// Whether an operator is applied.
    pub fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter | Self::Reduce)
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
const ROOT: usize = 0;

impl Case {
    /// Elements of a rank's input and output: the larger has as many as fit in the bytes, at least one per block.
    pub(super) fn counts(&self, world_size: usize) -> (usize, usize) {
        let whole = (self.bytes as usize / self.dtype.size()).max(1);
        let block = (whole / world_size).max(1);
        let row = block * world_size;
        match self.collective {
            Collective::AllGather | Collective::Gather => (block, row),
            Collective::ReduceScatter | Collective::Scatter => (row, block),
            Collective::AllToAll => (row, row),
            _ => (whole, whole),
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

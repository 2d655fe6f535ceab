//! Operations of the table, messages between two ranks, and the floor of any all-reduce.

use antiphon::{
    collectives::{Collectives, Communicator, all_reduce::algorithm_for},
    device::{ReduceOp, host::reduce::Reducer},
    tensor::{Element, TensorView, TensorViewMut},
};

use super::Plain;
use crate::{
    Result,
    case::{Case, Collective},
};

/// The contender of a case.
pub(super) fn contender<T: Element>(
    comm: &Communicator,
    case: Case,
    symmetric: bool,
) -> Result<Plain<'_, T>> {
    let name = match (case.collective, case.how.algorithm) {
        (Collective::ALL_REDUCE, Some(algorithm)) => algorithm.name(),
        (Collective::ALL_REDUCE, None) => {
            algorithm_for(comm, case.ordered_counts(comm).1 * T::DTYPE.size())?.name()
        }
        _ => "direct",
    };
    let call = move |comm: &Communicator, input: &[T], output: &mut [T]| match case.collective {
        Collective::SEND_RECV => ping_pong(comm, input, output),
        Collective::Memory => {
            read_and_write(input, output);
            Ok(())
        }
        _ => {
            let call = case.call(comm.rank(), comm.world_size());
            Ok(comm.call(&call, Some(TensorView::from(input)), Some(TensorViewMut::from(output)))?)
        }
    };
    Plain::new(comm, case, symmetric, name.to_owned(), call)
}

/// Rank 0 sends to rank 1, which sends back; the other ranks do nothing.
fn ping_pong<T: Element>(comm: &Communicator, input: &[T], output: &mut [T]) -> Result<()> {
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

/// A reduction of one source: the same loop as an all-reduce's, without peers.
fn read_and_write<T: Element>(input: &[T], output: &mut [T]) {
    let reducer = Reducer::new(T::DTYPE, ReduceOp::Sum);
    // SAFETY: two separate slices of equal length.
    unsafe { reducer.run(output.as_mut_ptr().cast(), &[input.as_ptr().cast()], output.len()) };
}

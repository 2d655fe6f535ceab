//! The operations without waiting: each returns a handle, and the buffers come back from it.

use antiphon_fabric::{Communicator, FabricError, Pending};
use antiphon_tensor::Element;

use crate::{
    Collectives, ReduceOp,
    error::{CollectiveError, Result},
};

/// What [`NonBlocking`] operations return: the operation goes on in the background until
/// [`wait`](Pending::wait) hands the buffer back.
type Handle<T> = Result<Pending<Vec<T>, CollectiveError>>;

/// Non-blocking forms of the [`Collectives`]. They run one after the other in the background of the communicator, in
/// the order of the calls, which must be the same on all ranks; blocking calls may go on meanwhile and have an order of
/// their own. Buffers are given away and come back, so nobody can touch them too early, even if the handle is lost.
///
/// For several operations in a row, or anything else, see [`Communicator::spawn`], of which these are the short forms.
///
/// ```
/// use antiphon_collectives::{CollectiveError, NonBlocking, ReduceOp};
/// use antiphon_fabric::LocalWorld;
///
/// LocalWorld::run(2, |comm| {
///     let pending = comm.start_all_reduce(vec![1.0f32; 1 << 20], ReduceOp::Sum)?;
///     // … something else …
///     let sum = pending.wait()?;
///     assert_eq!(sum[7], 2.0);
///     Ok::<_, CollectiveError>(())
/// });
/// ```
///
/// # Errors
/// Starting fails only when the background cannot work at all; errors of the operation come from
/// [`Pending::wait`].
pub trait NonBlocking {
    /// [`Collectives::all_reduce_in_place`].
    fn start_all_reduce<T: Element>(&self, buffer: Vec<T>, op: ReduceOp) -> Handle<T>;
    /// [`Collectives::all_gather`]; the handle gives the gathered elements.
    fn start_all_gather<T: Element>(&self, input: Vec<T>) -> Handle<T>;
    /// [`Collectives::reduce_scatter`]; the handle gives this rank's block.
    fn start_reduce_scatter<T: Element>(&self, input: Vec<T>, op: ReduceOp) -> Handle<T>;
    /// [`Collectives::all_to_all_in_place`].
    fn start_all_to_all<T: Element>(&self, buffer: Vec<T>) -> Handle<T>;
    /// [`Collectives::broadcast`].
    fn start_broadcast<T: Element>(&self, buffer: Vec<T>, root: usize) -> Handle<T>;
    /// [`Collectives::reduce_in_place`].
    fn start_reduce<T: Element>(&self, buffer: Vec<T>, op: ReduceOp, root: usize) -> Handle<T>;
    /// [`Communicator::barrier`].
    fn start_barrier(&self) -> Result<Pending<(), FabricError>>;
}

impl NonBlocking for Communicator {
    fn start_all_reduce<T: Element>(&self, mut buffer: Vec<T>, op: ReduceOp) -> Handle<T> {
        Ok(self.spawn(move |comm| comm.all_reduce_in_place(&mut buffer, op).map(|()| buffer))?)
    }

    fn start_all_gather<T: Element>(&self, input: Vec<T>) -> Handle<T> {
        Ok(self.spawn(move |comm| {
            let mut output = vec![T::default(); input.len() * comm.world_size()];
            comm.all_gather(&input, &mut output).map(|()| output)
        })?)
    }

    fn start_reduce_scatter<T: Element>(&self, input: Vec<T>, op: ReduceOp) -> Handle<T> {
        Ok(self.spawn(move |comm| {
            let mut output = vec![T::default(); input.len() / comm.world_size()];
            comm.reduce_scatter(&input, &mut output, op).map(|()| output)
        })?)
    }

    fn start_all_to_all<T: Element>(&self, mut buffer: Vec<T>) -> Handle<T> {
        Ok(self.spawn(move |comm| comm.all_to_all_in_place(&mut buffer).map(|()| buffer))?)
    }

    fn start_broadcast<T: Element>(&self, mut buffer: Vec<T>, root: usize) -> Handle<T> {
        Ok(self.spawn(move |comm| comm.broadcast(&mut buffer, root).map(|()| buffer))?)
    }

    fn start_reduce<T: Element>(&self, mut buffer: Vec<T>, op: ReduceOp, root: usize) -> Handle<T> {
        Ok(self.spawn(move |comm| comm.reduce_in_place(&mut buffer, op, root).map(|()| buffer))?)
    }

    fn start_barrier(&self) -> Result<Pending<(), FabricError>> {
        Ok(self.spawn(Communicator::barrier)?)
    }
}

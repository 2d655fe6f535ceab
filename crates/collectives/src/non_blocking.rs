//! The non-blocking forms of the operations: each returns a handle, which returns the buffers.

use antiphon_fabric::{Communicator, FabricError, Pending};
use antiphon_operation::{Call, InPlace};
use antiphon_tensor::Element;

use crate::{
    Collectives, ReduceOp,
    error::{CollectiveError, Result},
};

/// The handle of a [`NonBlocking`] operation. The operation runs in the background; [`wait`](Pending::wait) returns the buffer.
type Handle<T> = Result<Pending<Vec<T>, CollectiveError>>;

/// Non-blocking forms of the [`Collectives`]. The operations run one after the other in the background of the communicator, in
/// the order of the calls, which must be the same on all ranks. Blocking calls may run at the same time and are ordered
/// separately. A call takes its buffers and the handle returns them, so the caller cannot access them too early, even if it
/// drops the handle.
///
/// [`Communicator::spawn`] is the general form, for several operations in a row or other work.
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
    /// [`Collectives::call`]. The handle gives the output: the input's vector where the operation works in place, else a new one,
    /// which is empty on a rank that gets nothing.
    fn start_call<T: Element>(&self, call: Call<'static>, input: Vec<T>) -> Handle<T>;

    /// [`Collectives::scatter`] of blocks of `count` elements; the root gives its row, the others an empty vector. The
    /// handle gives this rank's block.
    fn start_scatter<T: Element>(&self, row: Vec<T>, count: usize, root: usize) -> Handle<T>;

    /// [`Communicator::barrier`].
    fn start_barrier(&self) -> Result<Pending<(), FabricError>>;

    /// [`Collectives::all_reduce_in_place`].
    fn start_all_reduce<T: Element>(&self, buffer: Vec<T>, op: ReduceOp) -> Handle<T> {
        self.start_call(Call::all_reduce(op), buffer)
    }

    /// [`Collectives::all_gather`]; the handle gives the gathered elements.
    fn start_all_gather<T: Element>(&self, input: Vec<T>) -> Handle<T> {
        self.start_call(Call::all_gather(), input)
    }

    /// [`Collectives::reduce_scatter`]; the handle gives this rank's block.
    fn start_reduce_scatter<T: Element>(&self, input: Vec<T>, op: ReduceOp) -> Handle<T> {
        self.start_call(Call::reduce_scatter(op), input)
    }

    /// [`Collectives::all_to_all_in_place`].
    fn start_all_to_all<T: Element>(&self, buffer: Vec<T>) -> Handle<T> {
        self.start_call(Call::all_to_all(), buffer)
    }

    /// [`Collectives::broadcast`].
    fn start_broadcast<T: Element>(&self, buffer: Vec<T>, root: usize) -> Handle<T> {
        self.start_call(Call::broadcast(root), buffer)
    }

    /// [`Collectives::reduce_in_place`].
    fn start_reduce<T: Element>(&self, buffer: Vec<T>, op: ReduceOp, root: usize) -> Handle<T> {
        self.start_call(Call::reduce(op, root), buffer)
    }

    /// [`Collectives::all_to_all_v`]; the handle gives what has come.
    fn start_all_to_all_v<T: Element>(
        &self,
        input: Vec<T>,
        sends: Vec<usize>,
        receives: Vec<usize>,
    ) -> Handle<T> {
        self.start_call(Call::all_to_all_v(sends, receives), input)
    }

    /// [`Collectives::all_gather_v`]; the handle gives the gathered elements.
    fn start_all_gather_v<T: Element>(&self, input: Vec<T>, counts: Vec<usize>) -> Handle<T> {
        self.start_call(Call::all_gather_v(counts), input)
    }

    /// [`Collectives::reduce_scatter_v`]; the handle gives this rank's part.
    fn start_reduce_scatter_v<T: Element>(
        &self,
        input: Vec<T>,
        counts: Vec<usize>,
        op: ReduceOp,
    ) -> Handle<T> {
        self.start_call(Call::reduce_scatter_v(counts, op), input)
    }

    /// [`Collectives::gather`]; the handle gives the root what it gathered, and the others nothing.
    fn start_gather<T: Element>(&self, input: Vec<T>, root: usize) -> Handle<T> {
        self.start_call(Call::gather(root), input)
    }
}

/// An output with room for `count` elements, or an error that names the count.
fn room<T: Element>(count: usize) -> Result<Vec<T>> {
    let mut output = Vec::new();
    output.try_reserve_exact(count).map_err(|e| {
        FabricError::InvalidArgument(format!("no memory for {count} elements of {}: {e}", T::DTYPE))
    })?;
    output.resize(count, T::default());
    Ok(output)
}

impl NonBlocking for Communicator {
    fn start_call<T: Element>(&self, call: Call<'static>, mut input: Vec<T>) -> Handle<T> {
        Ok(self.spawn(move |comm| {
            if call.operation.row().in_place == InPlace::Same {
                return comm.call_in_place(&call, (&mut input).into()).map(|()| input);
            }
            let shape = call.output_shape(&[input.len()], comm.rank(), comm.world_size());
            let len = match call.needs_output(comm.rank()) {
                true => shape.map_or(0, |shape| shape[0]), // the call tells what is wrong with the input
                false => 0,
            };
            let mut output = room(len)?;
            comm.call(&call, Some((&input).into()), Some((&mut output).into())).map(|()| output)
        })?)
    }

    fn start_scatter<T: Element>(&self, row: Vec<T>, count: usize, root: usize) -> Handle<T> {
        Ok(self.spawn(move |comm| {
            let mut output = room(count)?;
            comm.scatter(Some((&row).into()), &mut output, root).map(|()| output)
        })?)
    }

    fn start_barrier(&self) -> Result<Pending<(), FabricError>> {
        Ok(self.spawn(Communicator::barrier)?)
    }
}

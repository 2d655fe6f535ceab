//! Calls as values, on GPUs.

use antiphon_device::cuda::{DevicePointer, StreamRef, memory};
use antiphon_fabric::{FabricError, Operation};
use antiphon_operation::{Call, InPlace};
use antiphon_tensor::{TensorView, TensorViewMut};

use crate::{
    all_reduce::Algorithm,
    arguments::{Input, Output},
    cuda::{CudaCollectives, device},
    error::{CollectiveError, Result},
};

impl CudaCollectives {
    /// Whether there are kernels for an operation.
    pub fn has_operation(operation: Operation) -> bool {
        use Operation::{AllGather, AllReduce, AllToAll, Barrier, Broadcast, ReduceScatter};
        matches!(operation, Barrier | AllReduce | AllGather | ReduceScatter | AllToAll | Broadcast)
    }

    /// Any operation as a value, in the order of the stream. A rank need not pass a tensor that is the root's alone.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); [`FabricError::InvalidArgument`] for an operation that has no kernels.
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    pub unsafe fn call(
        &self,
        call: &Call<'_>,
        input: Option<&TensorView<'_>>,
        output: Option<&mut TensorViewMut<'_>>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let (rank, op) = (self.rank(), call.op);
        let input = input.filter(|_| call.needs_input(rank));
        let output = output.filter(|_| call.needs_output(rank));
        // SAFETY: passed on.
        unsafe {
            match (call.operation, input, output) {
                (Operation::Barrier, ..) => self.barrier(stream),
                (Operation::AllReduce, Some(input), Some(output)) => match call.algorithm {
                    0 => self.all_reduce(input, output, op, stream),
                    number => match Algorithm::numbered(number) {
                        Ok(Some(by)) => self.all_reduce_with(input, output, op, by, stream),
                        wrong => match Algorithm::registered(number) {
                            Some(by) => self.all_reduce_registered(input, output, op, by, stream),
                            None => wrong.map(drop),
                        },
                    },
                },
                (Operation::AllGather, Some(input), Some(output)) => self.all_gather(input, output, stream),
                (Operation::ReduceScatter, Some(input), Some(output)) => {
                    self.reduce_scatter(input, output, op, stream)
                }
                (Operation::AllToAll, Some(input), Some(output)) => self.all_to_all(input, output, stream),
                (Operation::Broadcast, input, Some(output)) => {
                    if let Some(input) = input {
                        self.copy(call, input, output, stream)?;
                    }
                    self.broadcast(output, call.root, stream)
                }
                (operation, ..) if Self::has_operation(operation) => {
                    let which = if input.is_none() && call.needs_input(rank) { "input" } else { "output" };
                    Err(CollectiveError::Missing { operation: operation.name(), which, rank })
                }
                (operation, ..) => {
                    Err(FabricError::invalid(format!("there are no kernels for {operation}")).into())
                }
            }
        }
    }

    /// [`call`](Self::call) with one buffer for input and output, where the operation allows that.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    ///
    /// # Safety
    /// As [`call`](Self::call).
    pub unsafe fn call_in_place(
        &self,
        call: &Call<'_>,
        buffer: &mut TensorViewMut<'_>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let (operation, serves) = (call.operation, self.serves());
        let whole = Output::on(serves, operation, buffer)?;
        let own = || -> Result<Output> {
            Ok(whole.elements(call.own_piece(whole.count, self.rank(), self.world_size())?))
        };
        let (from, to) = match operation.row().in_place {
            InPlace::Same => (whole, whole),
            InPlace::InputBlock => (own()?, whole),
            InPlace::OutputBlock => (whole, own()?),
            InPlace::Never => return Err(CollectiveError::not_in_place(operation)),
        };
        // SAFETY: the tensors are parts of the buffer; the rest is passed on.
        unsafe {
            let input = TensorView::from_raw_parts(from.data, from.dtype, &[from.count], None, serves);
            let output = TensorViewMut::from_raw_parts(to.data, to.dtype, &[to.count], None, serves);
            let (input, mut output) = (input.expect("plain"), output.expect("plain"));
            self.call(call, Some(&input), Some(&mut output), stream)
        }
    }

    /// Copies a tensor to another of the same length, unless that lies at the same place.
    ///
    /// # Safety
    /// As [`call`](Self::call).
    unsafe fn copy(
        &self,
        call: &Call<'_>,
        input: &TensorView<'_>,
        output: &mut TensorViewMut<'_>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let serves = self.serves();
        let from = Input::on(serves, call.operation, input)?;
        let to = Output::on(serves, call.operation, output)?;
        crate::arguments::block(call.operation, &from, &to, self.world_size())?;
        if from.count == 0 || from.data.addr() == to.data.addr() {
            return Ok(());
        }
        self.enter(stream)?;
        let at = |address: usize| DevicePointer(address as u64);
        // SAFETY: both have as many elements, and lie apart; the caller answers for the rest.
        unsafe {
            memory::copy(stream, at(to.data.addr()), at(from.data.addr()), from.count * from.dtype.size())
        }
        .map_err(device)
    }
}

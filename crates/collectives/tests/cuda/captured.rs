//! Every operation of the table in graphs, replayed beside eager calls; and a rank that is alone.

use antiphon_collectives::{Call, Collectives, ReduceOp, StreamCollectives};
use antiphon_device::cuda::{DeviceMemory, Graph};
use antiphon_operation::{Extent, Operation};
use antiphon_tensor::{DType, Device, Element, TensorView, TensorViewMut};

use crate::{
    graphs::GraphError,
    harness::{Outcome, Rank, on_gpus, values},
};

/// Views of memory on the device.
pub unsafe fn tensor<T: Element>(
    memory: &DeviceMemory,
    start: usize,
    count: usize,
    device: Device,
) -> TensorViewMut<'_> {
    let at = memory.pointer().0 as usize + start * size_of::<T>();
    // SAFETY: the tests' memory has `count` elements from `start` on, and the tests synchronise before they free it.
    unsafe { TensorViewMut::from_raw_parts(at as *mut u8, T::DTYPE, &[count], None, device) }.unwrap()
}

/// An operation of about `count` elements as each rank calls it; parts have lengths around that.
pub fn calls_of(operation: Operation, count: usize, world: usize, root: usize) -> Vec<Call<'static>> {
    let (row, length) = (operation.row(), |index: usize| count * (index % 3) / 2);
    let call = Call::new(operation).with_root(root);
    let of = |rank: usize| match (row.input, row.output) {
        (Extent::Parts, Extent::Parts) => call
            .clone()
            .with_counts((0..world).map(|to| length(rank + 2 * to)).collect::<Vec<_>>())
            .with_receives((0..world).map(|from| length(from + 2 * rank)).collect::<Vec<_>>()),
        _ => call.clone().with_counts((0..world).map(length).collect::<Vec<_>>()),
    };
    (0..world).map(of).collect()
}

/// A call with its tensors, and what it must give.
pub struct Case<T> {
    pub call: Call<'static>,
    pub input: Vec<T>,
    pub expected: Vec<T>,
}

impl<T: Element> Case<T> {
    pub fn new(rank: &Rank, call: &Call<'static>, count: usize) -> Outcome<Self> {
        let (me, world) = (rank.comm.rank(), rank.comm.world_size());
        let input = values::<T>(me, call.input_layout(count, me, world).elements());
        let mut expected = vec![T::from_f64(7.0); call.output_layout(count, me, world).elements()];
        rank.comm.call(call, Some(TensorView::from(&input)), Some(TensorViewMut::from(&mut expected)))?;
        Ok(Self { call: call.clone(), input, expected })
    }
}

/// Replays beside eager calls; the state of rings and slots is the device's.
#[test]
fn every_operation_is_captured() {
    on_gpus(2, |rank| {
        let (me, count) = (rank.comm.rank(), 10_007);
        let device = Device::Cuda(rank.collectives.context().device().ordinal());
        rank.collectives.prepare(DType::F32, ReduceOp::Sum)?;
        for operation in Operation::ALL.iter().copied().filter(|operation| operation.is_call()) {
            let case = Case::<f32>::new(rank, &calls_of(operation, count, 2, 1)[me], count)?;
            let (from, to) = (rank.upload(&case.input)?, rank.allocate(4 * case.expected.len())?);
            let call = || -> Result<(), GraphError> {
                // SAFETY: the memory lives until the stream has been waited for.
                unsafe {
                    let input = tensor::<f32>(&from, 0, case.input.len(), device);
                    let mut output = tensor::<f32>(&to, 0, case.expected.len(), device);
                    let stream = rank.stream.borrow();
                    Ok(rank.collectives.call(
                        &case.call,
                        Some(&input.as_view()),
                        Some(&mut output),
                        stream,
                    )?)
                }
            };
            call()?; // loads the kernels
            let graph = Graph::capture(&rank.stream, |_| (0..3).try_for_each(|_| call()))?.instantiate()?;
            for _ in 0..5 {
                // SAFETY: the memory of the graph lives until the stream has been waited for.
                unsafe { graph.launch(&rank.stream) }?;
                call()?;
            }
            let got = rank.download(&to, 0, 4 * case.expected.len())?;
            if case.call.needs_output(me) {
                rank.same(&format!("{:?} in graphs", case.call), &got, &case.expected)?;
            }
        }
        Ok(())
    });
}

#[test]
fn what_a_rank_sends_itself_is_captured() {
    on_gpus(1, |rank| {
        let device = Device::Cuda(rank.collectives.context().device().ordinal());
        let (from, to) = (rank.upload(&values::<f32>(0, 64))?, rank.allocate(256)?);
        let graph = Graph::capture(&rank.stream, |stream| -> Result<(), GraphError> {
            // SAFETY: the memory lives until the stream has been waited for.
            unsafe {
                let input = tensor::<f32>(&from, 0, 64, device);
                let mut output = tensor::<f32>(&to, 0, 64, device);
                rank.collectives.send_recv(&input.as_view(), 0, &mut output, 0, stream)?;
            }
            Ok(rank.collectives.barrier(stream)?)
        })?;
        // SAFETY: as above.
        unsafe { graph.instantiate()?.launch(&rank.stream) }?;
        rank.same("sent to itself", &rank.download(&to, 0, 256)?, &values::<f32>(0, 64))
    });
}

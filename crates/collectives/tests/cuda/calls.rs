//! Every operation of the table as a value, on GPUs, beside the host's bits; and messages, which are none of the table's calls.

use antiphon_collectives::{Call, CollectiveError, Collectives, ReduceOp, cuda::CudaCollectives};
use antiphon_device::cuda::{Context, DeviceMemory, Graph};
use antiphon_fabric::LocalWorld;
use antiphon_operation::{Extent, InPlace, Operation};
use antiphon_tensor::{DType, Device, Element, TensorView, TensorViewMut, bf16};

use crate::{
    graphs::GraphError,
    harness::{Outcome, Rank, gpus, on_gpus, values},
};

/// Views of memory on the device.
unsafe fn tensor<T: Element>(
    memory: &DeviceMemory,
    start: usize,
    count: usize,
    device: Device,
) -> TensorViewMut<'_> {
    let at = memory.pointer().0 as usize + start * size_of::<T>();
    // SAFETY: the tests' memory has so many elements, and they synchronise before it goes.
    unsafe { TensorViewMut::from_raw_parts(at as *mut u8, T::DTYPE, &[count], None, device) }.unwrap()
}

/// An operation of about `count` elements as each rank calls it; parts have lengths around that.
fn calls_of(operation: Operation, count: usize, world: usize, root: usize) -> Vec<Call<'static>> {
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
struct Case<T> {
    call: Call<'static>,
    input: Vec<T>,
    expected: Vec<T>,
}

impl<T: Element> Case<T> {
    fn new(rank: &Rank, call: &Call<'static>, count: usize) -> Outcome<Self> {
        let (me, world) = (rank.comm.rank(), rank.comm.world_size());
        let input = values::<T>(me, call.input_layout(count, me, world).elements());
        let mut expected = vec![T::from_f64(7.0); call.output_layout(count, me, world).elements()];
        rank.comm.call(call, Some(TensorView::from(&input)), Some(TensorViewMut::from(&mut expected)))?;
        Ok(Self { call: call.clone(), input, expected })
    }

    /// Apart, and in place where the operation allows that.
    fn compare(&self, rank: &Rank, count: usize) -> Outcome {
        let (me, world) = (rank.comm.rank(), rank.comm.world_size());
        let (call, stream) = (&self.call, rank.stream.borrow());
        let device = Device::Cuda(rank.collectives.context().device().ordinal());
        let (from, to) =
            (rank.upload(&self.input)?, rank.upload(&vec![T::from_f64(7.0); self.expected.len()])?);
        if call.operation.row().reduces {
            rank.collectives.prepare(T::DTYPE, call.op)?;
        }
        // SAFETY: the memory lives until the stream has been waited for.
        unsafe {
            let input = tensor::<T>(&from, 0, self.input.len(), device);
            let mut output = tensor::<T>(&to, 0, self.expected.len(), device);
            rank.collectives.call(call, Some(&input.as_view()), Some(&mut output), stream)?;
        }
        let got = rank.download(&to, 0, size_of::<T>() * self.expected.len())?;
        if call.needs_output(me) {
            rank.same(&format!("{call:?} of {count}"), &got, &self.expected)?;
        }
        let (whole, piece) = match call.operation.row().in_place {
            InPlace::Never => return Ok(()),
            InPlace::Same => (self.input.clone(), 0..self.input.len()),
            InPlace::OutputBlock => (self.input.clone(), call.own_piece(self.input.len(), me, world)?),
            InPlace::InputBlock => {
                let own = call.own_piece(self.expected.len(), me, world)?;
                let mut whole = vec![T::from_f64(7.0); self.expected.len()];
                whole[own.clone()].copy_from_slice(&self.input);
                (whole, 0..self.expected.len())
            }
        };
        let buffer = rank.upload(&whole)?;
        // SAFETY: as above.
        unsafe {
            let mut view = tensor::<T>(&buffer, 0, whole.len(), device);
            rank.collectives.call_in_place(call, &mut view, stream)?;
        }
        let got = rank.download(&buffer, size_of::<T>() * piece.start, size_of::<T>() * piece.len())?;
        match call.needs_output(me) {
            true => rank.same(&format!("{call:?} of {count} in place"), &got, &self.expected),
            false => Ok(()),
        }
    }
}

fn every_operation(world: usize) {
    on_gpus(world, |rank| {
        for operation in Operation::ALL.iter().copied().filter(|operation| operation.is_call()) {
            for (index, count) in [0, 1, 7, 1000, 65_537, 3_000_001].into_iter().enumerate() {
                let root = index % world;
                let call = &calls_of(operation, count, world, root)[rank.comm.rank()];
                Case::<bf16>::new(rank, call, count)?.compare(rank, count)?;
                Case::<f32>::new(rank, &call.clone().with_op(ReduceOp::Max), count)?.compare(rank, count)?;
                if !operation.row().reduces {
                    Case::<u8>::new(rank, call, count)?.compare(rank, count)?;
                }
            }
        }
        Ok(())
    });
}

#[test]
fn every_operation_has_the_hosts_bits_on_2_gpus() {
    every_operation(2);
}

#[test]
fn every_operation_has_the_hosts_bits_on_3_gpus() {
    every_operation(3);
}

#[test]
fn every_operation_has_the_hosts_bits_on_4_gpus() {
    every_operation(4);
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

fn ring(world: usize) {
    on_gpus(world, |rank| {
        let me = rank.comm.rank();
        let device = Device::Cuda(rank.collectives.context().device().ordinal());
        let (next, previous) = ((me + 1) % world, (me + world - 1) % world);
        // Shorter and longer than a ring, and bytes that mean "not arrived".
        for count in [0, 1, 495, 496, 497, 100_000, 5_000_000, 40_000_001] {
            let of = |rank: usize| {
                values::<f32>(rank, count / 4 + 1)
                    .iter()
                    .flat_map(|v| v.to_le_bytes())
                    .map(|b| b | 0xF0)
                    .collect::<Vec<u8>>()
            };
            let (mine, theirs) = (&of(me)[..count], &of(previous)[..count]);
            let (from, to) = (rank.upload(mine)?, rank.allocate(count)?);
            // SAFETY: the memory lives until the stream has been waited for.
            unsafe {
                let input = tensor::<u8>(&from, 0, count, device);
                let mut output = tensor::<u8>(&to, 0, count, device);
                let stream = rank.stream.borrow();
                rank.collectives.send_recv(&input.as_view(), next, &mut output, previous, stream)?;
            }
            rank.same(&format!("{count} bytes round the ring"), &rank.download(&to, 0, count)?, theirs)?;
        }
        Ok(())
    });
}

#[test]
fn messages_go_round_a_ring_of_2_gpus() {
    ring(2);
}

#[test]
fn messages_go_round_a_ring_of_4_gpus() {
    ring(4);
}

/// On streams of their own, so that neither rank receives only once it has sent.
#[test]
fn both_ranks_may_send_before_they_receive() {
    on_gpus(2, |rank| {
        let (me, count) = (rank.comm.rank(), 20_000_000);
        let device = Device::Cuda(rank.collectives.context().device().ordinal());
        let receives = rank.collectives.context().stream()?;
        let (from, to) = (rank.upload(&values::<f32>(me, count))?, rank.allocate(4 * count)?);
        rank.stream.borrow().synchronize()?;
        for _ in 0..3 {
            // SAFETY: the memory lives until both streams have been waited for.
            unsafe {
                let input = tensor::<f32>(&from, 0, count, device);
                let mut output = tensor::<f32>(&to, 0, count, device);
                rank.collectives.send(&input.as_view(), 1 - me, rank.stream.borrow())?;
                rank.collectives.recv(&mut output, 1 - me, receives.borrow())?;
            }
        }
        receives.borrow().synchronize()?;
        rank.same("sent both ways", &rank.download(&to, 0, 4 * count)?, &values::<f32>(1 - me, count))
    });
}

#[test]
fn messages_that_differ_are_named_on_the_receiver() {
    let Some(driver) = gpus(2) else { return };
    let timeout = std::time::Duration::from_secs(2);
    let texts = LocalWorld::run_with(2, timeout, |comm| -> Outcome<String> {
        let context = Context::primary(driver.device(comm.rank() as u32)?)?;
        let collectives = CudaCollectives::new(&comm, &context)?;
        let (stream, device) = (context.stream()?, Device::Cuda(context.device().ordinal()));
        let memory = DeviceMemory::allocate(&context, 4096)?;
        // SAFETY: the memory lives until the stream has been waited for.
        unsafe {
            match comm.rank() {
                0 => {
                    collectives.send(&tensor::<f32>(&memory, 0, 100, device).as_view(), 1, stream.borrow())?
                }
                _ => collectives.recv(&mut tensor::<f32>(&memory, 0, 101, device), 0, stream.borrow())?,
            }
        }
        stream.borrow().synchronize()?;
        Ok(collectives.check().map_or_else(|error| error.to_string(), |()| String::new()))
    });
    let text = texts[1].as_ref().unwrap();
    assert!(text.contains("send/recv(100 × f32") && text.contains("send/recv(101 × f32"), "{text}");
}

#[test]
fn a_rank_that_is_alone_copies() {
    on_gpus(1, |rank| {
        let device = Device::Cuda(rank.collectives.context().device().ordinal());
        for operation in Operation::ALL.iter().copied().filter(|operation| operation.is_call()) {
            let call =
                &calls_of(operation, 1000, 1, 0)[0].clone().with_counts(vec![1000]).with_receives(vec![1000]);
            let case = Case::<f32>::new(rank, call, 1000)?;
            assert_eq!(case.expected, case.input, "{operation}");
            case.compare(rank, 1000)?;
        }
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

#[test]
fn calls_that_make_no_sense_are_refused() {
    on_gpus(2, |rank| {
        let device = Device::Cuda(rank.collectives.context().device().ordinal());
        let memory = rank.allocate(4096)?;
        // SAFETY: nothing is queued.
        let refused = |call: Call<'_>, input: usize, output: usize| unsafe {
            let input = tensor::<f32>(&memory, 0, input, device);
            let mut output = tensor::<f32>(&memory, 512, output, device);
            let stream = rank.stream.borrow();
            let outcome = rank.collectives.call(&call, Some(&input.as_view()), Some(&mut output), stream);
            outcome.expect_err("refused").to_string()
        };
        let text = refused(Call::new(Operation::Gather).with_root(2), 4, 8);
        assert!(text.contains("root rank 2 is not below the world size 2"), "{text}");
        let text = refused(Call::new(Operation::AllGatherV).with_counts(vec![3]), 3, 3);
        assert!(text.contains("1 counts for 2 ranks"), "{text}");
        let text =
            refused(Call::new(Operation::AllToAllV).with_counts(vec![1, 2]).with_receives(vec![1, 1]), 3, 3);
        assert!(text.contains("3 elements, expected 2"), "{text}");
        // SAFETY: as above.
        let error: CollectiveError = unsafe {
            let input = tensor::<f32>(&memory, 0, 4, device);
            rank.collectives
                .send(&input.as_view(), rank.comm.rank(), rank.stream.borrow())
                .expect_err("refused")
        };
        assert!(error.to_string().contains("by send_recv alone"), "{error}");
        Ok(())
    });
}

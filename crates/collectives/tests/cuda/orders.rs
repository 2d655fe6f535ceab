//! Every family of calls around captures and launches of graphs.

use antiphon_collectives::{
    ReduceOp, StreamCollectives,
    cuda::{Algorithm, CudaBuilder, CudaCollectives},
    mixed::{MixedCall, MixedOp},
};
use antiphon_device::cuda::{Stream, memory};
use antiphon_operation::Operation;
use antiphon_tensor::{DType, Device};

use crate::{
    captured::{Case, calls_of, tensor},
    fused::{Case as FusedCase, Form, Fused},
    harness::{At, Outcome, Rank, What, on_gpus, values},
    mixed::Mixed,
};
use antiphon_testing::orders::Calls;

impl Rank {
    fn in_every_order(
        &self,
        call: impl Fn(usize, &Stream) -> Outcome,
        check: impl Fn(usize) -> Outcome,
    ) -> Outcome {
        // The kernels are loaded, and the memory is there, before a rank waits in a kernel.
        for which in 0..3 {
            call(which, &self.stream)?;
            self.stream.borrow().synchronize()?;
            check(which)?;
        }
        self.comm.barrier()?;
        let be_late = |number: usize| {
            if number % self.comm.world_size() == self.comm.rank() {
                std::thread::sleep(std::time::Duration::from_millis(3));
            }
        };
        let calls =
            Calls { context: self.collectives.context(), call: &call, check: &check, be_late: &be_late };
        calls.in_every_order()?;
        Ok(self.comm.barrier()?)
    }
}

/// Elements of a call of one launch.
const COUNT: usize = 5003;

fn operations(world: usize) {
    on_gpus(world, |rank| {
        let me = rank.comm.rank();
        let device = Device::Cuda(rank.collectives.context().device().ordinal());
        rank.collectives.prepare(DType::F32, ReduceOp::Sum)?;
        for operation in Operation::ALL.iter().copied().filter(|operation| operation.is_call()) {
            let case = Case::<f32>::new(rank, &calls_of(operation, COUNT, world, 1)[me], COUNT)?;
            let bytes = 4 * case.expected.len();
            let made = (0..3).map(|_| Ok((rank.upload(&case.input)?, rank.allocate(bytes)?)));
            let memories = made.collect::<Outcome<Vec<_>>>()?;
            let call = |which: usize, stream: &Stream| -> Outcome {
                let (from, to) = &memories[which];
                // SAFETY: the memory lives until the streams have been waited for.
                unsafe {
                    let input = tensor::<f32>(from, 0, case.input.len(), device);
                    let mut output = tensor::<f32>(to, 0, case.expected.len(), device);
                    let (input, output) = (Some(&input.as_view()), Some(&mut output));
                    Ok(rank.collectives.call(&case.call, input, output, stream.borrow())?)
                }
            };
            let check = |which: usize| -> Outcome {
                let to = &memories[which].1;
                if case.call.needs_output(me) {
                    rank.same(&format!("{:?}", case.call), &rank.download(to, 0, bytes)?, &case.expected)?;
                }
                // SAFETY: the memory has as many bytes, and no call is under way.
                unsafe { memory::fill(rank.stream.borrow(), to.pointer(), 0x5A, to.len()) }?;
                Ok(rank.stream.borrow().synchronize()?)
            };
            // The root of a broadcast reads the output.
            if case.call.operation != Operation::Broadcast {
                rank.in_every_order(call, check)?;
            }
        }
        Ok(())
    });
}

#[test]
fn operations_keep_their_order_around_captures_on_2_gpus() {
    operations(2);
}

#[test]
fn operations_keep_their_order_around_captures_on_3_gpus() {
    operations(3);
}

/// All-reduces with an epilogue, and of registered memory.
#[test]
fn fused_calls_keep_their_order_around_captures_on_2_gpus() {
    on_gpus(2, |rank| {
        let plain = FusedCase::plain(DType::BF16, 5, 512);
        let cases = [
            FusedCase::new(DType::BF16, 7, 1024),
            FusedCase { algorithm: Some(Algorithm::TwoShot), ..FusedCase::new(DType::BF16, 64, 512) },
            FusedCase::quantized(DType::BF16, 9, 512, Form::Fp8Groups(128)),
            plain,
        ];
        for case in cases {
            let fused = (0..3).map(|_| Fused::new(rank, case)).collect::<Outcome<Vec<_>>>()?;
            let call = |which: usize, stream: &Stream| -> Outcome { Ok(fused[which].queue_on(stream)?) };
            let check = |which: usize| -> Outcome {
                fused[which].check()?;
                fused[which].reset()?;
                Ok(rank.stream.borrow().synchronize()?)
            };
            rank.in_every_order(call, check)?;
        }
        let expected = vec![3.0f32; COUNT];
        let mine = vec![1.0 + rank.comm.rank() as f32; COUNT];
        for algorithm in [Algorithm::OneShot, Algorithm::TwoShot] {
            let made = (0..3).map(|_| Ok((rank.upload(&mine)?, rank.allocate(4 * COUNT)?)));
            let memories = made.collect::<Outcome<Vec<_>>>()?;
            for (from, to) in &memories {
                rank.register(from)?;
                rank.register(to)?;
            }
            let at = |pointer: u64| At(pointer, DType::F32, COUNT);
            let call = |which: usize, stream: &Stream| -> Outcome {
                let (from, to) = &memories[which];
                let what = What::Registered(ReduceOp::Sum, algorithm);
                Ok(rank.queue_on(what, at(from.pointer().0), at(to.pointer().0), stream)?)
            };
            let check = |which: usize| -> Outcome {
                let to = &memories[which].1;
                rank.same("registered", &rank.download(to, 0, 4 * COUNT)?, &expected)?;
                Ok(to.write(&rank.stream, 0, &vec![0x5A; 4 * COUNT])?)
            };
            rank.in_every_order(call, check)?;
            for (from, to) in &memories {
                rank.collectives.unregister(&rank.comm, from.pointer())?;
                rank.collectives.unregister(&rank.comm, to.pointer())?;
            }
        }
        Ok(())
    });
}

#[test]
fn mixed_calls_keep_their_order_around_captures_on_4_gpus() {
    on_gpus(4, |rank| {
        let mixed = Mixed::new(rank, 2)?;
        mixed.gpus.prepare(&rank.collectives, DType::F32)?;
        for op in [MixedOp::AllReduceAllGather, MixedOp::ReduceScatterAllReduce] {
            let case = MixedCall::from(op);
            let (from, to) = mixed.lengths(&case, COUNT);
            let input = values::<f32>(rank.comm.rank(), from);
            let mut expected = vec![0f32; to];
            mixed.host.run(&rank.comm, case, &input, &mut expected)?;
            let made = (0..3).map(|_| Ok((rank.upload(&input)?, rank.allocate(4 * to)?)));
            let memories = made.collect::<Outcome<Vec<_>>>()?;
            let call = |which: usize, stream: &Stream| -> Outcome {
                let (input, output) = &memories[which];
                let at = |pointer: u64, count| At(pointer, DType::F32, count);
                let (input, output) = (at(input.pointer().0, from), at(output.pointer().0, to));
                Ok(mixed.queue_on(case, input, output, stream)?)
            };
            let check = |which: usize| -> Outcome {
                let output = &memories[which].1;
                rank.same(&format!("{op:?}"), &rank.download(output, 0, 4 * to)?, &expected)?;
                Ok(output.write(&rank.stream, 0, &vec![0x5A; 4 * to])?)
            };
            rank.in_every_order(call, check)?;
        }
        Ok(())
    });
}

/// Each rank receives on one stream, then reduces on another, then sends on a third one: the sends, for which the receives wait, find room.
fn receives_before_sends(world: usize) {
    on_gpus(world, |rank| {
        let (me, context) = (rank.comm.rank(), rank.collectives.context());
        let device = Device::Cuda(context.device().ordinal());
        let [sums, receives, sends] = [context.stream()?, context.stream()?, context.stream()?];
        let (to, from) = ((me + 1) % world, (me + world - 1) % world);
        let (ones, sum) = (rank.upload(&vec![1.0f32; COUNT])?, rank.allocate(4 * COUNT)?);
        let (sent, received) = (rank.upload(&values::<f32>(me, COUNT))?, rank.allocate(4 * COUNT)?);
        rank.collectives.prepare(DType::F32, ReduceOp::Sum)?;
        for _ in 0..3 {
            // SAFETY: the memory lives until the streams have been waited for.
            unsafe {
                let reduce = || -> Outcome {
                    let (input, mut output) =
                        (tensor::<f32>(&ones, 0, COUNT, device), tensor::<f32>(&sum, 0, COUNT, device));
                    Ok(rank.collectives.all_reduce(
                        input.as_view(),
                        &mut output,
                        ReduceOp::Sum,
                        sums.borrow(),
                    )?)
                };
                reduce()?;
                let mut output = tensor::<f32>(&received, 0, COUNT, device);
                rank.collectives.recv(&mut output, from, receives.borrow())?;
                reduce()?;
                let input = tensor::<f32>(&sent, 0, COUNT, device);
                rank.collectives.send(&input.as_view(), to, sends.borrow())?;
                reduce()?;
            }
            for stream in [&sums, &receives, &sends] {
                stream.borrow().synchronize()?;
            }
            rank.same("the sum", &rank.download(&sum, 0, 4 * COUNT)?, &vec![world as f32; COUNT])?;
            rank.same("the message", &rank.download(&received, 0, 4 * COUNT)?, &values::<f32>(from, COUNT))?;
        }
        Ok(())
    });
}

#[test]
fn a_receive_delays_no_send_on_2_gpus() {
    receives_before_sends(2);
}

#[test]
fn a_receive_delays_no_send_on_4_gpus() {
    receives_before_sends(4);
}

/// A call for which there is no room comes behind the stream of a message that is over, and not behind a receive that waits: the send for
/// that follows the call.
#[test]
fn a_message_that_is_over_holds_no_room_on_2_gpus() {
    on_gpus(2, |rank| {
        let (me, context) = (rank.comm.rank(), rank.collectives.context());
        let device = Device::Cuda(context.device().ordinal());
        let [first, receives, others] = [context.stream()?, context.stream()?, context.stream()?];
        let group = rank.comm.split(Some(0), 0)?.expect("all ranks have a color");
        let least = CudaBuilder::LEAST_STAGING_BYTES;
        let beside = CudaCollectives::builder(&group, context).staging_bytes(least).build()?;
        for collectives in [&rank.collectives, &beside] {
            collectives.prepare(DType::F32, ReduceOp::Sum)?;
        }
        let (ones, sum) = (rank.upload(&vec![1.0f32; COUNT])?, rank.allocate(4 * COUNT)?);
        let (sent, received) = (rank.upload(&values::<f32>(me, COUNT))?, rank.allocate(4 * COUNT)?);
        // SAFETY: the memory lives until the streams have been waited for; calls that overlap write the same.
        unsafe {
            let input = tensor::<f32>(&sent, 0, COUNT, device);
            let view = || tensor::<f32>(&received, 0, COUNT, device);
            let reduce = |collectives: &CudaCollectives, stream: &Stream| {
                let (input, mut output) =
                    (tensor::<f32>(&ones, 0, COUNT, device), tensor::<f32>(&sum, 0, COUNT, device));
                collectives.all_reduce(input.as_view(), &mut output, ReduceOp::Sum, stream.borrow())
            };
            rank.collectives.send_recv(&input.as_view(), 1 - me, &mut view(), 1 - me, first.borrow())?;
            reduce(&rank.collectives, &first)?;
            first.borrow().synchronize()?;
            rank.collectives.recv(&mut view(), 1 - me, receives.borrow())?;
            // On rank 0 this call waits while the next one needs its place.
            if me == 1 {
                std::thread::sleep(std::time::Duration::from_millis(50));
            }
            reduce(&rank.collectives, &first)?;
            reduce(&beside, &others)?;
            rank.collectives.send(&input.as_view(), 1 - me, others.borrow())?;
        }
        for stream in [&first, &receives, &others] {
            stream.borrow().synchronize()?;
        }
        beside.check()?;
        rank.same("the sum", &rank.download(&sum, 0, 4 * COUNT)?, &vec![2.0f32; COUNT])?;
        rank.same("the message", &rank.download(&received, 0, 4 * COUNT)?, &values::<f32>(1 - me, COUNT))?;
        Ok(())
    });
}

//! Calls that follow each other on the same memory, without the host between them: each may begin before the one ahead has ended.

use antiphon_collectives::{Collectives, ReduceOp, cuda::Algorithm};
use antiphon_device::cuda::DeviceMemory;
use antiphon_tensor::{DType, Device, TensorView};

use crate::{
    captured::tensor,
    harness::{At, Outcome, Rank, What, on_gpus, values},
};

const CALLS: usize = 3;

impl Rank {
    fn device(&self) -> Device {
        Device::Cuda(self.collectives.context().device().ordinal())
    }
}

#[test]
fn registered_sums_of_the_same_memory_follow_each_other_on_2_gpus() {
    on_gpus(2, |rank| {
        const COUNT: usize = 3000;
        rank.collectives.prepare(DType::F32, ReduceOp::Sum)?;
        let mine = values::<f32>(rank.comm.rank(), COUNT);
        let mut expected = vec![0f32; COUNT];
        rank.comm.all_reduce(&mine, &mut expected, ReduceOp::Sum)?;
        let (input, output) = (rank.upload(&mine)?, rank.allocate(4 * COUNT)?);
        rank.register(&input)?;
        rank.register(&output)?;
        for algorithm in Algorithm::ALL {
            let what = What::Registered(ReduceOp::Sum, algorithm);
            let at = |memory: &DeviceMemory| At(memory.pointer().0, DType::F32, COUNT);
            for _ in 0..CALLS {
                rank.queue(what, at(&input), at(&output))?;
            }
            rank.same(&format!("{what:?}"), &rank.download(&output, 0, 4 * COUNT)?, &expected)?;
        }
        rank.collectives.unregister(&rank.comm, input.pointer())?;
        Ok(rank.collectives.unregister(&rank.comm, output.pointer())?)
    });
}

/// Of as many bytes as the peers forward parts of.
#[test]
fn broadcasts_in_two_hops_follow_each_other_on_3_gpus() {
    on_gpus(3, |rank| {
        const COUNT: usize = 70_001;
        for root in [0, 2] {
            let expected = values::<f32>(root, COUNT);
            let memory = match rank.comm.rank() == root {
                true => rank.upload(&expected)?,
                false => rank.allocate(4 * COUNT)?,
            };
            let at = At(memory.pointer().0, DType::F32, COUNT);
            for _ in 0..CALLS {
                rank.queue(What::Broadcast(root), at, at)?;
            }
            rank.same("a broadcast", &rank.download(&memory, 0, 4 * COUNT)?, &expected)?;
        }
        Ok(())
    });
}

#[test]
fn lists_of_the_same_memory_follow_each_other_on_2_gpus() {
    on_gpus(2, |rank| {
        const COUNTS: [usize; 3] = [700, 1, 66];
        rank.collectives.prepare(DType::F32, ReduceOp::Sum)?;
        let device = rank.device();
        for reduces in [false, true] {
            let counts = |count: usize| if reduces { [2 * count, count] } else { [count, 2 * count] };
            let mut tensors = Vec::new();
            for (seed, count) in COUNTS.into_iter().enumerate() {
                let [from, to] = counts(count);
                let (input, mut expected) = (values::<f32>(rank.comm.rank() + seed, from), vec![0f32; to]);
                match reduces {
                    true => rank.comm.reduce_scatter(&input, &mut expected, ReduceOp::Sum)?,
                    false => rank.comm.all_gather(&input, &mut expected)?,
                }
                tensors.push((rank.upload(&input)?, rank.allocate(4 * to)?, count, expected));
            }
            // SAFETY: the memory lives until the stream has been waited for.
            unsafe {
                let of = |memory, which: usize, count| tensor::<f32>(memory, 0, counts(count)[which], device);
                let inputs: Vec<_> = tensors.iter().map(|(from, _, count, _)| of(from, 0, *count)).collect();
                let inputs: Vec<TensorView<'_>> = inputs.iter().map(|input| input.as_view()).collect();
                let mut outputs: Vec<_> = tensors.iter().map(|(_, to, count, _)| of(to, 1, *count)).collect();
                for _ in 0..CALLS {
                    let stream = rank.stream.borrow();
                    match reduces {
                        true => rank.collectives.reduce_scatter_list(
                            &inputs,
                            &mut outputs,
                            ReduceOp::Sum,
                            stream,
                        )?,
                        false => rank.collectives.all_gather_list(&inputs, &mut outputs, stream)?,
                    }
                }
            }
            for (_, to, _, expected) in &tensors {
                rank.same("of a list", &rank.download(to, 0, 4 * expected.len())?, expected)?;
            }
        }
        Ok(())
    });
}

/// The rings from one rank of four to another have room for less than such a message, and for less than what is left of one and the next.
#[test]
fn messages_that_wrap_their_rings_follow_each_other_on_4_gpus() {
    on_gpus(4, |rank| -> Outcome {
        const COUNT: usize = 800_001;
        let (me, device) = (rank.comm.rank(), rank.device());
        let memory = match me {
            0 => rank.upload(&values::<f32>(0, COUNT))?,
            _ => rank.allocate(4 * COUNT)?,
        };
        rank.comm.barrier()?;
        // SAFETY: the memory lives until the stream has been waited for.
        unsafe {
            let mut view = tensor::<f32>(&memory, 0, COUNT, device);
            for _ in 0..CALLS {
                match me {
                    0 => rank.collectives.send(&view.as_view(), 1, rank.stream.borrow())?,
                    1 => rank.collectives.recv(&mut view, 0, rank.stream.borrow())?,
                    _ => {}
                }
            }
        }
        if me == 1 {
            rank.same("a message", &rank.download(&memory, 0, 4 * COUNT)?, &values::<f32>(0, COUNT))?;
        }
        rank.stream.borrow().synchronize()?;
        Ok(rank.comm.barrier()?)
    });
}

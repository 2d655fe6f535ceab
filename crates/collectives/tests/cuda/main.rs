//! Collectives on GPUs against the host backend, bit by bit. Ranks are threads, one for each GPU; without a GPU for every
//! rank a test says so and skips.

mod calls;
mod faults;
mod fused;
mod fusion;
mod fusion_mixed;
mod graphs;
mod harness;
mod image;
mod loud;
mod mixed;
mod mixed_graphs;
mod registered;
mod streams;
mod tenants;

use antiphon_collectives::{CollectiveError, Collectives, ReduceOp, cuda::Algorithm};
use antiphon_tensor::{DType, Element, TensorView, TensorViewMut, bf16, f16};
use harness::{At, Outcome, Rank, What, on_gpus, values};

/// All-reduce in every way.
fn all_reduces(op: ReduceOp) -> [What; 5] {
    let [one, two] = Algorithm::ALL;
    [
        What::AllReduce(op, None),
        What::AllReduce(op, Some(one)),
        What::AllReduce(op, Some(two)),
        What::Registered(op, one),
        What::Registered(op, two),
    ]
}

const COUNTS: [usize; 12] = [1, 3, 8, 9, 248, 249, 1000, 4096, 7168, 65_537, 300_001, 1_500_000];

fn every_count<T: Element>(rank: &Rank) -> Outcome {
    for count in COUNTS {
        let mine = values::<T>(rank.comm.rank(), count);
        for what in all_reduces(ReduceOp::Sum) {
            rank.compare(what, &mine, 0)?;
        }
        let blocks = values::<T>(rank.comm.rank(), count * rank.comm.world_size());
        rank.compare(What::ReduceScatter(ReduceOp::Sum), &blocks, 0)?;
    }
    Ok(())
}

fn every_type(world_size: usize) {
    on_gpus(world_size, |rank| {
        every_count::<f32>(rank)?;
        every_count::<f16>(rank)?;
        every_count::<bf16>(rank)
    });
}

#[test]
fn sums_have_the_hosts_bits_on_2_gpus() {
    every_type(2);
}

#[test]
fn sums_have_the_hosts_bits_on_3_gpus() {
    every_type(3);
}

#[test]
fn sums_have_the_hosts_bits_on_4_gpus() {
    every_type(4);
}

fn every_move<T: Element>(rank: &Rank, offset: usize) -> Outcome {
    let world_size = rank.comm.world_size();
    for count in COUNTS {
        let mine = values::<T>(rank.comm.rank(), offset + count);
        rank.compare(What::AllGather, &mine, offset)?;
        for root in [0, world_size - 1] {
            rank.compare(What::Broadcast(root), &mine, offset)?;
        }
        let blocks = values::<T>(rank.comm.rank(), offset + count * world_size);
        rank.compare(What::AllToAll, &blocks, offset)?;
    }
    Ok(())
}

fn every_moved_type(world_size: usize) {
    on_gpus(world_size, |rank| {
        every_move::<u8>(rank, 0)?;
        every_move::<u8>(rank, 1)?;
        every_move::<bf16>(rank, 1)?;
        every_move::<i32>(rank, 3)?;
        every_move::<f64>(rank, 0)
    });
}

#[test]
fn what_moves_keeps_its_bits_on_2_gpus() {
    every_moved_type(2);
}

#[test]
fn what_moves_keeps_its_bits_on_3_gpus() {
    every_moved_type(3);
}

#[test]
fn what_moves_keeps_its_bits_on_4_gpus() {
    every_moved_type(4);
}

#[test]
fn words_that_mean_not_arrived_are_moved_like_others() {
    on_gpus(2, |rank| {
        let ones = vec![0xFFu8; 4 * 10_000];
        let mixed: Vec<u8> = (0..40_000).map(|i| if i / 4 % 3 == 0 { 0xFF } else { i as u8 }).collect();
        let masks: Vec<u8> = (0..40_000).map(|i| [0xFF, 0xFF, 0xFF, 0x7F][i % 4]).collect();
        for bytes in [ones, mixed, masks] {
            for what in [What::AllGather, What::AllToAll, What::Broadcast(1)] {
                rank.compare(what, &bytes, 0)?;
            }
        }
        Ok(())
    });
}

#[test]
fn every_operator_has_the_hosts_bits() {
    on_gpus(2, |rank| {
        for op in ReduceOp::ARITHMETIC {
            for what in all_reduces(op) {
                rank.compare(what, &values::<bf16>(rank.comm.rank(), 1001), 0)?;
                rank.compare(what, &values::<f32>(rank.comm.rank(), 1001), 0)?;
            }
            rank.compare(What::ReduceScatter(op), &values::<f16>(rank.comm.rank(), 2002), 0)?;
        }
        Ok(())
    });
}

#[test]
fn every_pattern_of_16_bits_survives() {
    on_gpus(2, |rank| {
        let all = |of: fn(u16) -> u16| (0..=u16::MAX).map(of).collect::<Vec<_>>();
        // With zero, with itself, and with something else.
        let second = [all(|_| 0x8000), all(|bits| bits), all(|bits| bits.wrapping_mul(40_503))];
        for other in second {
            let bits = if rank.comm.rank() == 0 { all(|bits| bits) } else { other };
            let bf16s: Vec<bf16> = bits.iter().map(|&bits| bf16::from_bits(bits)).collect();
            let f16s: Vec<f16> = bits.iter().map(|&bits| f16::from_bits(bits)).collect();
            // The same patterns as the words that mean "not arrived", and their neighbours.
            let f32s: Vec<f32> =
                bits.iter().map(|&bits| f32::from_bits(u32::from(bits) << 16 | 0xFFFF)).collect();
            for what in all_reduces(ReduceOp::Sum).into_iter().chain([What::ReduceScatter(ReduceOp::Sum)]) {
                rank.compare(what, &bf16s, 0)?;
                rank.compare(what, &f16s, 0)?;
                rank.compare(what, &f32s, 0)?;
            }
            for what in [What::AllGather, What::AllToAll, What::Broadcast(0)] {
                rank.compare(what, &bf16s, 0)?;
            }
        }
        Ok(())
    });
}

#[test]
fn misaligned_tensors_are_served() {
    on_gpus(2, |rank| {
        for (offset, count) in [(1, 4999), (3, 70_001)] {
            let mine = values::<bf16>(rank.comm.rank(), offset + 2 * count);
            for what in all_reduces(ReduceOp::Sum) {
                rank.compare(what, &mine, offset)?;
            }
            rank.compare(What::ReduceScatter(ReduceOp::Sum), &mine, offset)?;
        }
        Ok(())
    });
}

#[test]
fn in_place() {
    on_gpus(2, |rank| {
        let (me, world_size) = (rank.comm.rank(), rank.comm.world_size());
        for count in [5000, 4999, 400_000, 20_000_000] {
            let apart = What::Registered(ReduceOp::Sum, Algorithm::OneShot);
            let all_reduces = all_reduces(ReduceOp::Sum).into_iter().filter(|&what| what != apart);
            let others = [What::AllGather, What::ReduceScatter(ReduceOp::Sum), What::AllToAll];
            for what in all_reduces.chain(others) {
                let (from, to) = what.counts(count, world_size);
                let mine = values::<bf16>(me, from.max(to));
                // Where the smaller one lies in the larger one.
                let (in_at, out_at) = match what {
                    What::AllGather => (me * count, 0),
                    What::ReduceScatter(_) => (0, me * count),
                    _ => (0, 0),
                };
                let mut expected = vec![bf16::ZERO; to];
                what.on_host(&rank.comm, &mine[in_at..in_at + from], &mut expected)?;
                let buffer = rank.upload(&mine)?;
                let registered = matches!(what, What::Registered(..));
                if registered {
                    rank.register(&buffer)?;
                }
                let at = |first: usize, count| At(buffer.pointer().0 + 2 * first as u64, DType::BF16, count);
                rank.queue(what, at(in_at, from), at(out_at, to))?;
                let got = rank.download(&buffer, 2 * out_at, 2 * to)?;
                rank.same(&format!("{what:?} of {count} in place"), &got, &expected)?;
                if registered {
                    rank.collectives.unregister(&rank.comm, buffer.pointer())?;
                }
            }
        }
        Ok(())
    });
}

/// The forms that take one buffer, against those of the host.
#[test]
fn forms_in_place_are_the_hosts() {
    on_gpus(2, |rank| {
        let (comm, on) = (&rank.comm, &rank.collectives);
        for count in [6, 5000, 300_000] {
            let mine = values::<f32>(comm.rank(), count);
            for form in 0..4 {
                let (mut expected, mut memory) = (mine.clone(), rank.upload(&mine)?);
                let buffer = memory.view_mut(DType::F32, &[count])?;
                // SAFETY: the memory lives until it has been downloaded.
                unsafe {
                    match form {
                        0 => {
                            comm.all_reduce_in_place(&mut expected, ReduceOp::Max)?;
                            on.all_reduce_in_place(buffer, ReduceOp::Max, &rank.stream)?;
                        }
                        1 => {
                            comm.all_gather_in_place(&mut expected)?;
                            on.all_gather_in_place(buffer, &rank.stream)?;
                        }
                        2 => {
                            comm.reduce_scatter_in_place(&mut expected, ReduceOp::Avg)?;
                            on.reduce_scatter_in_place(buffer, ReduceOp::Avg, &rank.stream)?;
                        }
                        _ => {
                            comm.all_to_all_in_place(&mut expected)?;
                            on.all_to_all_in_place(buffer, &rank.stream)?;
                        }
                    }
                }
                let got = rank.download(&memory, 0, 4 * count)?;
                rank.same(&format!("form {form} of {count}"), &got, &expected)?;
            }
        }
        let mut memory = rank.allocate(20)?;
        // SAFETY: nothing is queued.
        let refused =
            unsafe { on.all_gather_in_place(memory.view_mut(DType::F32, &[5])?, &rank.stream) }.unwrap_err();
        assert!(refused.to_string().contains("the buffer has 5 elements"), "{refused}");
        Ok(())
    });
}

#[test]
fn the_largest_messages() {
    largest(2);
}

#[test]
fn the_largest_messages_on_4_gpus() {
    largest(4);
}

fn largest(world_size: usize) {
    on_gpus(world_size, |rank| {
        let mine = values::<bf16>(rank.comm.rank(), 70_000_001);
        for what in all_reduces(ReduceOp::Sum) {
            rank.compare(what, &mine, 0)?;
            rank.compare(what, &mine, 1)?;
        }
        let half = &mine[..50_000_000];
        for what in [What::AllGather, What::AllToAll, What::ReduceScatter(ReduceOp::Sum), What::Broadcast(1)]
        {
            rank.compare(what, half, 0)?;
        }
        Ok(())
    });
}

#[test]
fn nothing_is_moved_where_there_is_nothing() {
    on_gpus(2, |rank| {
        let memory = rank.allocate(16)?;
        let none = At(memory.pointer().0, DType::F32, 0);
        for what in
            [What::AllReduce(ReduceOp::Sum, None), What::AllGather, What::AllToAll, What::Broadcast(0)]
        {
            rank.queue(what, none, none)?;
        }
        rank.collectives.barrier(rank.stream.borrow())?;
        rank.compare(What::AllReduce(ReduceOp::Sum, None), &[1.0f32; 4], 0)
    });
}

#[test]
fn arguments_that_make_no_sense_are_refused() {
    on_gpus(2, |rank| {
        let refused = |outcome: Result<(), CollectiveError>| outcome.unwrap_err().to_string();
        let (host, mut written) = (vec![1.0f32; 4], vec![1.0f32; 4]);
        // SAFETY: nothing is queued.
        let outcome = unsafe {
            rank.collectives.all_reduce(
                TensorView::from(&host),
                TensorViewMut::from(&mut written),
                ReduceOp::Sum,
                rank.stream.borrow(),
            )
        };
        let text = refused(outcome);
        assert!(text.contains("the input is on host") && text.contains("serve cuda:"), "{text}");
        let memory = rank.upload(&[0i32; 64])?;
        let at = |dtype, count| At(memory.pointer().0, dtype, count);
        let sum = What::AllReduce(ReduceOp::Sum, None);
        let error = rank.queue(sum, at(DType::I32, 64), at(DType::I32, 64));
        assert!(refused(error).contains("i32 cannot be reduced"));
        let error = rank.queue(sum, at(DType::F32, 64), at(DType::F32, 63));
        assert!(refused(error).contains("63 elements, expected 64"));
        let error = rank.queue(sum, at(DType::F32, 64), at(DType::BF16, 64));
        assert!(refused(error).contains("the input is f32, the output is bf16"));
        let error = rank.queue(What::AllToAll, at(DType::F32, 63), at(DType::F32, 63));
        assert!(refused(error).contains("a multiple of the world size 2"));
        let error = rank.queue(What::Broadcast(2), at(DType::F32, 4), at(DType::F32, 4));
        assert!(refused(error).contains("root rank 2"));
        rank.compare(sum, &[1.0f32; 4], 0)
    });
}

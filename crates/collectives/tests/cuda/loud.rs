//! Failures that a program cannot overlook: NaN in place of a reduction, a report where data was to be moved, a word to the
//! program that makes no call, and to the peers what went wrong here alone.

use std::{
    sync::mpsc,
    time::{Duration, Instant},
};

use antiphon_collectives::{
    CollectiveError, ReduceOp, StreamCollectives,
    cuda::{Algorithm, OnFailure},
};
use antiphon_device::cuda::Graph;
use antiphon_fabric::FabricError;
use antiphon_tensor::{DType, Element, bf16, f16};

use crate::{
    faults::with_deadline,
    harness::{At, Outcome, Rank, What, on_gpus},
};

const TIMEOUT: Duration = Duration::from_millis(400);

/// What a rank finds in its output when the other one does not come: after the call that waited in vain, and after the one behind.
fn alone<T: Element>(what: What, count: usize, in_place: bool) -> Vec<[Vec<u8>; 2]> {
    with_deadline(TIMEOUT, |rank| {
        let (from, to) = what.counts(count, 2);
        let (input, output) =
            (rank.upload(&vec![T::from_f64(1.0); from.max(to)])?, rank.upload(&vec![T::from_f64(7.0); to])?);
        let output = if in_place { &input } else { &output };
        if let What::Registered(..) = what {
            rank.register(&input)?;
            if !in_place {
                rank.register(output)?;
            }
        }
        if let What::AllReduce(op, _) | What::Registered(op, _) | What::ReduceScatter(op) = what {
            rank.collectives.prepare(T::DTYPE, op)?;
        }
        rank.comm.barrier()?;
        if rank.comm.rank() == 1 {
            std::thread::sleep(2 * TIMEOUT);
            return Ok([Vec::new(), Vec::new()]);
        }
        let at =
            |memory: &antiphon_device::cuda::DeviceMemory, count| At(memory.pointer().0, T::DTYPE, count);
        let graph = Graph::capture(&rank.stream, |_| rank.queue(what, at(&input, from), at(output, to)))?;
        let graph = graph.instantiate()?;
        let size = to * T::DTYPE.size();
        let found = || -> Outcome<Vec<u8>> {
            // SAFETY: the memory outlives the stream, which `read` waits for.
            unsafe { graph.launch(&rank.stream) }?;
            let mut found = vec![0; size];
            output.read(&rank.stream, 0, &mut found)?;
            Ok(found)
        };
        let first = found()?;
        output.write(&rank.stream, 0, &vec![0; size])?;
        let second = found()?;
        let error = rank.collectives.check().expect_err("nobody else came");
        assert!(error.to_string().contains("ranks [1] of 2"), "{error}");
        Ok([first, second])
    })
}

fn is_nan<T: Element>(bytes: &[u8]) -> bool {
    bytes.chunks(size_of::<T>()).all(|element| match T::DTYPE {
        DType::F32 => f32::from_le_bytes(element.try_into().unwrap()).is_nan(),
        DType::F16 => f16::from_le_bytes(element.try_into().unwrap()).is_nan(),
        _ => bf16::from_le_bytes(element.try_into().unwrap()).is_nan(),
    })
}

fn becomes_nan<T: Element>(cases: &[(usize, bool)]) {
    let [one, two] = Algorithm::ALL;
    let op = ReduceOp::Sum;
    // Compiled once for all worlds below, whose deadline is shorter than that takes.
    on_gpus(2, |rank| Ok(rank.collectives.prepare(T::DTYPE, op)?));
    let all = [
        What::AllReduce(op, Some(one)),
        What::AllReduce(op, Some(two)),
        What::Registered(op, one),
        What::Registered(op, two),
        What::ReduceScatter(op),
    ];
    for what in all {
        for &(count, in_place) in cases {
            if in_place && matches!(what, What::Registered(_, Algorithm::OneShot)) {
                continue; // refused
            }
            let found = alone::<T>(what, count, in_place);
            let Some([first, second]) = found.first() else { return };
            for (call, bytes) in [("in vain", first), ("behind", second)] {
                assert!(is_nan::<T>(bytes), "{what:?} of {count}, in place: {in_place}, {call}");
            }
        }
    }
}

#[test]
fn a_reduction_that_waited_in_vain_and_those_behind_it_are_nan() {
    becomes_nan::<f32>(&[(9, false), (300_001, true)]);
    becomes_nan::<f16>(&[(9, true)]);
    becomes_nan::<bf16>(&[(4096, false)]);
}

#[test]
fn what_moves_in_vain_leaves_a_report() {
    for what in [What::AllGather, What::AllToAll, What::Broadcast(1)] {
        alone::<f32>(what, 4096, false); // which finds the report
    }
}

#[test]
fn a_program_that_makes_no_call_is_notified_of_a_failure() {
    let heard = with_deadline(TIMEOUT, |rank| {
        let (sender, heard) = mpsc::channel();
        rank.collectives.on_failure(OnFailure::Callback(Box::new(move |error: &FabricError| {
            let _ = sender.send(error.to_string());
        })));
        let memory = rank.upload(&[1.0f32; 64])?;
        rank.comm.barrier()?;
        if rank.comm.rank() == 0 {
            let at = At(memory.pointer().0, DType::F32, 64);
            rank.queue(What::AllReduce(ReduceOp::Sum, None), at, at)?;
            return Ok(heard.recv_timeout(10 * TIMEOUT)?);
        }
        std::thread::sleep(4 * TIMEOUT);
        Ok(String::new())
    });
    let Some(text) = heard.first() else { return };
    assert!(text.contains("all_reduce(64 × f32") && text.contains("ranks [1] of 2"), "{text}");
}

/// The errors of the ranks when the driver refuses the second rank's launches, because their capture was invalidated.
fn refused_on_one_rank(count: usize) {
    let errors = with_deadline(Duration::from_secs(60), |rank| {
        let memory = rank.upload(&vec![1.0f32; count])?;
        let at = At(memory.pointer().0, DType::F32, count);
        let sum = What::AllReduce(ReduceOp::Sum, None);
        rank.collectives.prepare(DType::F32, ReduceOp::Sum)?;
        rank.comm.barrier()?;
        let start = Instant::now();
        let error = match rank.comm.rank() {
            0 => {
                rank.queue(sum, at, at)?;
                rank.stream.borrow().synchronize()?;
                rank.collectives.check().expect_err("the other one failed")
            }
            _ => {
                let mut error = None;
                let _ = Graph::capture(&rank.stream, |stream| -> Outcome {
                    let _ = stream.synchronize(); // which a capture does not survive
                    error = rank.queue(sum, at, at).err();
                    Err("spoilt".into())
                });
                error.expect("a spoilt capture takes no launch")
            }
        };
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        Ok(error)
    });
    let Some(CollectiveError::Fabric(first)) = errors.first() else {
        return assert!(errors.is_empty(), "{errors:?}");
    };
    assert!(matches!(first, FabricError::Aborted { by: 1, .. }), "{first}");
}

#[test]
fn a_launch_that_fails_on_one_rank_is_told_to_the_others() {
    refused_on_one_rank(64);
}

/// A call that is larger than the staging memory goes through a second stream as well, which is forked off first.
#[test]
fn a_fork_that_fails_on_one_rank_is_told_to_the_others() {
    refused_on_one_rank(100 << 20);
}

/// Memory that kernels poll stays as long as they may.
#[test]
fn collectives_may_be_dropped_during_a_capture() {
    with_deadline(TIMEOUT, |rank| {
        let Rank { comm, stream, collectives } = rank;
        if comm.rank() == 1 {
            std::thread::sleep(3 * TIMEOUT);
            return Ok(()); // it does not come to the barrier
        }
        let other = collectives.context().stream()?;
        collectives.barrier(stream.borrow())?;
        let graph = Graph::capture(&other, |_| -> Outcome {
            drop(collectives);
            Ok(())
        });
        drop(graph); // the driver may have refused the capture
        Ok(stream.borrow().synchronize()?)
    });
}

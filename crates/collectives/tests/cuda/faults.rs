//! Ranks that do not come, leave, or do something else: named within the deadline, with the GPUs usable afterwards.

use std::time::{Duration, Instant};

use antiphon_collectives::{
    CollectiveError, ReduceOp,
    cuda::{Algorithm, CudaCollectives},
    fusion::Accumulation,
};
use antiphon_device::cuda::{Context, DeviceMemory, memory};
use antiphon_fabric::{FabricError, LocalWorld};
use antiphon_tensor::{DType, Device, quantize::TokenRule};
use antiphon_testing::{device_of, gpus_for, sized};

use crate::{
    captured::tensor,
    fused::{Case, Form, From, Fused},
    harness::{At, Outcome, Rank, What, on_gpus},
};

const SUM: What = What::AllReduce(ReduceOp::Sum, None);

/// Runs `body` on two GPUs with a deadline, and then a sound call on new communicators.
pub fn with_deadline<T: Send>(timeout: Duration, body: impl Fn(Rank) -> Outcome<T> + Sync) -> Vec<T> {
    let Some(driver) = gpus_for(2) else { return Vec::new() };
    let outcomes = LocalWorld::run_with(2, timeout, |comm| -> Outcome<T> {
        let context = Context::primary(device_of(driver, comm.rank())?)?;
        let collectives = CudaCollectives::new(&comm, &context)?;
        collectives.prepare(DType::F32, ReduceOp::Sum)?;
        let stream = context.stream()?;
        comm.barrier()?;
        body(Rank { comm, stream, collectives })
    });
    on_gpus(2, |rank| rank.compare(SUM, &[1.0f32; 1000], 0));
    outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(|error| panic!("{error}"))).collect()
}

fn call(rank: &Rank, count: usize) -> Outcome<CollectiveError> {
    let memory = rank.upload(&vec![1.0f32; count])?;
    let at = At(memory.pointer().0, DType::F32, count);
    rank.queue(SUM, at, at)?;
    rank.stream.borrow().synchronize()?;
    Ok(rank.queue(SUM, at, at).expect_err("the first call failed"))
}

#[test]
fn a_rank_that_does_not_come_is_named_at_the_deadline() {
    let timeout = Duration::from_millis(500);
    let texts = with_deadline(timeout, |rank| match rank.comm.rank() {
        0 => {
            let text = call(&rank, 64)?.to_string();
            assert!(rank.collectives.check().unwrap_err().to_string().contains("failed earlier"));
            Ok(text)
        }
        _ => {
            std::thread::sleep(2 * timeout);
            Ok(String::new())
        }
    });
    let Some(text) = texts.first() else { return };
    assert!(text.contains("all_reduce(64 × f32, sum") && text.contains("timed out"), "{text}");
    assert!(text.contains("ranks [1] of 2"), "{text}");
}

#[test]
fn a_rank_that_leaves_is_named_long_before_the_deadline() {
    let errors = with_deadline(Duration::from_secs(60), |rank| match rank.comm.rank() {
        0 => {
            let start = Instant::now();
            let error = call(&rank, 1 << 20)?;
            assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
            Ok(Some(error))
        }
        _ => {
            std::thread::sleep(Duration::from_millis(100));
            Ok(None)
        }
    });
    let Some(error) = errors.first() else { return };
    let lost = matches!(error, Some(CollectiveError::Fabric(FabricError::PeerLost { rank: 1, .. })));
    assert!(lost, "{error:?}");
}

#[test]
fn ranks_that_call_different_things_are_told_so() {
    let errors = with_deadline(Duration::from_secs(60), |rank| call(&rank, 64 + rank.comm.rank()));
    let [first, second] = errors.as_slice() else { return };
    let texts = [first.to_string(), second.to_string()];
    for text in texts {
        assert!(text.contains("64 × f32") && text.contains("65 × f32"), "{text}");
    }
}

#[test]
fn ranks_whose_tensors_are_in_different_places_are_told_so() {
    let outcomes = with_deadline(Duration::from_secs(60), |rank| {
        let memory = rank.upload(&[1.0f32; 256])?;
        rank.register(&memory)?;
        let at = At(memory.pointer().0 + 512 * rank.comm.rank() as u64, DType::F32, 64);
        rank.queue(What::Registered(ReduceOp::Sum, Algorithm::TwoShot), at, at)?;
        rank.stream.borrow().synchronize()?;
        // The memory goes when both have ended: a rank that waits finds the other's tag and gives up, while the other, which is late, still
        // comes to load from it.
        Ok((rank.collectives.check().expect_err("they disagree"), memory))
    });
    for (error, _) in outcomes {
        assert!(matches!(error, CollectiveError::Fabric(FabricError::Mismatch { .. })), "{error}");
        assert!(error.to_string().contains("two-shot, registered"), "{error}");
    }
}

#[test]
fn a_rank_that_does_not_come_with_its_registered_memory_is_named_at_the_deadline() {
    let timeout = Duration::from_millis(500);
    let texts = with_deadline(Duration::from_secs(60), |rank| {
        let (input, output) = (rank.upload(&[1.0f32; 64])?, rank.upload(&[1.0f32; 64])?);
        rank.register(&input)?;
        let at = |memory: &DeviceMemory| At(memory.pointer().0, DType::F32, 64);
        let call = What::Registered(ReduceOp::Sum, Algorithm::OneShot);
        rank.queue(call, at(&input), at(&output))?; // compiles the kernel
        rank.stream.borrow().synchronize()?;
        rank.comm.barrier()?;
        rank.comm.set_timeout(timeout);
        if rank.comm.rank() == 1 {
            std::thread::sleep(2 * timeout);
            return Ok(String::new());
        }
        rank.queue(call, at(&input), at(&output))?;
        rank.stream.borrow().synchronize()?;
        Ok(rank.collectives.check().expect_err("nobody else came").to_string())
    });
    let Some(text) = texts.first() else { return };
    assert!(text.contains("one-shot, registered") && text.contains("ranks [1] of 2"), "{text}");
}

/// Calls that a rank has in its stream behind one that gave up send nothing: the peers may not have read what was sent
/// before, and would take the one for the other.
#[test]
fn a_late_rank_does_not_get_what_is_of_later_calls() {
    const CALLS: usize = 6;
    const COUNT: usize = 1000;
    let timeout = Duration::from_millis(300);
    let errors = with_deadline(timeout, |rank| {
        let me = rank.comm.rank();
        // The value of a call tells it from the others.
        let inputs: Outcome<Vec<_>> =
            (0..CALLS).map(|call| rank.upload(&[(call + 1) as f32; COUNT])).collect();
        let outputs: Outcome<Vec<_>> = (0..CALLS).map(|_| rank.allocate(4 * COUNT)).collect();
        let (inputs, outputs) = (inputs?, outputs?);
        let (bytes, fills) = sized((8 << 30, 400), (1 << 30, 8));
        let busy = rank.allocate(bytes)?;
        rank.comm.barrier()?;
        if me == 0 {
            // Together 0.8 s: its GPU is late by more than the deadline, its host is not.
            for _ in 0..fills {
                // SAFETY: the memory has as many bytes, and lives until the stream is done.
                unsafe { memory::fill(rank.stream.borrow(), busy.pointer(), 1, busy.len()) }?;
            }
        }
        for (input, output) in inputs.iter().zip(&outputs) {
            let at = |memory: &DeviceMemory| At(memory.pointer().0, DType::F32, COUNT);
            rank.queue(SUM, at(input), at(output))?;
        }
        rank.stream.borrow().synchronize()?;
        let error = rank.collectives.check().expect_err("a call failed");
        // The first call of the late rank has all that it needs, and must not have more.
        let mut first = vec![0; 4 * COUNT];
        outputs[0].read(&rank.stream, 0, &mut first)?;
        if me == 0 {
            rank.same("the first call", &first, &[2.0f32; COUNT])?;
        }
        Ok(error.to_string())
    });
    for error in errors {
        assert!(error.contains("all_reduce(1000 × f32"), "{error}");
    }
}

/// Cases from one block to all blocks of a device: in clusters, in pieces, and with both kinds of blocks that only reduce.
fn fused_cases() -> [Case; 5] {
    let (one, two) = (Some(Algorithm::OneShot), Some(Algorithm::TwoShot));
    let bf16 = |tokens, hidden| Case::new(DType::BF16, tokens, hidden);
    [
        Case { algorithm: one, ..bf16(1, 1024) },
        Case { algorithm: one, ..bf16(16, 16_384) },
        Case {
            algorithm: two,
            ..Case::quantized(DType::BF16, 64, 7168, Form::Fp8Tokens(TokenRule::Quotient))
        },
        Case { from: From::Experts(8), ..bf16(sized(256, 32), 7168) },
        Case {
            algorithm: two,
            ..Case::quantized(DType::BF16, sized(2500, 150), 16_384, Form::Fp8Groups(128))
        },
    ]
}

/// Queues a call that cannot be completed, and others behind it; how long they took, and why they failed.
fn fails(rank: &Rank, fused: &Fused) -> Outcome<(Duration, CollectiveError)> {
    let start = Instant::now();
    fused.queue()?;
    // Unless the first is over already: these must not wait for anything.
    let _ = fused.queue().and_then(|()| fused.queue());
    rank.stream.borrow().synchronize()?;
    let elapsed = start.elapsed();
    Ok((elapsed, rank.collectives.check().expect_err("a peer is missing")))
}

#[test]
fn a_rank_that_does_not_come_to_a_fused_call_is_named_at_the_deadline() {
    let timeout = sized(Duration::from_millis(500), Duration::from_secs(3));
    for case in fused_cases() {
        let texts = with_deadline(Duration::from_secs(60), |rank| {
            let fused = Fused::without_host(&rank, case)?;
            fused.queue()?; // compiles the kernels
            rank.stream.borrow().synchronize()?;
            rank.comm.barrier()?;
            rank.comm.set_timeout(timeout);
            if rank.comm.rank() == 1 {
                std::thread::sleep(4 * timeout);
                return Ok(String::new());
            }
            let (elapsed, error) = fails(&rank, &fused)?;
            assert!(elapsed < 3 * timeout, "{case:?}: {elapsed:?}");
            Ok(error.to_string())
        });
        let Some(text) = texts.first() else { return };
        assert!(text.contains("all_reduce_fused(") && text.contains("timed out"), "{case:?}: {text}");
        assert!(text.contains("ranks [1] of 2"), "{case:?}: {text}");
    }
}

#[test]
fn a_rank_that_leaves_a_fused_call_is_named_long_before_the_deadline() {
    for case in fused_cases() {
        let errors = with_deadline(Duration::from_secs(60), |rank| {
            let fused = Fused::without_host(&rank, case)?;
            fused.queue()?;
            rank.stream.borrow().synchronize()?;
            rank.comm.barrier()?;
            if rank.comm.rank() == 1 {
                return Ok(None);
            }
            let (elapsed, error) = fails(&rank, &fused)?;
            assert!(elapsed < Duration::from_secs(10), "{case:?}: {elapsed:?}");
            Ok(Some(error))
        });
        let Some(error) = errors.first() else { return };
        let lost = matches!(error, Some(CollectiveError::Fabric(FabricError::PeerLost { rank: 1, .. })));
        assert!(lost, "{case:?}: {error:?}");
    }
}

#[test]
fn ranks_that_fuse_different_things_are_told_so() {
    let bf16 = |tokens, hidden| Case::new(DType::BF16, tokens, hidden);
    let by = |algorithm| Case { algorithm: Some(algorithm), ..bf16(8, 1024) };
    let rounded = Case { accumulation: Accumulation::Rounded, ..by(Algorithm::OneShot) };
    let rows = sized(600, 40);
    let elements = |rows: usize| format!("{} × bf16", rows * 16_384);
    let names = |one: &str, other: &str| [one.to_owned(), other.to_owned()];
    let pairs = [
        // As many elements, in other rows.
        ([bf16(8, 1024), bf16(4, 2048)], names("rows of 1024", "rows of 2048")),
        ([bf16(rows, 16_384), bf16(rows + 1, 16_384)], [elements(rows), elements(rows + 1)]),
        ([by(Algorithm::OneShot), by(Algorithm::TwoShot)], names("one-shot", "two-shot")),
        ([by(Algorithm::OneShot), rounded], names("one-shot)", "one-shot, rounded)")),
        ([bf16(8, 1024), Case::plain(DType::BF16, 8, 1024)], names("all_reduce_fused(", "all_reduce(")),
    ];
    for (cases, said) in pairs {
        let errors = with_deadline(Duration::from_secs(60), |rank| {
            let fused = Fused::without_host(&rank, cases[rank.comm.rank()])?;
            fused.queue()?;
            rank.stream.borrow().synchronize()?;
            Ok(fused.queue().expect_err("the first call failed").to_string())
        });
        // A rank may find the failure before its peer's first block has said what the peer does.
        let names_both = |text: &String| said.iter().all(|said| text.contains(said));
        assert!(errors.iter().any(names_both) || errors.is_empty(), "{cases:?}: {errors:?}");
        for text in &errors {
            assert!(names_both(text) || text.contains("disagreed with rank"), "{cases:?}: {text}");
        }
    }
}

#[test]
fn messages_that_differ_are_named_on_the_receiver() {
    let Some(driver) = gpus_for(2) else { return };
    let timeout = std::time::Duration::from_secs(2);
    let texts = LocalWorld::run_with(2, timeout, |comm| -> Outcome<String> {
        let context = Context::primary(device_of(driver, comm.rank())?)?;
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

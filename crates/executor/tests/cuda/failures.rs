//! Ranks that do not come, leave or do something else: an error by the deadline, and new communicators work.

use std::time::{Duration, Instant};

use antiphon_executor::{ExecutorError, cuda::CudaOptions};
use antiphon_fabric::FabricError;
use antiphon_language::library::{Setting, find};
use antiphon_plan::verify::VerifiedPlan;
use antiphon_testing::gpus;

use crate::harness::{Both, Call, Outcome, Rank, on_gpus, proved, run};

fn plan(world_size: usize) -> VerifiedPlan {
    proved(find("packet-all-reduce").unwrap().plan(&Setting::new(world_size as u32)).unwrap())
}

/// Chunks of the calls.
const CHUNKS: [usize; 2] = [64, 128];

/// Runs `body` with a loaded and prepared plan and a call for each of [`CHUNKS`], and then a sound call on a new communicator.
fn with_deadline<T: Send>(
    world_size: usize,
    timeout: Duration,
    body: impl Fn(&Rank, &Both<'_>, [Call<f32>; 2]) -> Outcome<T> + Sync,
) -> Vec<Outcome<T>> {
    let plan = plan(world_size);
    let outcomes = run(world_size, timeout, |rank| {
        let mut both = Both::load(rank, &plan, CudaOptions::default())?;
        for chunk in CHUNKS {
            both.prepare::<f32>(chunk)?;
        }
        let [small, large] = CHUNKS.map(|chunk| both.unchecked(chunk));
        let calls = [small?, large?];
        rank.comm.barrier()?;
        body(rank, &both, calls)
    });
    on_gpus(world_size, |rank| Both::load(rank, &plan, CudaOptions::default())?.compare::<f32>(64, 0, 0));
    outcomes
}

/// The error of a call that cannot end.
fn vain(rank: &Rank, both: &Both<'_>, call: &Call<f32>) -> Outcome<ExecutorError> {
    both.queue(call)?;
    rank.stream.borrow().synchronize()?;
    Ok(both.gpu.check().expect_err("a rank is missing"))
}

fn absent(world_size: usize) {
    let timeout = Duration::from_millis(700);
    let outcomes = with_deadline(world_size, timeout, |rank, both, calls| {
        if rank.comm.rank() == world_size - 1 {
            std::thread::sleep(3 * timeout);
            return Ok(None);
        }
        Ok(Some(vain(rank, both, &calls[0])?))
    });
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let Some(error) = outcome.unwrap() else { continue };
        let (text, absent) = (error.to_string(), world_size - 1);
        let named = match error {
            ExecutorError::Fabric(FabricError::Timeout { .. }) => format!("ranks [{absent}] of {world_size}"),
            // Another rank gave up a little earlier.
            ExecutorError::Fabric(FabricError::Aborted { .. }) => {
                format!("gave up waiting for rank {absent}")
            }
            error => panic!("rank {rank}: {error:?}"),
        };
        assert!(text.contains("execute(") && text.contains(&named), "rank {rank}: {text}");
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_at_the_deadline_on_2() {
    absent(2);
}

#[test]
fn a_rank_that_does_not_come_is_named_at_the_deadline_on_3() {
    absent(3);
}

#[test]
fn a_rank_that_leaves_is_named_long_before_the_deadline_on_2() {
    // A rank that leaves frees its memory, which waits for the kernels of its GPU: each rank has one of its own.
    if gpus(2).is_none() {
        return;
    }
    let outcomes = with_deadline(2, Duration::from_secs(60), |rank, both, calls| {
        if rank.comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(100));
            return Ok(None);
        }
        let start = Instant::now();
        let error = vain(rank, both, &calls[0])?;
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
        Ok(Some(error))
    });
    let Some(outcome) = outcomes.into_iter().next() else { return };
    let error = outcome.unwrap();
    let lost = matches!(error, Some(ExecutorError::Fabric(FabricError::PeerLost { rank: 1, .. })));
    assert!(lost, "{error:?}");
}

#[test]
fn ranks_that_call_different_sizes_are_told_so_on_2() {
    let outcomes = with_deadline(2, Duration::from_secs(60), |rank, both, calls| {
        vain(rank, both, &calls[rank.comm.rank()])
    });
    for outcome in outcomes {
        let text = outcome.unwrap().to_string();
        assert!(text.contains("execute(128 × f32") && text.contains("execute(256 × f32"), "{text}");
    }
}

//! A rank whose call ends after another rank gave up in it fails too.

use std::{
    thread,
    time::{Duration, Instant},
};

use antiphon_device::cuda::Graph;

use crate::{
    Outcome, Rank, on_gpus,
    order::{Rotated, SIZES},
};

const TIMEOUT: Duration = Duration::from_millis(300);
/// Around the deadline, in milliseconds.
const DELAYS: [u64; 5] = [0, 200, 300, 400, 900];

/// When a rank launched, when it knew how the call ended, and the error.
struct Launched {
    began: Instant,
    ended: Instant,
    error: Option<String>,
}

/// A graph, as its launch asks nobody whether the peers are still there: what is found is found behind the kernel.
fn launch_late(rank: &Rank, delays: [u64; 2]) -> Outcome<Launched> {
    let (stream, call) = (&rank.streams[0], Rotated::new(rank, 0, SIZES[0])?);
    rank.comm.set_timeout(TIMEOUT); // which the graph keeps
    let graph = Graph::capture(stream, |_| call.call(rank, stream.borrow()))?.instantiate()?;
    rank.comm.set_timeout(Duration::from_secs(60));
    rank.comm.barrier()?;
    thread::sleep(Duration::from_millis(delays[rank.comm.rank()]));
    let began = Instant::now();
    // SAFETY: what the graph uses lives until the stream has been waited for.
    unsafe { graph.launch(stream) }?;
    stream.borrow().synchronize_within(Duration::from_secs(60))?;
    let error = rank.rotations.check().err().map(|error| error.to_string());
    Ok(Launched { began, ended: Instant::now(), error })
}

#[test]
fn a_rank_that_ends_a_call_after_another_one_gave_up_fails_too() {
    let mut late = 0;
    let mut has_gpus = false;
    for delays in DELAYS.into_iter().flat_map(|first| DELAYS.map(|second| [first, second])) {
        let calls = on_gpus(2, Duration::from_secs(60), |rank| launch_late(&rank, delays));
        for (call, other) in calls.iter().zip(calls.iter().rev()) {
            has_gpus = true;
            // The thread that tells the peers looks every 10 ms.
            if other.error.is_some() && other.ended + Duration::from_millis(50) < call.began {
                let error = call
                    .error
                    .as_ref()
                    .unwrap_or_else(|| panic!("{delays:?}: a result behind {:?}", other.error));
                assert!(error.contains("gave up waiting for rank"), "{delays:?}: {error}");
                late += 1;
            }
        }
    }
    assert!(late > 0 || !has_gpus, "no rank came after the other one gave up");
}

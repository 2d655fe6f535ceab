//! Calls that run, calls that are captured, and launches of graphs, on several streams of one tenant.

use std::time::Duration;

use antiphon_device::cuda::{DeviceMemory, Event, Graph, GraphExec, Stream, StreamRef};
use antiphon_fabric::FabricError;
use antiphon_testing::rotation::rotate;

use crate::{Outcome, Rank, on_gpus, values};

/// Bytes of a call of one launch, and of one in pieces, which uses the tenant's side stream.
pub(crate) const SIZES: [usize; 2] = [4 << 10, 2 << 20];

/// A call: each rank's values go to the next rank.
pub(crate) struct Rotated {
    from: DeviceMemory,
    to: DeviceMemory,
    expected: Vec<f32>,
}

impl Rotated {
    pub(crate) fn new(rank: &Rank, round: usize, bytes: usize) -> Outcome<Self> {
        let (me, world) = (rank.comm.rank(), rank.comm.world_size());
        let from = rank.upload(&values(me, round, bytes / 4))?;
        let to = rank.upload(&vec![-1.0; bytes / 4])?;
        Ok(Self { from, to, expected: values((me + world - 1) % world, round, bytes / 4) })
    }

    pub(crate) fn call(&self, rank: &Rank, stream: StreamRef<'_>) -> Result<(), FabricError> {
        // SAFETY: the tests keep the memory until they have synchronised with the streams.
        unsafe { rotate(&rank.rotations, [self.from.pointer(), self.to.pointer()], self.from.len(), stream) }
    }

    fn check(&self, rank: &Rank, name: &str) -> Outcome {
        let got = rank.download(&self.to, &rank.streams[0])?;
        rank.rotations.check()?;
        assert!(got == self.expected, "{name} of rank {}: {} elements", rank.comm.rank(), got.len());
        Ok(())
    }
}

fn wait_for(streams: &[&Stream]) -> Outcome {
    streams.iter().try_for_each(|stream| stream.borrow().synchronize_within(Duration::from_secs(60)))?;
    Ok(())
}

/// Makes the ranks late in turn, so that a call is under way when the next one is made.
fn is_late(rank: &Rank, round: usize) {
    if round % rank.comm.world_size() == rank.comm.rank() {
        std::thread::sleep(Duration::from_millis(3));
    }
}

/// A captured call on the stream of the next eager one: that one still waits for the eager call before, on another stream.
fn a_capture_between(world: usize) {
    on_gpus(world, Duration::from_secs(60), |rank| {
        let [a, b] = &rank.streams;
        for (round, bytes) in SIZES.into_iter().enumerate() {
            let [first, captured, second] =
                [0, 1, 2].map(|call| Rotated::new(&rank, 3 * round + call, bytes));
            let (first, captured, second) = (first?, captured?, second?);
            rank.comm.barrier()?;
            is_late(&rank, round);
            first.call(&rank, a.borrow())?;
            let graph = Graph::capture(b, |_| captured.call(&rank, b.borrow()))?.instantiate()?;
            second.call(&rank, b.borrow())?;
            wait_for(&[a, b])?;
            first.check(&rank, "before the capture")?;
            second.check(&rank, "behind the capture")?;
            // SAFETY: what the graph uses lives until the stream has been waited for.
            unsafe { graph.launch(a) }?;
            wait_for(&[a])?;
            captured.check(&rank, "captured")?;
        }
        Ok(())
    });
}

#[test]
fn a_capture_between_eager_calls_leaves_their_order_on_2_gpus() {
    a_capture_between(2);
}

#[test]
fn a_capture_between_eager_calls_leaves_their_order_on_3_gpus() {
    a_capture_between(3);
}

/// Nothing can be put behind the call before while its stream is captured. The refusal changes nothing.
#[test]
fn a_call_behind_a_stream_in_capture_is_refused_by_name() {
    on_gpus(2, Duration::from_secs(60), |rank| {
        let [a, b] = &rank.streams;
        let [first, second, third] = [0, 1, 2].map(|call| Rotated::new(&rank, call, SIZES[0]));
        let (first, second, third) = (first?, second?, third?);
        first.call(&rank, b.borrow())?;
        let graph = Graph::capture(b, |_| -> Result<(), FabricError> {
            for _ in 0..2 {
                let error = second.call(&rank, a.borrow()).expect_err("the stream is captured");
                let text = error.to_string();
                assert!(matches!(error, FabricError::InvalidArgument(_)), "{text}");
                assert!(text.contains("the call before is being captured"), "{text}");
            }
            third.call(&rank, b.borrow())
        })?
        .instantiate()?;
        second.call(&rank, a.borrow())?;
        // SAFETY: what the graph uses lives until the stream has been waited for.
        unsafe { graph.launch(a) }?;
        wait_for(&[a, b])?;
        [first, second, third].iter().try_for_each(|call| call.check(&rank, "a call"))
    });
}

/// Another capture has begun behind the eager call: an event of then orders the next eager call, whatever becomes of the stream.
#[test]
fn a_call_behind_two_captures_is_ordered_by_an_earlier_event() {
    on_gpus(2, Duration::from_secs(60), |rank| {
        let [a, b] = &rank.streams;
        let other = rank.rotations.context().stream()?;
        let calls = [0, 1, 2, 3].map(|call| Rotated::new(&rank, call, SIZES[1]));
        let [first, one, two, second] = calls;
        let (first, one, two, second) = (first?, one?, two?, second?);
        rank.comm.barrier()?;
        is_late(&rank, 0);
        first.call(&rank, a.borrow())?;
        let mut graphs = Vec::new();
        let outer = Graph::capture(&other, |_| -> Outcome {
            one.call(&rank, other.borrow())?;
            graphs.push(Graph::capture(a, |_| -> Outcome {
                two.call(&rank, a.borrow())?;
                Ok(second.call(&rank, b.borrow())?)
            })?);
            Ok(())
        })?;
        graphs.push(outer);
        for graph in graphs {
            // SAFETY: what the graph uses lives until the stream has been waited for.
            unsafe { graph.instantiate()?.launch(b) }?;
            wait_for(&[b])?;
        }
        wait_for(&[a, b, &other])?;
        [first, one, two, second].iter().try_for_each(|call| call.check(&rank, "a call"))
    });
}

/// The streams of a capture are ordered in it, also where the first is that of the eager call before, which needs no event.
#[test]
fn a_fork_in_a_capture_follows_its_calls_on_3_gpus() {
    on_gpus(3, Duration::from_secs(60), |rank| {
        let [stream, fork] = &rank.streams;
        let context = rank.rotations.context();
        let (forked, joined) = (Event::new(context)?, Event::new(context)?);
        for (round, bytes) in SIZES.into_iter().enumerate() {
            let calls = [0, 1, 2, 3].map(|call| Rotated::new(&rank, 4 * round + call, bytes));
            let calls = calls.into_iter().collect::<Outcome<Vec<_>>>()?;
            let eager = if round == 0 { stream } else { fork };
            calls[0].call(&rank, eager.borrow())?;
            wait_for(&[eager])?;
            let graph = Graph::capture(stream, |_| -> Outcome {
                forked.record(stream)?;
                fork.borrow().wait(&forked)?;
                for (index, call) in calls.iter().enumerate() {
                    call.call(&rank, [stream, fork][index % 2].borrow())?;
                }
                joined.record(fork)?;
                Ok(stream.borrow().wait(&joined)?)
            })?
            .instantiate()?;
            for replay in 0..4 {
                is_late(&rank, replay);
                // SAFETY: what the graph uses lives until the stream has been waited for.
                unsafe { graph.launch(stream) }?;
                calls[0].call(&rank, stream.borrow())?;
            }
            wait_for(&[stream, fork])?;
            calls.iter().try_for_each(|call| call.check(&rank, "in a fork"))?;
        }
        Ok(())
    });
}

/// A call in pieces that is captured takes the side stream into its capture.
#[test]
fn eager_calls_in_pieces_have_a_side_stream_of_their_own() {
    on_gpus(2, Duration::from_secs(60), |rank| {
        let [a, b] = &rank.streams;
        let calls = [0, 1, 2].map(|call| Rotated::new(&rank, call, SIZES[1]));
        let [first, captured, second] = calls;
        let (first, captured, second) = (first?, captured?, second?);
        first.call(&rank, a.borrow())?;
        let graph = Graph::capture(b, |_| -> Result<(), FabricError> {
            captured.call(&rank, b.borrow())?;
            second.call(&rank, a.borrow())?; // runs now
            captured.call(&rank, b.borrow())
        })?
        .instantiate()?;
        wait_for(&[a])?;
        // SAFETY: what the graph uses lives until the stream has been waited for.
        unsafe { graph.launch(a) }?;
        wait_for(&[a, b])?;
        [first, captured, second].iter().try_for_each(|call| call.check(&rank, "a call"))
    });
}

/// Rank 0 launches two graphs at once while the others are late. The kernels find it, and no rank hangs. The second graph has `calls`
/// calls: the last of four would have the slot of the call that waits.
fn replays_that_overlap(world: usize, bytes: usize, calls: usize) {
    let errors = on_gpus(world, Duration::from_secs(60), |rank| {
        let [a, b] = &rank.streams;
        let made = (0..=calls).map(|round| Rotated::new(&rank, round, bytes)).collect::<Outcome<Vec<_>>>()?;
        let graph = |made: &[Rotated], stream: &Stream| -> Outcome<GraphExec> {
            let all = |_: StreamRef<'_>| made.iter().try_for_each(|call| call.call(&rank, stream.borrow()));
            Ok(Graph::capture(stream, all)?.instantiate()?)
        };
        let graphs = [graph(&made[..1], a)?, graph(&made[1..], b)?];
        rank.comm.barrier()?;
        let is_late = rank.comm.rank() != 0;
        let start = std::time::Instant::now();
        let mut heard = None; // of rank 0's failure
        while is_late && heard.is_none() && start.elapsed() < Duration::from_secs(20) {
            heard = rank.rotations.check_ready().err();
            std::thread::sleep(Duration::from_millis(1));
        }
        for (graph, stream) in graphs.iter().zip([a, b]) {
            // SAFETY: what the graphs use lives until the streams have been waited for.
            unsafe { graph.launch(stream) }?;
            match is_late {
                true => wait_for(&[stream])?,
                // The first call has advanced.
                false if calls > 1 => std::thread::sleep(Duration::from_millis(500)),
                false => (),
            }
        }
        wait_for(&[a, b])?;
        heard.or_else(|| rank.rotations.check_ready().err()).ok_or_else(|| "no error".into())
    });
    let Some((first, others)) = errors.split_first() else { return };
    assert!(matches!(first, FabricError::Overlap { rank: 0, .. }), "{first}");
    for error in others {
        let text = error.to_string();
        assert!(matches!(error, FabricError::Aborted { by: 0, .. } | FabricError::Overlap { .. }), "{text}");
        assert!(text.contains("at the same time"), "{text}");
    }
}

#[test]
fn replays_that_overlap_end_in_an_error_on_every_rank_of_2() {
    SIZES.into_iter().for_each(|bytes| replays_that_overlap(2, bytes, 1));
}

#[test]
fn replays_that_overlap_end_in_an_error_on_every_rank_of_4() {
    replays_that_overlap(4, SIZES[0], 1);
}

#[test]
fn a_graph_that_passes_a_call_ends_in_an_error_on_every_rank_of_2() {
    replays_that_overlap(2, SIZES[0], 4);
}

#[test]
fn a_graph_that_passes_a_call_ends_in_an_error_on_every_rank_of_3() {
    replays_that_overlap(3, SIZES[0], 4);
}

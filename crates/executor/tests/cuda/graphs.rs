//! Graphs of calls, replayed between eager calls of other sizes, plans and streams; and flags that begin anew.

use antiphon_device::cuda::{Event, Graph, Stream};
use antiphon_executor::{ExecutorError, cuda::CudaOptions};
use antiphon_language::library::{Setting, find};
use antiphon_testing::sized;

use crate::harness::{Both, Outcome, on_gpus, proved};

#[derive(Debug, thiserror::Error)]
pub enum GraphError {
    #[error(transparent)]
    Cuda(#[from] antiphon_device::cuda::CudaError),
    #[error(transparent)]
    Executor(#[from] ExecutorError),
}

/// Graphs of one to three calls of two plans, launched between eager calls of another size, of which those of the other plan are on a second stream.
fn replays(world_size: usize) {
    let plan = |name: &str| proved(find(name).unwrap().plan(&Setting::new(world_size as u32)).unwrap());
    let (packets, signals) = (plan("packet-all-reduce"), plan("two-shot-all-reduce"));
    on_gpus(world_size, |rank| -> Outcome {
        let mut packets = Both::load(rank, &packets, CudaOptions::default())?;
        let mut signals = Both::load(rank, &signals, CudaOptions::default())?;
        for chunk in [256, 64] {
            packets.prepare::<f32>(chunk)?;
            signals.prepare::<f32>(chunk)?;
        }
        let calls = [packets.call::<f32>(256, 0, 1)?, packets.call::<f32>(64, 0, 2)?];
        let others = [signals.call::<f32>(256, 0, 3)?, signals.call::<f32>(64, 0, 4)?];
        let (mut graphs, second) = (Vec::new(), rank.context.stream()?);
        let event = Event::new(&rank.context)?;
        for count in 1..=3 {
            let graph = Graph::capture(&rank.stream, |_| -> Result<(), GraphError> {
                for call in 0..count {
                    match call {
                        1 => signals.queue(&others[0])?,
                        _ => packets.queue(&calls[0])?,
                    }
                }
                Ok(())
            })?;
            graphs.push(graph.instantiate()?);
        }
        rank.meet()?;
        for replay in 0..sized(1000, 20) {
            // SAFETY: all memory of the graphs lives until the end of the test, which synchronises.
            unsafe { graphs[replay % 3].launch(&rank.stream) }?;
            packets.queue(&calls[1])?;
            if replay % 4 == 0 {
                // Launches of graphs are ordered by the program.
                let behind = |first: &Stream, next: &Stream| -> Outcome {
                    event.record(first)?;
                    Ok(next.borrow().wait(&event)?)
                };
                behind(&rank.stream, &second)?;
                signals.queue_on(&others[1], &second)?;
                behind(&second, &rank.stream)?;
            }
        }
        for (call, what) in calls.iter().zip(["replayed", "eager"]) {
            packets.check(call, what)?;
        }
        others.iter().try_for_each(|call| signals.check(call, "of the other plan"))
    });
}

#[test]
fn graphs_replay_between_eager_calls_on_2() {
    replays(2);
}

#[test]
fn graphs_replay_between_eager_calls_on_4() {
    replays(4);
}

#[test]
fn flags_begin_anew_on_2() {
    let plan = proved(find("one-shot-all-reduce").unwrap().plan(&Setting::new(2)).unwrap());
    on_gpus(2, |rank| {
        let mut both = Both::load(rank, &plan, CudaOptions::default())?;
        both.compare::<f32>(8192, 0, 0)?; // with flag 1
        rank.comm.barrier()?;
        both.gpu.set_flags(u32::MAX - 2)?;
        rank.comm.barrier()?;
        for seed in 1..3 {
            both.compare::<f32>(4, 0, seed)?; // with the last flags, which leaves most packets as they are
        }
        // With flags 1, 2 and 3: the packets of the first call must not count.
        (3..6).try_for_each(|seed| both.compare::<f32>(8192, 0, seed))
    });
}

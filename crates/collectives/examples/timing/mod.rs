//! What a call takes on GPUs, in microseconds: graphs of calls, lined up by a call before; the slowest rank of each replay,
//! the median of the replays.

use antiphon_collectives::{CollectiveError, StreamCollectives, cuda::CudaCollectives};
use antiphon_device::cuda::{Event, Graph, Stream};
use antiphon_fabric::Communicator;

pub type Error = Box<dyn std::error::Error + Send + Sync>;

pub const REPLAYS: usize = 9;

/// Times graphs of `calls` calls each. All ranks do it together.
pub fn time(
    comm: &Communicator,
    collectives: &CudaCollectives,
    stream: &Stream,
    calls: usize,
    call: impl Fn() -> Result<(), CollectiveError>,
) -> Result<f64, Error> {
    let graph = Graph::capture(stream, |_| (0..calls).try_for_each(|_| Ok::<_, Error>(call()?)))?;
    let graph = graph.instantiate()?;
    let context = collectives.context();
    let (begin, end) = (Event::with_time(context)?, Event::with_time(context)?);
    let mut times = Vec::new();
    for replay in 0..=REPLAYS {
        comm.barrier()?;
        collectives.barrier(stream.borrow())?; // lines the GPUs up
        begin.record(stream)?;
        // SAFETY: the caller keeps what its calls use; the line after the next waits.
        unsafe { graph.launch(stream) }?;
        end.record(stream)?;
        stream.borrow().synchronize()?;
        let mine = end.elapsed_since(&begin)?.as_secs_f64() * 1e6 / calls as f64;
        let slowest = comm.exchange_objects(&mine)?.into_iter().fold(0.0, f64::max);
        if replay > 0 {
            times.push(slowest);
        }
    }
    collectives.check()?;
    Ok(median(&mut times))
}

pub fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

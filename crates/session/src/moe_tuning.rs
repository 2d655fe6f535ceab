//! The numbers of multiprocessors of dispatches and combines, measured and kept.

use std::{ops::RangeInclusive, time::Duration};

use antiphon_collectives::AlgorithmTable;
use antiphon_device::cuda::{Context, DeviceMemory, Event, Graph, Stream, StreamRef};
use antiphon_fabric::Communicator;
use antiphon_moe::{
    Combine, Dispatch, MoeError, Movement, Multiprocessors, Routing, RowFormat, SmTimes, Tokens,
    cuda::{CudaByTokenRoutes, CudaMoe, RouteMemory},
    layout,
};
use antiphon_tensor::{DType, TensorView};
use antiphon_tuning::Key;

use crate::Result;

/// The numbers that are measured, as far as the GPU has them.
const NUMBERS: [u32; 9] = [4, 8, 12, 16, 24, 32, 48, 64, 96];
const MEASURED: [Movement; 2] = [Movement::Dispatch, Movement::Combine];
/// Every token goes to most of eight ranks.
const TOP_K: usize = 8;
const EXPERTS_OF_A_RANK: usize = 32;
/// Calls in a graph.
const CALLS: u32 = 4;

fn key(movement: Movement, comm: &Communicator, context: &Context) -> Result<Key> {
    Ok(Key::new(movement.name(), "", comm.world_size(), context.device().properties()?.name))
}

fn names() -> Vec<String> {
    NUMBERS.iter().map(u32::to_string).collect()
}

fn times(table: &AlgorithmTable) -> Vec<(usize, SmTimes)> {
    let rows = table.table().rows().iter();
    rows.map(|row| {
        let timings = NUMBERS.iter().zip(&row.timings);
        (row.bytes, timings.filter_map(|(sms, timing)| Some((*sms, timing.as_ref()?.median_ns))).collect())
    })
    .collect()
}

/// What has been measured before on such GPUs, as far as all ranks find it in the cache. All ranks call it together.
pub(crate) fn load(comm: &Communicator, context: &Context) -> Result<Multiprocessors> {
    MEASURED.iter().try_fold(Multiprocessors::default(), |chosen, &movement| {
        Ok(match AlgorithmTable::cached(comm, &key(movement, comm, context)?, &names())? {
            Some(table) => chosen.measured(movement, &times(&table)),
            None => chosen,
        })
    })
}

/// Measures, and keeps the tables. All ranks call it together.
pub(crate) fn measure(
    comm: &Communicator,
    moe: &CudaMoe,
    hidden: usize,
    tokens: RangeInclusive<usize>,
) -> Result<Multiprocessors> {
    let row = hidden.checked_mul(DType::BF16.size()).filter(|row| *row > 0);
    let Some((row, largest)) = row.and_then(|row| Some((row, row.checked_mul(*tokens.end())?))) else {
        let problem = format!("tokens of {hidden} elements, {} of them at most", tokens.end());
        return Err(MoeError::Refused { call: "tune", problem }.into());
    };
    let sizes = tokens.start().max(&1) * row..=largest;
    let mut calls: Option<Calls> = None;
    let mut chosen = Multiprocessors::default();
    for movement in MEASURED {
        let key = key(movement, comm, moe.context())?;
        let table = AlgorithmTable::measure(comm, &key, &names(), sizes.clone(), |number, bytes| {
            if calls.as_ref().is_none_or(|calls| calls.tokens != bytes / row) {
                calls = None; // its memory first
                calls = Some(Calls::new(comm, moe, bytes / row, hidden)?);
            }
            let is_there = comm.exchange_objects(&moe.set_num_sms(NUMBERS[number]).is_ok())?;
            match (&mut calls, is_there.iter().all(|&is_there| is_there)) {
                (Some(calls), true) => calls.time(comm, moe, movement).map(Some),
                _ => Ok(None),
            }
        })?;
        chosen = chosen.measured(movement, &times(&table));
    }
    Ok(chosen)
}

/// Calls of a number of tokens of each rank, whose experts are equally likely.
struct Calls {
    tokens: usize,
    hidden: usize,
    routes: CudaByTokenRoutes,
    x: DeviceMemory,
    received: DeviceMemory,
    sums: DeviceMemory,
    stream: Stream,
    start: Event,
    end: Event,
}

impl Calls {
    fn new(comm: &Communicator, moe: &CudaMoe, tokens: usize, hidden: usize) -> Result<Self> {
        let (context, world_size) = (moe.context(), comm.world_size());
        let num_experts = EXPERTS_OF_A_RANK * world_size;
        let ids = choices(comm.rank(), tokens, num_experts);
        let plan = layout(
            &TensorView::new(&ids, &[tokens, TOP_K]).map_err(MoeError::from)?,
            num_experts,
            world_size,
        )?;
        let stream = context.stream()?;
        let upload = |bytes: &[u8]| -> Result<DeviceMemory> {
            let memory = DeviceMemory::allocate(context, bytes.len().max(1))?;
            memory.write(&stream, 0, bytes)?;
            Ok(memory)
        };
        let in_rank = upload(&plan.is_token_in_rank)?;
        let per_expert =
            upload(&plan.tokens_per_expert.iter().flat_map(|n| n.to_ne_bytes()).collect::<Vec<_>>())?;
        let row = hidden * DType::BF16.size();
        let zeros = |rows: usize| upload(&vec![0; rows.max(1) * row]);
        let routing = Routing {
            num_experts,
            top_k: TOP_K,
            is_token_in_rank: in_rank.view(DType::U8, &[tokens, world_size]).map_err(MoeError::from)?,
            tokens_per_expert: per_expert.view(DType::I32, &[num_experts]).map_err(MoeError::from)?,
            format: RowFormat { hidden, dtype: DType::BF16, scales: None },
            capacity: None,
        };
        // SAFETY: what the call reads lives until the counts have come.
        let routes = unsafe { moe.notify(&routing, RouteMemory::Own, stream.borrow()) }?;
        let (x, sums, received) = (zeros(tokens)?, zeros(tokens)?, zeros(routes.rows())?);
        let (start, end) = (Event::with_time(context)?, Event::with_time(context)?);
        Ok(Self { tokens, hidden, routes, x, received, sums, stream, start, end })
    }

    /// The time of a call, of some in a graph, so that the host's share is none of it. All ranks come together.
    fn time(&mut self, comm: &Communicator, moe: &CudaMoe, movement: Movement) -> Result<Duration> {
        // A combine needs a dispatch before it, and the first call of a kernel is not captured.
        let stream = self.stream.clone();
        self.call(moe, Movement::Dispatch, stream.borrow())?;
        self.call(moe, movement, stream.borrow())?;
        let graph = Graph::capture(&stream, |stream| -> Result<()> {
            self.call(moe, Movement::Dispatch, stream)?; // the GPUs meet
            self.start.record_external(stream)?;
            (0..CALLS).try_for_each(|_| self.call(moe, movement, stream))?;
            Ok(self.end.record_external(stream)?)
        })?;
        let graph = graph.instantiate()?;
        comm.barrier()?;
        // SAFETY: what the graph uses lives in `self`, and the run is waited for.
        unsafe { graph.launch(&stream) }?;
        stream.borrow().synchronize()?;
        moe.check()?;
        Ok(self.end.elapsed_since(&self.start)? / CALLS)
    }

    fn call(&mut self, moe: &CudaMoe, movement: Movement, stream: StreamRef<'_>) -> Result<()> {
        let (sent, arrived) = ([self.tokens, self.hidden], [self.routes.rows(), self.hidden]);
        match movement {
            Movement::Combine => {
                let combine = Combine {
                    rows: self.received.view(DType::BF16, &arrived).map_err(MoeError::from)?,
                    weights: None,
                    biases: [None, None],
                    output: self.sums.view_mut(DType::BF16, &sent).map_err(MoeError::from)?,
                    output_weights: None,
                };
                // SAFETY: the memory lives until the stream has been waited for.
                unsafe { moe.combine(&self.routes, combine, stream) }?;
            }
            _ => {
                let dispatch = Dispatch {
                    tokens: Tokens {
                        x: self.x.view(DType::BF16, &sent).map_err(MoeError::from)?,
                        scales: None,
                        choices: None,
                    },
                    received: Tokens {
                        x: self.received.view_mut(DType::BF16, &arrived).map_err(MoeError::from)?,
                        scales: None,
                        choices: None,
                    },
                };
                // SAFETY: as above.
                unsafe { moe.dispatch(&self.routes, dispatch, stream) }?;
            }
        }
        Ok(())
    }
}

/// Different experts of each token, by a generator that each rank begins elsewhere.
fn choices(rank: usize, tokens: usize, num_experts: usize) -> Vec<i64> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64.wrapping_mul(rank as u64 + 1) | 1;
    let mut ids = Vec::with_capacity(tokens * TOP_K);
    while ids.len() < tokens * TOP_K {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let id = (state >> 33) as i64 % num_experts as i64;
        if !ids[ids.len() / TOP_K * TOP_K..].contains(&id) {
            ids.push(id);
        }
    }
    ids
}

//! Compiles a plan into the steps of one rank. This module has the steps that synchronise; [`data`] has those that move bytes.

mod data;

use std::collections::HashMap;

use antiphon_plan::{
    Block, ChannelId, ChannelIndex, ChannelType, Extent, Notify, NotifyKind, Op, OpKind, Pipeline, Place,
    Plan, Rank, SemaphoreOp, ThreadBlockId, Wiring,
};

use super::{
    PacketKind, Ports,
    placement::Placements,
    program::{Layout, Program, Request, Signal, Step, Steps},
};
use crate::{ExecutorError, error::Result};

/// More steps than any sensible plan has: a hostile one must not fill the memory.
const MOST_STEPS: usize = 1 << 20;
/// More work in loops than any sensible message needs, in units of [`Step::cost`]: a few lines may ask for any number of turns.
const MOST_WORK: u64 = 1 << 26;

/// The sizes for which a plan is compiled.
#[derive(Clone, Copy)]
pub(crate) struct Target<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) wiring: &'a Wiring,
    pub(crate) placements: &'a Placements,
    pub(crate) rank: usize,
    pub(crate) packets: PacketKind,
    pub(crate) ports: Ports,
    /// Bytes of an element.
    pub(crate) element: usize,
    /// The extent of a chunk, whose bytes fit into memory.
    pub(crate) extent: Extent,
    /// Whether chunks are parts of the tensors' chunks.
    pub(crate) sliced: bool,
}

/// Compiles the part of one rank of a plan that has passed [`Plan::check`].
///
/// # Errors
/// [`ExecutorError::Operation`] for what cannot be executed, or only by leaving a buffer.
pub(crate) fn compile(target: Target<'_>) -> Result<Program> {
    let chunk = target.extent.chunk() as usize;
    let layout = Layout { chunk, cut: target.sliced || !chunk.is_multiple_of(8) };
    let mut compiler = Compiler {
        target,
        chunk,
        barriers: HashMap::new(),
        steps: 0,
        work: 0,
        sources: 1,
        packet_sources: 0,
    };
    let blocks = 0..target.plan.gpus[target.rank].threadblocks.len();
    let block = |id| Block::new(target.plan, Rank(target.rank as u32), ThreadBlockId(id as u32));
    let blocks = blocks.map(|id| compiler.block(block(id))).collect::<Result<_>>()?;
    let Compiler { barriers, sources, packet_sources, .. } = compiler;
    Ok(Program { blocks, layout, barriers: barriers.len(), sources, packet_sources })
}

struct Compiler<'a> {
    target: Target<'a>,
    chunk: usize,
    barriers: HashMap<u32, usize>,
    steps: usize,
    work: u64,
    sources: usize,
    packet_sources: usize,
}

/// Where an operation stands, and what that means for its bytes.
#[derive(Clone, Copy)]
struct Scope<'a> {
    block: Block<'a>,
    place: Place,
    /// The unit of the pipeline around it.
    unit: Option<u64>,
}

impl Scope<'_> {
    fn refuse(&self, op: &OpKind, what: impl std::fmt::Display) -> ExecutorError {
        ExecutorError::Operation { place: self.place, what: format!("{}: {what}", op.name()) }
    }
}

impl<'a> Compiler<'a> {
    fn block(&mut self, block: Block<'a>) -> Result<Steps> {
        let mut steps = Steps { steps: Vec::new(), places: Vec::new() };
        for (at, op) in block.get().ops.iter().enumerate() {
            let scope = Scope { block, place: block.place(at, None), unit: None };
            match &op.kind {
                OpKind::Pipeline(pipeline) => self.pipeline(scope, &op.kind, pipeline, &mut steps)?,
                kind => self.op(scope, kind, &mut steps)?,
            }
        }
        // A rank has ended when its ports have.
        let last = steps.steps.iter().rposition(|step| matches!(step, Step::Engine(_)));
        if let Some(last) = last.filter(|&at| !matches!(steps.steps[at], Step::Engine(Request::Flush))) {
            let scope = Scope { block, place: steps.places[last], unit: None };
            self.push(scope, Step::Engine(Request::Flush), &mut steps)?;
        }
        Ok(steps)
    }

    fn pipeline(
        &mut self,
        scope: Scope<'a>,
        kind: &OpKind,
        pipeline: &Pipeline,
        steps: &mut Steps,
    ) -> Result<()> {
        let bytes = u128::from(pipeline.num_chunks) * self.chunk as u128;
        let iterations = bytes.div_ceil(u128::from(pipeline.unit_size)).min(u128::from(u64::MAX)) as u64;
        // Larger than any operation is as good as infinite.
        let unit = usize::try_from(pipeline.unit_size).unwrap_or(usize::MAX);
        let head = steps.steps.len();
        self.push(scope, Step::Loop { iterations, unit, steps: 0 }, steps)?;
        for (at, Op { kind, .. }) in pipeline.ops.iter().enumerate() {
            let place = Place { inner: Some(at as u32), ..scope.place };
            self.op(Scope { place, unit: Some(pipeline.unit_size), ..scope }, kind, steps)?;
        }
        let inside = &steps.steps[head + 1..];
        let turn = inside.iter().map(Step::cost).fold(0, u64::saturating_add);
        self.work = self.work.saturating_add(iterations.saturating_mul(turn));
        if self.work > MOST_WORK {
            return Err(scope.refuse(kind, format!("{iterations} turns are too many")));
        }
        steps.steps[head] = Step::Loop { iterations, unit, steps: inside.len() };
        Ok(())
    }

    fn push(&mut self, scope: Scope<'a>, step: Step, steps: &mut Steps) -> Result<()> {
        self.steps += 1;
        if self.steps > MOST_STEPS {
            let what = format!("more than {MOST_STEPS} steps");
            return Err(ExecutorError::Operation { place: scope.place, what });
        }
        steps.steps.push(step);
        steps.places.push(scope.place);
        Ok(())
    }

    fn op(&mut self, scope: Scope<'a>, op: &OpKind, steps: &mut Steps) -> Result<()> {
        match op {
            OpKind::Nop => self.push(scope, Step::Meet, steps),
            OpKind::Barrier { barrier, num_threadblocks } => {
                let next = self.barriers.len();
                let barrier = *self.barriers.entry(barrier.0).or_insert(next);
                self.push(scope, Step::Barrier { barrier, of: *num_threadblocks }, steps)
            }
            OpKind::Notify(notify) => self.notify(scope, op, notify, steps),
            OpKind::Semaphore(SemaphoreOp { acquire, semaphores, .. }) => {
                let ids = semaphores.iter().map(|id| id.index()).collect();
                self.push(scope, if *acquire { Step::Acquire(ids) } else { Step::Release(ids) }, steps)
            }
            OpKind::Copy(copy) => self.copy(scope, op, copy, steps),
            OpKind::Put(put) => self.put(scope, op, put, steps),
            OpKind::Get(get) => self.get(scope, op, get, steps),
            OpKind::Reduce(reduce) => self.reduce(scope, op, reduce, steps),
            OpKind::SwitchReduce(reduce) => self.switch_reduce(scope, op, reduce, steps),
            OpKind::SwitchReduceBroadcast(reduce) => self.switch_reduce_broadcast(scope, op, reduce, steps),
            OpKind::SwitchBroadcast(broadcast) => self.switch_broadcast(scope, op, broadcast, steps),
            OpKind::Pipeline(_) => Err(scope.refuse(op, "stands in a pipeline")),
        }
    }

    fn notify(&mut self, scope: Scope<'a>, op: &OpKind, notify: &Notify, steps: &mut Steps) -> Result<()> {
        let Notify { channel_type, channels, .. } = notify;
        match notify.kind {
            NotifyKind::Signal => {
                if *channel_type == ChannelType::Port {
                    self.push(scope, Step::Meet, steps)?; // what the port was given before is done
                }
                self.signal(scope, op, *channel_type, channels, notify.relaxed, steps)
            }
            NotifyKind::Flush if self.target.ports == Ports::Engines => self.flush(scope, steps),
            NotifyKind::Wait => {
                let ends = channels.iter().map(|&index| {
                    self.counterpart(scope, op, *channel_type, index)?;
                    Ok(self.place(
                        scope.block.rank(),
                        *channel_type,
                        scope.block.channel(*channel_type, index),
                    ))
                });
                let step = Step::Wait(ends.collect::<Result<_>>()?);
                self.push(scope, step, steps)
            }
            // The block puts the data itself, so it has left when all threads have done their parts.
            NotifyKind::Flush => self.push(scope, Step::Meet, steps),
        }
    }

    /// The block goes on when its engine has done what the block has requested.
    fn flush(&mut self, scope: Scope<'a>, steps: &mut Steps) -> Result<()> {
        self.push(scope, Step::Engine(Request::Flush), steps)?;
        self.push(scope, Step::Meet, steps)
    }

    /// Whether an engine does what is done through a channel.
    fn is_by_engine(&self, channel_type: ChannelType) -> bool {
        channel_type == ChannelType::Port && self.target.ports == Ports::Engines
    }

    fn signal(
        &mut self,
        scope: Scope<'a>,
        op: &OpKind,
        channel_type: ChannelType,
        channels: &[ChannelIndex],
        relaxed: bool,
        steps: &mut Steps,
    ) -> Result<()> {
        let signals = channels.iter().map(|&index| {
            let (peer, end) = self.counterpart(scope, op, channel_type, index)?;
            let own = self.place(scope.block.rank(), channel_type, scope.block.channel(channel_type, index));
            Ok(Signal { rank: peer.index(), channel: self.place(peer, channel_type, end), own })
        });
        let signals = signals.collect::<Result<_>>()?;
        if self.is_by_engine(channel_type) {
            return self.push(scope, Step::Engine(Request::Signal(signals)), steps);
        }
        // An executor's memory may let a relaxed signal overtake what is read ahead of it, which the plan does not expect.
        let is_first = || steps.steps.iter().all(|step| matches!(step, Step::Meet | Step::Signal { .. }));
        let relaxed = relaxed && is_first();
        self.push(scope, Step::Signal { signals, relaxed }, steps)
    }

    /// The other end of a channel.
    fn counterpart(
        &self,
        scope: Scope<'a>,
        op: &OpKind,
        channel_type: ChannelType,
        index: ChannelIndex,
    ) -> Result<(Rank, ChannelId)> {
        let (id, peer) = (scope.block.channel(channel_type, index), scope.block.peer(channel_type, index));
        let end = self.target.wiring.counterpart(scope.block.rank(), channel_type, id);
        end.map(|end| (peer, end)).ok_or_else(|| {
            scope.refuse(op, format!("{channel_type:?} channel {id} to rank {peer}, which has none back"))
        })
    }

    /// The place of a channel's count among its rank's.
    fn place(&self, rank: Rank, channel_type: ChannelType, id: ChannelId) -> usize {
        let before = match channel_type {
            ChannelType::Port => self.target.plan.gpus[rank.index()].peers(ChannelType::Memory).len(),
            _ => 0,
        };
        before + id.index()
    }
}

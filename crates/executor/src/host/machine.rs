//! The interpreter: all thread blocks of a rank on one thread, each until it would have to wait.
//!
//! Ranks outnumber cores and thread blocks outnumber ranks, so blocks are state machines: a step that would wait
//! gives way to the next block. When no block can continue, the thread waits as all waits on the host do: it spins, yields,
//! then sleeps on a futex that peers wake, and checks every millisecond for lost peers and the deadline.
//!
//! ## Why this synchronisation suffices
//!
//! * Blocks of one rank share a thread: its program order is stronger than what block barriers, semaphores and barriers
//!   require, so these are plain numbers.
//! * A channel's count has one writer, the peer, whose blocks share a thread too. It is stored with release order after the
//!   data and loaded with acquire order before it, so that everything the peer did before is seen. Counts only grow,
//!   and they are never reset. Relaxed signals are as strong as others.
//! * A packet's word carries its data; see [`packet`](super::packet).
//! * Puts through ports are done when their step is, by this thread.

use std::time::Duration;

use antiphon_device::{
    host::{
        reduce::Reducer,
        wait::{Patience, wait_for},
    },
    sync::Ordering,
};
use antiphon_fabric::FabricError;
use antiphon_plan::{ChannelId, ChannelType, Place, REDUCE_OPS, Rank};

use super::{addresses::ChunkAddresses, memory::SyncArea, packet::flag_at};
use crate::{
    Waiting,
    layout::{Base, PacketKind, Program, Signal, Step},
};

/// The memory and the numbers of one launch of a program.
pub(super) struct Launch<'a> {
    pub(super) rank: usize,
    pub(super) program: &'a Program,
    /// The addresses of every rank's chunks, by [`slot`](crate::layout::slot).
    pub(super) addresses: &'a [ChunkAddresses],
    pub(super) sync: &'a SyncArea,
    /// The flag of this launch's packets.
    pub(super) flag: u32,
    pub(super) packets: PacketKind,
    /// For each of [`REDUCE_OPS`].
    pub(super) reducers: [Reducer; REDUCE_OPS.len()],
    /// Bytes of an element.
    pub(super) element: usize,
    pub(super) patience: Patience,
}

/// Where a thread block stands.
#[derive(Debug, Default, Clone)]
pub(super) struct State {
    step: usize,
    turn: Option<Turn>,
    /// Bytes of the step that are done, of a data step.
    pub(super) done: usize,
    /// Channels or semaphores of the step that are done; at a barrier, 1 once it has arrived.
    item: usize,
    /// The barrier's generation when it arrived.
    generation: u64,
    /// The packet word that is not there yet.
    pub(super) missing: Option<*const u8>,
}

/// A loop that a block is in.
#[derive(Debug, Clone, Copy)]
struct Turn {
    head: usize,
    end: usize,
    number: u64,
    of: u64,
    unit: usize,
}

/// Where thread blocks of the rank meet.
#[derive(Debug, Default, Clone)]
struct Meeting {
    arrived: u32,
    generation: u64,
}

/// A channel of the rank.
#[derive(Debug, Clone)]
pub(super) struct Channel {
    pub(super) channel_type: ChannelType,
    pub(super) id: ChannelId,
    pub(super) peer: Rank,
    /// Signals sent, and taken.
    pub(super) sent: u64,
    pub(super) taken: u64,
}

impl Channel {
    /// A channel through which no signal was sent.
    pub(super) fn new((channel_type, id, peer): (ChannelType, ChannelId, Rank)) -> Self {
        Channel { channel_type, id, peer, sent: 0, taken: 0 }
    }
}

/// The state that lasts from launch to launch, and room for the rest so that no launch allocates.
pub(super) struct Machine {
    pub(super) channels: Vec<Channel>,
    pub(super) semaphores: Vec<i64>,
    barriers: Vec<Meeting>,
    states: Vec<State>,
    pub(super) sources: Vec<*const u8>,
    pub(super) tile: Vec<u8>,
}

// SAFETY: the pointers are used within a launch only, by the thread that runs it.
unsafe impl Send for Machine {}

/// Why a launch ended early.
pub(super) struct Stuck {
    pub(super) place: Place,
    pub(super) waiting: Waiting,
    pub(super) reason: FabricError,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Swept {
    Done,
    Moved,
    Stuck,
}

impl Machine {
    pub(super) fn new(channels: Vec<Channel>, semaphores: Vec<i64>) -> Self {
        let (barriers, states, sources, tile) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Machine { channels, semaphores, barriers, states, sources, tile }
    }

    /// Makes room for launches of a program.
    pub(super) fn reserve(&mut self, program: &Program) {
        self.states.reserve(program.blocks.len());
        self.sources.reserve(program.sources);
        let tile = program.packet_sources.max(1) * super::data::TILE;
        self.tile.resize(tile.max(self.tile.len()), 0);
        self.barriers.resize(program.barriers.max(self.barriers.len()), Meeting::default());
    }

    /// Runs a program to its end. `check` is asked about every millisecond while nothing moves, with the time since
    /// when; it ends the launch with its error, which is made from the ranks that are waited for.
    pub(super) fn run(
        &mut self,
        launch: &Launch<'_>,
        mut check: impl FnMut(Duration, &dyn Fn() -> Vec<usize>) -> Result<(), FabricError>,
    ) -> Result<(), Box<Stuck>> {
        self.states.clear();
        self.states.resize(launch.program.blocks.len(), State::default());
        self.barriers.fill(Meeting::default());
        let mut swept = self.sweep(launch);
        loop {
            swept = match swept {
                Swept::Done => return Ok(()),
                Swept::Moved => self.sweep(launch),
                Swept::Stuck => {
                    let machine = std::cell::RefCell::new(&mut *self);
                    let waited = wait_for(
                        launch.sync.bell(launch.rank),
                        launch.patience,
                        || Some(machine.borrow_mut().sweep(launch)).filter(|swept| *swept != Swept::Stuck),
                        |waited| check(waited, &|| machine.borrow().awaited(launch)),
                    );
                    match waited {
                        Ok(swept) => swept,
                        Err(reason) => return Err(Box::new(self.stuck(launch, reason))),
                    }
                }
            }
        }
    }

    /// Advances every block as far as possible.
    fn sweep(&mut self, launch: &Launch<'_>) -> Swept {
        let (mut moved, mut done) = (false, true);
        for id in 0..launch.program.blocks.len() {
            let mut state = std::mem::take(&mut self.states[id]);
            moved |= self.go_on(launch, id, &mut state);
            done &= state.step >= launch.program.blocks[id].steps.len();
            self.states[id] = state;
        }
        match (done, moved) {
            (true, _) => Swept::Done,
            (false, true) => Swept::Moved,
            (false, false) => Swept::Stuck,
        }
    }

    /// Advances one block as far as possible; returns whether it advanced.
    fn go_on(&mut self, launch: &Launch<'_>, id: usize, state: &mut State) -> bool {
        let steps = &launch.program.blocks[id].steps;
        let mut moved = false;
        while let Some(step) = steps.get(state.step) {
            let before = (state.done, state.item);
            if let Step::Loop { iterations, unit, steps } = *step {
                let end = state.step + steps + 1;
                if iterations == 0 || steps == 0 {
                    state.step = end;
                } else {
                    state.turn = Some(Turn { head: state.step, end, number: 0, of: iterations, unit });
                    state.step += 1;
                }
                continue;
            }
            if !self.step(launch, step, state) {
                return moved | (before != (state.done, state.item));
            }
            moved = true;
            (state.done, state.item) = (0, 0);
            state.step += 1;
            if let Some(turn) = &mut state.turn
                && state.step == turn.end
            {
                turn.number += 1;
                if turn.number < turn.of {
                    state.step = turn.head + 1;
                } else {
                    state.turn = None;
                }
            }
        }
        moved
    }

    /// Does a step, or as much of it as can be done; whether it is over.
    fn step(&mut self, launch: &Launch<'_>, step: &Step, state: &mut State) -> bool {
        match step {
            Step::Meet => true,
            Step::Barrier { barrier, of } => self.meet(*barrier, *of, state),
            Step::Signal { signals, .. } => {
                signals.iter().for_each(|signal| self.signal(launch, signal));
                true
            }
            Step::Wait(channels) => {
                while let Some(&channel) = channels.get(state.item) {
                    let taken = &mut self.channels[channel].taken;
                    if launch.sync.count(launch.rank, channel).load(Ordering::Acquire) <= *taken {
                        return false;
                    }
                    *taken += 1;
                    state.item += 1;
                }
                true
            }
            Step::Acquire(ids) => {
                while let Some(&id) = ids.get(state.item) {
                    if self.semaphores[id] <= 0 {
                        return false;
                    }
                    self.semaphores[id] -= 1;
                    state.item += 1;
                }
                true
            }
            Step::Release(ids) => {
                ids.iter().for_each(|&id| self.semaphores[id] = self.semaphores[id].saturating_add(1));
                true
            }
            Step::Loop { .. } => true,
            Step::Engine(_) => unreachable!("a host's blocks do the work of ports"),
            Step::Data { frame, work } => {
                let turn = state.turn.map(|turn| (turn.number, turn.unit));
                let window = frame.window(turn);
                self.data(launch, work, window, state)
            }
        }
    }

    fn signal(&mut self, launch: &Launch<'_>, signal: &Signal) {
        let sent = &mut self.channels[signal.own].sent;
        *sent += 1;
        // Pairs with the acquire load of the peer's `Step::Wait`: all that this rank did before is seen by then.
        launch.sync.count(signal.rank, signal.channel).store(*sent, Ordering::Release);
        launch.sync.bell(signal.rank).ring();
    }

    fn meet(&mut self, barrier: usize, of: u32, state: &mut State) -> bool {
        let meeting = &mut self.barriers[barrier];
        if state.item == 0 {
            state.item = 1;
            state.generation = meeting.generation;
            meeting.arrived += 1;
            if meeting.arrived >= of {
                meeting.arrived = 0;
                meeting.generation += 1;
            }
        }
        meeting.generation != state.generation
    }

    /// The ranks that this one waits for; itself if its blocks wait for each other only.
    fn awaited(&self, launch: &Launch<'_>) -> Vec<usize> {
        let mut ranks: Vec<usize> =
            self.waits(launch).filter_map(|(_, waiting)| waiting.peer().map(Rank::index)).collect();
        let packets = self.waits(launch).any(|(_, waiting)| matches!(waiting, Waiting::Packet { .. }));
        if packets && ranks.is_empty() {
            let ranks_of_all = 0..launch.addresses.len() / Base::COUNT;
            ranks.extend(ranks_of_all.filter(|&rank| rank != launch.rank));
        }
        if ranks.is_empty() {
            ranks.push(launch.rank);
        }
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// Every block that waits: where, and for what.
    fn waits(&self, launch: &Launch<'_>) -> impl Iterator<Item = (Place, Waiting)> {
        let block = |(id, state): (usize, &State)| {
            let block = &launch.program.blocks[id];
            let step = block.steps.get(state.step)?;
            Some((block.places[state.step], self.waiting(launch, step, state)))
        };
        self.states.iter().enumerate().filter_map(block)
    }

    fn waiting(&self, launch: &Launch<'_>, step: &Step, state: &State) -> Waiting {
        match step {
            Step::Wait(channels) => {
                let at = channels[state.item.min(channels.len() - 1)];
                let Channel { channel_type, id, peer, taken, .. } = self.channels[at];
                let seen = launch.sync.count(launch.rank, at).load(Ordering::Acquire);
                Waiting::Signal { peer, channel_type, channel: id, expected: taken + 1, seen }
            }
            Step::Acquire(ids) => Waiting::Semaphore { semaphore: ids[state.item.min(ids.len() - 1)] },
            Step::Barrier { barrier, of } => {
                Waiting::Barrier { arrived: self.barriers[*barrier].arrived, expected: *of }
            }
            _ => {
                // SAFETY: a missing packet's place is one in this launch's packets.
                let seen = state.missing.map_or(0, |place| unsafe { flag_at(place) });
                Waiting::Packet { expected: launch.flag, seen, byte: state.done }
            }
        }
    }

    /// The error of a launch that cannot continue: that of a block that waits for another rank, if there is one.
    fn stuck(&self, launch: &Launch<'_>, reason: FabricError) -> Stuck {
        let is_remote =
            |waiting: &Waiting| matches!(waiting, Waiting::Signal { .. } | Waiting::Packet { .. });
        let wait = self.waits(launch).find(|(_, waiting)| is_remote(waiting));
        let (place, waiting) =
            wait.or_else(|| self.waits(launch).next()).expect("a launch that waits has a block that does");
        Stuck { place, waiting, reason }
    }
}

//! Accesses to one cell between which there is no order.

use std::collections::{BTreeSet, HashSet};

use super::cells::Cells;
use super::clock::Clock;
use super::finding::{Finding, Hazard, Kind, Served};
use super::order::{Order, Orders, Timelines};
use super::program::{Program, View, What};
use super::runs::{Goal, Runs, Stalled};
use super::schedule::Schedule;
use crate::ids::Rank;

/// An access, as later ones see it: it is done when its timeline has come to the level.
#[derive(Clone, Copy)]
struct Done {
    timeline: u32,
    level: u32,
    at: u32,
    piece: u32,
    step: u32,
    /// Whether its move writes packets.
    packets: bool,
    /// Whether it is the write of those.
    is_packet: bool,
    /// As packets, in the history of the plain bytes that they take.
    foreign: bool,
    /// Whether it begins when it looks for packets, and not when they are there.
    polls: bool,
}

/// The last write of a cell, and the reads since; all of them, where it depends on the run which was the last.
#[derive(Clone, Default)]
struct History {
    writes: Vec<Done>,
    reads: Vec<Done>,
}

/// Most pairs of accesses to one cell, at all sizes together.
pub(super) const PAIRS: u64 = 1 << 28;

/// Races, buffers that are still used when their rank has ended, and ranks whose buffers are used before they begin.
///
/// The clocks know what is ordered in every run, but where several blocks add to a counter or take from it perhaps not all
/// of it: there, what they leave open is looked for in the runs.
///
/// # Errors
/// [`Kind::TooLarge`]
pub(super) fn find(
    program: &Program<'_>,
    cells: &Cells,
    schedule: &Schedule,
    orders: &Orders,
    runs: &Runs<'_, '_>,
    pairs: &mut u64,
    limit: usize,
) -> Result<Vec<Finding>, Kind> {
    let single = |each: &[(u32, u32)]| each.len() <= 1;
    let mut races = Races {
        program,
        cells,
        orders,
        runs,
        sure: program.counters.iter().all(|counter| single(&counter.acquirers) && single(&counter.releasers)),
        every: program.contended() || cells.mixed(),
        pairs: 0,
        lines: Timelines::new(program),
        agents: agents(program),
        history: vec![History::default(); cells.len()],
        early: BTreeSet::new(),
        seen: HashSet::new(),
        found: Vec::new(),
    };
    for &(agent, step) in schedule {
        if let What::Move(moves) | What::Push { moves, .. } = &program.steps[step as usize].what {
            moves.clone().try_for_each(|at| races.accesses(agent, step, at))?;
        }
        if races.found.len() >= limit {
            return Ok(races.found);
        }
        if races.pairs > *pairs {
            return Err(Kind::TooLarge { what: "pairs of accesses to the same bytes", limit: PAIRS });
        }
    }
    *pairs -= races.pairs;
    races.late()?;
    for &(rank, owner) in &races.early {
        races.found.push(Finding::new(program.plan, Kind::Unstarted { rank, owner }, Vec::new()));
    }
    Ok(races.found)
}

/// The agents of each rank.
fn agents(program: &Program<'_>) -> Vec<std::ops::Range<u32>> {
    let mut next = 0;
    let ranks = program.plan.gpus.iter().map(|gpu| {
        let first = next;
        next += gpu.threadblocks.len() as u32;
        first..next
    });
    ranks.collect()
}

struct Races<'p, 'a> {
    program: &'p Program<'a>,
    cells: &'p Cells,
    orders: &'p Orders,
    runs: &'p Runs<'p, 'a>,
    /// Whether the clocks know everything.
    sure: bool,
    /// Whether all accesses of a cell are kept: their order depends on the run, or not each takes all of its bytes.
    every: bool,
    pairs: u64,
    lines: Timelines,
    agents: Vec<std::ops::Range<u32>>,
    history: Vec<History>,
    early: BTreeSet<(Rank, Rank)>,
    /// Pairs of steps that have been reported.
    seen: HashSet<(u32, u32)>,
    found: Vec<Finding>,
}

impl Races<'_, '_> {
    fn accesses(&mut self, agent: u32, step: u32, at: u32) -> Result<(), Kind> {
        let program = self.program;
        let each = &program.moves[at as usize];
        let timeline = each.port.map_or(agent, |port| self.lines.port(port));
        let packets = program.dests(each).iter().any(|dest| dest.view.packets());
        let level = self.orders.execution.level[at as usize];
        for piece in 0..each.pieces {
            let (foreign, polls, is_packet, number) = (false, false, false, each.first_piece + piece);
            let done = Done { timeline, level, at, piece: number, step, packets, is_packet, foreign, polls };
            for source in program.sources(each) {
                self.started(agent, source.view, done.piece);
                self.read(source.cell + piece, done)?;
                if source.view.packets() {
                    for plain in self.cells.shared(source.view, source.cell + piece) {
                        self.read(plain, Done { foreign: true, polls: each.awaits, ..done })?;
                    }
                }
            }
            for dest in program.dests(each) {
                self.started(agent, dest.view, done.piece);
                let done = Done { is_packet: dest.view.packets(), ..done };
                self.write(dest.cell + piece, done)?;
                if dest.view.packets() {
                    for plain in self.cells.shared(dest.view, dest.cell + piece) {
                        self.write(plain, Done { foreign: true, ..done })?;
                    }
                }
            }
        }
        Ok(())
    }

    fn started(&mut self, agent: u32, view: View, piece: u32) {
        let (rank, owner) = (self.program.agents[agent as usize].rank, view.rank());
        if view.callers() && rank != owner {
            let known = &self.orders.execution.before[piece as usize];
            if !known.knows(self.agents[owner.index()].clone()) {
                self.early.insert((rank, owner));
            }
        }
    }

    fn read(&mut self, cell: u32, done: Done) -> Result<(), Kind> {
        let mut history = std::mem::take(&mut self.history[cell as usize]);
        for &write in &history.writes {
            self.pairs += 1;
            if !self.ordered(write, done, &self.orders.data) {
                self.race(Hazard::ReadAfterWrite, cell, write, done)?;
            }
        }
        history.reads.push(done);
        self.history[cell as usize] = history;
        Ok(())
    }

    fn write(&mut self, cell: u32, done: Done) -> Result<(), Kind> {
        let mut history = std::mem::take(&mut self.history[cell as usize]);
        self.pairs += (history.writes.len() + history.reads.len()) as u64;
        for &write in &history.writes {
            if !self.ordered(write, done, &self.orders.data) {
                self.race(Hazard::WriteAfterWrite, cell, write, done)?;
            }
        }
        for &read in &history.reads {
            // A move reads a byte before it writes it.
            let same = read.piece == done.piece && read.foreign == done.foreign;
            if !same && !self.ordered(read, done, &self.orders.execution) {
                self.race(Hazard::WriteAfterRead, cell, read, done)?;
            }
        }
        if !self.every {
            history = History::default();
        }
        history.writes.push(done);
        self.history[cell as usize] = history;
        Ok(())
    }

    /// Whether an access is over before another begins. Those of packets are compared where packets are.
    fn ordered(&self, first: Done, second: Done, order: &Order) -> bool {
        let known = match second.polls {
            true => &order.start[second.at as usize],
            false => &order.before[second.piece as usize],
        };
        first.foreign && second.foreign || self.before(first, order, known)
    }

    fn before(&self, first: Done, order: &Order, known: &Clock) -> bool {
        let is_announced = if order.packets_end_moves() { first.packets } else { first.is_packet };
        known.reaches(first.timeline, first.level)
            || is_announced && known.reaches(self.lines.piece(first.piece), 1)
    }

    /// Two accesses that the clocks do not order.
    fn race(&mut self, hazard: Hazard, cell: u32, first: Done, second: Done) -> Result<(), Kind> {
        if self.seen.contains(&(first.step, second.step)) {
            return Ok(());
        }
        let (pieces, polls) = ([Some(first.piece), Some(second.piece)], [first.polls, second.polls]);
        // Where the order depends on the run, the write may also be the first.
        let written = hazard != Hazard::WriteAfterRead || self.every;
        let stalled = Stalled { pieces, polls, ..Stalled::default() };
        let is_packet = first.is_packet || first.foreign;
        let Some(served) = self.happens(stalled, Goal::Together, written, is_packet)? else { return Ok(()) };
        self.seen.insert((first.step, second.step));
        let places = [first, second].map(|done| self.program.steps[done.step as usize].place);
        let region = self.cells.region(cell);
        let is_announced = hazard != Hazard::WriteAfterRead
            && self.orders.announced.as_ref().is_some_and(|order| self.ordered(first, second, order));
        let kind = match is_announced {
            true => Kind::OnlyAnnounced { hazard, region },
            false => Kind::Race { hazard, region },
        };
        self.found.push(Finding::new(self.program.plan, kind, places.to_vec()).in_run(served));
        Ok(())
    }

    /// The order in which agents take from counters, in a run in which the clocks allow the race to happen. What was `written`
    /// may not be seen where only relaxed waits order, or, if it `is_packet` is false, only packets.
    fn happens(
        &self,
        stalled: Stalled,
        goal: Goal,
        written: bool,
        is_packet: bool,
    ) -> Result<Option<Vec<Served>>, Kind> {
        if self.sure {
            return Ok(Some(Vec::new()));
        }
        let mut state = self.runs.find(stalled, goal)?;
        if state.is_none() && written && self.orders.relaxed() {
            let passes_packets = self.orders.packets_alone() && !is_packet;
            state = self.runs.find(Stalled { strict: true, passes_packets, ..stalled }, goal)?;
        }
        Ok(state.map(|state| state.served))
    }

    /// The caller has its buffers back when its rank has ended.
    fn late(&mut self) -> Result<(), Kind> {
        for gpu in &self.program.plan.gpus {
            let (data, execution) =
                (&self.orders.data.end[gpu.id.index()], &self.orders.execution.end[gpu.id.index()]);
            for kind in [View::INPUT, View::OUTPUT] {
                for cell in self.cells.of(View::new(gpu.id, kind)) {
                    let History { writes, reads } = &self.history[cell as usize];
                    let writes = writes.iter().filter(|&&write| !self.before(write, &self.orders.data, data));
                    let reads =
                        reads.iter().filter(|&&read| !self.before(read, &self.orders.execution, execution));
                    let open: Vec<_> =
                        writes.map(|&write| (write, true)).chain(reads.map(|&read| (read, false))).collect();
                    for (late, written) in open {
                        if self.seen.contains(&(late.step, u32::MAX)) {
                            break;
                        }
                        let goal = Goal::Ended(gpu.id);
                        let stalled = Stalled { pieces: [Some(late.piece), None], ..Stalled::default() };
                        let Some(served) = self.happens(stalled, goal, written, false)? else { continue };
                        self.seen.insert((late.step, u32::MAX));
                        let place = self.program.steps[late.step as usize].place;
                        let kind = Kind::Late { region: self.cells.region(cell), written };
                        let finding = Finding::new(self.program.plan, kind, vec![place]);
                        self.found.push(finding.in_run(served));
                        break;
                    }
                }
            }
        }
        Ok(())
    }
}

//! The order of accesses in every run: a clock for each access.
//!
//! A timeline is a thread block, a port channel of one, or a single piece of a move that writes packets. The level of a block
//! grows where its threads synchronise, and that of a port with each push. A block learns of other timelines where its threads
//! synchronise after the step that received this knowledge. It passes on the knowledge that it had when its threads synchronised
//! before the step that sends it.

use std::rc::Rc;

use super::Memory;
use super::cells::Cells;
use super::clock::Clock;
use super::finding::Kind;
use super::program::{Link, Move, Program, What};
use super::schedule::Schedule;

/// Most entries of all clocks.
const LIMIT: usize = 1 << 27;

/// How often knowledge is used to gain more; what is known after any of them holds.
const ROUNDS: usize = 6;

/// The clocks before each access.
pub(super) struct Order {
    /// For each piece of a move, what is known before it.
    pub before: Vec<Rc<Clock>>,
    /// For each move, what is known before any packets that it waits for.
    pub start: Vec<Rc<Clock>>,
    /// For each move, the level that its timeline has when it is done.
    pub level: Vec<u32>,
    /// For each rank, what is known when it has ended: its blocks have, and its ports are flushed.
    pub end: Vec<Clock>,
    /// The clocks that were added to each counter, by each of its releasers in turn.
    sent: Vec<Vec<Vec<Rc<Clock>>>>,
    /// How many of those each acquired step is known to be behind: equal if nothing new was found.
    found: Vec<u32>,
    carries: Carries,
}

/// What orders.
#[derive(Clone, Copy)]
struct Carries {
    /// Whether relaxed signals do.
    relaxed: bool,
    /// Whether a packet carries what its writer knew, and not itself alone.
    knowledge: bool,
}

/// The order of data, and that of execution, in which relaxed signals count too: what was read before one has been read,
/// but what was written need not be seen. In device memory packets are like relaxed signals, except for their own data.
pub(super) struct Orders {
    pub data: Rc<Order>,
    pub execution: Rc<Order>,
    /// In device memory, the order that data would have on a host, where it is another.
    pub announced: Option<Rc<Order>>,
}

impl Order {
    /// Whether who knows a packet knows that all accesses of the move that wrote it are over, and not the packet's alone.
    pub fn packets_end_moves(&self) -> bool {
        self.carries.knowledge
    }
}

impl Orders {
    /// Whether there is an order of execution that is none of data.
    pub fn relaxed(&self) -> bool {
        !Rc::ptr_eq(&self.data, &self.execution)
    }

    /// Whether packets carry themselves alone.
    pub fn packets_alone(&self) -> bool {
        self.announced.is_some()
    }
}

/// Timelines are numbered: agents, then ports, then pieces.
#[derive(Clone, Copy)]
pub(super) struct Timelines {
    agents: u32,
    ports: u32,
}

impl Timelines {
    pub fn new(program: &Program<'_>) -> Self {
        Timelines { agents: program.agents.len() as u32, ports: program.ports.len() as u32 }
    }

    pub fn port(self, port: u32) -> u32 {
        self.agents + port
    }

    pub fn piece(self, piece: u32) -> u32 {
        self.agents + self.ports + piece
    }
}

/// Both orders of a program.
///
/// # Errors
/// [`Kind::TooLarge`]
pub(super) fn orders(
    program: &Program<'_>,
    cells: &Cells,
    schedule: &Schedule,
    memory: Memory,
) -> Result<Orders, Kind> {
    let walk = |carries, earlier: Option<&Order>| Walk::new(program, cells, carries, earlier).walk(schedule);
    let all = Carries { relaxed: true, knowledge: true };
    let mut execution = walk(all, None)?;
    if program.counters.iter().any(|counter| counter.releasers.len() > 1) {
        for _ in 0..ROUNDS {
            let again = walk(all, Some(&execution))?;
            let settled = again.found == execution.found;
            execution = again;
            if settled {
                break;
            }
        }
    }
    let relaxed = program.steps.iter().any(|step| {
        matches!(step.what, What::Acquire { relaxed: true, .. } | What::Release { relaxed: true, .. })
    });
    let on_host = match relaxed {
        true => Some(Rc::new(walk(Carries { relaxed: false, ..all }, Some(&execution))?)),
        false => None,
    };
    let has_packets =
        program.moves.iter().any(|each| program.dests(each).iter().any(|dest| dest.view.packets()));
    let on_device = match memory == Memory::Device && has_packets {
        true => Some(Rc::new(walk(Carries { relaxed: false, knowledge: false }, Some(&execution))?)),
        false => None,
    };
    let execution = Rc::new(execution);
    let on_host = on_host.unwrap_or_else(|| execution.clone());
    Ok(match on_device {
        Some(data) => Orders { data, execution, announced: Some(on_host) },
        None => Orders { data: on_host, execution, announced: None },
    })
}

/// A timeline as far as it has been walked.
struct Line {
    known: Rc<Clock>,
    level: u32,
    /// The knowledge that the block gets when its threads synchronise.
    news: Vec<Rc<Clock>>,
}

/// The number of a cell of packets among those of all launches, for a move.
fn packets_of(program: &Program<'_>, each: &Move, cell: u32) -> usize {
    cell as usize * program.launches as usize + each.launch as usize - 1
}

/// Nothing is known yet about the writers of packets. Where a cell has several writers, and the order in which agents take from a
/// counter decides which of them is first, nothing will be known later either.
fn first_writers(program: &Program<'_>, cells: &Cells) -> Vec<Option<Rc<Clock>>> {
    let mut first = vec![None; cells.len() * program.launches as usize];
    if program.contended() {
        let nothing = Rc::new(Clock::default());
        let mut writers = vec![0u32; first.len()];
        for each in &program.moves {
            for dest in program.dests(each).iter().filter(|dest| dest.view.packets()) {
                for cell in (0..each.pieces).map(|piece| packets_of(program, each, dest.cell + piece)) {
                    writers[cell] += 1;
                    if writers[cell] > 1 {
                        first[cell] = Some(nothing.clone());
                    }
                }
            }
        }
    }
    first
}

struct Walk<'p, 'a> {
    program: &'p Program<'a>,
    lines: Timelines,
    carries: Carries,
    earlier: Option<&'p Order>,
    agents: Vec<Line>,
    ports: Vec<Line>,
    come: Vec<usize>,
    /// For each agent, what its rank knew when it began each launch.
    begun: Vec<Vec<Rc<Clock>>>,
    /// How many each acquirer of a counter has taken.
    taken: Vec<Vec<u32>>,
    /// What is known behind the piece that wrote each cell of packets first, in each launch.
    packets: Vec<Option<Rc<Clock>>>,
    entries: usize,
    order: Order,
}

impl<'p, 'a> Walk<'p, 'a> {
    fn new(program: &'p Program<'a>, cells: &Cells, carries: Carries, earlier: Option<&'p Order>) -> Self {
        let lines = Timelines::new(program);
        let line = |timeline| {
            let mut known = Clock::default();
            known.set(timeline, 0);
            Line { known: Rc::new(known), level: 0, news: Vec::new() }
        };
        let nothing = Rc::new(Clock::default());
        Walk {
            program,
            lines,
            carries,
            earlier,
            agents: (0..lines.agents).map(line).collect(),
            ports: (0..lines.ports).map(|port| line(lines.port(port))).collect(),
            come: vec![0; program.meetings.len()],
            begun: vec![vec![nothing.clone()]; lines.agents as usize],
            taken: program.counters.iter().map(|counter| vec![0; counter.acquirers.len()]).collect(),
            packets: first_writers(program, cells),
            entries: 0,
            order: Order {
                before: vec![nothing.clone(); cells.pieces],
                start: vec![nothing; program.moves.len()],
                level: vec![0; program.moves.len()],
                end: Vec::new(),
                sent: (program.counters.iter())
                    .map(|counter| vec![Vec::new(); counter.releasers.len()])
                    .collect(),
                found: Vec::new(),
                carries,
            },
        }
    }

    fn walk(mut self, schedule: &Schedule) -> Result<Order, Kind> {
        for &(agent, step) in schedule {
            self.step(agent, step);
            if self.entries > LIMIT {
                return Err(Kind::TooLarge { what: "orders between thread blocks", limit: LIMIT as u64 });
            }
        }
        self.order.end = vec![Clock::default(); self.program.plan.gpus.len()];
        for agent in 0..self.lines.agents {
            self.meet(agent);
            let rank = self.program.agents[agent as usize].rank.index();
            self.order.end[rank].join(&self.agents[agent as usize].known);
        }
        for (port, &agent) in self.program.ports.iter().enumerate() {
            let rank = self.program.agents[agent as usize].rank.index();
            self.order.end[rank].join(&self.ports[port].known);
        }
        Ok(self.order)
    }

    fn step(&mut self, agent: u32, step: u32) {
        let program = self.program;
        match &program.steps[step as usize].what {
            What::Nop => self.meet(agent),
            What::Barrier(barrier) => self.barrier(*barrier, step),
            What::Acquire { links, relaxed } => {
                let launch = program.steps[step as usize].launch;
                for link in program.links(links) {
                    self.acquire(agent, link.counter, launch, !relaxed || self.carries.relaxed);
                }
            }
            What::Release { links, relaxed } => {
                for link in program.links(links) {
                    let known = match link.port {
                        Some(port) => self.reach(agent, port),
                        None if *relaxed && !self.carries.relaxed => {
                            self.begin(agent, program.steps[step as usize].launch)
                        }
                        None => self.agents[agent as usize].known.clone(),
                    };
                    self.release(agent, link.counter, known);
                }
            }
            What::Flush(links) => self.flush(agent, program.links(links)),
            What::Move(moves) => {
                for at in moves.clone() {
                    let level = self.agents[agent as usize].level + 1;
                    let known = self.agents[agent as usize].known.clone();
                    self.pieces(agent, at, known, level);
                }
            }
            What::Push { moves, links, flush } => {
                let starts: Vec<_> = program
                    .links(links)
                    .iter()
                    .map(|link| link.port.map(|port| self.reach(agent, port)))
                    .collect();
                let mut pushed: Vec<u32> = program.links(links).iter().filter_map(|link| link.port).collect();
                for at in moves.clone() {
                    let port = program.moves[at as usize].port.expect("pushes have ports");
                    let known = self.reach(agent, port);
                    self.pieces(agent, at, known, self.ports[port as usize].level + 1);
                    pushed.push(port);
                }
                pushed.sort_unstable();
                pushed.dedup();
                pushed.into_iter().for_each(|port| self.pushed(port));
                self.signal(agent, program.links(links), starts);
                if *flush {
                    self.flush(agent, program.links(links));
                }
            }
        }
    }

    /// Where an agent's threads meet.
    fn meet(&mut self, agent: u32) {
        let line = &mut self.agents[agent as usize];
        line.level += 1;
        let news = std::mem::take(&mut line.news);
        let mut known = (*line.known).clone();
        for (at, clock) in news.iter().enumerate() {
            if !news[..at].iter().rev().take(1).any(|other| Rc::ptr_eq(other, clock)) {
                known.join(clock);
            }
        }
        known.set(agent, line.level);
        self.entries += known.len();
        line.known = Rc::new(known);
    }

    /// The agents that meet stand together in the schedule, so the last of them finds all of them there.
    fn barrier(&mut self, barrier: u32, step: u32) {
        let (ends, launch) = (self.program.barrier(step).is_none(), self.program.steps[step as usize].launch);
        let agents = &self.program.meetings[barrier as usize].agents;
        self.come[barrier as usize] += 1;
        if self.come[barrier as usize] < agents.len() {
            return;
        }
        self.come[barrier as usize] = 0;
        let mut all = Clock::default();
        for &(agent, _) in agents {
            self.meet(agent);
            all.join(&self.agents[agent as usize].known);
        }
        self.entries += all.len();
        let all = Rc::new(all);
        for &(agent, _) in agents {
            self.agents[agent as usize].known = all.clone();
            if ends {
                // There are two such meetings, of which the later one stays.
                self.begun[agent as usize].truncate(launch as usize - 1);
                self.begun[agent as usize].push(all.clone());
            }
        }
    }

    /// The knowledge of a port's next push: the pushes before it, and the knowledge of its block.
    fn reach(&mut self, agent: u32, port: u32) -> Rc<Clock> {
        let line = &mut self.ports[port as usize];
        let mut known = (*line.known).clone();
        known.join(&self.agents[agent as usize].known);
        self.entries += known.len();
        line.known = Rc::new(known);
        line.known.clone()
    }

    fn pushed(&mut self, port: u32) {
        let line = &mut self.ports[port as usize];
        line.level += 1;
        let mut known = (*line.known).clone();
        known.set(self.lines.port(port), line.level);
        line.known = Rc::new(known);
    }

    /// The signals behind pushes. Those of one operation through one port are in no order, so that only the last to
    /// arrive says that all are done.
    fn signal(&mut self, agent: u32, links: &[Link], starts: Vec<Option<Rc<Clock>>>) {
        for ((at, link), start) in links.iter().enumerate().zip(starts) {
            let port = link.port.expect("signals behind pushes go through ports");
            let last = links[at + 1..].iter().all(|other| other.port != link.port);
            let known = if last { self.ports[port as usize].known.clone() } else { start.expect("a port's") };
            self.release(agent, link.counter, known);
        }
    }

    fn flush(&mut self, agent: u32, links: &[Link]) {
        for port in links.iter().filter_map(|link| link.port) {
            let known = self.ports[port as usize].known.clone();
            self.agents[agent as usize].news.push(known);
        }
    }

    fn release(&mut self, agent: u32, counter: u32, known: Rc<Clock>) {
        let of = &self.program.counters[counter as usize];
        let at = of.releasers.binary_search_by_key(&agent, |&(who, _)| who).expect("listed when lowered");
        self.order.sent[counter as usize][at].push(known);
    }

    /// For each agent that adds to the counter: how much it must have added when this agent takes one more. That is all that is
    /// needed, less all that the others can have added by then.
    fn acquire(&mut self, agent: u32, counter: u32, launch: u32, orders: bool) {
        let of = &self.program.counters[counter as usize];
        let own = of.acquirer(agent);
        let taken = &mut self.taken[counter as usize][own];
        *taken += 1;
        let needed = i64::from(*taken).saturating_sub(of.initial);
        let level = self.agents[agent as usize].level + 1;
        let possible: Vec<i64> = (0..of.releasers.len())
            .map(|who| {
                // All that add are blocks of one rank: what one adds in a later launch comes behind all that others add in this one.
                let by_now = i64::from(of.releasers[who].1 / self.program.launches * launch);
                match self.earlier {
                    // What comes after this step cannot have come before it.
                    Some(earlier) => {
                        let sent = &earlier.sent[counter as usize][who];
                        by_now.min(sent.partition_point(|clock| !clock.reaches(agent, level)) as i64)
                    }
                    None => by_now,
                }
            })
            .collect();
        let all: i64 = possible.iter().sum();
        for (who, &possible) in possible.iter().enumerate() {
            let sure = needed.saturating_sub(all - possible).clamp(0, possible);
            self.order.found.push(sure as u32);
            if sure == 0 {
                continue;
            }
            let known = match orders {
                true => self.order.sent[counter as usize][who][sure as usize - 1].clone(),
                false => {
                    let (releaser, times) = of.releasers[who];
                    self.begin(releaser, (sure as u32 - 1) / (times / self.program.launches) + 1)
                }
            };
            self.agents[agent as usize].news.push(known);
        }
    }

    /// What a block's rank knew when it began a launch: nothing at the first one.
    fn begin(&self, agent: u32, launch: u32) -> Rc<Clock> {
        self.begun[agent as usize][launch as usize - 1].clone()
    }

    /// The pieces of a move, each of which knows what its packets' writers knew.
    fn pieces(&mut self, agent: u32, at: u32, known: Rc<Clock>, level: u32) {
        let program = self.program;
        let each = &program.moves[at as usize];
        self.order.level[at as usize] = level;
        self.order.start[at as usize] = known.clone();
        for piece in 0..each.pieces {
            let known = if each.awaits { self.behind_packets(each, piece, &known) } else { known.clone() };
            if each.awaits {
                self.agents[agent as usize].news.push(known.clone());
            }
            self.write_packets(each, piece, &known);
            self.order.before[(each.first_piece + piece) as usize] = known;
        }
    }

    fn behind_packets(&mut self, each: &Move, piece: u32, known: &Clock) -> Rc<Clock> {
        let mut joined = known.clone();
        for source in self.program.sources(each).iter().filter(|source| source.view.packets()) {
            let writer = &self.packets[packets_of(self.program, each, source.cell + piece)];
            joined.join(writer.as_ref().expect("the schedule waited for it"));
        }
        self.entries += joined.len();
        Rc::new(joined)
    }

    fn write_packets(&mut self, each: &Move, piece: u32, known: &Clock) {
        let mut behind = None;
        for dest in self.program.dests(each).iter().filter(|dest| dest.view.packets()) {
            let writer = &mut self.packets[packets_of(self.program, each, dest.cell + piece)];
            if writer.is_none() {
                let behind = behind.get_or_insert_with(|| {
                    let mut behind = if self.carries.knowledge { known.clone() } else { Clock::default() };
                    behind.set(self.lines.piece(each.first_piece + piece), 1);
                    Rc::new(behind)
                });
                *writer = Some(behind.clone());
            }
        }
    }
}

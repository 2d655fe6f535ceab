//! One run of the program, or the state of its deadlock.
//!
//! If each counter has one block that takes from it, all runs are equivalent: an awaited state stays true until the step takes
//! it, so ready steps may be done in any order, and every run does the same steps or stops in the
//! same state. If several blocks take from one counter, a block takes from it as soon as there is enough for it and for all that
//! the others could ever take. Otherwise the order matters, and every order is tried: blocks that have each taken a certain
//! number of times are in the same state for every order.

use std::collections::{HashMap, HashSet, VecDeque};

use super::cells::Cells;
use super::finding::{Finding, Kind, Missing, Served};
use super::program::{Counted, Move, Program, What};
use super::runs;
use crate::place::Place;

/// The steps in an order in which they can be done, each as its agent and its number. The steps of one barrier are
/// consecutive.
pub(super) type Schedule = Vec<(u32, u32)>;

/// The wait of an agent.
#[derive(Clone, Copy)]
enum Waiting {
    Counter(u32),
    Barrier(u32),
    Cell(u32),
}

#[derive(Clone)]
struct Run<'p, 'a> {
    program: &'p Program<'a>,
    /// For each agent, the next step, and of that the next link.
    next: Vec<(u32, u32)>,
    /// The wait of each agent.
    waits: Vec<Option<Waiting>>,
    /// For each counter, how many were added.
    added: Vec<i64>,
    /// For each counter, how many each of its acquirers has taken.
    taken: Vec<Vec<u32>>,
    /// For each barrier, the agents that have reached it.
    come: Vec<Vec<u32>>,
    /// For each cell of packets, the last launch that has written it, from 1.
    written: Vec<u32>,
    counter_waiters: Vec<Vec<u32>>,
    cell_waiters: HashMap<u32, Vec<u32>>,
    ready: Vec<u32>,
    schedule: Schedule,
    /// The agents that took where another could have.
    served: Vec<Served>,
}

/// One of the runs of the program, all of which end.
///
/// # Errors
/// The deadlock, or [`Kind::TooLarge`].
pub(super) fn run(program: &Program<'_>, cells: &Cells) -> Result<Schedule, Box<Finding>> {
    let mut run = Run {
        program,
        next: program.agents.iter().map(|agent| (agent.steps.start, 0)).collect(),
        waits: vec![None; program.agents.len()],
        added: program.counters.iter().map(|counter| counter.initial).collect(),
        taken: program.counters.iter().map(|counter| vec![0; counter.acquirers.len()]).collect(),
        come: vec![Vec::new(); program.meetings.len()],
        written: vec![0; cells.len()],
        counter_waiters: vec![Vec::new(); program.counters.len()],
        cell_waiters: HashMap::new(),
        ready: (0..program.agents.len() as u32).rev().collect(),
        schedule: Vec::with_capacity(program.steps.len()),
        served: Vec::new(),
    };
    run.go();
    let limit = runs::states(program, cells);
    let mut seen = HashSet::from([run.taken.clone()]);
    let mut todo = VecDeque::from([run]);
    let mut ended = None;
    while let Some(run) = todo.pop_front() {
        if run.waits.iter().all(Option::is_none) {
            ended.get_or_insert(run.schedule);
            continue;
        }
        let takers = run.takers();
        if takers.is_empty() {
            return Err(Box::new(run.stuck()));
        }
        for (agent, counter) in takers {
            let mut next = run.clone();
            next.serve(agent, counter);
            if seen.insert(next.taken.clone()) {
                todo.push_back(next);
            }
            if seen.len() > limit {
                return Err(Box::new(Finding::new(program.plan, runs::too_large(limit), Vec::new())));
            }
        }
    }
    Ok(ended.expect("some run ends, or none does"))
}

impl Run<'_, '_> {
    fn go(&mut self) {
        while let Some(agent) = self.ready.pop() {
            self.advance(agent);
        }
    }

    /// The agents that could take from a counter that has not enough for all.
    fn takers(&self) -> Vec<(u32, u32)> {
        let waits = self.waits.iter().enumerate().filter_map(|(agent, waiting)| match *waiting {
            Some(Waiting::Counter(counter)) => Some((agent as u32, counter)),
            _ => None,
        });
        let there = |&(_, counter): &(u32, u32)| {
            let taken: i64 = self.taken[counter as usize].iter().map(|&taken| i64::from(taken)).sum();
            self.added[counter as usize] > taken
        };
        waits.filter(there).collect()
    }

    /// Gives one to an agent that waits for it, though others may want it.
    fn serve(&mut self, agent: u32, counter: u32) {
        let of = &self.program.counters[counter as usize];
        self.taken[counter as usize][of.acquirer(agent)] += 1;
        let who = &self.program.agents[agent as usize];
        self.served.push(Served { counter: of.counted, rank: who.rank, block: who.block });
        self.next[agent as usize].1 += 1;
        self.counter_waiters[counter as usize].retain(|&other| other != agent);
        self.ready.push(agent);
        self.go();
    }

    /// Does an agent's steps until it waits.
    fn advance(&mut self, agent: u32) {
        let end = self.program.agents[agent as usize].steps.end;
        while self.next[agent as usize].0 < end {
            let step = self.next[agent as usize].0;
            let waiting = self.step(agent, step);
            self.waits[agent as usize] = waiting;
            match waiting {
                None => {
                    self.schedule.push((agent, step));
                    self.next[agent as usize] = (step + 1, 0);
                }
                Some(Waiting::Counter(counter)) => {
                    self.counter_waiters[counter as usize].push(agent);
                    return;
                }
                Some(Waiting::Cell(cell)) => {
                    self.cell_waiters.entry(cell).or_default().push(agent);
                    return;
                }
                Some(Waiting::Barrier(barrier)) => {
                    self.meet(barrier, agent);
                    return;
                }
            }
        }
    }

    /// Does a step, or says what it waits for.
    fn step(&mut self, agent: u32, step: u32) -> Option<Waiting> {
        let program = self.program;
        match &program.steps[step as usize].what {
            What::Nop | What::Flush(_) => None,
            What::Barrier(barrier) => Some(Waiting::Barrier(*barrier)),
            What::Acquire { links, .. } => {
                let links = program.links(links);
                while let Some(link) = links.get(self.next[agent as usize].1 as usize) {
                    if !self.take(agent, link.counter) {
                        return Some(Waiting::Counter(link.counter));
                    }
                    self.next[agent as usize].1 += 1;
                }
                None
            }
            What::Release { links, .. } => {
                program.links(links).iter().for_each(|link| self.add(link.counter));
                None
            }
            What::Move(moves) => self.moves(program.moves(moves)),
            What::Push { moves, links, .. } => {
                if let waiting @ Some(_) = self.moves(program.moves(moves)) {
                    return waiting;
                }
                program.links(links).iter().for_each(|link| self.add(link.counter));
                None
            }
        }
    }

    /// Takes one, if there is one for this agent whatever the others do.
    fn take(&mut self, agent: u32, counter: u32) -> bool {
        let of = &self.program.counters[counter as usize];
        let taken = &mut self.taken[counter as usize];
        let own = of.acquirer(agent);
        let launch = self.program.steps[self.next[agent as usize].0 as usize].launch;
        let others = of.others(own, launch, self.program.launches);
        let enough = self.added[counter as usize] > others + i64::from(taken[own]);
        if enough {
            taken[own] += 1;
        }
        enough
    }

    fn add(&mut self, counter: u32) {
        let added = &mut self.added[counter as usize];
        *added = added.saturating_add(1);
        self.ready.append(&mut self.counter_waiters[counter as usize]);
    }

    fn moves(&mut self, moves: &[Move]) -> Option<Waiting> {
        let program = self.program;
        for each in moves.iter().filter(|each| each.awaits) {
            for source in program.sources(each).iter().filter(|source| source.view.packets()) {
                let mut cells = source.cell..source.cell + each.pieces;
                if let Some(cell) = cells.find(|&cell| self.written[cell as usize] < each.launch) {
                    return Some(Waiting::Cell(cell));
                }
            }
        }
        for each in moves {
            for dest in program.dests(each).iter().filter(|dest| dest.view.packets()) {
                for cell in dest.cell..dest.cell + each.pieces {
                    self.written[cell as usize] = each.launch.max(self.written[cell as usize]);
                    self.ready.extend(self.cell_waiters.remove(&cell).unwrap_or_default());
                }
            }
        }
        None
    }

    fn meet(&mut self, barrier: u32, agent: u32) {
        let come = &mut self.come[barrier as usize];
        come.push(agent);
        if come.len() < self.program.meetings[barrier as usize].agents.len() {
            return;
        }
        for agent in std::mem::take(come) {
            let next = &mut self.next[agent as usize];
            self.schedule.push((agent, next.0));
            *next = (next.0 + 1, 0);
            self.waits[agent as usize] = None;
            self.ready.push(agent);
        }
    }

    /// Why nothing more can be done.
    fn stuck(&self) -> Finding {
        let program = self.program;
        let mut places: Vec<Place> = Vec::new();
        let mut waits = Vec::new();
        for (agent, waiting) in self.cycle() {
            let step = self.next[agent as usize].0;
            waits.push(match waiting {
                Waiting::Counter(counter) => Missing::Count(program.counters[counter as usize].counted),
                Waiting::Barrier(_) => match program.barrier(step) {
                    Some(barrier) => Missing::Barrier(barrier),
                    None => continue,
                },
                Waiting::Cell(_) => Missing::Packets,
            });
            places.push(program.steps[step as usize].place);
        }
        Finding::new(program.plan, Kind::Deadlock { waits }, places).in_run(self.served.clone())
    }

    /// Agents each of which waits for the next one: a circle if there is one, else a chain to an agent that waits for
    /// agents that are all done.
    fn cycle(&self) -> Vec<(u32, Waiting)> {
        let start = self.waits.iter().position(Option::is_some).expect("somebody waits") as u32;
        let mut chain: Vec<(u32, Waiting)> = Vec::new();
        let mut agent = Some(start);
        while let Some(at) = agent {
            if let Some(from) = chain.iter().position(|&(before, _)| before == at) {
                chain.drain(..from);
                break;
            }
            let Some(waiting) = self.waits[at as usize] else { break };
            chain.push((at, waiting));
            agent = self.awaited(at, waiting);
        }
        chain
    }

    /// An agent that would end an agent's wait, and waits too: another one, if there is one.
    fn awaited(&self, own: u32, waiting: Waiting) -> Option<u32> {
        let waits = |agent: &u32| self.waits[*agent as usize].is_some();
        match waiting {
            Waiting::Counter(counter) => {
                let of = &self.program.counters[counter as usize];
                let adds = |&agent: &u32| {
                    let rest = self.next[agent as usize].0..self.program.agents[agent as usize].steps.end;
                    rest.into_iter().any(|step| self.adds(step, counter))
                };
                let all = of.releasers.iter().map(|&(agent, _)| agent).filter(waits).filter(adds);
                all.min_by_key(|&agent| agent == own)
            }
            Waiting::Barrier(barrier) => {
                let all = self.program.meetings[barrier as usize].agents.iter().map(|&(agent, _)| agent);
                let come = &self.come[barrier as usize];
                all.filter(waits).find(|agent| !come.contains(agent))
            }
            Waiting::Cell(cell) => (0..self.program.agents.len() as u32).filter(waits).find(|&agent| {
                let rest = self.next[agent as usize].0..self.program.agents[agent as usize].steps.end;
                rest.into_iter().any(|step| self.writes(step, cell))
            }),
        }
    }

    fn adds(&self, step: u32, counter: u32) -> bool {
        match &self.program.steps[step as usize].what {
            What::Release { links, .. } | What::Push { links, .. } => {
                self.program.links(links).iter().any(|link| link.counter == counter)
            }
            _ => false,
        }
    }

    fn writes(&self, step: u32, cell: u32) -> bool {
        match &self.program.steps[step as usize].what {
            What::Move(moves) | What::Push { moves, .. } => self.program.moves(moves).iter().any(|each| {
                let mut dests = self.program.dests(each).iter();
                dests.any(|dest| (dest.cell..dest.cell + each.pieces).contains(&cell))
            }),
            _ => false,
        }
    }
}

/// Counters to which a launch adds as many as it takes find the next launch as they found this one.
pub(super) fn unbalanced(program: &Program<'_>) -> Vec<Finding> {
    let sum = |each: &[(u32, u32)]| each.iter().map(|&(_, times)| u64::from(times)).sum::<u64>();
    let off = program.counters.iter().filter(|counter| sum(&counter.releasers) != sum(&counter.acquirers));
    off.map(|counter| {
        let (added, taken) = (sum(&counter.releasers), sum(&counter.acquirers));
        let who = counter.acquirers.first().or(counter.releasers.first());
        let place = who.and_then(|&(agent, _)| first_use(program, agent, counter.counted));
        let kind = Kind::Unbalanced { counter: counter.counted, added, taken };
        Finding::new(program.plan, kind, place.into_iter().collect())
    })
    .collect()
}

fn first_use(program: &Program<'_>, agent: u32, counted: Counted) -> Option<Place> {
    let steps = program.agents[agent as usize].steps.clone();
    let steps = &program.steps[steps.start as usize..steps.end as usize];
    let uses = |what: &What| match what {
        What::Acquire { links, .. } | What::Release { links, .. } | What::Push { links, .. } => {
            program.links(links).iter().any(|link| program.counters[link.counter as usize].counted == counted)
        }
        _ => false,
    };
    steps.iter().find(|step| uses(&step.what)).map(|step| step.place)
}

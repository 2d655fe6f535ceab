//! The runs of the program, with thread blocks of many threads, or of one thread, which can deadlock more easily.
//!
//! A run has a choice only where several blocks may take the same count from a counter. Every other possible step stays possible
//! until it is done, and is done at once. So only the orders of these takes are tried, and everything that can happen in any
//! run happens in one of them. The number of takes of each block determines the places of all blocks, whatever the order was.
//! So states are distinguished by these numbers alone (and by the content of memory, where that matters).
//!
//! Accesses may be held: they begin and never end. If two held accesses both begin in some run, they happen at the same time: a race.
//! If they both begin in no run, one of them always ends before the other begins.

use std::cell::{Cell, OnceCell};
use std::collections::{HashMap, HashSet, VecDeque};

use super::cells::Cells;
use super::finding::{Kind, Missing, Served};
use super::program::{Link, Program, What};
use crate::ids::Rank;
use crate::place::Place;

/// Most states of one search.
const STATES: usize = 1 << 16;

/// Most words of all states of one search.
const WORDS: usize = 1 << 26;

/// Most words of all states in all searches at all sizes.
pub(super) const ALL: usize = 1 << 30;

/// What a small state counts for at least, for it is looked at too.
const LEAST_WORDS: usize = 1 << 13;

/// A piece of a move.
type Piece = (u32, u32);

/// The event that is searched for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Goal {
    /// A state in which nothing more can be done, though not all have ended.
    Deadlock,
    /// The held pieces under way at the same time.
    Together,
    /// The end of a rank, the held piece not being done.
    Ended(Rank),
    /// The first held piece under way, while plain data are in the bytes of the packets that are watched. With `true` the data
    /// may also be left over from the launch before.
    Mistaken(bool),
}

/// Pieces that are begun and never done.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stalled {
    /// Their numbers among those of all moves.
    pub pieces: [Option<u32>; 2],
    /// Whether they begin when they look for packets, and not when these are there.
    pub polls: [bool; 2],
    /// A cell of packets that is watched, and the cells of plain data from and to which share its bytes.
    pub cell: Option<(u32, u32, u32)>,
    /// Whether relaxed waits are passed over: what remains ordered is so by the others alone.
    pub strict: bool,
    /// Whether waits for packets are passed over.
    pub passes_packets: bool,
    /// Whether blocks do one operation after the other, as with one thread.
    pub alone: bool,
}

/// The content of the watched cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// The content that the launch before left.
    Before,
    /// Packets.
    Packets,
    /// Plain data of a step.
    Data(u32),
}

/// The steps that a block's threads have not done since they synchronised.
#[derive(Clone)]
struct Item {
    step: u32,
    left: Left,
}

#[derive(Clone)]
enum Left {
    /// Counters to take one from.
    Takes(Vec<u32>),
    /// Pieces to move.
    Pieces(Vec<Piece>),
    /// Cells of packets of a launch to wait for.
    Cells(u32, Vec<u32>),
    /// A port, and how many of its entries must be done.
    Flush(u32, u32),
}

#[derive(Clone)]
struct Block {
    items: Vec<Item>,
    /// The step where they meet next, or the end; of one alone, the step that it is at.
    meets: u32,
    /// Whether they wait at a barrier.
    came: bool,
}

/// The operations that a port does at once.
#[derive(Clone)]
struct Entry {
    step: u32,
    /// Counters to add to when it begins.
    early: Vec<u32>,
    pieces: Vec<Piece>,
    /// And when it is done.
    late: Vec<u32>,
}

#[derive(Clone, Default)]
struct Port {
    queue: VecDeque<Entry>,
    pushed: u32,
    done: u32,
}

/// How far everything is.
#[derive(Clone)]
pub(super) struct State {
    blocks: Vec<Block>,
    ports: Vec<Port>,
    added: Vec<i64>,
    /// For each counter, how many each of its acquirers has taken.
    taken: Vec<Vec<u32>>,
    come: Vec<u32>,
    /// For each cell of packets, the last launch that has written it, from 1.
    written: Vec<u32>,
    begun: [bool; 2],
    pub content: Content,
    dirty: Vec<u32>,
    /// The content of memory, where it matters.
    pub holds: Vec<u32>,
    /// The agents that took where another could have.
    pub served: Vec<Served>,
}

/// Told of each piece when it is done.
pub(super) trait Watch {
    /// `holds` and `served` are the state's.
    fn moved(&mut self, holds: &mut Vec<u32>, served: &[Served], step: u32, piece: Piece);
    /// A run has ended.
    fn ended(&mut self, state: &State);
    /// Whether enough has been seen.
    fn enough(&self) -> bool;
}

/// See the module's page.
pub(super) struct Runs<'p, 'a> {
    program: &'p Program<'a>,
    cells: &'p Cells,
    /// The agents that wait for packets in each cell.
    readers: OnceCell<HashMap<u32, Vec<u32>>>,
    ports: Vec<Vec<u32>>,
    /// Counters of which several take.
    contended: Vec<u32>,
    /// Most states of one search.
    limit: usize,
    /// Words of a state, and how many there may still be in all searches.
    words: usize,
    left: Cell<usize>,
}

struct Play<'r, 'p, 'a, 'w> {
    runs: &'r Runs<'p, 'a>,
    state: State,
    stalled: Stalled,
    watch: Option<&'w mut (dyn Watch + 'w)>,
}

impl<'p, 'a> Runs<'p, 'a> {
    /// Makes searches that take `left` words in all.
    pub fn new(program: &'p Program<'a>, cells: &'p Cells, left: usize) -> Self {
        let mut ports = vec![Vec::new(); program.agents.len()];
        for (port, &agent) in program.ports.iter().enumerate() {
            ports[agent as usize].push(port as u32);
        }
        let contended = (0..program.counters.len() as u32)
            .filter(|&counter| program.counters[counter as usize].acquirers.len() > 1)
            .collect();
        Runs {
            program,
            cells,
            readers: OnceCell::new(),
            ports,
            contended,
            limit: states(program, cells),
            words: words(program, cells).max(LEAST_WORDS),
            left: Cell::new(left),
        }
    }

    /// How many words there may still be.
    pub fn left(&self) -> usize {
        self.left.get()
    }

    /// The order in which agents took in a run that reaches the goal, if there is one.
    ///
    /// # Errors
    /// [`Kind::TooLarge`]
    pub fn find(&self, stalled: Stalled, goal: Goal) -> Result<Option<State>, Kind> {
        self.explore(stalled, goal, Vec::new(), None)
    }

    /// All runs, with what memory holds.
    ///
    /// # Errors
    /// [`Kind::TooLarge`]
    pub fn watch<'w>(&self, holds: Vec<u32>, watch: &'w mut (dyn Watch + 'w)) -> Result<Option<State>, Kind> {
        self.explore(Stalled::default(), Goal::Deadlock, holds, Some(watch))
    }

    fn explore<'w>(
        &self,
        stalled: Stalled,
        goal: Goal,
        holds: Vec<u32>,
        watch: Option<&'w mut (dyn Watch + 'w)>,
    ) -> Result<Option<State>, Kind> {
        let mut play = Play { runs: self, state: self.start(holds), stalled, watch };
        for agent in 0..self.program.agents.len() as u32 {
            play.enter(agent, self.program.agents[agent as usize].steps.start);
        }
        play.run();
        let mut seen = HashSet::from([self.key(&play.state)]);
        let mut todo = VecDeque::from([play.state.clone()]);
        while let Some(state) = todo.pop_front() {
            let left = self.left.get();
            if left < self.words {
                return Err(too_large(ALL / self.words));
            }
            self.left.set(left - self.words);
            let takers = self.takers(&state);
            if self.reached(&state, stalled, goal, takers.is_empty()) {
                return Ok(Some(state));
            }
            if takers.is_empty()
                && let Some(watch) = &mut play.watch
            {
                watch.ended(&state);
            }
            if play.watch.as_ref().is_some_and(|watch| watch.enough()) {
                return Ok(None);
            }
            for (agent, counter) in takers {
                play.state = state.clone();
                play.serve(agent, counter);
                play.run();
                if seen.insert(self.key(&play.state)) {
                    todo.push_back(play.state.clone());
                }
                if seen.len() > self.limit {
                    return Err(too_large(self.limit));
                }
            }
        }
        Ok(None)
    }

    fn start(&self, holds: Vec<u32>) -> State {
        let program = self.program;
        let block = Block { items: Vec::new(), meets: 0, came: false };
        State {
            blocks: vec![block; program.agents.len()],
            ports: vec![Port::default(); program.ports.len()],
            added: program.counters.iter().map(|counter| counter.initial).collect(),
            taken: program.counters.iter().map(|counter| vec![0; counter.acquirers.len()]).collect(),
            come: vec![0; program.meetings.len()],
            written: vec![0; self.cells.len()],
            begun: [false; 2],
            content: Content::Before,
            dirty: Vec::new(),
            holds,
            served: Vec::new(),
        }
    }

    fn key(&self, state: &State) -> Vec<u32> {
        let taken = self.contended.iter().flat_map(|&counter| &state.taken[counter as usize]);
        taken.chain(&state.holds).copied().collect()
    }

    /// The agents that could take from a counter that has not enough for all.
    fn takers(&self, state: &State) -> Vec<(u32, u32)> {
        let mut takers = Vec::new();
        for &counter in &self.contended {
            let taken: i64 = state.taken[counter as usize].iter().map(|&taken| i64::from(taken)).sum();
            if state.added[counter as usize] <= taken {
                continue;
            }
            let acquirers = self.program.counters[counter as usize].acquirers.iter();
            let waits = |&agent: &u32| {
                let mut items = state.blocks[agent as usize].items.iter();
                items.any(|item| matches!(&item.left, Left::Takes(left) if left.contains(&counter)))
            };
            takers.extend(acquirers.map(|&(agent, _)| agent).filter(waits).map(|agent| (agent, counter)));
        }
        takers
    }

    fn reached(&self, state: &State, stalled: Stalled, goal: Goal, last: bool) -> bool {
        match goal {
            Goal::Deadlock => last && (0..self.program.agents.len()).any(|agent| !self.ended(state, agent)),
            Goal::Together => {
                stalled.pieces.iter().zip(state.begun).all(|(piece, begun)| piece.is_none() || begun)
            }
            Goal::Mistaken(before) => {
                let data = match state.content {
                    Content::Before => before,
                    Content::Packets => false,
                    Content::Data(_) => true,
                };
                data && state.begun[0]
            }
            Goal::Ended(rank) => {
                let agents = self.program.agents.iter().enumerate();
                agents.filter(|(_, agent)| agent.rank == rank).all(|(agent, _)| self.ended(state, agent))
            }
        }
    }

    /// Whether a block and its ports have nothing more to do.
    fn ended(&self, state: &State, agent: usize) -> bool {
        let block = &state.blocks[agent];
        block.items.is_empty()
            && block.meets == self.program.agents[agent].steps.end
            && self.ports[agent].iter().all(|&port| state.ports[port as usize].queue.is_empty())
    }

    /// The waits of the blocks that have not ended.
    pub fn waits(&self, state: &State) -> Vec<(Place, Missing)> {
        let program = self.program;
        let place = |step: u32| program.steps[step as usize].place;
        let mut waits = Vec::new();
        for (agent, block) in state.blocks.iter().enumerate() {
            let port = |port: &&u32| !state.ports[**port as usize].queue.is_empty();
            match block.items.iter().find(|item| !matches!(item.left, Left::Flush(..))) {
                Some(Item { step, left: Left::Takes(left) }) => {
                    let counted = program.counters[left[0] as usize].counted;
                    waits.push((place(*step), Missing::Count(counted)));
                }
                Some(item) => waits.push((place(item.step), Missing::Packets)),
                None if block.came => {
                    let barrier = program.barrier(block.meets).map(Missing::Barrier);
                    waits.extend(barrier.map(|barrier| (place(block.meets), barrier)));
                }
                None => {
                    if let Some(&port) = self.ports[agent].iter().find(port) {
                        let step = state.ports[port as usize].queue[0].step;
                        waits.push((place(step), Missing::Packets));
                    }
                }
            }
        }
        waits
    }
}

/// How many states there may be in one search, of a program of its size.
pub(super) fn states(program: &Program<'_>, cells: &Cells) -> usize {
    (WORDS / words(program, cells)).clamp(4, STATES)
}

/// How many words a state may have.
fn words(program: &Program<'_>, cells: &Cells) -> usize {
    program.steps.len() + cells.pieces + cells.len() + program.counters.len() + 64
}

/// More states than these.
pub(super) fn too_large(limit: usize) -> Kind {
    let what = "states that differ in which thread blocks took from a counter before others";
    Kind::TooLarge { what, limit: limit as u64 }
}

/// The agents that wait for packets in each cell.
fn readers(program: &Program<'_>) -> HashMap<u32, Vec<u32>> {
    let mut readers: HashMap<u32, Vec<u32>> = HashMap::new();
    for (at, agent) in program.agents.iter().enumerate() {
        for step in &program.steps[agent.steps.start as usize..agent.steps.end as usize] {
            let (What::Move(moves) | What::Push { moves, .. }) = &step.what else { continue };
            for each in program.moves(moves).iter().filter(|each| each.awaits) {
                for source in program.sources(each).iter().filter(|source| source.view.packets()) {
                    for cell in source.cell..source.cell + each.pieces {
                        let agents = readers.entry(cell).or_default();
                        if agents.last() != Some(&(at as u32)) {
                            agents.push(at as u32);
                        }
                    }
                }
            }
        }
    }
    readers
}

impl Play<'_, '_, '_, '_> {
    /// Does all that can be done in one way only.
    fn run(&mut self) {
        while let Some(agent) = self.state.dirty.pop() {
            self.progress(agent);
        }
    }

    /// A block's threads go on from a step until they meet; one alone, to the next step.
    fn enter(&mut self, agent: u32, from: u32) {
        let program = self.runs.program;
        let end = program.agents[agent as usize].steps.end;
        let mut step = from;
        let mut items = Vec::new();
        while step < end {
            match &program.steps[step as usize].what {
                What::Nop | What::Barrier(_) => break,
                What::Acquire { relaxed: true, .. } if self.stalled.strict => {}
                What::Acquire { links, .. } => {
                    let counters = program.links(links).iter().map(|link| link.counter).collect();
                    items.push(Item { step, left: Left::Takes(counters) });
                }
                What::Release { links, .. } => {
                    for link in program.links(links) {
                        match link.port {
                            Some(port) => self.push(port, step, Vec::new(), Vec::new(), vec![link.counter]),
                            None => self.add(link.counter),
                        }
                    }
                }
                What::Flush(links) => self.flushes(step, program.links(links), &mut items),
                What::Move(moves) => {
                    let pieces = moves.clone().flat_map(|at| self.pieces(at)).collect();
                    items.push(Item { step, left: Left::Pieces(pieces) });
                }
                What::Push { moves, links, flush } => {
                    self.pushes(step, moves.clone(), program.links(links));
                    let cells = moves.clone().flat_map(|at| self.awaited(at)).collect();
                    let launch = program.moves(moves).first().map_or(0, |each| each.launch);
                    items.push(Item { step, left: Left::Cells(launch, cells) });
                    if *flush {
                        self.flushes(step, program.links(links), &mut items);
                    }
                }
            }
            if self.stalled.alone {
                break;
            }
            step += 1;
        }
        self.state.blocks[agent as usize] = Block { items, meets: step, came: false };
        self.state.dirty.push(agent);
    }

    fn pieces(&self, at: u32) -> impl Iterator<Item = Piece> + use<> {
        (0..self.runs.program.moves[at as usize].pieces).map(move |piece| (at, piece))
    }

    /// The cells of packets that a move waits for.
    fn awaited(&self, at: u32) -> Vec<u32> {
        let program = self.runs.program;
        let each = &program.moves[at as usize];
        let awaits = each.awaits && !self.stalled.passes_packets;
        let sources = program.sources(each).iter().filter(|source| awaits && source.view.packets());
        sources.flat_map(|source| source.cell..source.cell + each.pieces).collect()
    }

    fn push(&mut self, port: u32, step: u32, early: Vec<u32>, pieces: Vec<Piece>, late: Vec<u32>) {
        let port = &mut self.state.ports[port as usize];
        port.queue.push_back(Entry { step, early, pieces, late });
        port.pushed += 1;
    }

    /// A port does the parts of one operation in no order: only its last signal shows that all are done.
    fn pushes(&mut self, step: u32, moves: std::ops::Range<u32>, links: &[Link]) {
        let program = self.runs.program;
        let of_move = |at: u32| program.moves[at as usize].port.expect("pushes have ports");
        let mut ports: Vec<u32> =
            moves.clone().map(of_move).chain(links.iter().filter_map(|link| link.port)).collect();
        ports.sort_unstable();
        ports.dedup();
        for port in ports {
            let pieces = moves.clone().filter(|&at| of_move(at) == port).flat_map(|at| self.pieces(at));
            let pieces = pieces.collect();
            let mut early: Vec<u32> =
                links.iter().filter(|link| link.port == Some(port)).map(|link| link.counter).collect();
            let late = early.pop().into_iter().collect();
            self.push(port, step, early, pieces, late);
        }
    }

    fn flushes(&self, step: u32, links: &[Link], items: &mut Vec<Item>) {
        for port in links.iter().filter_map(|link| link.port) {
            let pushed = self.state.ports[port as usize].pushed;
            items.push(Item { step, left: Left::Flush(port, pushed) });
        }
    }

    fn add(&mut self, counter: u32) {
        let added = &mut self.state.added[counter as usize];
        *added = added.saturating_add(1);
        let acquirers = self.runs.program.counters[counter as usize].acquirers.iter();
        self.state.dirty.extend(acquirers.map(|&(agent, _)| agent));
    }

    /// Takes one, if there is one for this agent whatever the others do.
    fn take(&mut self, agent: u32, step: u32, counter: u32) -> bool {
        let of = &self.runs.program.counters[counter as usize];
        let taken = &mut self.state.taken[counter as usize];
        let own = of.acquirer(agent);
        let launch = self.runs.program.steps[step as usize].launch;
        let others = of.others(own, launch, self.runs.program.launches);
        let enough = self.state.added[counter as usize] > others + i64::from(taken[own]);
        if enough {
            taken[own] += 1;
        }
        enough
    }

    /// Gives one to an agent that waits for it, though others may want it.
    fn serve(&mut self, agent: u32, counter: u32) {
        let of = &self.runs.program.counters[counter as usize];
        self.state.taken[counter as usize][of.acquirer(agent)] += 1;
        let who = &self.runs.program.agents[agent as usize];
        self.state.served.push(Served { counter: of.counted, rank: who.rank, block: who.block });
        for item in &mut self.state.blocks[agent as usize].items {
            if let Left::Takes(left) = &mut item.left
                && let Some(at) = left.iter().position(|&other| other == counter)
            {
                left.swap_remove(at);
                break;
            }
        }
        self.state.dirty.push(agent);
    }

    /// Does what a block's threads and ports can do, and has the threads meet.
    fn progress(&mut self, agent: u32) {
        loop {
            for &port in &self.runs.ports[agent as usize] {
                self.drain(port);
            }
            let mut items = std::mem::take(&mut self.state.blocks[agent as usize].items);
            items.retain_mut(|item| !self.done(agent, item));
            let waits = !items.is_empty();
            let block = &mut self.state.blocks[agent as usize];
            block.items = items;
            let meets = block.meets;
            if waits || block.came || meets == self.runs.program.agents[agent as usize].steps.end {
                return;
            }
            match self.runs.program.steps[meets as usize].what {
                What::Barrier(barrier) => {
                    block.came = true;
                    self.come(barrier);
                    return;
                }
                _ => self.enter(agent, meets + 1),
            }
        }
    }

    fn come(&mut self, barrier: u32) {
        let agents = &self.runs.program.meetings[barrier as usize].agents;
        self.state.come[barrier as usize] += 1;
        if (self.state.come[barrier as usize] as usize) < agents.len() {
            return;
        }
        self.state.come[barrier as usize] = 0;
        for &(agent, _) in agents {
            let next = self.state.blocks[agent as usize].meets + 1;
            self.enter(agent, next);
        }
    }

    fn done(&mut self, agent: u32, item: &mut Item) -> bool {
        match &mut item.left {
            Left::Takes(left) => {
                left.retain(|&counter| !self.take(agent, item.step, counter));
                left.is_empty()
            }
            Left::Pieces(pieces) => {
                pieces.retain(|&piece| !self.moved(item.step, piece));
                pieces.is_empty()
            }
            Left::Cells(launch, cells) => {
                cells.iter().all(|&cell| self.state.written[cell as usize] >= *launch)
            }
            Left::Flush(port, pushed) => self.state.ports[*port as usize].done >= *pushed,
        }
    }

    fn drain(&mut self, port: u32) {
        while let Some(mut entry) = self.state.ports[port as usize].queue.pop_front() {
            entry.early.drain(..).for_each(|counter| self.add(counter));
            entry.pieces.retain(|&piece| !self.moved(entry.step, piece));
            if !entry.pieces.is_empty() {
                self.state.ports[port as usize].queue.push_front(entry);
                return;
            }
            entry.late.iter().for_each(|&counter| self.add(counter));
            self.state.ports[port as usize].done += 1;
        }
    }

    /// Moves a piece, if it can begin and is not held.
    fn moved(&mut self, step: u32, (at, piece): Piece) -> bool {
        let program = self.runs.program;
        let each = &program.moves[at as usize];
        let awaits = each.awaits && !self.stalled.passes_packets;
        let mut awaited = program.sources(each).iter().filter(|source| awaits && source.view.packets());
        let there = awaited.all(|source| self.state.written[(source.cell + piece) as usize] >= each.launch);
        let number = each.first_piece + piece;
        let mut held = false;
        for (at, _) in self.stalled.pieces.iter().enumerate().filter(|&(_, stalled)| *stalled == Some(number))
        {
            self.state.begun[at] |= there || self.stalled.polls[at];
            held = true;
        }
        if held || !there {
            return false;
        }
        if let Some((packets, from, to)) = self.stalled.cell {
            for dest in program.dests(each).iter().map(|dest| dest.cell + piece) {
                if dest == packets {
                    self.state.content = Content::Packets;
                } else if (from..to).contains(&dest) {
                    self.state.content = Content::Data(step);
                }
            }
        }
        for dest in program.dests(each).iter().filter(|dest| dest.view.packets()) {
            let cell = dest.cell + piece;
            let written = &mut self.state.written[cell as usize];
            if *written < each.launch {
                *written = each.launch;
                let readers = self.runs.readers.get_or_init(|| readers(program));
                self.state.dirty.extend(readers.get(&cell).into_iter().flatten());
            }
        }
        if let Some(watch) = &mut self.watch {
            watch.moved(&mut self.state.holds, &self.state.served, step, (at, piece));
        }
        true
    }
}

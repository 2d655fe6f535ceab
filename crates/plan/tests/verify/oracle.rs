//! A model checker for tiny plans, written from the memory model and not from the verifier: it tries every interleaving.
//!
//! Once as one thread per block would run: operations in order, each at once; nothing may get stuck. Then as many threads
//! would: between two meetings of its threads a block has its operations begin in any order, and each is under way for a
//! while; no two that conflict may be under way together, and none may touch a caller's buffers when their rank has ended.
//! What ports were given goes on behind the block's back, in order.
//!
//! Chunks are a few units long, a unit being the alignment, and everything is told for each unit of each buffer (a *cell*):
//! which inputs it holds, and, if there are relaxed signals, which blocks have been told of the last write. A block may
//! touch only what it has been told of. In device memory packets tell of nothing but themselves.
//!
//! Packets and plain data of scratch may share bytes, and then end each other. Plain data may equal any flag: nobody may
//! look for packets where they lie, be they of this launch or of the one before.
//!
//! Launches back to back are one plan: behind each, a rank's blocks and ports come to an end, one of its blocks touches the rank's tensors,
//! and all go on. Packets are those of a launch, and others in their place are not taken for them.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Range;

use antiphon_plan::verify::{Expected, Memory, Source};
use antiphon_plan::{
    Access, Block, BufferType, ChannelIndex, ChannelType, GroupShare, Mode, Notify, NotifyKind, OpKind,
    Pipeline, Plan, Put, PutKind, Rank, ReduceOp, Wiring,
};

/// What can go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bad {
    Deadlock,
    Race,
    Late,
    Unbalanced,
    Unwritten,
    Wrong,
    /// Plain data taken for packets: they may equal the flag.
    Mistaken,
}

/// More states than these are not tried.
const STATES: usize = 300_000;

/// Cells, as bits.
type Mask = u128;

/// The place of what inputs a cell holds among all that any holds.
type Value = u32;
const NOTHING: Value = 0;

#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    /// For each block, the phase's first operation.
    from: Vec<usize>,
    /// For each block, what operations of the phase are: 0 to do, 1 under way, 2 done. Those that take from several counters
    /// have from there on, as bits, from which they have.
    phase: Vec<Vec<u8>>,
    counts: Vec<i64>,
    /// For each block, what its ports have to do.
    ports: Vec<VecDeque<Pushed>>,
    /// What each cell holds.
    holds: Vec<Value>,
    /// For each cell, the launch that wrote packets there.
    launches: Vec<u8>,
    /// Where plain data lie in place of packets, perhaps of the launch before.
    spoilt: Mask,
    /// What each block has been told; empty if there is nothing relaxed.
    told: Told,
}

/// What a block gave one of its ports.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Pushed {
    port: u32,
    op: usize,
    under_way: bool,
    /// What the block had been told.
    told: Mask,
}

/// The cells whose last write each block has been told of.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
struct Told {
    /// For each block, when its threads met last.
    blocks: Vec<Mask>,
    /// What comes to that when they meet next.
    news: Vec<Mask>,
    /// Each port of each block.
    ports: Vec<Vec<Mask>>,
    /// For each counter, what those tell that have been added and not taken: to all, and to who takes them relaxed.
    signals: Vec<VecDeque<[Mask; 2]>>,
    /// For each block, when its rank began the launch behind another.
    begun: Vec<Mask>,
    /// For each cell of packets, what its writer had been told.
    packets: Vec<Mask>,
}

impl Told {
    fn all(&mut self) -> impl Iterator<Item = &mut Mask> {
        let Told { blocks, news, ports, signals, begun, packets } = self;
        let many = ports.iter_mut().flatten().chain(signals.iter_mut().flatten().flatten());
        blocks.iter_mut().chain(news).chain(packets).chain(begun).chain(many)
    }
}

/// What an item is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Operation,
    /// All blocks and ports of the rank end.
    End,
    /// The rank's caller accesses its tensors.
    Touch,
}

/// An operation in one turn.
struct Item<'a> {
    role: Role,
    /// From 1.
    launch: u8,
    kind: &'a OpKind,
    /// Unit by unit, from which cells to which.
    pieces: Vec<(Vec<usize>, Vec<usize>)>,
    reads: Mask,
    writes: Mask,
    /// The same and what shares bytes with it.
    bytes: [Mask; 2],
}

/// A cell: rank, buffer, whether it is for packets, and unit.
type Cell = (Rank, BufferType, bool, u64);

pub struct Oracle<'a> {
    plan: &'a Plan,
    blocks: Vec<Block<'a>>,
    items: Vec<Vec<Item<'a>>>,
    cells: Vec<Cell>,
    /// For each cell, those of the other kind that share bytes with it.
    shared: Vec<Mask>,
    wiring: Wiring,
    /// The cells whose inputs are prescribed, with these inputs.
    expected: Vec<(usize, Vec<usize>)>,
    values: RefCell<Vec<Vec<usize>>>,
    /// Whether blocks have many threads.
    many: bool,
    /// Whether it matters what blocks have been told.
    relaxed: bool,
    memory: Memory,
}

/// What can go wrong with a plan at chunks of some units, of which the outputs must hold this, if anything can; `Err` if it
/// has too many states.
pub fn judge_at(plan: &Plan, units: u64, expected: &[Expected], memory: Memory) -> Result<Option<Bad>, ()> {
    let mut spoilt = 0;
    // What a launch leaves in place of packets, the next one finds.
    for launch in 0..2 {
        for many in [false, true] {
            if (launch == 0 || spoilt != 0)
                && let bad @ Some(_) =
                    Oracle::new(plan, units, expected, many, memory).explore(&mut spoilt)?.0
            {
                return Ok(bad);
            }
        }
    }
    Ok(None)
}

/// What can go wrong if the plan is launched that often back to back; `Err` if there are too many states.
pub fn judge_launches(
    plan: &Plan,
    units: u64,
    expected: &[Expected],
    memory: Memory,
    launches: u8,
) -> Result<Option<Bad>, ()> {
    let oracle = Oracle::of_launches(plan, units, expected, true, memory, launches);
    Ok(oracle.explore(&mut 0)?.0)
}

/// What the outputs hold at the end of some run, chunk by chunk, where they hold the same everywhere in a chunk.
pub fn outputs(plan: &Plan) -> Option<Vec<Expected>> {
    let oracle = Oracle::new(plan, 1, &[], false, Memory::Host);
    let Ok((None, Some(end))) = oracle.explore(&mut 0) else { return None };
    let values = oracle.values.borrow();
    let row = |(cell, &(rank, buffer, packets, index)): (usize, &Cell)| {
        let value = &values[end.holds[cell] as usize];
        let from =
            value.iter().map(|&cell| Source { rank: oracle.cells[cell].0, index: oracle.cells[cell].3 });
        let from: Vec<_> = from.collect();
        let is_output = !packets && buffer == home(plan, BufferType::Output);
        (is_output && !from.is_empty()).then_some(Expected {
            rank,
            index,
            size: 1,
            from,
            op: reduction(plan),
        })
    };
    Some(oracle.cells.iter().enumerate().filter_map(row).collect())
}

/// In place, of an all-reduce or what has no name, input and output are the same.
fn home(plan: &Plan, buffer: BufferType) -> BufferType {
    match buffer {
        BufferType::Output if plan.inplace => BufferType::Input,
        buffer => buffer,
    }
}

/// Plans have one reduction.
fn reduction(plan: &Plan) -> ReduceOp {
    let ops = plan.gpus.iter().flat_map(|gpu| &gpu.threadblocks).flat_map(|block| &block.ops);
    let mut found = ops.filter_map(|op| match &op.kind {
        OpKind::Reduce(reduce) => Some(reduce.op),
        _ => None,
    });
    found.next().unwrap_or(ReduceOp::Sum)
}

/// The units of one thread block of a group, if there is a group, and of these the units of one turn, if there are turns.
fn units(all: Range<u64>, group: Option<GroupShare>, turn: Option<(u64, u64)>) -> Range<u64> {
    let mut own = all.clone();
    if let Some(GroupShare { tb_id, tbg_size }) = group {
        // The first gets the first unit, and so on in turns; then each takes as many in one piece.
        let len = |block: u32| all.clone().skip(block as usize).step_by(tbg_size as usize).count() as u64;
        let before: u64 = (0..tb_id).map(len).sum();
        own = all.start + before..all.start + before + len(tb_id);
    }
    match turn {
        Some((turn, unit)) => {
            let at = |turn: u64| (own.start + turn * unit).min(own.end);
            at(turn)..at(turn + 1)
        }
        None => own,
    }
}

/// From a cell of packets to the one in the other half of the scratch; of plain data it is twice as far.
const HALF: u64 = 1 << 32;

impl<'a> Oracle<'a> {
    fn new(plan: &'a Plan, chunk: u64, expected: &[Expected], many: bool, memory: Memory) -> Self {
        Self::of_launches(plan, chunk, expected, many, memory, 1)
    }

    fn of_launches(
        plan: &'a Plan,
        chunk: u64,
        expected: &[Expected],
        many: bool,
        memory: Memory,
        launches: u8,
    ) -> Self {
        let mut cells = Vec::new();
        let mut numbers: HashMap<Cell, usize> = HashMap::new();
        let mut number = |cell: Cell| {
            *numbers.entry(cell).or_insert_with(|| {
                cells.push(cell);
                cells.len() - 1
            })
        };
        let expected = expected.iter().flat_map(|row| (0..row.size * chunk).map(move |unit| (row, unit)));
        let expected: Vec<_> = expected
            .map(|(row, unit)| {
                let to = (row.rank, home(plan, BufferType::Output), false, row.index * chunk + unit);
                let from = row
                    .from
                    .iter()
                    .map(|from| (from.rank, BufferType::Input, false, from.index * chunk + unit));
                let mut from: Vec<_> = from.map(&mut number).collect();
                from.sort_unstable();
                (number(to), from)
            })
            .collect();
        for gpu in &plan.gpus {
            for unit in 0..gpu.input_chunks * chunk {
                number((gpu.id, BufferType::Input, false, unit));
            }
        }
        let blocks: Vec<_> = Block::all(plan).collect();
        let items = blocks.iter().map(|block| {
            let mut items = Vec::new();
            for launch in 1..=launches {
                if launch > 1 {
                    let end = (Role::End, launch, &OpKind::Nop, Vec::new());
                    items.push(end.clone());
                    if block.id().index() == 0 {
                        let pieces = touched(plan, block, chunk, &mut number);
                        items.push((Role::Touch, launch, &OpKind::Nop, pieces));
                    }
                    items.push(end);
                }
                // Launches take turns between the halves of the scratch.
                let mut number = |(rank, buffer, packets, unit): Cell| {
                    let is_other = plan.use_double_scratch_buffer && launch % 2 == 0;
                    let half = if packets { HALF } else { 2 * HALF };
                    let other = if is_other && buffer == BufferType::Scratch { half } else { 0 };
                    number((rank, buffer, packets, unit + other))
                };
                for op in &block.get().ops {
                    let OpKind::Pipeline(Pipeline { unit_size, num_chunks, ops }) = &op.kind else {
                        let (kind, pieces) = pieces(plan, block, &op.kind, chunk, None, &mut number);
                        items.push((Role::Operation, launch, kind, pieces));
                        continue;
                    };
                    let unit = unit_size / plan.buffer_alignment;
                    for turn in (0..num_chunks * chunk).step_by(unit as usize).map(|at| at / unit) {
                        let turn = Some((turn, unit));
                        items.extend(ops.iter().map(|op| {
                            let (kind, pieces) = pieces(plan, block, &op.kind, chunk, turn, &mut number);
                            (Role::Operation, launch, kind, pieces)
                        }));
                    }
                }
            }
            items
        });
        let items: Vec<Vec<_>> = items.collect();
        let shared: Vec<Mask> = cells.iter().map(|cell| sharing(&cells, cell)).collect();
        let of = |(role, launch, kind, pieces)| Item { role, launch, ..Item::of(kind, pieces, &shared) };
        let mut items: Vec<Vec<Item<'_>>> =
            items.into_iter().map(|items| items.into_iter().map(of).collect()).collect();
        if many {
            // Each packet by itself: it is read once it is there, whatever the others do.
            let packets = |item: &Item<'_>| {
                let port = matches!(item.kind, OpKind::Put(Put { channel_type: ChannelType::Port, .. }));
                !port && item.pieces.iter().any(|(from, to)| from.iter().chain(to).any(|&cell| cells[cell].2))
            };
            let split = |item: Item<'a>| match packets(&item) {
                true => {
                    let Item { launch, kind, .. } = item;
                    let alone = |piece| Item { launch, ..Item::of(kind, vec![piece], &shared) };
                    item.pieces.into_iter().map(alone).collect()
                }
                false => vec![item],
            };
            items = items.into_iter().map(|items| items.into_iter().flat_map(split).collect()).collect();
        }
        let relaxed = |item: &Item<'_>| matches!(item.kind, OpKind::Notify(Notify { relaxed: true, .. }));
        let packets = memory == Memory::Device && cells.iter().any(|cell| cell.2);
        let relaxed = many && (packets || items.iter().flatten().any(relaxed));
        assert!(cells.len() <= Mask::BITS as usize);
        let values = RefCell::new(vec![Vec::new()]);
        let wiring = Wiring::new(plan);
        Oracle { plan, blocks, items, cells, shared, wiring, expected, values, many, relaxed, memory }
    }

    /// What is wrong with some run, if anything is with any, and the end of a run. `spoilt` is what runs before left in
    /// place of packets, and then these too.
    fn explore(&self, spoilt: &mut Mask) -> Result<(Option<Bad>, Option<State>), ()> {
        let start = State { spoilt: *spoilt, ..self.start() };
        let mut seen = HashSet::from([start.clone()]);
        let mut todo = vec![start.clone()];
        let mut end = None;
        while let Some(state) = todo.pop() {
            if let Some(bad) = self.bad(&state) {
                return Ok((Some(bad), end));
            }
            let next = match self.next(&state) {
                Ok(next) => next,
                Err(bad) => return Ok((Some(bad), end)),
            };
            if next.is_empty() {
                if let Some(bad) = self.bad_end(&state, &start) {
                    return Ok((Some(bad), end));
                }
                *spoilt |= state.spoilt;
                end = Some(state);
            }
            for state in next {
                if seen.insert(state.clone()) {
                    todo.push(state);
                }
            }
            if seen.len() > STATES {
                return Err(());
            }
        }
        Ok((None, end))
    }

    fn bad_end(&self, state: &State, start: &State) -> Option<Bad> {
        if (0..self.blocks.len()).any(|block| !self.ended(state, block)) {
            return Some(Bad::Deadlock);
        }
        if state.counts != start.counts {
            return Some(Bad::Unbalanced);
        }
        if self.relaxed {
            for gpu in &self.plan.gpus {
                let of = (0..self.blocks.len()).filter(|&block| self.blocks[block].rank() == gpu.id);
                let Told { blocks, news, ports, .. } = &state.told;
                let told =
                    of.flat_map(|block| ports[block].iter().copied().chain([blocks[block], news[block]]));
                let told = told.fold(0, |all, each| all | each);
                let callers = |&(rank, buffer, packets, _): &Cell| {
                    rank == gpu.id && buffer != BufferType::Scratch && !packets
                };
                if self.cells.iter().enumerate().any(|(cell, of)| callers(of) && told & 1 << cell == 0) {
                    return Some(Bad::Late);
                }
            }
        }
        let last = self.items.iter().flatten().map(|item| item.launch).max().unwrap_or(1);
        self.expected.iter().any(|row| self.wrong(state, row, last)).then_some(Bad::Wrong)
    }

    /// Whether a cell does not hold what it should behind a launch.
    fn wrong(&self, state: &State, (cell, from): &(usize, Vec<usize>), launch: u8) -> bool {
        let values = self.values.borrow();
        let expected = from.iter().map(|&from| given(from, launch));
        !values[state.holds[*cell] as usize].iter().copied().eq(expected)
    }

    fn value(&self, inputs: Vec<usize>) -> Value {
        let mut values = self.values.borrow_mut();
        let known = values.iter().position(|value| *value == inputs);
        known.unwrap_or_else(|| {
            values.push(inputs);
            values.len() - 1
        }) as Value
    }

    fn start(&self) -> State {
        let mut counts = Vec::new();
        for gpu in &self.plan.gpus {
            counts.extend(gpu.peers(ChannelType::Memory).iter().map(|_| 0));
            counts.extend(gpu.peers(ChannelType::Port).iter().map(|_| 0));
            counts.extend(gpu.semaphores.iter().map(|semaphore| semaphore.init_value));
        }
        let blocks = self.blocks.len();
        let holds = (0..self.cells.len()).map(|cell| self.start_value(cell)).collect();
        let told = match self.relaxed {
            true => Told {
                blocks: vec![Mask::MAX; blocks],
                news: vec![0; blocks],
                ports: self
                    .blocks
                    .iter()
                    .map(|block| vec![0; block.gpu().peers(ChannelType::Port).len()])
                    .collect(),
                signals: counts.iter().map(|&count| (0..count).map(|_| [0; 2]).collect()).collect(),
                begun: vec![0; blocks],
                packets: vec![0; self.cells.len()],
            },
            false => Told::default(),
        };
        State {
            from: vec![0; blocks],
            phase: (0..blocks).map(|block| vec![0; self.phase_len(block, 0)]).collect(),
            counts,
            ports: vec![VecDeque::new(); blocks],
            holds,
            launches: vec![0; self.cells.len()],
            spoilt: 0,
            told,
        }
    }

    fn start_value(&self, cell: usize) -> Value {
        let (rank, buffer, packets, unit) = self.cells[cell];
        match buffer == BufferType::Input && !packets && unit < self.input_units(rank) {
            true => self.value(vec![cell]),
            false => NOTHING,
        }
    }

    fn input_units(&self, rank: Rank) -> u64 {
        let inputs =
            self.cells.iter().filter(|cell| cell.0 == rank && cell.1 == BufferType::Input && !cell.2);
        inputs.map(|cell| cell.3 + 1).max().unwrap_or(0)
    }

    fn ops(&self, block: usize) -> impl Iterator<Item = &OpKind> {
        self.items[block].iter().map(|item| item.kind)
    }

    /// How many operations stand before the next meeting; alone, one.
    fn phase_len(&self, block: usize, from: usize) -> usize {
        let meets = |item: &&Item<'_>| {
            item.role == Role::End
                || item.role == Role::Operation && matches!(item.kind, OpKind::Nop | OpKind::Barrier { .. })
        };
        self.items[block].iter().skip(from).take_while(|item| !meets(item)).count()
    }

    fn ended(&self, state: &State, block: usize) -> bool {
        let all = self.ops(block).count();
        let done = state.phase[block].iter().all(|&op| op == 2);
        state.from[block] + state.phase[block].len() == all && done && state.ports[block].is_empty()
    }

    /// Everything under way: the block and its operation.
    fn under_way(&self, state: &State) -> Vec<(usize, usize)> {
        let mut all = Vec::new();
        for block in 0..self.blocks.len() {
            let phase = state.phase[block].iter().enumerate().filter(|(_, op)| **op == 1);
            all.extend(phase.map(|(at, _)| (block, state.from[block] + at)));
            let ports = state.ports[block].iter().filter(|pushed| pushed.under_way);
            all.extend(ports.map(|pushed| (block, pushed.op)));
        }
        all
    }

    fn bad(&self, state: &State) -> Option<Bad> {
        let under_way = self.under_way(state);
        for (at, &(block, op)) in under_way.iter().enumerate() {
            let item = &self.items[block][op];
            for &(rank, buffer, ..) in self.of(item.reads | item.writes) {
                let own = rank == self.blocks[block].rank();
                if !own && buffer != BufferType::Scratch && self.rank_ended(state, rank) {
                    return Some(Bad::Late);
                }
            }
            // A move reads a byte before it writes it, but not as something else.
            let [reads, writes] = [item.bytes[0] & !item.reads, item.bytes[1] & !item.writes];
            if item.writes & (reads | writes) | item.reads & writes != 0 {
                return Some(Bad::Race);
            }
            if under_way[..at].iter().any(|&(block, op)| conflict(item, &self.items[block][op])) {
                return Some(Bad::Race);
            }
        }
        None
    }

    fn of(&self, mask: Mask) -> impl Iterator<Item = &Cell> {
        self.cells.iter().enumerate().filter(move |(cell, _)| mask & 1 << cell != 0).map(|(_, cell)| cell)
    }

    fn rank_ended(&self, state: &State, rank: Rank) -> bool {
        (0..self.blocks.len())
            .filter(|&block| self.blocks[block].rank() == rank)
            .all(|block| self.ended(state, block))
    }

    /// All states that one step leads to.
    fn next(&self, state: &State) -> Result<Vec<State>, Bad> {
        let mut next = Vec::new();
        for block in 0..self.blocks.len() {
            for at in 0..state.phase[block].len() {
                next.extend(self.step(state, block, at)?);
            }
            self.meet(state, block, &mut next);
            self.drain(state, block, &mut next)?;
        }
        Ok(next)
    }

    /// An operation begins, or ends.
    fn step(&self, state: &State, block: usize, at: usize) -> Result<Vec<State>, Bad> {
        let mut after = state.clone();
        let op = state.from[block] + at;
        let kind = self.items[block][op].kind;
        match state.phase[block][at] {
            1 => {
                after.phase[block][at] = 2;
                self.write(&mut after, block, op, None);
                return Ok(vec![after]);
            }
            2 => return Ok(Vec::new()),
            _ => {}
        }
        if !self.many && state.phase[block][..at].iter().any(|&op| op != 2) {
            return Ok(Vec::new());
        }
        after.phase[block][at] = 2;
        if self.items[block][op].role == Role::Touch {
            after.phase[block][at] = 1;
            self.touch(state, block, op)?;
            return Ok(vec![after]);
        }
        match kind {
            OpKind::Notify(notify) if notify.kind == NotifyKind::Flush => {
                let done = state.ports[block].iter().all(|pushed| {
                    pushed.op > op || notify.channels.iter().all(|index| index.0 != pushed.port)
                });
                // In order with what is pushed before and after.
                if !done || !self.pushes_before_begun(state, block, at) {
                    return Ok(Vec::new());
                }
                if self.relaxed {
                    for &index in &notify.channels {
                        after.told.news[block] |= state.told.ports[block][index.index()];
                    }
                }
            }
            OpKind::Notify(notify) if notify.kind == NotifyKind::Signal => {
                for &index in &notify.channels {
                    if notify.channel_type == ChannelType::Port {
                        if !self.pushes_before_begun(state, block, at) {
                            return Ok(Vec::new());
                        }
                        after.ports[block].push_back(self.pushed(state, block, index, op));
                    } else {
                        let told =
                            if notify.relaxed { self.begun(state, block) } else { self.told(state, block) };
                        let counter = self.peers_count(block, notify.channel_type, index);
                        self.add(&mut after, counter, [told, self.begun(state, block)]);
                    }
                }
            }
            OpKind::Notify(notify) => {
                let of = notify.channel_type;
                let counter = |&index: &ChannelIndex| {
                    let channel = self.blocks[block].channel(of, index);
                    self.count(self.blocks[block].rank(), of, channel.index())
                };
                let counters: Vec<_> = notify.channels.iter().map(counter).collect();
                let relaxed = notify.relaxed && of != ChannelType::Port;
                return Ok(self.takes(state, [block, at], &counters, relaxed));
            }
            OpKind::Semaphore(op) => {
                let gpu = self.blocks[block].gpu();
                let first = self.count(gpu.id, ChannelType::Port, gpu.peers(ChannelType::Port).len());
                let counters: Vec<_> = op.semaphores.iter().map(|id| first + id.index()).collect();
                if op.acquire {
                    return Ok(self.takes(state, [block, at], &counters, false));
                }
                for counter in counters {
                    self.add(&mut after, counter, [self.told(state, block), 0]);
                }
            }
            OpKind::Put(put) if put.channel_type == ChannelType::Port => {
                if !self.pushes_before_begun(state, block, at) {
                    return Ok(Vec::new());
                }
                let [index] = put.channels[..] else { panic!("one channel") };
                after.ports[block].push_back(self.pushed(state, block, index, op));
            }
            _ => {
                let item = &self.items[block][op];
                if item.reads & state.spoilt != 0 {
                    return Err(Bad::Mistaken);
                }
                let absent = |cell: &usize| {
                    let is_other = state.launches[*cell] != item.launch;
                    self.cells[*cell].2 && (is_other || state.holds[*cell] == NOTHING)
                };
                if item.pieces.iter().any(|(from, _)| from.iter().any(absent)) {
                    return Ok(Vec::new());
                }
                self.read(state, block, op, None)?;
                after.phase[block][at] = 1;
            }
        }
        Ok(vec![after])
    }

    /// An operation takes one of what it takes, in any order: whatever is there.
    fn takes(&self, state: &State, [block, at]: [usize; 2], counters: &[usize], relaxed: bool) -> Vec<State> {
        let taken = state.phase[block][at] >> 2;
        let open = (0..counters.len()).filter(|link| taken & 1 << link == 0);
        let take = |link: usize| {
            let mut after = state.clone();
            let all = taken | 1 << link;
            after.phase[block][at] = if all.count_ones() as usize == counters.len() { 2 } else { all << 2 };
            self.take(&mut after, counters[link], block, relaxed).then_some(after)
        };
        open.filter_map(take).collect()
    }

    /// What a block gives its ports is in order.
    fn pushes_before_begun(&self, state: &State, block: usize, at: usize) -> bool {
        (0..at).all(|before| {
            let pushes = match self.ops(block).nth(state.from[block] + before) {
                Some(OpKind::Put(Put { channel_type: ChannelType::Port, .. })) => true,
                Some(OpKind::Notify(notify)) => {
                    notify.kind == NotifyKind::Signal && notify.channel_type == ChannelType::Port
                }
                _ => false,
            };
            !pushes || state.phase[block][before] != 0
        })
    }

    /// The head of a port's queue begins, or ends.
    fn drain(&self, state: &State, block: usize, next: &mut Vec<State>) -> Result<(), Bad> {
        let mut heads = HashSet::new();
        for at in 0..state.ports[block].len() {
            let pushed = &state.ports[block][at];
            let (port, op) = (pushed.port, pushed.op);
            if !heads.insert(port) {
                continue;
            }
            let mut after = state.clone();
            let index = ChannelIndex(port);
            let kind = self.items[block][op].kind;
            if matches!(kind, OpKind::Put(_)) && !pushed.under_way {
                self.read(state, block, op, Some(pushed))?;
                after.ports[block][at].under_way = true;
                next.push(after);
                continue;
            }
            after.ports[block].remove(at);
            if self.relaxed {
                after.told.ports[block][index.index()] |= pushed.told;
            }
            let signals = match kind {
                OpKind::Put(put) => {
                    self.write(&mut after, block, op, Some(pushed));
                    put.kind != PutKind::Plain && put.kind != PutKind::Packets
                }
                _ => true,
            };
            if signals {
                let told = if self.relaxed { after.told.ports[block][index.index()] } else { 0 };
                self.add(&mut after, self.peers_count(block, ChannelType::Port, index), [told; 2]);
            }
            next.push(after);
        }
        Ok(())
    }

    /// The block's threads meet, if all of the phase is done; at a barrier, those of all its blocks.
    fn meet(&self, state: &State, block: usize, next: &mut Vec<State>) {
        let at = |block: usize| {
            let done = state.phase[block].iter().enumerate().all(|(at, &op)| {
                let id = state.from[block] + at;
                // A push with a flush is done when the port has done it.
                let flushes = matches!(
                    self.ops(block).nth(id),
                    Some(OpKind::Put(Put { kind: PutKind::WithSignalAndFlush, .. }))
                );
                op == 2 && !(flushes && state.ports[block].iter().any(|pushed| pushed.op == id))
            });
            done.then(|| self.ops(block).nth(state.from[block] + state.phase[block].len())).flatten()
        };
        // Where a launch ends, ports have done everything.
        let ends = |block: usize| {
            let next = self.items[block].get(state.from[block] + state.phase[block].len());
            next.is_some_and(|item| item.role == Role::End)
                && at(block).is_some()
                && state.ports[block].is_empty()
        };
        let is_end = ends(block);
        let all: Vec<usize> = match at(block) {
            Some(OpKind::Nop)
                if self.items[block][state.from[block] + state.phase[block].len()].role == Role::End =>
            {
                let of_rank = |&other: &usize| self.blocks[other].rank() == self.blocks[block].rank();
                let all: Vec<_> = (0..self.blocks.len()).filter(of_rank).collect();
                match all[0] == block && all.iter().all(|&block| ends(block)) {
                    true => all,
                    false => return,
                }
            }
            Some(OpKind::Nop) => vec![block],
            Some(&OpKind::Barrier { barrier, num_threadblocks }) => {
                let same = |other: &usize| {
                    let of = |block: usize| self.blocks[block].rank();
                    of(*other) == of(block)
                        && matches!(at(*other), Some(&OpKind::Barrier { barrier: id, .. }) if id == barrier)
                };
                let all: Vec<_> = (0..self.blocks.len()).filter(same).collect();
                match all.len() == num_threadblocks as usize && all[0] == block {
                    true => all,
                    false => return,
                }
            }
            _ => return,
        };
        let mut after = state.clone();
        if self.relaxed {
            let of_ports = |block: usize| match is_end {
                true => state.told.ports[block].iter().fold(0, |all, each| all | each),
                false => 0,
            };
            let told =
                all.iter().fold(0, |told, &block| told | self.at_meeting(state, block) | of_ports(block));
            for &block in &all {
                after.told.blocks[block] = told;
                after.told.news[block] = 0;
                if is_end {
                    after.told.begun[block] = told;
                }
            }
        }
        for block in all {
            after.from[block] += state.phase[block].len() + 1;
            after.phase[block] = vec![0; self.phase_len(block, after.from[block])];
        }
        next.push(after);
    }

    /// What a block knows whose threads meet.
    fn at_meeting(&self, state: &State, block: usize) -> Mask {
        let (told, first) = (&state.told, state.from[block]);
        let flushed = (first..first + state.phase[block].len()).map(|op| match self.items[block][op].kind {
            OpKind::Put(put) if put.kind == PutKind::WithSignalAndFlush => {
                told.ports[block][put.channels[0].index()]
            }
            _ => 0,
        });
        flushed.fold(told.blocks[block] | told.news[block], |all, each| all | each)
    }

    fn told(&self, state: &State, block: usize) -> Mask {
        state.told.blocks.get(block).copied().unwrap_or_default()
    }

    fn begun(&self, state: &State, block: usize) -> Mask {
        state.told.begun.get(block).copied().unwrap_or_default()
    }

    fn pushed(&self, state: &State, block: usize, port: ChannelIndex, op: usize) -> Pushed {
        Pushed { port: port.0, op, under_way: false, told: self.told(state, block) }
    }

    fn add(&self, after: &mut State, counter: usize, told: [Mask; 2]) {
        after.counts[counter] += 1;
        if self.relaxed {
            after.told.signals[counter].push_back(told);
        }
    }

    fn take(&self, after: &mut State, counter: usize, block: usize, relaxed: bool) -> bool {
        after.counts[counter] -= 1;
        if after.counts[counter] < 0 {
            return false;
        }
        if self.relaxed {
            let told = after.told.signals[counter].pop_front().expect("as many as are counted");
            after.told.news[block] |= told[usize::from(relaxed)];
        }
        true
    }

    /// What is known of a piece: by a block or its port, and by the writer of the packets in it.
    fn known(&self, state: &State, block: usize, from: &[usize], pushed: Option<&Pushed>) -> Mask {
        let who = match pushed {
            Some(pushed) => pushed.told | state.told.ports[block][pushed.port as usize],
            None => state.told.blocks[block],
        };
        from.iter().fold(who, |told, &cell| told | state.told.packets[cell])
    }

    fn read(&self, state: &State, block: usize, op: usize, pushed: Option<&Pushed>) -> Result<(), Bad> {
        for (from, to) in &self.items[block][op].pieces {
            if self.relaxed {
                let known = self.known(state, block, from, pushed);
                let plain = from.iter().filter(|&&cell| !self.cells[cell].2);
                let unknown = |&cell: &usize| (1 << cell | self.shared[cell]) & !known != 0;
                if plain.chain(to).any(unknown) {
                    return Err(Bad::Race);
                }
            }
            if from.iter().any(|&cell| state.holds[cell] == NOTHING) {
                return Err(Bad::Unwritten);
            }
        }
        Ok(())
    }

    /// The caller has the outputs of the launch before.
    fn touch(&self, state: &State, block: usize, op: usize) -> Result<(), Bad> {
        let item = &self.items[block][op];
        if self.relaxed && (item.reads | item.writes) & !state.told.blocks[block] != 0 {
            return Err(Bad::Late);
        }
        let own = |row: &&(usize, Vec<usize>)| self.cells[row.0].0 == self.blocks[block].rank();
        let wrong = self.expected.iter().filter(own).any(|row| self.wrong(state, row, item.launch - 1));
        if wrong { Err(Bad::Wrong) } else { Ok(()) }
    }

    /// It has overwritten them, and the inputs.
    fn touched(&self, after: &mut State, block: usize, op: usize) {
        let item = &self.items[block][op];
        if self.relaxed {
            after.told.all().for_each(|told| *told &= !item.writes);
            after.ports.iter_mut().flatten().for_each(|pushed| pushed.told &= !item.writes);
            after.told.news[block] |= item.writes;
        }
        for cell in (0..self.cells.len()).filter(|cell| item.writes & 1 << cell != 0) {
            let is_input = self.start_value(cell) != NOTHING;
            after.holds[cell] = if is_input { self.value(vec![given(cell, item.launch)]) } else { NOTHING };
        }
    }

    /// What an operation wrote is there, and its block or port knows.
    fn write(&self, after: &mut State, block: usize, op: usize, pushed: Option<&Pushed>) {
        let item = &self.items[block][op];
        if item.role == Role::Touch {
            return self.touched(after, block, op);
        }
        for (from, to) in &item.pieces {
            let mut inputs = Vec::new();
            for &cell in from {
                inputs.extend_from_slice(&self.values.borrow()[after.holds[cell] as usize]);
            }
            inputs.sort_unstable();
            if reduction(self.plan) != ReduceOp::Sum {
                inputs.dedup();
            }
            let value = self.value(inputs);
            let written = to.iter().fold(0, |all, &cell| all | 1 << cell | self.shared[cell]);
            if self.relaxed {
                let known = self.known(after, block, from, pushed);
                after.told.all().for_each(|told| *told &= !written);
                after.ports.iter_mut().flatten().for_each(|pushed| pushed.told &= !written);
                for &cell in to {
                    let is_first = after.launches[cell] != item.launch || after.holds[cell] == NOTHING;
                    if self.cells[cell].2 && is_first {
                        after.told.packets[cell] = match self.memory {
                            Memory::Host => known | written,
                            Memory::Device => 1 << cell | self.shared[cell],
                        };
                    }
                }
                match pushed {
                    Some(pushed) => after.told.ports[block][pushed.port as usize] |= written,
                    None => {
                        let behind = from.iter().fold(0, |told, &cell| told | after.told.packets[cell]);
                        after.told.news[block] |= written | behind;
                    }
                }
            }
            for &cell in to {
                for other in (0..self.cells.len()).filter(|other| self.shared[cell] & 1 << other != 0) {
                    after.holds[other] = NOTHING;
                }
                if self.cells[cell].2 {
                    after.spoilt &= !(1 << cell);
                } else {
                    after.spoilt |= self.shared[cell];
                }
            }
            for &cell in to {
                after.holds[cell] = value;
                after.launches[cell] = item.launch;
            }
        }
    }

    fn count(&self, rank: Rank, of: ChannelType, at: usize) -> usize {
        let before: usize = (self.plan.gpus[..rank.index()].iter())
            .map(|gpu| {
                gpu.peers(ChannelType::Memory).len()
                    + gpu.peers(ChannelType::Port).len()
                    + gpu.semaphores.len()
            })
            .sum();
        let ports = if of == ChannelType::Port {
            self.plan.gpus[rank.index()].peers(ChannelType::Memory).len()
        } else {
            0
        };
        before + ports + at
    }

    fn peers_count(&self, block: usize, of: ChannelType, index: antiphon_plan::ChannelIndex) -> usize {
        let block = &self.blocks[block];
        let peer = block.peer(of, index);
        let channel = self.wiring.counterpart(block.rank(), of, block.channel(of, index));
        self.count(peer, of, channel.expect("wired").index())
    }
}

fn conflict(one: &Item<'_>, other: &Item<'_>) -> bool {
    let [reads, writes] = other.bytes;
    one.writes & (reads | writes) | one.reads & writes != 0
}

/// Packets take twice the bytes of plain data, from twice as far.
fn sharing(cells: &[Cell], &(rank, buffer, packets, unit): &Cell) -> Mask {
    let shares = |&(_, (of, other, others, at)): &(usize, &Cell)| {
        let same = (rank, buffer, !packets) == (*of, *other, *others);
        same && buffer == BufferType::Scratch && if packets { at / 2 == unit } else { *at == unit / 2 }
    };
    cells.iter().enumerate().filter(shares).fold(0, |mask, (cell, _)| mask | 1 << cell)
}

/// What the caller gives a cell of an input for a launch.
fn given(cell: usize, launch: u8) -> usize {
    cell + usize::from(launch - 1) * Mask::BITS as usize
}

/// The units of a rank's tensors as a caller accesses them: all are written, those of the output also read.
fn touched(plan: &Plan, block: &Block<'_>, chunk: u64, number: &mut impl FnMut(Cell) -> usize) -> Pieces {
    let (gpu, mut pieces) = (block.gpu(), Pieces::new());
    for (buffer, chunks) in [(BufferType::Input, gpu.input_chunks), (BufferType::Output, gpu.output_chunks)] {
        for unit in 0..chunks * chunk {
            let cell = number((gpu.id, home(plan, buffer), false, unit));
            let from = if buffer == BufferType::Output { vec![cell] } else { Vec::new() };
            pieces.push((from, vec![cell]));
        }
    }
    pieces
}

type Pieces = Vec<(Vec<usize>, Vec<usize>)>;

/// What an operation does in one turn.
fn pieces<'a>(
    plan: &Plan,
    block: &Block<'_>,
    kind: &'a OpKind,
    chunk: u64,
    turn: Option<(u64, u64)>,
    number: &mut impl FnMut(Cell) -> usize,
) -> (&'a OpKind, Pieces) {
    let mut accesses = Vec::new();
    block.accesses(kind, |access| accesses.push(access));
    let packets = accesses.iter().any(|access| access.packets);
    let mut cells = |access: &Access| -> Vec<usize> {
        let Access { rank, buffer, chunks, packets: is_packets, group, .. } = access;
        let all = chunks.start * chunk..chunks.end * chunk;
        let units = units(all, *group, turn.filter(|_| !packets));
        units.map(|unit| number((*rank, home(plan, *buffer), *is_packets, unit))).collect()
    };
    let mut of = |mode| -> Vec<Vec<usize>> {
        accesses.iter().filter(|access| access.mode == mode).map(&mut cells).collect()
    };
    let (from, to) = (of(Mode::Read), of(Mode::Write));
    // Puts of several chunks pair them; all else combines its sources for all destinations.
    let paired = matches!(kind, OpKind::Put(_) | OpKind::Get(_)) && from.len() == to.len();
    let each = if paired { 1 } else { usize::MAX };
    let all = from.chunks(each).zip(to.chunks(each)).flat_map(|(from, to)| {
        let len = from.first().map_or(0, Vec::len);
        let at = |unit: usize, of: &[Vec<usize>]| of.iter().map(|cells| cells[unit]).collect();
        (0..len).map(|unit| (at(unit, from), at(unit, to))).collect::<Vec<_>>()
    });
    (kind, all.collect())
}

impl<'a> Item<'a> {
    fn of(kind: &'a OpKind, pieces: Pieces, shared: &[Mask]) -> Self {
        let mask = |cells: &mut dyn Iterator<Item = &usize>| cells.fold(0, |mask, cell| mask | 1 << cell);
        let reads = mask(&mut pieces.iter().flat_map(|(from, _)| from));
        let writes = mask(&mut pieces.iter().flat_map(|(_, to)| to));
        let bytes = [reads, writes].map(|cells| {
            let each = shared.iter().enumerate().filter(|(cell, _)| cells & 1 << cell != 0);
            each.fold(cells, |all, (_, shared)| all | shared)
        });
        Item { role: Role::Operation, launch: 1, kind, pieces, reads, writes, bytes }
    }
}

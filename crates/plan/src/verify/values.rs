//! The content of every cell as a set of contributions, compared with the result that the collective must have.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::rc::Rc;

use antiphon_operation::ReduceOp;

use super::cells::{Cells, buffer};
use super::expect::{Expectation, Expected};
use super::finding::{Finding, Kind, Mistake, Served};
use super::program::{Move, Program, View, What};
use super::runs::{Goal, Runs, Stalled, State, Watch};
use super::schedule::Schedule;
use crate::ids::Rank;
use crate::op::BufferType;

/// Most contributions in all values together.
const LIMIT: usize = 1 << 26;

/// The content of a cell.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Value {
    /// Never written.
    Nothing,
    /// Something made of that, which has been reported.
    Reported,
    /// The caller's data, in this cell.
    Input(u32),
    /// Data that a step wrote into the same bytes in the other form, packets or plain.
    Overwritten(u32),
    /// Several reduced, ascending; in a sum, what contributes twice counts twice.
    Reduced(ReduceOp, Rc<[u32]>, Rounding),
}

/// How a reduction came about, which its bits depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Rounding {
    /// One step reduced inputs in the order of the ranks, and rounded once.
    OnceInRankOrder,
    Otherwise,
}

/// Values by number, equal ones by the same.
struct Values {
    values: Vec<Value>,
    numbers: HashMap<Value, u32>,
    contributions: usize,
}

/// The cells of packets in which a launch leaves plain data, and the steps that wrote these.
pub(super) type Left = BTreeMap<u32, u32>;

const NOTHING: u32 = 0;
const REPORTED: u32 = 1;

impl Values {
    fn new() -> Self {
        let mut values = Values { values: Vec::new(), numbers: HashMap::new(), contributions: 0 };
        values.number(Value::Nothing);
        values.number(Value::Reported);
        values
    }

    fn number(&mut self, value: Value) -> u32 {
        let next = self.values.len() as u32;
        *self.numbers.entry(value).or_insert_with_key(|value| {
            self.values.push(value.clone());
            next
        })
    }

    fn reduced(&mut self, op: ReduceOp, parts: &[u32], rounding: Rounding) -> u32 {
        if parts.contains(&REPORTED) {
            return REPORTED;
        }
        let mut all = Vec::new();
        for &part in parts {
            match &self.values[part as usize] {
                Value::Reduced(of, parts, _) if *of == op => all.extend_from_slice(parts),
                _ => all.push(part),
            }
        }
        all.sort_unstable();
        if op != ReduceOp::Sum {
            all.dedup();
        }
        match all[..] {
            [one] => one,
            _ => {
                self.contributions += all.len();
                self.number(Value::Reduced(op, all.into(), rounding))
            }
        }
    }

    /// Whether two values have the same contributions, in whatever order they were reduced.
    fn is_same(&self, one: u32, other: u32) -> bool {
        match [one, other].map(|value| &self.values[value as usize]) {
            [Value::Reduced(op, parts, _), Value::Reduced(of, others, _)] => {
                op == of
                    && parts.len() == others.len()
                    && parts.iter().zip(&**others).all(|(&one, &other)| self.is_same(one, other))
            }
            _ => one == other,
        }
    }

    /// In words.
    fn describe(&self, cells: &Cells, value: u32) -> String {
        match &self.values[value as usize] {
            Value::Nothing => "nothing that was written".into(),
            Value::Reported => "what was never written".into(),
            Value::Overwritten(_) => "data in another form".into(),
            Value::Input(cell) => {
                let (view, bytes) = cells.place(*cell);
                let region = cells.region_of(view, bytes);
                format!("rank {}'s input (chunk {})", region.rank, region.chunks.start)
            }
            Value::Reduced(op, parts, _) => {
                let each: Vec<_> = parts.iter().map(|&part| self.describe(cells, part)).collect();
                format!("the {op} of {}", each.join(", "))
            }
        }
    }
}

/// Wrong results, and reads of what was never written. `collective` says that inputs are the caller's to keep.
///
/// # Errors
/// [`Kind::TooLarge`]
pub(super) fn check(
    program: &Program<'_>,
    cells: &Cells,
    schedule: &Schedule,
    expectation: Option<&Expectation>,
    limit: usize,
) -> Result<Checked, Kind> {
    let mut run = Run::new(program, cells, expectation, limit);
    for &(_, step) in schedule {
        if let What::Move(moves) | What::Push { moves, .. } = &program.steps[step as usize].what {
            for each in program.moves(moves) {
                (0..each.pieces).for_each(|piece| run.transfer(step, each, piece));
            }
        }
        if run.values.contributions > LIMIT {
            return Err(Kind::TooLarge { what: "contributions", limit: LIMIT as u64 });
        }
        if run.found.len() >= limit {
            return Ok(run.checked());
        }
    }
    run.results();
    Ok(run.checked())
}

/// The same in every run, and runs that do not end.
///
/// # Errors
/// [`Kind::TooLarge`]
pub(super) fn check_runs(
    program: &Program<'_>,
    cells: &Cells,
    runs: &Runs<'_, '_>,
    expectation: Option<&Expectation>,
    limit: usize,
) -> Result<Checked, Kind> {
    let mut run = Run::new(program, cells, expectation, limit);
    let stuck = match runs.find(Stalled { alone: true, ..Stalled::default() }, Goal::Deadlock)? {
        None => runs.watch(run.holds.clone(), &mut run)?,
        stuck => stuck,
    };
    if run.values.contributions > LIMIT {
        return Err(Kind::TooLarge { what: "contributions", limit: LIMIT as u64 });
    }
    if let Some(state) = stuck {
        let (places, waits) = runs.waits(&state).into_iter().unzip();
        let finding = Finding::new(program.plan, Kind::Deadlock { waits }, places);
        run.found.push(finding.in_run(state.served));
    }
    Ok(run.checked())
}

struct Run<'p, 'a> {
    program: &'p Program<'a>,
    cells: &'p Cells,
    expectation: Option<&'p Expectation>,
    limit: usize,
    values: Values,
    /// The content of each cell.
    holds: Vec<u32>,
    seen: HashSet<u32>,
    overwritten: HashSet<Rank>,
    left: Left,
    /// Whether every output is known to be rounded once, from inputs in the order of the ranks.
    in_rank_order: bool,
    found: Vec<Finding>,
}

/// What [`check`] says of a program.
pub(super) struct Checked {
    pub found: Vec<Finding>,
    pub left: Left,
    /// Whether every output is one input, or inputs that one step has reduced in the order of the ranks.
    pub in_rank_order: bool,
}

impl<'p, 'a> Run<'p, 'a> {
    fn new(
        program: &'p Program<'a>,
        cells: &'p Cells,
        expectation: Option<&'p Expectation>,
        limit: usize,
    ) -> Self {
        let mut values = Values::new();
        let mut holds = vec![NOTHING; cells.len()];
        for gpu in &program.plan.gpus {
            let (view, bytes) = buffer(program, gpu.id, BufferType::Input);
            for cell in cells.of(view) {
                let (_, at) = cells.place(cell);
                if bytes.start <= at.start && at.end <= bytes.end {
                    holds[cell as usize] = values.number(Value::Input(cell));
                }
            }
        }
        Run {
            program,
            cells,
            expectation,
            limit,
            values,
            holds,
            seen: HashSet::new(),
            overwritten: HashSet::new(),
            left: Left::new(),
            in_rank_order: expectation.is_some(),
            found: Vec::new(),
        }
    }

    fn checked(self) -> Checked {
        Checked { found: self.found, left: self.left, in_rank_order: self.in_rank_order }
    }

    fn transfer(&mut self, step: u32, each: &Move, piece: u32) {
        let program = self.program;
        let mut parts = Vec::new();
        for source in program.sources(each) {
            let cell = source.cell + piece;
            let value = self.holds[cell as usize];
            parts.push(match self.values.values[value as usize] {
                Value::Nothing => {
                    self.unwritten(step, cell);
                    REPORTED
                }
                Value::Overwritten(writer) => {
                    self.mistaken(step, source.view, cell, writer);
                    REPORTED
                }
                _ => value,
            });
        }
        let value = match each.combine {
            Some(op) => self.values.reduced(op, &parts, self.rounding(each, &parts)),
            None => parts[0],
        };
        for dest in program.dests(each) {
            self.holds[(dest.cell + piece) as usize] = value;
            let shared = self.cells.shared(dest.view, dest.cell + piece);
            if !shared.is_empty() {
                let overwritten = self.values.number(Value::Overwritten(step));
                self.holds[shared.start as usize..shared.end as usize].fill(overwritten);
            }
            self.overwrites(step, dest.view, dest.cell + piece);
        }
    }

    /// How a step rounds what it makes of these. Executors take the plain sources first, and then the packets.
    fn rounding(&self, each: &Move, parts: &[u32]) -> Rounding {
        let sources = self.program.sources(each).iter().zip(parts);
        let (packets, plain): (Vec<_>, Vec<_>) = sources.partition(|(source, _)| source.view.packets());
        let rank_of = |&(_, &part): &(_, &u32)| match self.values.values[part as usize] {
            Value::Input(cell) => Some(self.cells.place(cell).0.rank()),
            _ => None,
        };
        let ranks: Option<Vec<Rank>> = plain.iter().chain(&packets).map(rank_of).collect();
        match ranks {
            Some(ranks) if ranks.is_sorted_by(|one, next| one < next) => Rounding::OnceInRankOrder,
            _ => Rounding::Otherwise,
        }
    }

    /// The findings at the end of a run, and the data that it leaves in place of packets.
    fn results(&mut self) {
        for gpu in self.program.plan.gpus.iter().filter(|_| self.cells.mixed()) {
            for cell in self.cells.of(View::new(gpu.id, View::PACKETS)) {
                if let Value::Overwritten(step) = self.values.values[self.holds[cell as usize] as usize] {
                    self.left.insert(cell, step);
                }
            }
        }
        match self.expectation {
            None => {}
            Some(Expectation::Table(rows)) => {
                let limit = self.limit;
                let rows = rows.iter().filter_map(|row| self.wrong(row)).take(limit);
                let wrong: Vec<_> = rows.collect();
                self.found.extend(wrong);
            }
            Some(Expectation::SendReceive) => self.send_receive(),
        }
    }

    /// What has been found since there were `before`, if it is new, is of a run with these takes.
    fn found_in(&mut self, before: usize, served: &[Served]) {
        for finding in self.found.split_off(before) {
            if self.found.iter().all(|other| other.kind != finding.kind || other.places != finding.places) {
                self.found.push(finding.in_run(served.to_vec()));
            }
        }
    }

    fn unwritten(&mut self, step: u32, cell: u32) {
        if self.seen.insert(step) {
            self.report(Kind::Unwritten { region: self.cells.region(cell) }, step);
        }
    }

    fn mistaken(&mut self, step: u32, view: View, cell: u32, writer: u32) {
        if self.seen.insert(step) {
            let mistake = if view.packets() { Mistake::DataForPackets } else { Mistake::PacketsForData };
            let places = [step, writer].map(|step| self.program.steps[step as usize].place);
            let kind = Kind::MixedScratch { region: self.cells.region(cell), mistake };
            self.found.push(Finding::new(self.program.plan, kind, places.to_vec()));
        }
    }

    fn overwrites(&mut self, step: u32, view: View, cell: u32) {
        let plan = self.program.plan;
        let keeps = !plan.inplace && !matches!(plan.collective.as_str(), "test" | "custom");
        if keeps && view.kind() == View::INPUT && self.overwritten.insert(view.rank()) {
            self.report(Kind::InputOverwritten { region: self.cells.region(cell) }, step);
        }
    }

    fn report(&mut self, kind: Kind, step: u32) {
        let place = self.program.steps[step as usize].place;
        self.found.push(Finding::new(self.program.plan, kind, vec![place]));
    }

    fn bytes(&self, rank: Rank, of: BufferType, index: u64, size: u64) -> (View, Range<u64>) {
        let (view, whole) = buffer(self.program, rank, of);
        let start = whole.start + index * self.program.chunk;
        (view, start..start + size * self.program.chunk)
    }

    /// The first of a row's cells that is wrong.
    fn wrong(&mut self, row: &Expected) -> Option<Finding> {
        let (view, bytes) = self.bytes(row.rank, BufferType::Output, row.index, row.size);
        let cells = self.cells.within(view, bytes.clone()).expect("cut there");
        for cell in cells {
            let (_, at) = self.cells.place(cell);
            let offset = at.start - bytes.start;
            let parts: Vec<_> = (row.from.iter())
                .map(|from| {
                    let (view, whole) = self.bytes(from.rank, BufferType::Input, from.index, row.size);
                    let start = whole.start + offset;
                    let cell = self.cells.within(view, start..start + (at.end - at.start));
                    // Cells that are cut otherwise have never met.
                    cell.filter(|cell| cell.len() == 1)
                        .map(|cell| self.values.number(Value::Input(cell.start)))
                })
                .collect();
            let expected = parts
                .into_iter()
                .collect::<Option<Vec<_>>>()
                .map(|parts| self.values.reduced(row.op, &parts, Rounding::OnceInRankOrder));
            let found = self.holds[cell as usize];
            if expected != Some(found) {
                self.in_rank_order = false;
            }
            if found == REPORTED || expected.is_some_and(|expected| self.values.is_same(expected, found)) {
                continue;
            }
            let expected = match expected {
                Some(expected) => self.values.describe(self.cells, expected),
                None => self.row(row, offset),
            };
            let region = self.cells.region_of(view, at);
            let found = self.values.describe(self.cells, found);
            let kind = Kind::Wrong { region, expected, found };
            return Some(Finding::new(self.program.plan, kind, Vec::new()));
        }
        None
    }

    /// A row in words, where its cells are cut otherwise than what is there.
    fn row(&self, row: &Expected, offset: u64) -> String {
        let chunk = |index: u64| index as f64 + offset as f64 / self.program.chunk as f64;
        let each: Vec<_> = row
            .from
            .iter()
            .map(|from| format!("rank {}'s input (chunk {})", from.rank, chunk(from.index)))
            .collect();
        each.join(", ")
    }

    /// Each written output is the whole input of some rank.
    fn send_receive(&mut self) {
        let mut received = 0;
        for gpu in &self.program.plan.gpus {
            let (view, bytes) = buffer(self.program, gpu.id, BufferType::Output);
            let cells = self.cells.within(view, bytes).expect("cut there");
            let untouched = |cell: u32| match self.values.values[self.holds[cell as usize] as usize] {
                Value::Nothing => true,
                Value::Input(from) => from == cell,
                _ => false,
            };
            if cells.clone().all(untouched) {
                continue;
            }
            received += 1;
            let sender = |cell: u32| match self.values.values[self.holds[cell as usize] as usize] {
                Value::Input(from) => {
                    let (from, at) = self.cells.place(from);
                    let (input, bytes) = buffer(self.program, from.rank(), BufferType::Input);
                    let here = self.cells.place(cell).1.start
                        - buffer(self.program, gpu.id, BufferType::Output).1.start;
                    (from == input && at.start - bytes.start == here).then_some(from.rank())
                }
                _ => None,
            };
            let first = cells.clone().next().and_then(sender);
            let wrong =
                cells.clone().find(|&cell| first.is_none_or(|rank| rank == gpu.id) || sender(cell) != first);
            if let Some(cell) = wrong.filter(|&cell| self.holds[cell as usize] != REPORTED) {
                let kind = Kind::Wrong {
                    region: self.cells.region(cell),
                    expected: "the same place of one other rank's input".into(),
                    found: self.values.describe(self.cells, self.holds[cell as usize]),
                };
                self.found.push(Finding::new(self.program.plan, kind, Vec::new()));
            }
        }
        if received == 0 && self.program.plan.gpus.iter().any(|gpu| gpu.output_chunks > 0) {
            let (view, bytes) = buffer(self.program, Rank(0), BufferType::Output);
            let kind = Kind::Wrong {
                region: self.cells.region_of(view, bytes),
                expected: "another rank's input, there or at some other rank".into(),
                found: "nothing that was written".into(),
            };
            self.found.push(Finding::new(self.program.plan, kind, Vec::new()));
        }
    }
}

impl Watch for Run<'_, '_> {
    fn moved(&mut self, holds: &mut Vec<u32>, served: &[Served], step: u32, (at, piece): (u32, u32)) {
        let before = self.found.len();
        std::mem::swap(holds, &mut self.holds);
        self.transfer(step, &self.program.moves[at as usize], piece);
        std::mem::swap(holds, &mut self.holds);
        self.found_in(before, served);
    }

    fn ended(&mut self, state: &State) {
        let before = self.found.len();
        self.holds.clone_from(&state.holds);
        self.results();
        self.found_in(before, &state.served);
    }

    fn enough(&self) -> bool {
        self.found.len() >= self.limit || self.values.contributions > LIMIT
    }
}

/// Where cells must end for the comparison with what is expected.
pub(super) fn cuts(program: &Program<'_>, expectation: Option<&Expectation>) -> Vec<(View, u64)> {
    let mut cuts = Vec::new();
    for gpu in &program.plan.gpus {
        for of in [BufferType::Input, BufferType::Output] {
            let (view, bytes) = buffer(program, gpu.id, of);
            cuts.extend([(view, bytes.start), (view, bytes.end)]);
        }
    }
    let Some(Expectation::Table(rows)) = expectation else { return cuts };
    let mut cut = |rank, of, index: u64, size: u64| {
        let (view, whole) = buffer(program, rank, of);
        cuts.extend([index, index + size].map(|at| (view, whole.start + at * program.chunk)));
    };
    for row in rows {
        cut(row.rank, BufferType::Output, row.index, row.size);
        row.from.iter().for_each(|from| cut(from.rank, BufferType::Input, from.index, row.size));
    }
    cuts
}

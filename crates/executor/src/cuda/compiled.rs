//! Kernels that are compiled for the steps of a plan.
//!
//! The interpreter reads a step's kind, operator and numbers of operands from the table, and its loops and branches depend on them. In a
//! compiled kernel these are constants. Blocks whose steps agree in them have one *shape*: a case of a switch in a generated source, which
//! calls the functions of `compiled.cuh` for one step after the other. Steps that repeat are loops. What differs between the blocks of a
//! shape stays in the table: counters, addresses, ranges of bytes, numbers of turns, how many blocks meet. So the instances of an
//! algorithm, its symmetric ranks and all sizes of its messages share one kernel, except that chunks which are no whole number of packets
//! have a step for each chunk, and so may give another one.
//!
//! * A block copies its part of the table into shared memory while the launch ahead ends, for both halves of the scratch, and adds the
//!   addresses of the tensors as it does. So no step begins with a load from global memory.
//! * A block that begins with packets of its rank's own tensor loads their first units while the state of the launch is on its way, and sends
//!   them ahead of all that can wait (`begin.cuh`). One that begins with relaxed signals has their fence there.
//! * Up to 8 consecutive steps that move as many bytes each are done side by side: the proof lets operations between two meetings of the
//!   threads be done in any order (`side_by_side.cuh`).
//! * Where a block's threads have nothing left to wait for, they meet and let the kernel behind start. When all blocks of a grid have come there, the grid ends
//!   whatever others do, so the kernel behind may take its room.
//! * A reduction issues the loads of up to 8 sources before it uses the first, and a step with few sources those of several vectors. It
//!   takes them in the order of the plan, and so has the interpreter's bits.
//! * Whether operands lie alike is tested once for a step, ahead of its loop. Where they do, vectors of 16 bytes are what the loop moves.
//! * The warp polls the packets of up to 8 sources together.
//!
//! How a launch begins, the waits for signals, semaphores and barriers, and the clearing of packets are the functions of `steps.cuh` in
//! both forms, and so is the order of the steps. A packet is awaited by fabric's wait too, and a warp that gives up sends nothing more. A
//! warp waits for the packets of two units or of 8 sources before it stores the results of the first, where the interpreter waits unit by
//! unit. It cannot wait for what it has not stored yet: the proof takes an operation to read all packets before it stores anything, so an
//! operation that is next in its block gets all of its packets whatever it stores itself.
//!
//! A source has numbers and names of this module alone: nothing of a plan's text.

use std::{collections::HashMap, fmt::Write as _, sync::Arc};

use super::{
    listing::{Kind, Listed, Listing},
    table::{HALVES, PlanItem, PlanStep},
    writer::Writer,
};

/// How a GPU executes a plan's steps. The bits of the results are the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Form {
    /// Compiled, unless the plan has more than 512 distinct operations.
    #[default]
    Auto,
    /// By a kernel for the plan's steps, which takes less time at each of them. The first time on a machine it is compiled in about a
    /// second, and from then on it comes from a cache.
    Compiled,
    /// By a kernel that serves all plans and reads their steps from memory.
    Interpreted,
}

impl Form {
    /// All forms.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Compiled, Self::Interpreted];

    /// Its name: `auto`, `compiled` or `interpreted`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Compiled => "compiled",
            Self::Interpreted => "interpreted",
        }
    }
}

/// The most operations in the source of a kernel that [`Form::Auto`] compiles.
const MOST_OPERATIONS: usize = 512;

/// The most bytes of a block's part of the table that it copies into its shared memory, of which every block of two grids has as much.
const MOST_COPIED: usize = 12 << 10;

/// The longest sequence of steps whose repetitions become a loop.
const LONGEST_PERIOD: usize = 8;

/// What a source says of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Operation {
    pub(super) kind: Kind,
    /// The operator, whether a signal is relaxed, or how many steps a loop has.
    pub(super) detail: u32,
    pub(super) by_turn: bool,
    pub(super) counts: [u32; 4],
}

impl Operation {
    pub(super) fn items(&self) -> usize {
        self.counts.iter().sum::<u32>() as usize
    }
}

/// A step in a source, or some.
#[derive(Debug, PartialEq)]
pub(super) enum Node {
    Once(Operation),
    /// Consecutive steps that are equal.
    Repeated {
        times: usize,
        body: Vec<Operation>,
    },
    /// The turns of a pipeline.
    Turns(Vec<Node>),
}

impl Node {
    /// Whether a block may wait in it for what others send.
    pub(super) fn waits(&self) -> bool {
        let is_waiting = |operation: &Operation| match operation.kind {
            Kind::Packets => operation.counts[1] > 0,
            Kind::Wait | Kind::Acquire | Kind::Arrive | Kind::Copy | Kind::Raise | Kind::Flush => true,
            _ => false,
        };
        match self {
            Self::Once(operation) => is_waiting(operation),
            Self::Repeated { body, .. } => body.iter().any(is_waiting),
            Self::Turns(inside) => inside.iter().any(Self::waits),
        }
    }
}

/// The shapes of a rank's blocks.
#[derive(Debug)]
pub(super) struct Shapes {
    /// The shape of each block.
    pub(super) of_blocks: Vec<u32>,
    shapes: Vec<Vec<Node>>,
    /// The most steps and items of a block.
    most: [usize; 2],
}

impl Shapes {
    pub(super) fn new(listing: &Listing) -> Self {
        let mut known = HashMap::new();
        let mut shapes = Self { of_blocks: Vec::new(), shapes: Vec::new(), most: [0; 2] };
        for (_, steps) in listing.blocks() {
            let items = steps.iter().map(Listed::items).sum::<u32>() as usize;
            shapes.most = [shapes.most[0].max(steps.len()), shapes.most[1].max(items)];
            let shape = operations(&steps[..steps.len() - Listing::END]);
            let next = known.len() as u32;
            let id = *known.entry(shape).or_insert_with_key(|shape| {
                shapes.shapes.push(nodes(shape));
                next
            });
            shapes.of_blocks.push(id);
        }
        shapes
    }

    /// How many shapes there are.
    pub(super) fn len(&self) -> usize {
        self.shapes.len()
    }

    /// How many operations the source of a compiled kernel has.
    pub(super) fn operations(&self) -> usize {
        fn count(nodes: &[Node]) -> usize {
            let of = |node: &Node| match node {
                Node::Once(_) => 1,
                Node::Repeated { body, .. } => body.len(),
                Node::Turns(inside) => count(inside),
            };
            nodes.iter().map(of).sum()
        }
        self.shapes.iter().map(|nodes| count(nodes)).sum()
    }

    /// The source of the kernel that a form asks for; none is the interpreter.
    pub(super) fn source(&self, form: Form) -> Option<Arc<str>> {
        let is_compiled = match form {
            Form::Auto => self.operations() <= MOST_OPERATIONS,
            Form::Compiled => true,
            Form::Interpreted => false,
        };
        is_compiled.then(|| self.text().into())
    }

    /// The steps and items for which a block has room in its shared memory, and in its part of the table, if its part is copied there.
    pub(super) fn copied(&self) -> Option<[usize; 2]> {
        let [steps, items] = self.most;
        let fits = steps * size_of::<PlanStep>() + HALVES * items * size_of::<PlanItem>() <= MOST_COPIED;
        fits.then_some([steps, items.max(1)])
    }

    fn text(&self) -> String {
        let is_copied = self.copied().is_some();
        // What is not copied does not make another kernel.
        let [steps, items] = self.copied().unwrap_or([1, 1]);
        let mut text = format!(
            "constexpr bool IS_COPIED = {is_copied};\nconstexpr u32 MOST_STEPS = {steps}, MOST_ITEMS = {items}, HALVES = {HALVES};\n\n"
        );
        for (name, source) in CALLED {
            write!(text, "#line 1 \"{name}\"\n{source}").expect("a string takes all");
        }
        text += "#line 1 \"executor/shapes.cuh\"\n";
        for (id, shape) in self.shapes.iter().enumerate() {
            Writer::write(&mut text, id, shape);
        }
        text += "\nDEVICE bool run(block_steps& b, u32 shape) {\n    switch (shape) {\n";
        for id in 0..self.shapes.len() {
            writeln!(text, "    case {id}: return shape_{id}(b);").expect("a string takes all");
        }
        text + "    }\n    return true;\n}\n"
    }
}

/// What the steps of a kernel call, by the names that a compiler's messages mention.
const CALLED: [(&str, &str); 4] = [
    ("executor/compiled.cuh", include_str!("compiled.cuh")),
    ("executor/data.cuh", include_str!("data.cuh")),
    ("executor/side_by_side.cuh", include_str!("side_by_side.cuh")),
    ("executor/begin.cuh", include_str!("begin.cuh")),
];

/// What a source says of some steps.
fn operations(steps: &[Listed]) -> Vec<Operation> {
    let mut left = 0; // of the steps of a loop
    let operation = |step: &Listed| {
        let is_turn = left > 0;
        left = if step.kind == Kind::Loop { step.detail } else { left.saturating_sub(1) };
        let detail = if step.kind == Kind::Arrive { 0 } else { step.detail };
        Operation { kind: step.kind, detail, by_turn: is_turn && step.by_turn, counts: step.counts }
    };
    steps.iter().map(operation).collect()
}

fn nodes(mut rest: &[Operation]) -> Vec<Node> {
    let mut nodes = Vec::new();
    while let Some(first) = rest.first() {
        if first.kind == Kind::Loop {
            let (inside, behind) = rest[1..].split_at(first.detail as usize);
            nodes.push(Node::Turns(self::nodes(inside)));
            rest = behind;
            continue;
        }
        let (period, times) = repetition(rest);
        nodes.push(match times {
            1 => Node::Once(*first),
            _ => Node::Repeated { times, body: rest[..period].to_vec() },
        });
        rest = &rest[period * times..];
    }
    nodes
}

/// The steps at the beginning that are repeated, and how many times they are there, such that a loop saves the most; 1 and 1 if none does.
fn repetition(steps: &[Operation]) -> (usize, usize) {
    let flat = steps.iter().position(|step| step.kind == Kind::Loop).unwrap_or(steps.len());
    let times = |period: usize| {
        let equal = (period..flat).take_while(|&at| steps[at] == steps[at - period]).count();
        1 + equal / period
    };
    let all = (1..=LONGEST_PERIOD.min(flat)).map(|period| (period, times(period)));
    let worth = all.filter(|&(_, times)| times > 2);
    worth.max_by_key(|&(period, times)| (period * (times - 1), std::cmp::Reverse(period))).unwrap_or((1, 1))
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use antiphon_plan::{
        Plan, Rank,
        verify::{Memory, Options, VerifiedPlan},
    };
    use antiphon_tensor::DType;

    use super::*;
    use crate::cuda::{CudaOptions, PlanKernel};

    /// The calls that a shape's text makes, in the order in which a block makes them if every pipeline has one turn: the function, and the
    /// places of the step and of its first item. A call that does several steps counts as one for each.
    fn calls(text: &str) -> Vec<(String, usize, usize)> {
        let (mut calls, mut lines) = (Vec::new(), text.lines().map(str::trim));
        while let Some(line) = lines.next() {
            match line.strip_prefix("for (u32 k = 0; k < ").and_then(|rest| rest.split_once(';')) {
                Some((times, _)) => {
                    let body: Vec<_> = lines.by_ref().take_while(|line| *line != "}").collect();
                    for k in 0..times.parse().unwrap() {
                        calls.extend(body.iter().filter_map(|line| call(line, k)));
                    }
                }
                None => match several(line.trim_start_matches("if (!")) {
                    Some(several) => calls.extend(several),
                    None => calls.extend(call(line, 0)),
                },
            }
        }
        calls
    }

    fn call(line: &str, k: usize) -> Option<(String, usize, usize)> {
        let value = |text: &str| match text.trim().split_once(" + k * ") {
            Some((first, each)) => first.parse::<usize>().unwrap() + k * each.parse::<usize>().unwrap(),
            None => text.trim().parse().unwrap(),
        };
        let (name, _) = line.split_once(['(', '<'])?;
        let (step, item) = line.split_once("step_of(b, ")?.1.split_once(')')?.0.split_once(',')?;
        Some((name.to_owned(), value(step), value(item)))
    }

    /// The steps of a call `name<numbers>(b, step, item…)`, of which the last number says how many they are.
    fn several(line: &str) -> Option<Vec<(String, usize, usize)>> {
        let (name, rest) = line.split_once("(b, ")?;
        let (name, numbers) = name.trim_end_matches('>').split_once('<').unwrap_or((name, ""));
        let numbers: Vec<usize> = numbers.split(", ").filter_map(|number| number.parse().ok()).collect();
        let (function, items) = match (name, &numbers[..]) {
            ("begin_with_signals", []) => ("add", 0),
            ("begin_with_packets", [packed, _]) => ("packets", 1 + packed),
            ("packets_side_by_side", [_, to, packed, _]) => ("packets", 1 + to + packed),
            ("plain_side_by_side", [to, _]) => ("plain", 1 + to),
            _ => return None,
        };
        let mut places = rest.split([',', ')']).map(|place| place.trim().parse::<usize>().unwrap());
        let (step, item) = (places.next()?, places.next()?);
        let times = numbers.last().copied().unwrap_or(1);
        Some((0..times).map(|k| (function.to_owned(), step + k, item + k * items)).collect())
    }

    fn function(kind: Kind) -> Option<&'static str> {
        Some(match kind {
            Kind::Arrive => "arrive",
            Kind::Signal | Kind::Release => "add",
            Kind::Wait | Kind::Acquire => "take",
            Kind::Plain => "plain",
            Kind::Packets => "packets",
            Kind::Copy => "copy",
            Kind::Raise => "raise",
            Kind::Flush => "flush",
            Kind::Meet | Kind::Loop | Kind::End | Kind::IfClearing | Kind::Clear => return None,
        })
    }

    /// Every block's case does each of its steps once, in their order and with their own items.
    fn check(listing: &Listing) -> Shapes {
        let shapes = Shapes::new(listing);
        let text = shapes.source(Form::Compiled).unwrap();
        assert_eq!(text.matches('{').count(), text.matches('}').count());
        for ((_, steps), shape) in listing.blocks().zip(&shapes.of_blocks) {
            let case = text.split_once(&format!("bool shape_{shape}(")).unwrap().1;
            let case = case.split_once("return true;").unwrap().0;
            let first = steps[0].first;
            let expected = steps[..steps.len() - Listing::END].iter().enumerate().filter_map(|(at, step)| {
                Some((function(step.kind)?.to_owned(), at, (step.first - first) as usize))
            });
            assert_eq!(calls(case), expected.collect::<Vec<_>>(), "{case}");
        }
        shapes
    }

    fn proved(mut plan: Plan) -> Option<VerifiedPlan> {
        plan.name = Some("*/ #error".into());
        VerifiedPlan::new(plan, &Options { memory: Memory::Device, ..Options::default() }).ok()
    }

    #[test]
    fn the_fuzzers_plans_pass_the_emitter() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/plan_file");
        let mut emitted = 0;
        for file in fs::read_dir(folder).unwrap() {
            let plan = Plan::from_json(&fs::read(file.unwrap().path()).unwrap());
            let Some(plan) = plan.ok().and_then(proved) else { continue };
            for rank in 0..plan.plan().num_ranks() {
                let rank = Rank(rank as u32);
                let options = CudaOptions { form: Form::Compiled, ..CudaOptions::default() };
                let listed = PlanKernel::listed(&plan, rank, DType::F32, options, 132).unwrap();
                let shapes = check(&listed.listing);
                let source = shapes.source(Form::Compiled).unwrap();
                assert!(!source.contains("#error") && shapes.len() > 0);
                emitted += 1;
            }
        }
        assert!(emitted > 30, "{emitted}");
    }

    fn operation(kind: Kind, operands: u32) -> Operation {
        Operation { kind, detail: 0, by_turn: false, counts: [operands, 0, 0, 0] }
    }

    #[test]
    fn steps_that_repeat_are_loops() {
        let (meet, wait) = (operation(Kind::Meet, 0), operation(Kind::Wait, 1));
        let (plain, other) = (operation(Kind::Plain, 2), operation(Kind::Plain, 3));
        let ring = [meet, wait, plain].repeat(3);
        let repeated = |times, body: &[Operation]| Node::Repeated { times, body: body.to_vec() };
        assert_eq!(nodes(&ring), [repeated(3, &[meet, wait, plain])]);
        assert_eq!(nodes(&[plain; 5]), [repeated(5, &[plain])]);
        // Twice is not worth a loop.
        let twice = [plain, other, plain, other];
        assert_eq!(nodes(&twice), twice.map(Node::Once));
        let pipeline = Operation { detail: 4, ..operation(Kind::Loop, 0) };
        let steps = [&[wait, pipeline, plain, plain, plain, meet][..], &[plain; 2]].concat();
        let turns = vec![repeated(3, &[plain]), Node::Once(meet)];
        let expected = [Node::Once(wait), Node::Turns(turns), Node::Once(plain), Node::Once(plain)];
        assert_eq!(nodes(&steps), expected);
    }

    /// Plans of more distinct operations are interpreted.
    #[test]
    fn many_operations_are_not_compiled_by_themselves() {
        let shapes = |count: u32| Shapes {
            of_blocks: vec![0],
            shapes: vec![(1..=count).map(|operands| Node::Once(operation(Kind::Wait, operands))).collect()],
            most: [count as usize, 1],
        };
        for (count, is_compiled) in [(MOST_OPERATIONS as u32, true), (MOST_OPERATIONS as u32 + 1, false)] {
            assert_eq!(shapes(count).source(Form::Auto).is_some(), is_compiled);
            assert!(shapes(count).source(Form::Compiled).is_some());
            assert!(shapes(count).source(Form::Interpreted).is_none());
        }
        // What does not fit shared memory stays where it is.
        let copied = |count| shapes(count).source(Form::Compiled).unwrap().contains("IS_COPIED = true");
        assert!(copied(20) && !copied(400));
    }
}

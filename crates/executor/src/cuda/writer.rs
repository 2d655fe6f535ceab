//! The source of a compiled kernel's shapes: a call for each step of a block, or for some.

use std::fmt::Write as _;

use super::{
    compiled::{Node, Operation},
    family::operator_name,
    listing::Kind,
};

/// The most steps that a block does side by side.
const MOST_SIDE_BY_SIDE: usize = 8;

/// Where a line of a source stands.
#[derive(Clone, Copy, Default)]
struct Inside {
    /// The step of the pipeline around it.
    turns: Option<usize>,
    /// The steps and items of each repetition around it.
    repeated: Option<[usize; 2]>,
}

/// Writes the steps of a shape.
pub(super) struct Writer<'a> {
    text: &'a mut String,
    /// The next step of the block and its first item.
    step: usize,
    item: usize,
    inside: Inside,
}

impl Writer<'_> {
    /// Writes the function of a shape behind a text.
    pub(super) fn write(text: &mut String, id: usize, shape: &[Node]) {
        let mut writer = Writer { text, step: 0, item: 0, inside: Inside::default() };
        writer.line(format_args!("\nDEVICE bool shape_{id}(block_steps& b) {{"));
        writer.shape(shape);
        writer.line(format_args!("    return true;\n}}"));
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        let depth = usize::from(self.inside.turns.is_some()) + usize::from(self.inside.repeated.is_some());
        writeln!(self.text, "{:1$}{line}", "", 4 * depth).expect("a string takes all");
    }

    /// The steps of a block, and how it begins.
    fn shape(&mut self, nodes: &[Node]) {
        // Threads that have done nothing yet need not meet.
        let meetings = nodes
            .iter()
            .take_while(|node| matches!(node, Node::Once(first) if first.kind == Kind::Meet))
            .count();
        self.step = meetings;
        let nodes = &nodes[meetings..];
        let first = nodes.first().and_then(|first| self.beginning(first));
        let call = first.as_deref().unwrap_or("begin(b)");
        self.line(format_args!("    if (!{call}) return false;"));
        let rest = &nodes[usize::from(first.is_some())..];
        let waits = rest.iter().rposition(Node::waits).map_or(0, |last| last + 1);
        let (waiting, behind) = rest.split_at(waits);
        self.nodes(waiting);
        // The first warp that releases counts for its block, so all have to be there.
        let behind = match behind {
            [Node::Once(meet), behind @ ..] if meet.kind == Kind::Meet => {
                self.operation(meet);
                behind
            }
            _ => {
                if waits > 0 {
                    self.line(format_args!("    if (!meet(b)) return false;"));
                }
                behind
            }
        };
        self.line(format_args!("    release(b);"));
        self.nodes(behind);
    }

    /// How a block begins with its first steps, if that is more than to begin ahead of them.
    fn beginning(&mut self, first: &Node) -> Option<String> {
        let (times, operation) = match first {
            Node::Once(operation) => (1, operation),
            Node::Repeated { times, body } if body.len() == 1 => (*times, &body[0]),
            _ => return None,
        };
        let (step, item) = (self.step, self.item);
        let call = match (operation.kind, operation.counts) {
            (Kind::Packets, [1, 0, 0, packed]) if operation.detail == 0 && times <= MOST_SIDE_BY_SIDE => {
                format!("begin_with_packets<{packed}, {times}>(b, {step}, {item})")
            }
            (Kind::Signal, [counts, ..]) if operation.detail != 0 && times == 1 => {
                format!("begin_with_signals(b, {step}, {item}, {counts})")
            }
            _ => return None,
        };
        self.step += times;
        self.item += operation.items() * times;
        Some(call)
    }

    /// Steps that move bytes each, as one call.
    fn side_by_side(&mut self, times: usize, operation: &Operation) -> bool {
        let Operation { kind, detail: 0, by_turn, counts: [plain, packets, to, packed] } = *operation else {
            return false;
        };
        if plain + packets != 1 || packets * packed != 0 || times > MOST_SIDE_BY_SIDE {
            return false;
        }
        let (step, item) = (self.step, self.item);
        match kind {
            Kind::Packets => self.line(format_args!(
                "    packets_side_by_side<{packets}, {to}, {packed}, {times}>(b, {step}, {item});"
            )),
            Kind::Plain => {
                let part = self.part("l", by_turn);
                self.line(format_args!(
                    "    plain_side_by_side<{to}, {times}>(b, {step}, {item}, [&](const step_of& l) {{ return {part}; }});"
                ));
            }
            _ => return false,
        }
        self.step += times;
        self.item += operation.items() * times;
        true
    }

    fn nodes(&mut self, nodes: &[Node]) {
        for node in nodes {
            let outside = self.inside;
            match node {
                Node::Once(operation) => self.operation(operation),
                Node::Repeated { times, body } if body.len() == 1 && self.side_by_side(*times, &body[0]) => {}
                Node::Repeated { times, body } => {
                    let items: usize = body.iter().map(Operation::items).sum();
                    let next = [self.step + body.len() * times, self.item + items * times];
                    self.line(format_args!("#pragma unroll 1"));
                    self.line(format_args!("    for (u32 k = 0; k < {times}; ++k) {{"));
                    self.inside.repeated = Some([body.len(), items]);
                    body.iter().for_each(|operation| self.operation(operation));
                    self.inside = outside;
                    self.line(format_args!("    }}"));
                    [self.step, self.item] = next;
                }
                Node::Turns(inside) => {
                    let head = self.step;
                    self.line(format_args!("#pragma unroll 1"));
                    self.line(format_args!(
                        "    for (u32 turn = 0; turn < b.steps[{head}].share[0]; ++turn) {{"
                    ));
                    self.step += 1;
                    self.inside.turns = Some(head);
                    self.nodes(inside);
                    self.inside = outside;
                    self.line(format_args!("    }}"));
                }
            }
        }
    }

    /// The bytes of a step.
    fn part(&self, at: &str, by_turn: bool) -> String {
        match self.inside.turns.filter(|_| by_turn) {
            Some(head) => format!("part_of({at}, turn, b.steps[{head}].share[1])"),
            None => format!("part_of({at})"),
        }
    }

    fn operation(&mut self, operation: &Operation) {
        let Operation { kind, detail, by_turn, counts: [a, b, c, d] } = *operation;
        let (mut step, mut item) = (self.step.to_string(), self.item.to_string());
        if let Some([steps, items]) = self.inside.repeated {
            (step, item) = (format!("{step} + k * {steps}"), format!("{item} + k * {items}"));
        }
        let at = format!("step_of(b, {step}, {item})");
        match kind {
            Kind::Meet => self.line(format_args!("    if (!meet(b)) return false;")),
            Kind::Arrive => self.line(format_args!("    arrive(b, {at});")),
            Kind::Signal | Kind::Release => {
                self.line(format_args!("    add(b, {at}, {}, {}, {a});", kind.name(), detail != 0));
            }
            Kind::Wait | Kind::Acquire => self.line(format_args!("    take(b, {at}, {}, {a});", kind.name())),
            Kind::Plain => {
                let part = self.part(&at, by_turn);
                let operator = operator_name(detail);
                self.line(format_args!("    plain<{operator}, {a}, {c}>(b, {at}, {part});"));
            }
            Kind::Copy => self.line(format_args!("    copy(b, {at}, {});", self.part(&at, by_turn))),
            Kind::Raise => self.line(format_args!("    raise(b, {at}, {a});")),
            Kind::Flush => self.line(format_args!("    flush(b, {at});")),
            Kind::Packets => {
                let operator = operator_name(detail);
                self.line(format_args!(
                    "    packets<{operator}, {a}, {b}, {c}, {d}>(b, {at}, part_of({at}));"
                ));
            }
            Kind::Loop | Kind::End | Kind::IfClearing | Kind::Clear => {
                unreachable!("loops do not nest, and the end of a block is the kernel's")
            }
        }
        self.step += 1;
        self.item += operation.items();
    }
}

#[cfg(test)]
mod tests {
    use antiphon_language::library::{Setting, find};
    use antiphon_plan::{
        Rank,
        verify::{Memory, Options, VerifiedPlan},
    };
    use antiphon_tensor::DType;

    use crate::cuda::{CudaOptions, Form, PlanKernel};

    /// The calls of the first shape of a library plan's rank 0 of 4, without what they are about.
    fn calls(algorithm: &str) -> Vec<String> {
        let options = Options { memory: Memory::Device, ..Options::default() };
        let plan = find(algorithm).unwrap().plan(&Setting::new(4)).unwrap();
        let plan = VerifiedPlan::new(plan, &options).unwrap();
        let options = CudaOptions { form: Form::Compiled, ..CudaOptions::default() };
        let listed = PlanKernel::listed(&plan, Rank(0), DType::F32, options, 132).unwrap();
        let source = listed.shapes.source(Form::Compiled).unwrap();
        let shape = source.split_once("bool shape_0(").unwrap().1.split_once("return true;").unwrap().0;
        let call = |line: &str| Some(line.trim().trim_start_matches("if (!").split_once("(b")?.0.to_owned());
        shape.lines().skip(1).filter_map(call).collect()
    }

    /// Packets to three peers are sent as the launch begins, and those of three peers are awaited together.
    #[test]
    fn packets_of_several_steps_are_side_by_side() {
        let sum = "packets<OPERATOR_SUM, 1, 3, 1, 3>";
        let expected =
            ["begin_with_packets<1, 3>", sum, "packets_side_by_side<1, 1, 0, 3>", "meet", "release"];
        assert_eq!(calls("packet-all-reduce"), expected);
    }

    /// A put of one source to three peers loads it once. The kernel behind may start behind the last wait.
    #[test]
    fn a_source_that_several_get_is_loaded_once() {
        let expected = [
            "begin_with_signals",
            "take",
            "meet",
            "plain<OPERATOR_NONE, 1, 3>",
            "plain<OPERATOR_NONE, 1, 1>",
            "meet",
            "add",
            "take",
            "meet",
            "release",
        ];
        assert_eq!(calls("direct-all-gather"), expected);
    }
}

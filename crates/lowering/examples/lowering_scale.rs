//! How long it takes to lower a large program: 100,000 operations of tensor-parallel layers, or as many as are asked for.
//!
//! ```sh
//! cargo run --release -p antiphon-lowering --example lowering_scale [OPERATIONS [realize] [small]]
//! ```
//!
//! With `small` rows have 64 elements instead of 4096, of 4 tokens instead of 16, so that a program of up to 500 operations is also run
//! before and after.
//!
//! The times are seconds of the processor, to which other processes on the machine add little. The fastest of five runs is
//! printed.

use std::fmt::Write as _;

use antiphon_lowering::{Costs, Edits, Graph, Options, Realize, World, check, lower, second_opinion};
use rustix::time::{ClockId, clock_gettime};

/// Layers of a sum, a residual, a norm, and operations beside them, until the program has `operations` operations.
fn program(operations: usize, rows: usize, hidden: usize) -> String {
    let shape = format!("[{rows},{hidden}]");
    let mut text = format!(
        "group tp size 4\n%x0: bf16{shape} = input()\n%r0: bf16{shape} = input()\n%w: bf16[{hidden}] = input()\n",
    );
    for i in 0..operations.div_ceil(20) {
        let next = i + 1;
        for step in 0..10 {
            let from = if step == 0 { format!("x{i}") } else { format!("y{i}_{}", step - 1) };
            let _ = writeln!(text, "%y{i}_{step}: bf16{shape} = unary(%{from}) op=silu");
        }
        let _ = write!(
            text,
            "%s{i}: bf16{shape} = start(%y{i}_9) prim=all_reduce group=tp red=sum token={i}
%sum{i}: bf16{shape} = wait(%s{i}) tokens=[{i}]
%r{next}: bf16{shape} = binary(%sum{i}, %r{i}) op=add
%wide{i}: f32{shape} = cast(%r{next})
%sq{i}: f32{shape} = binary(%wide{i}) op=pow scalar=2.0
%mean{i}: f32[{rows},1] = reduce(%sq{i}) op=mean dims=[1] keepdim=true
%eps{i}: f32[{rows},1] = binary(%mean{i}) op=add scalar=1e-6
%inv{i}: f32[{rows},1] = unary(%eps{i}) op=rsqrt
%scaled{i}: f32{shape} = binary(%wide{i}, %inv{i}) op=mul
%weighted{i}: f32{shape} = binary(%scaled{i}, %w) op=mul
%x{next}: bf16{shape} = cast(%weighted{i})
"
        );
    }
    let last = operations.div_ceil(20);
    text + &format!("return %x{last}, %r{last}\n")
}

/// The seconds that the processor has spent on this process.
fn seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Lowers the program of a JSON text; the text is a line on what came of it, and the times are those of each step.
fn run(json: &str, options: &Options) -> (String, Vec<(&'static str, f64)>) {
    let world = World::default();
    let mut marks = vec![("", seconds())];
    let before = Graph::from_json(json.as_bytes()).expect("what was written");
    marks.push(("read JSON", seconds()));
    let lowered = lower(&before, &world, &Costs::of(world.device), options);
    marks.push(("rules and proof", seconds()));
    let edits = serde_json::to_string(&Edits::between(&before, &lowered.graph)).expect("plain values");
    marks.push(("edits as JSON", seconds()));
    let opinion = second_opinion(&before, &lowered.graph, options.numerics);
    marks.push(("second opinion", seconds()));
    let times = marks.windows(2).map(|pair| (pair[1].0, pair[1].1 - pair[0].1)).collect();
    assert_eq!(check(&before, &lowered.decisions, &lowered.graph), []);
    let [calls, fewer] = lowered.report.calls;
    let text = format!(
        "{} operations, {calls} calls, became {}, {fewer} calls; {} MB of JSON, {} MB of edits; the second opinion: {opinion:?}",
        before.ops.len(),
        lowered.graph.ops.len(),
        json.len() >> 20,
        edits.len() >> 20
    );
    (text, times)
}

fn main() {
    let operations = std::env::args().nth(1).and_then(|count| count.parse().ok()).unwrap_or(100_000);
    let is_asked = |word: &str| std::env::args().any(|other| other == word);
    let (rows, hidden) = if is_asked("small") { (4, 64) } else { (16, 4096) };
    let json = Graph::from_text(&program(operations, rows, hidden)).expect("a program").to_json();
    // As in programs of torch, whose compilers place tensors themselves.
    let realize = if is_asked("realize") { Realize::Always } else { Realize::Never };
    let options = Options { realize, ..Options::default() };
    let all = |times: &[(&str, f64)]| times.iter().map(|(_, time)| time).sum::<f64>();
    let runs = (0..5).map(|_| run(&json, &options));
    let (text, times) = runs.min_by(|a, b| all(&a.1).total_cmp(&all(&b.1))).expect("there are several runs");
    println!("{text}");
    times.iter().for_each(|(name, time)| println!("{name:>16}: {time:.3} s"));
    println!("{:>16}: {:.3} s", "in all", all(&times));
}

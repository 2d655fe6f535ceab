//! How long it takes to lower a large program: 100,000 operations of tensor-parallel layers, or as many as are asked for.
//!
//! ```sh
//! cargo run --release -p antiphon-lowering --example lowering_scale [OPERATIONS [realize]]
//! ```

use std::{fmt::Write as _, time::Instant};

use antiphon_lowering::{Costs, Edits, Graph, Options, Realize, World, check, lower};

/// Layers of a sum, a residual, a norm, and operations beside them, until there are so many operations.
fn program(operations: usize) -> String {
    let mut text = String::from(
        "group tp size 4\n%x0: bf16[16,4096] = input()\n%r0: bf16[16,4096] = input()\n%w: bf16[4096] = input()\n",
    );
    for i in 0..operations.div_ceil(20) {
        let (next, shape) = (i + 1, "[16,4096]");
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
%mean{i}: f32[16,1] = reduce(%sq{i}) op=mean dims=[1] keepdim=true
%eps{i}: f32[16,1] = binary(%mean{i}) op=add scalar=1e-6
%inv{i}: f32[16,1] = unary(%eps{i}) op=rsqrt
%scaled{i}: f32{shape} = binary(%wide{i}, %inv{i}) op=mul
%weighted{i}: f32{shape} = binary(%scaled{i}, %w) op=mul
%x{next}: bf16{shape} = cast(%weighted{i})
"
        );
    }
    let last = operations.div_ceil(20);
    text + &format!("return %x{last}, %r{last}\n")
}

fn main() {
    let operations = std::env::args().nth(1).and_then(|count| count.parse().ok()).unwrap_or(100_000);
    let json = Graph::from_text(&program(operations)).expect("a program").to_json();
    // As in programs of torch, whose compilers place tensors themselves.
    let realize =
        if std::env::args().any(|word| word == "realize") { Realize::Always } else { Realize::Never };
    let (world, options) = (World::default(), Options { realize, ..Options::default() });
    let mut marks = vec![("", Instant::now())];
    let before = Graph::from_json(json.as_bytes()).expect("what was written");
    marks.push(("read JSON", Instant::now()));
    let lowered = lower(&before, &world, &Costs::of(world.device), &options);
    marks.push(("rules and proof", Instant::now()));
    assert_eq!(check(&before, &lowered.plan, &lowered.graph), []);
    marks.push(("proof once more", Instant::now()));
    let edits = serde_json::to_string(&Edits::between(&before, &lowered.graph)).expect("plain values");
    marks.push(("edits as JSON", Instant::now()));
    let after = lowered.graph.to_json();
    marks.push(("write JSON", Instant::now()));
    let [calls, fewer] = lowered.report.calls;
    println!(
        "{} operations, {calls} calls, became {}, {fewer} calls; {} MB of JSON became {} MB, {} MB of edits",
        before.ops.len(),
        lowered.graph.ops.len(),
        json.len() >> 20,
        after.len() >> 20,
        edits.len() >> 20
    );
    for pair in marks.windows(2) {
        println!("{:>16}: {:.3} s", pair[1].0, (pair[1].1 - pair[0].1).as_secs_f64());
    }
    let all = marks.last().expect("there are marks").1 - marks[0].1;
    println!("{:>16}: {:.3} s", "in all", all.as_secs_f64());
}

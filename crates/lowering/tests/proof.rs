//! Random programs: a lowered program computes the same as before, without races, and every change of a lowered program or
//! of its plan is found.

mod common;

use antiphon_lowering::{
    Arithmetic, Choice, Class, CommReq, Element, FindingKind, Graph, Kind, Numerics, Options, Plan, Realize,
    Roles, check, verify,
};
use common::{Chance, agree, graph, lowered};

const F32: Element = Element::Number(antiphon_tensor::DType::F32);
const BF16: Element = Element::Number(antiphon_tensor::DType::BF16);

/// A program of up to twelve steps on tensors of four rows of eight, with sums over two groups, norms and residuals.
fn program(seed: u64) -> String {
    let mut chance = Chance(seed ^ 0x5DEE_CE66);
    let mut text = String::from(
        "group tp size 2\ngroup one size 1\n%i0: f32[4,8] = input()\n%i1: f32[4,8] = input()\n%i2: f32[8] = input()\n",
    );
    let mut values = vec!["%i0".to_owned(), "%i1".to_owned()];
    let mut sums: Vec<String> = Vec::new();
    for step in 0..3 + chance.below(9) {
        let any = |chance: &mut Chance| values[chance.below(values.len())].clone();
        let (x, y) = (any(&mut chance), any(&mut chance));
        let new = format!("%v{step}");
        match chance.below(10) {
            0..=2 => {
                let group = if chance.below(6) == 0 { "one" } else { "tp" };
                let red = if chance.below(5) == 0 { "max" } else { "sum" };
                text += &format!(
                    "%s{step}: f32[4,8] = start({x}) prim=all_reduce group={group} red={red} token={step}\n"
                );
                text += &format!("{new}: f32[4,8] = wait(%s{step}) tokens=[{step}]\n");
                sums.push(new.clone());
            }
            3..=4 if sums.len() > 1 => {
                let (a, b) = (&sums[chance.below(sums.len())], &sums[chance.below(sums.len())]);
                text += &format!("{new}: f32[4,8] = binary({a}, {b}) op=add\n");
            }
            5..=6 if !sums.is_empty() => {
                let sum = &sums[chance.below(sums.len())];
                text += &format!(
                    "%r{step}: f32[4,8] = binary({sum}, {y}) op=add
                     %q{step}: f32[4,8] = binary(%r{step}, %r{step}) op=mul
                     %m{step}: f32[4,1] = reduce(%q{step}) op=mean dims=[1] keepdim=true
                     %e{step}: f32[4,1] = binary(%m{step}) op=add scalar=0.01
                     %k{step}: f32[4,1] = unary(%e{step}) op=rsqrt
                     %n{step}: f32[4,8] = binary(%r{step}, %k{step}) op=mul
                     {new}: f32[4,8] = binary(%n{step}, %i2) op=mul\n"
                );
                values.push(format!("%r{step}"));
            }
            7 => text += &format!("{new}: f32[4,8] = opaque({x}, {y}) target=mixed\n"),
            8 => text += &format!("{new}: f32[4,8] = opaque({x}) target=told effect=true\n"),
            _ => {
                text += &format!(
                    "{new}: f32[4,8] = binary({x}, {y}) op={}\n",
                    ["add", "sub", "maximum"][chance.below(3)]
                )
            }
        }
        values.push(new);
    }
    let outputs: Vec<String> =
        (0..1 + chance.below(3)).map(|_| values[2 + chance.below(values.len() - 2)].clone()).collect();
    text + &format!("return {}\n", outputs.join(", "))
}

/// `GRAPHS=100000 cargo test --release -p antiphon-lowering --test proof` looks at more.
fn graphs() -> u64 {
    std::env::var("GRAPHS").ok().and_then(|count| count.parse().ok()).unwrap_or(10_000)
}

#[test]
fn random_programs_compute_the_same_afterwards() {
    let mut rewritten = 0;
    for seed in 0..graphs() {
        let before = graph(&program(seed));
        let numerics = if seed % 2 == 0 { Numerics::Close } else { Numerics::Same };
        let realize = if seed % 3 == 0 { Realize::Always } else { Realize::Measured };
        let options = Options { numerics, realize, overlap: seed % 5 < 2, ..Options::default() };
        let after = lowered(&before, &options);
        rewritten += u64::from(!after.plan.rewrites.is_empty());
        agree(&before, &after.graph, 2, seed, Arithmetic::Exact, 1e-7);
        if numerics == Numerics::Same {
            agree(&before, &after.graph, 2, seed, Arithmetic::Kernels, 1e-4);
        }
        assert_eq!(Graph::from_text(&after.graph.to_text()).unwrap().to_json(), after.graph.to_json());
    }
    assert!(rewritten > graphs() / 2, "{rewritten} of {} were rewritten at all", graphs());
}

/// A random change to a graph or to its plan, if it changes anything.
fn mutated(graph: &Graph, plan: &Plan, chance: &mut Chance) -> Option<(Graph, Plan, &'static str)> {
    let (mut graph, mut plan) = (graph.clone(), plan.clone());
    let kept = (graph.clone(), plan.clone());
    let at = chance.below(graph.ops.len());
    let what = match chance.below(17) {
        0 => {
            graph.ops.remove(at);
            "an operation goes"
        }
        1 => {
            let args = &mut graph.ops[at].args;
            if args.is_empty() {
                return None;
            }
            let place = chance.below(args.len());
            args[place] = kept.0.ops[chance.below(kept.0.ops.len())].outs.first().copied()?;
            "an operand is another"
        }
        2 => {
            match &mut graph.ops[at].kind {
                Kind::Start { coll, .. } | Kind::Sync { coll } => {
                    coll.red = Some(antiphon_operation::ReduceOp::Prod);
                }
                Kind::Fused { fused } => fused.weight_bias += 1.0,
                Kind::Binary { op, .. } => *op = antiphon_lowering::Binary::Div,
                _ => return None,
            }
            "an operation is another"
        }
        3 => {
            if let Kind::Fused { fused } = &mut graph.ops[at].kind {
                fused.eps = fused.eps.map(|eps| eps + 0.5);
            } else {
                return None;
            }
            "an eps is another"
        }
        4 => {
            let outputs = graph.outputs.len();
            graph.outputs[chance.below(outputs)] = kept.0.ops[at].outs.first().copied()?;
            "an output is another"
        }
        5 => {
            let count = plan.calls.len();
            let call = plan.calls.get_mut(chance.below(count.max(1)))?;
            call.covers.pop();
            "a call stands for one less"
        }
        6 => {
            let slot = plan.slots.first_mut()?;
            slot.bytes -= 256.min(slot.bytes);
            "a slot is smaller"
        }
        7 => {
            plan.slots.pop()?;
            "a slot goes"
        }
        8 => {
            let slot = plan.slots.first_mut()?;
            slot.last = slot.first.clone();
            "a slot ends earlier"
        }
        9 => {
            let [first, second, ..] = &mut plan.slots[..] else { return None };
            first.offset = second.offset;
            "two slots share bytes"
        }
        10 => {
            let count = plan.calls.len();
            let call = plan.calls.get_mut(chance.below(count.max(1)))?;
            call.choice = if call.choice == Choice::Async { Choice::Sync } else { Choice::Async };
            "a call is made in another way"
        }
        11 => {
            let (Kind::Start { coll, .. } | Kind::Sync { coll }) = &mut graph.ops[at].kind else {
                return None;
            };
            coll.group = if coll.group == "tp" { "one" } else { "tp" }.into();
            "a call is another group's"
        }
        12 => {
            let Kind::Start { token, .. } = &mut graph.ops[at].kind else { return None };
            token.0 += 100;
            "a start has another token"
        }
        13 => {
            let out = *graph.ops[at].outs.first()?;
            let ty = &mut graph.values[out.index()].ty;
            ty.dtype = if ty.dtype == F32 { BF16 } else { F32 };
            "a value has other elements"
        }
        14 => {
            let out = *graph.ops[at].outs.first()?;
            let req = CommReq { domain: "tp".into(), groups: vec!["tp".into()], roles: Roles::In };
            graph.values[out.index()].class = Class::Comm(req);
            "a value lies where peers reach it"
        }
        15 => {
            let count = plan.calls.len();
            let call = plan.calls.get_mut(chance.below(count.max(1)))?;
            call.signature = call.signature.replace("sum", "max");
            "a call has another signature"
        }
        _ => {
            let other = chance.below(graph.ops.len());
            let [a, b] = [&graph.ops[at], &graph.ops[other]];
            if !a.kind.communicates() || !b.kind.communicates() || at == other {
                return None;
            }
            graph.ops.swap(at, other);
            "two calls change places"
        }
    };
    (kept != (graph.clone(), plan.clone())).then_some((graph, plan, what))
}

#[test]
fn whatever_is_changed_is_found_or_changes_nothing() {
    let mut found = std::collections::BTreeMap::new();
    for seed in 0..graphs() {
        let before = graph(&program(seed));
        let options = Options { realize: Realize::Always, overlap: seed % 4 == 0, ..Options::default() };
        let after = lowered(&before, &options);
        let mut chance = Chance(seed + 77);
        for _ in 0..4 {
            let Some((graph, plan, what)) = mutated(&after.graph, &after.plan, &mut chance) else { continue };
            if !check(&before, &plan, &graph).is_empty() {
                *found.entry(what).or_insert(0) += 1;
                continue;
            }
            // A change that passes must leave the results as they were: another operand of equal value, an operation that
            // no output needs.
            agree(&before, &graph, 2, seed, Arithmetic::Exact, 1e-7);
        }
    }
    assert_eq!(found.len(), 17, "only these were found: {found:?}");
}

#[test]
fn what_makes_no_sense_is_named() {
    let head = "group tp size 2\n%x: f32[4,8] = input()\n";
    let start = "%s: f32[4,8] = start(%x) prim=all_reduce group=tp red=sum token=0\n";
    let wait = "%w: f32[4,8] = wait(%s) tokens=[0]\n";
    let found = |body: &str| {
        let graph = Graph::from_text(&format!("{head}{body}")).unwrap();
        verify(&graph).into_iter().map(|finding| finding.kind).collect::<Vec<_>>()
    };
    assert_eq!(found(&format!("{start}{wait}return %w")), []);
    assert_eq!(found(&format!("{start}return %x")), [FindingKind::Token], "never waited for");
    assert!(found(&format!("{start}return %s")).contains(&FindingKind::InFlight));
    assert!(
        found(&format!("{start}%d: f32[4,8] = unary(%s) op=neg\n{wait}return %d"))
            .contains(&FindingKind::InFlight)
    );
    assert!(
        found(&format!("{start}{wait}%v: f32[4,8] = wait(%w) tokens=[0]\nreturn %v"))
            .contains(&FindingKind::Token)
    );
    assert!(found(&format!("{start}{wait}return %s")).contains(&FindingKind::Stale));
    let written = "%o: f32[4,8] = unary(%x) op=neg\n%s: f32[4,8] = start(%o) prim=all_reduce group=tp red=sum token=0\n\
                   %c: f32[4,8] = assign(%o, %x)\n%w: f32[4,8] = wait(%s) tokens=[0]\nreturn %w";
    assert_eq!(found(written), [FindingKind::InFlight], "its operand is written meanwhile");
    assert_eq!(
        found(&format!("{start}{wait}return %w").replace("group=tp", "group=dp")),
        [FindingKind::Group]
    );
    assert_eq!(found(&format!("{start}{wait}return %w").replace("red=sum", "")), [FindingKind::Group]);
    for shape in [
        "%d: f32[4,9] = unary(%x) op=neg",
        "%d: f32[-4,-8] = view(%x) view=reshape",
        "%d: f32[s7,8] = full() value=1",
        "%d: f32[2,8] strides [-8,1] = view(%x) view=strided",
        "%d: f32[2,8] strides [8,1] offset 24 = view(%x) view=strided",
        "%d: f32[4,8] = view(%x) view={\"permute\":[1,0]}",
        "%d: f32[8,4] strides [1,8] = view(%x) view={\"permute\":[1,2]}",
        "%d: f32[4,9] strides [8,0] = view(%x) view=expand",
        "%t: f32[4,8] = start(%x) prim=all_to_all group=tp sends=[1,2] receives=[2,2] token=0\n%d: f32[4,8] = wait(%t) tokens=[0]",
    ] {
        assert!(found(&format!("{shape}\nreturn %d")).contains(&FindingKind::Shape), "{shape}");
    }
    let comm = r#"%d: f32[4,8] class {"comm":{"domain":"tp","groups":["tp"],"roles":"in"}} = unary(%x) op=neg
return %d"#;
    assert_eq!(found(comm), [FindingKind::Escape]);
}

#[test]
fn a_plan_of_another_graph_proves_nothing() {
    let (one, two) = (graph(&program(1)), graph(&program(2)));
    let after = lowered(&one, &Options::default());
    assert_eq!(check(&two, &after.plan, &after.graph)[0].kind, FindingKind::Plan);
    assert_eq!(Plan::from_json(after.plan.to_json().as_bytes()).unwrap(), after.plan);
    assert!(Plan::from_json(b"{}").unwrap_err().to_string().contains("missing field"));
}

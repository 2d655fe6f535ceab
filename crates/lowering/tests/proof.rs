//! Random programs: a lowered program computes the same as before, without races, and every change of a lowered program or
//! of its decisions is found.

mod common;

use antiphon_lowering::{
    Arithmetic, Costs, Decisions, FindingKind, Graph, Numerics, Options, Realize, World, check,
    faults::{self, Fault},
    lower, verify,
};
use common::{Chance, Tally, agree, graph, lowered, races, tamper::tampered, trial};

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
        rewritten += u64::from(!after.decisions.rewrites.is_empty());
        agree(&before, &after.graph, 2, seed, Arithmetic::Exact, 1e-7);
        if numerics == Numerics::Same {
            agree(&before, &after.graph, 2, seed, Arithmetic::Kernels, 1e-4);
        }
        assert_eq!(Graph::from_text(&after.graph.to_text()).unwrap().to_json(), after.graph.to_json());
    }
    assert!(rewritten > graphs() / 2, "{rewritten} of {} were rewritten at all", graphs());
}

#[test]
fn whatever_is_changed_is_found_or_changes_nothing() {
    let mut found = std::collections::BTreeSet::new();
    for seed in 0..graphs() {
        let before = graph(&program(seed));
        let options = Options { realize: Realize::Always, overlap: seed % 4 == 0, ..Options::default() };
        let after = lowered(&before, &options);
        let mut chance = Chance(seed + 77);
        for _ in 0..4 {
            let Some((graph, decisions, kind)) = tampered(&after.graph, &after.decisions, &mut chance) else {
                continue;
            };
            if !check(&before, &decisions, &graph).is_empty() {
                found.insert(kind);
                continue;
            }
            // A change that passes must leave the results as they were: another operand of equal value, an operation that
            // no output needs.
            agree(&before, &graph, 2, seed, Arithmetic::Exact, 1e-7);
        }
    }
    assert!(found.len() > 20, "only these were found: {found:?}");
}

/// `ADVERSARIES=100000 SEED=1 cargo test --release -p antiphon-lowering --test proof adversaries` looks at more, and
/// `make fuzz-lowering` for hours.
fn adversaries() -> (u64, u64) {
    let number = |name, usual| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual);
    (number("SEED", 1), number("ADVERSARIES", 2_000))
}

#[test]
fn adversaries_are_lowered_right_and_their_changes_refused() {
    let (seed, count) = adversaries();
    let mut tally = Tally::new();
    for seed in seed..seed + count {
        trial(seed, 10, &mut tally).unwrap_or_else(|wrong| panic!("{wrong}"));
    }
    assert_eq!(tally.never_refused(), [""; 0]);
}

/// Ten identities that do not hold and ten wrong lifetimes, in the rules or in the proof.
#[test]
fn every_mistake_is_found() {
    let mut missed = Vec::new();
    for fault in Fault::ALL {
        if is_told_by_constants(*fault) || is_told_by_flights(*fault) {
            continue;
        }
        faults::put(Some(*fault));
        let mut tally = Tally::new();
        let wrong = (1..1_500).find_map(|seed| trial(seed, 20, &mut tally).err());
        faults::put(None);
        if wrong.is_none() {
            missed.push(*fault);
        }
    }
    assert_eq!(missed, []);
}

/// Whether a mistake places tensors wrongly that collectives read while they are in flight, through views.
fn is_told_by_flights(fault: Fault) -> bool {
    let comm = r#"class {"comm":{"domain":"tp","groups":["tp"],"roles":"in"}}"#;
    let before = graph(&format!(
        "group tp size 2
         %x: f32[4,8] = input()
         %a: f32[4,8] {comm} = unary(%x) op=neg
         %b: f32[4,8] {comm} = unary(%x) op=abs
         %u: f32[32] = view(%a) view=reshape
         %v: f32[2,8] offset 16 = view(%b) view=strided
         %s: f32[32] = start(%u) prim=all_reduce group=tp red=sum token=0
         %t: f32[2,8] = start(%v) prim=all_reduce group=tp red=sum token=1
         %y: f32[4,8] = unary(%x) op=exp
         %p: f32[32] = wait(%s) tokens=[0]
         %c: f32[4,8] {comm} = unary(%y) op=abs
         %q: f32[2,8] = wait(%t) tokens=[1]
         %d: f32[4,8] = sync(%c) prim=all_reduce group=tp red=sum
         return %p, %q, %d"
    ));
    // Calls of groups that are not ours stay as they are.
    let world = World { groups: Some(Vec::new()), ..World::default() };
    faults::put(Some(fault));
    let after = lower(&before, &world, &Costs::of(world.device), &Options::default());
    let findings = check(&before, &after.decisions, &after.graph);
    faults::put(None);
    !after.report.findings.is_empty()
        || !findings.is_empty()
        || races(&after.graph, &after.decisions).is_some()
}

/// Whether a mistake lets what is too close for the interpreter to see pass: the next constant, or a rounding.
fn is_told_by_constants(fault: Fault) -> bool {
    let pairs = [
        (
            "f64",
            "%r: f64[4] = binary(%x) op=add scalar=0.1",
            "%r: f64[4] = binary(%x) op=add scalar=0.10000000000000002",
        ),
        (
            "f32",
            "%r: f32[4] = binary(%x) op=add scalar=1",
            "%n: bf16[4] = cast(%x)\n%w: f32[4] = cast(%n)\n%r: f32[4] = binary(%w) op=add scalar=1",
        ),
    ];
    pairs.into_iter().any(|(dtype, one, other)| {
        let of = |body: &str| graph(&format!("%x: {dtype}[4] = input()\n{body}\nreturn %r"));
        let (before, after) = (of(one), of(other));
        let decisions = lowered(&before, &Options::default()).decisions;
        assert!(!check(&before, &decisions, &after).is_empty());
        faults::put(Some(fault));
        let accepted = check(&before, &decisions, &after).is_empty();
        faults::put(None);
        accepted
    })
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
    assert_eq!(check(&two, &after.decisions, &after.graph)[0].kind, FindingKind::Decisions);
    assert_eq!(Decisions::from_json(after.decisions.to_json().as_bytes()).unwrap(), after.decisions);
    assert!(Decisions::from_json(b"{}").unwrap_err().to_string().contains("missing field"));
}

//! What the verifier proves and what it rejects.

mod hostile;
mod mutants;
mod oracle;
mod plans;
mod random;
mod sizes;

use antiphon_plan::verify::{Expectation, Expected, Options, Report, Source, verify};
use antiphon_plan::{Plan, Rank, ReduceOp};

#[test]
fn right_plans_are_proved() {
    for (name, plan) in plans::all() {
        let report = verify(&plan, &Options::default());
        assert!(report.proved && report.meaning, "{name}: {report}");
    }
}

/// For measuring: `cargo test -p antiphon-plan --release --test verify -- --ignored`, then `antiphon plan verify FILE`.
#[test]
#[ignore = "writes a file to measure with"]
fn a_large_plan_in_a_file() {
    let plan = plans::hierarchical(4, 8, 12).expect("a plan");
    let file = std::env::temp_dir().join("hierarchical_4x8.json");
    std::fs::write(&file, plan.to_json()).expect("a writable folder");
    println!("{}: {} bytes", file.display(), plan.to_json().len());
}

/// A channel that carries data one way needs none back; one that carries signals does.
#[test]
fn only_signals_need_a_channel_back() {
    let mut plan = plans::all_gather(2).expect("a plan");
    let one_way = |plan: &mut Plan, keep: &[&str]| {
        plan.gpus[1].threadblocks[0].ops.clear();
        plan.gpus[1].threadblocks[0].channels.clear();
        plan.gpus[1].channels.clear();
        plan.gpus[0].threadblocks[0].ops.retain(|op| keep.contains(&op.kind.name()));
        verify(plan, &Options { expectation: Some(Expectation::Table(Vec::new())) })
    };
    let kinds = |report: &Report| report.errors().map(|error| error.kind.name()).collect::<Vec<_>>();
    assert_eq!(kinds(&one_way(&mut plan.clone(), &["nop", "put", "signal"])), ["no_counterpart"]);
    // Nobody waits for it, so it may come too late.
    assert_eq!(kinds(&one_way(&mut plan, &["nop", "put"])), ["late"]);
}

/// What is expected may be told, for plans whose collective says nothing or something else.
#[test]
fn a_table_takes_the_place_of_the_collective() {
    let plan = plans::all_gather(2).expect("a plan");
    let row = |from| Expected {
        rank: Rank(1),
        index: 0,
        size: 1,
        from: vec![Source { rank: Rank(from), index: 0 }],
        op: ReduceOp::Sum,
    };
    let judge = |from| verify(&plan, &Options { expectation: Some(Expectation::Table(vec![row(from)])) });
    assert!(judge(0).proved);
    let report = judge(1);
    let text = report.to_string();
    assert!(
        text.contains("must hold rank 1's input (chunk 0), and holds rank 0's input (chunk 0)"),
        "{text}"
    );
}

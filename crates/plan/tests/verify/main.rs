//! What the verifier proves and what it rejects.

mod hostile;
mod mutants;
mod oracle;
mod plans;
mod random;

use antiphon_plan::verify::{Options, verify};

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

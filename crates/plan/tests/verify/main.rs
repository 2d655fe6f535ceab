//! What the verifier proves and what it rejects.

mod plans;

use antiphon_plan::verify::{Options, verify};

#[test]
fn right_plans_are_proved() {
    for (name, plan) in plans::all() {
        let report = verify(&plan, &Options::default());
        assert!(report.proved && report.meaning, "{name}: {report}");
        println!("{name}: {report}");
    }
}

//! Ranks that are killed in the middle of a plan: the others get the error at once.

mod plans;

use std::time::Duration;

use antiphon_executor::{ExecutorError, LoadedPlan, Options};
use antiphon_fabric::Communicator;
use antiphon_plan::{
    ReduceOp,
    verify::{Options as Proof, VerifiedPlan},
};
use antiphon_testing::{VICTIMS, kill_each, role, say, say_error};

/// What a rank does when this binary is started as one.
#[test]
fn rank_process() {
    let Some(work) = role() else { return };
    let comm = Communicator::from_env().unwrap();
    let ranks = comm.world_size() as u32;
    let plan = match work.as_str() {
        "two-shot" => plans::two_shot(ranks, ReduceOp::Max, false),
        "packets" => plans::packets(ranks, ReduceOp::Max, false),
        other => panic!("{other} is no work"),
    };
    let plan = VerifiedPlan::new(plan.unwrap(), &Proof::default()).unwrap();
    let mut plan = LoadedPlan::load(&comm, &plan, Options::default()).unwrap();
    let (input, mut output) = (vec![1f32; 12 << 10], vec![0f32; 12 << 10]);
    say("ready");
    let error = loop {
        if let Err(error) = plan.execute(&comm, &input, &mut output) {
            break error;
        }
    };
    match error {
        ExecutorError::Fabric(error) => say_error(&error),
        ExecutorError::Stuck { reason, .. } => say_error(&reason),
        other => say(other),
    }
}

#[test]
fn killed_in_a_plan_of_signals() {
    kill_each(&VICTIMS[..3], "two-shot", Duration::from_millis(100));
}

#[test]
fn killed_in_a_plan_of_packets() {
    kill_each(&VICTIMS[..3], "packets", Duration::from_millis(100));
}

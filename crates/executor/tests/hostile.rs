//! Plan files from strangers: whatever they hold, there is a typed error or a result, in bounded time; never a panic, and
//! never an access outside a buffer.

mod plans;

use std::time::Duration;

use antiphon_executor::{LoadedPlan, Options};
use antiphon_fabric::LocalWorld;
use antiphon_plan::{
    Plan, ReduceOp,
    simulate::{Cluster, fitting, simulate},
    verify::{Options as Proof, VerifiedPlan, verify},
};

/// A small generator of numbers, the same in every run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % below.max(1)
    }
}

/// The text with one number replaced, a byte changed, or cut.
fn mutated(text: &str, numbers: &mut Numbers) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    let digits: Vec<usize> = (0..bytes.len()).filter(|&at| bytes[at].is_ascii_digit()).collect();
    match numbers.next(8) {
        0 => bytes.truncate(numbers.next(bytes.len())),
        1 => {
            let at = numbers.next(bytes.len());
            bytes[at] = numbers.next(256) as u8;
        }
        _ => {
            let at = digits[numbers.next(digits.len())];
            let new = ["0", "1", "2", "3", "7", "16", "4294967295", "18446744073709551615", "1000000"];
            bytes.splice(at..at + 1, new[numbers.next(new.len())].bytes());
        }
    }
    bytes
}

fn texts() -> Vec<String> {
    let plans = [
        plans::two_shot(1, ReduceOp::Sum, true),
        plans::alone(),
        plans::pipelined_all_to_all(1, 48),
        plans::switch_all_reduce(1, ReduceOp::Sum, true),
        plans::switch_packets(1),
        plans::get_all_gather(1, 2),
    ];
    plans.into_iter().map(|plan| plan.unwrap().to_json()).collect()
}

/// On one rank nothing can race, so that plans may run without a proof.
#[test]
fn mutated_plans_do_no_harm() {
    let (texts, mut numbers, mut ran) = (texts(), Numbers(1), 0);
    for round in 0..400 {
        let bytes = mutated(&texts[round % texts.len()], &mut numbers);
        let Ok(plan) = Plan::from_json(&bytes) else { continue };
        let chunks = [plan.gpus[0].input_chunks, plan.gpus[0].output_chunks];
        let done = LocalWorld::run_with(1, Duration::from_millis(20), |comm| {
            // SAFETY: there is one rank.
            let mut loaded = unsafe { LoadedPlan::load_unproved(&comm, plan.clone(), Options::default())? };
            let [input, output] = chunks.map(|chunks| vec![0f32; 8 * chunks.min(64) as usize]);
            loaded.execute(&comm, &input, &mut { output })
        });
        ran += usize::from(done[0].is_ok());
    }
    assert!(ran > 20, "only {ran} ran");
}

/// Of two ranks, only what is proved runs; proving must not be led astray either.
#[test]
fn mutated_plans_that_are_proved_run() {
    let text = plans::two_shot(2, ReduceOp::Sum, false).unwrap().to_json();
    let (mut numbers, mut ran) = (Numbers(7), 0);
    for _ in 0..150 {
        let bytes = mutated(&text, &mut numbers);
        let Ok(plan) = Plan::from_json(&bytes) else { continue };
        let Ok(proved) = VerifiedPlan::new(plan, &Proof::default()) else { continue };
        if proved.plan().num_ranks() != 2 {
            continue;
        }
        let chunks = proved.plan().gpus[0].input_chunks.min(64) as usize;
        let done = LocalWorld::run_with(2, Duration::from_secs(5), |comm| {
            let mut loaded = LoadedPlan::load(&comm, &proved, Options::default())?;
            loaded.execute(&comm, &vec![1f32; 8 * chunks], &mut vec![0f32; 8 * chunks])
        });
        ran += usize::from(done.iter().all(Result::is_ok));
    }
    assert!(ran > 3, "only {ran} ran");
}

/// The fuzzer begins with plans of the library. They are proved, and whatever is made of them is judged and played.
#[test]
fn mutated_plans_of_the_corpus_are_judged_and_played() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/corpus/plan_file");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
    files.sort();
    let (cluster, mut numbers, mut judged) = (Cluster::from_spec("h200x2").unwrap(), Numbers(3), 0);
    for file in &files {
        let text = std::fs::read_to_string(file).unwrap();
        let plan = Plan::from_json(text.as_bytes()).unwrap();
        assert!(verify(&plan, &Proof::default()).proved, "{}", file.display());
        for _ in 0..40 {
            let Ok(plan) = Plan::from_json(&mutated(&text, &mut numbers)) else { continue };
            let _ = verify(&plan, &Proof::default());
            let _ = simulate(&plan, &cluster, fitting(&plan, 1 << 16));
            judged += 1;
        }
    }
    assert!(files.len() > 10 && judged > 100, "{judged} of {} files", files.len());
}

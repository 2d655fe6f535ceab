//! A plan's file from a stranger: read, judged, played, loaded on one rank, executed.
#![no_main]

use std::time::Duration;

use antiphon_executor::{LoadedPlan, Options};
use antiphon_fabric::LocalWorld;
use antiphon_plan::{
    Plan,
    simulate::{Cluster, fitting, simulate},
    verify::{self, verify},
};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok(plan) = Plan::from_json(bytes) else { return };
    let _ = verify(&plan, &verify::Options::default());
    let cluster = Cluster::from_spec("h200x8").expect("a preset");
    let _ = simulate(&plan, &cluster, fitting(&plan, 1 << 20));
    let Some(gpu) = plan.gpus.first() else { return };
    let [input, output] = [gpu.input_chunks, gpu.output_chunks].map(|chunks| vec![0f32; 8 * chunks.min(64) as usize]);
    LocalWorld::run_with(1, Duration::from_millis(20), |comm| {
        // SAFETY: there is one rank, whose thread blocks share a thread.
        let loaded = unsafe { LoadedPlan::load_unproved(&comm, plan.clone(), Options::default()) };
        let _ = loaded.and_then(|mut plan| plan.execute(&comm, &input, &mut output.clone()));
    });
});

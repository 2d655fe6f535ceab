//! Many launches of plans that are chosen at random, with delays: `ANTIPHON_SOAK_CALLS` says how many.

use std::{env, time::Duration};

use antiphon_executor::{
    PacketKind,
    cuda::{CudaOptions, Form},
};
use antiphon_testing::sized;

use crate::{
    harness::{Both, Outcome, on_gpus, proved},
    library,
};

/// Plans that are loaded at once.
const LOADED: usize = 6;
/// Calls between two comparisons.
const TOGETHER: usize = 40;
/// Elements of a chunk.
const CHUNKS: [usize; 3] = [16, 100, 1024];

/// The next number below `end`, the same on all ranks.
fn next(random: &mut u64, end: usize) -> usize {
    *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*random >> 33) as usize % end
}

fn soak(ranks: usize, calls: usize) {
    let all = library(None, ranks as u32);
    let mut random = ranks as u64;
    let plans: Vec<_> = (0..LOADED)
        .map(|_| {
            let (algorithm, mut setting) = all[next(&mut random, all.len())].clone();
            setting.options.instances = 1 + next(&mut random, 3) as u32;
            let (form, packets) =
                (Form::ALL[1 + next(&mut random, 2)], PacketKind::ALL[next(&mut random, 2)]);
            (
                proved(algorithm.plan(&setting).unwrap()),
                CudaOptions { form, packets, ..CudaOptions::default() },
            )
        })
        .collect();
    on_gpus(ranks, |rank| -> Outcome {
        let mut all = Vec::new();
        for (plan, options) in &plans {
            let mut both = Both::load(rank, plan, *options)?;
            let mut prepared = Vec::new();
            for (seed, chunk) in CHUNKS.into_iter().enumerate() {
                both.prepare::<f32>(chunk)?;
                prepared.push(both.call::<f32>(chunk, seed, seed)?);
            }
            all.push((both, prepared));
        }
        let mut random = ranks as u64;
        for _ in 0..calls.div_ceil(TOGETHER) {
            let mut was_called = [[false; CHUNKS.len()]; LOADED];
            for _ in 0..TOGETHER {
                let (which, size) = (next(&mut random, LOADED), next(&mut random, CHUNKS.len()));
                let (both, prepared) = &all[which];
                let call = &prepared[size];
                was_called[which][size] = !both.in_place; // what is in place changes with every call
                // Another rank is late each time, and mostly none.
                if next(&mut random, 8 * ranks) == rank.comm.rank() {
                    std::thread::sleep(Duration::from_micros(300));
                }
                both.queue(call)?;
            }
            for ((both, prepared), was_called) in all.iter().zip(was_called) {
                let mut called = prepared.iter().zip(was_called).filter(|(_, was_called)| *was_called);
                called.try_for_each(|(call, _)| both.check(call, "in a soak"))?;
            }
        }
        Ok(())
    });
}

#[test]
fn a_soak_of_random_plans_on_2() {
    let calls = env::var("ANTIPHON_SOAK_CALLS").map_or(sized(2000, 80), |calls| calls.parse().unwrap());
    soak(2, calls);
}

#[test]
fn a_soak_of_random_plans_on_4() {
    let calls = env::var("ANTIPHON_SOAK_CALLS").map_or(sized(2000, 40), |calls| calls.parse().unwrap());
    soak(4, calls);
}

//! Plans between GPUs against the host's executor, bit by bit. Ranks are threads, one for each GPU; without a GPU for every rank a
//! test is recorded as skipped.

mod harness;

use antiphon_executor::cuda::CudaOptions;
use antiphon_language::library::{ALGORITHMS, Algorithm, Setting};
use antiphon_tensor::bf16;
use harness::{Both, on_gpus, proved};

/// Every algorithm of a kind, out of place and, where it works, in place, for chunks of any number of `alignment` bytes.
fn all(collective: &str, ranks: u32, alignment: u64) -> Vec<(&'static Algorithm, Setting)> {
    let mut all = Vec::new();
    for algorithm in ALGORITHMS.iter().filter(|algorithm| algorithm.collective == collective) {
        for inplace in [false, true] {
            let mut setting = Setting { inplace, unit_size: 48, ..Setting::new(ranks) };
            setting.options.buffer_alignment = alignment;
            let divides = !algorithm.nodes || ranks.is_multiple_of(2) && ranks > 2;
            if divides && (algorithm.inplace || !inplace) {
                all.push((algorithm, setting));
            }
        }
    }
    all
}

fn all_reduces(world_size: usize) {
    for (algorithm, setting) in all("allreduce", world_size as u32, 4) {
        let plan = proved(algorithm.plan(&setting).unwrap());
        on_gpus(world_size, |rank| {
            let mut both = Both::load(rank, &plan, CudaOptions::default())?;
            for (seed, chunk) in [4096, 4, 1000, 13].into_iter().enumerate() {
                both.compare::<f32>(chunk, 0, seed)?;
                both.compare::<f32>(chunk, 1, seed)?;
                both.compare::<bf16>(2 * chunk, 3, seed)?;
            }
            Ok(both.gpu.free(&rank.comm)?)
        });
    }
}

#[test]
fn all_reduces_have_the_hosts_bits_on_2() {
    all_reduces(2);
}

//! Adversarial programs and changes of what they are lowered to, for as long as is asked for, on all processors.
//!
//! ```sh
//! cargo run --release -p antiphon-lowering --example fuzz_lowering [SEED [CHANGES [THREADS]]]
//! ```
//!
//! It ends at the first program that is lowered to something else, is not proved, or of which a change is accepted that changes
//! results, with an exit status of 1. Otherwise it prints how many changes of each kind were refused and accepted, as JSON.

#[path = "../tests/common/mod.rs"]
mod common;

use common::{Tally, trial};

/// Changes of one program.
const CHANGES: usize = 20;

/// Tries every `step`th program from the seed `first` on, until `wanted` changes have been made. Returns the number of programs, too.
fn search(first: u64, step: u64, wanted: u64) -> (Tally, u64) {
    let (mut tally, mut programs) = (Tally::new(), 0);
    while (tally.changes() as u64) < wanted {
        if let Err(what) = trial(first + programs * step, CHANGES, &mut tally) {
            println!("{what}");
            std::process::exit(1);
        }
        programs += 1;
    }
    (tally, programs)
}

fn main() {
    let number = |place: usize, usual: u64| {
        std::env::args().nth(place).and_then(|text| text.parse().ok()).unwrap_or(usual)
    };
    let (seed, wanted) = (number(1, 1), number(2, 1_000_000));
    let threads =
        number(3, std::thread::available_parallelism().map_or(1, |count| count.get() as u64)).max(1);
    let (mut all, mut programs) = (Tally::new(), 0);
    std::thread::scope(|scope| {
        let start = |thread| scope.spawn(move || search(seed + thread, threads, wanted.div_ceil(threads)));
        let workers: Vec<_> = (0..threads).map(start).collect();
        for worker in workers {
            let (tally, count) = worker.join().expect("no panic");
            all.add(&tally);
            programs += count;
        }
    });
    let (changes, kinds) = (all.changes(), all.to_json());
    println!("{{\n  \"seed\": {seed},\n  \"programs\": {programs},\n  \"changes\": {changes},");
    println!("  \"accepted wrongly\": 0,\n  \"refused and accepted\": {kinds}\n}}");
}

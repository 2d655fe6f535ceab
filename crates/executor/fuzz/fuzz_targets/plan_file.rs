//! A plan file from a stranger.
#![no_main]

#[path = "../stranger.rs"]
mod stranger;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    stranger::receive(bytes);
});

// Bytes at random are seldom a plan: every other change is one that a plan may survive.
libfuzzer_sys::fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    if seed.is_multiple_of(2) {
        return libfuzzer_sys::fuzzer_mutate(data, size, max_size);
    }
    let mut changed = stranger::mutated(&data[..size], &mut stranger::Numbers(seed.into()));
    changed.truncate(max_size);
    data[..changed.len()].copy_from_slice(&changed);
    changed.len()
});

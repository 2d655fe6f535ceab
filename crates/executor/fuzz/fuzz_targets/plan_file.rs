//! An untrusted plan file.
#![no_main]

#[path = "../untrusted.rs"]
mod untrusted;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    untrusted::receive(bytes);
});

// Bytes at random are seldom a plan: every other change is one that a plan may survive.
libfuzzer_sys::fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    if seed.is_multiple_of(2) {
        return libfuzzer_sys::fuzzer_mutate(data, size, max_size);
    }
    let mut changed = untrusted::mutated(&data[..size], &mut untrusted::Numbers(seed.into()));
    changed.truncate(max_size);
    data[..changed.len()].copy_from_slice(&changed);
    changed.len()
});

//! Files of strangers: graphs as text, JSON and torch's, and plans.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    antiphon_lowering::fuzz::graph_file(bytes);
    antiphon_lowering::fuzz::decisions_file(bytes);
});

//! Graphs from strangers: text, JSON, torch's.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| antiphon_lowering::fuzz::graph_file(bytes));

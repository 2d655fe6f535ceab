//! Messages from peers that know no key, and from those that know it and are broken.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| antiphon_fabric::engine::fuzz(bytes));

//! Bytes from strangers, at the place where ranks meet.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| antiphon_fabric::rendezvous::frame::fuzz(bytes));

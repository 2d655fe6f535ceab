//! Bytes from unauthenticated peers, at the rendezvous.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| antiphon_fabric::rendezvous::frame::fuzz(bytes));

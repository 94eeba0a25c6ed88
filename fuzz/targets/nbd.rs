//! See [`fuzz::nbd`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::play(fuzz::nbd::run, data));

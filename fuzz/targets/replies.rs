//! See [`fuzz::replies`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::play(fuzz::replies::run, data));

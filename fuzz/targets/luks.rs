//! See [`fuzz::luks`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::play(fuzz::luks::run, data));

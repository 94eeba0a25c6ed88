//! See [`fuzz::queue`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::play(fuzz::queue::run, data));

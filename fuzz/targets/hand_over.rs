//! See [`fuzz::hand_over`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::play(fuzz::hand_over::run, data));

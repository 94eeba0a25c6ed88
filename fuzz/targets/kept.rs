//! See [`fuzz::kept`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::play(fuzz::kept::run, data));

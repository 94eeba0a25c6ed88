//! See [`fuzz::qmp`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::play(fuzz::qmp::run, data));

//! See [`fuzz::vduse`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::play(fuzz::vduse::run, data));

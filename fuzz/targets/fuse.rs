//! See [`fuzz::fuse`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::play(fuzz::fuse::run, data));

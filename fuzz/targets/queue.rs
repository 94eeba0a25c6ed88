//! See [`fuzz::queue`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::queue::run(data));

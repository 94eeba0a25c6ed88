//! See [`fuzz::nvme`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::play(fuzz::nvme::run, data));

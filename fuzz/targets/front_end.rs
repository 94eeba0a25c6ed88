//! See [`fuzz::front_end`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::play(fuzz::front_end::run, data));

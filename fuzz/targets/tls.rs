//! See [`fuzz::tls`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::play(fuzz::tls::run, data));

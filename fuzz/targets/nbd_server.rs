//! See [`fuzz::nbd_server`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::play(fuzz::nbd_server::run, data));

//! See [`fuzz::nbd_client`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::play(fuzz::nbd_client::run, data));

//! See [`fuzz::vhost_user`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::play(fuzz::vhost_user::run, data));

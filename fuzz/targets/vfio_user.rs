//! See [`fuzz::vfio_user`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::play(fuzz::vfio_user::run, data));

//! See [`fuzz::scsi`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::play(fuzz::scsi::run, data));

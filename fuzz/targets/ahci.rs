//! See [`fuzz::ahci`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::play(fuzz::ahci::run, data));

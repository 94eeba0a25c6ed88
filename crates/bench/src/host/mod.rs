//! The machine on which the benchmark runs: its state and its settings.

pub mod affinity;
pub mod data_file;
pub(crate) mod footprint;
pub mod machine;
pub(crate) mod process;
pub mod ram_disk;
pub(crate) mod syscalls;
pub(crate) mod timed;

//! The machine on which the benchmark runs: its state and its settings.

pub(crate) mod affinity;
pub(crate) mod data_file;
pub(crate) mod footprint;
pub(crate) mod machine;
pub(crate) mod process;
pub(crate) mod ram_disk;
pub(crate) mod syscalls;

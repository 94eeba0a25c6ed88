//! What is read from, and done to, the machine that is measured on.

pub(crate) mod affinity;
pub(crate) mod data_file;
pub(crate) mod footprint;
pub(crate) mod machine;
pub(crate) mod process;
pub(crate) mod ram_disk;
pub(crate) mod syscalls;

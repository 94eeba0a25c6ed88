//! The block layer: requests, nodes, drivers.

pub mod options;

//! Guest memory.

mod any_thread;
mod bus_error;
mod elsewhere;
mod regions;
mod registered;
mod view;

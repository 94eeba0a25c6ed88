//! Command lines and QMP.

mod activity;
mod hostile;
mod inventory;
mod qmp;
mod qsd;
mod state;
mod typed;

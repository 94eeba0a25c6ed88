//! Mechanisms that can be left out, to see what each is worth.

/// What a loop is to do without: for measuring only. By default nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ablation {
    /// Without contract E1: a loop that sleeps is not told of the calls, bottom halves and tasks' wake-ups
    /// that other threads queue, and finds them when something else wakes it. It is still told to
    /// stop, and of what its thread pool has done.
    pub no_wake: bool,
    /// Without contract E10: [`EventLoop::defer`](crate::EventLoop::defer) makes each call at once.
    pub no_batching: bool,
}

//! Mechanisms that can be left out, to see what each is worth.

/// Mechanisms that a loop leaves out, for measurements. By default none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ablation {
    /// Leaves out the wake-up contract: calls, bottom halves and wake-ups of tasks that other threads queue do
    /// not wake a sleeping loop. It finds them at the next event. A stop and results of the thread pool still
    /// wake it.
    pub no_wake: bool,
    /// Leaves out the deferral contract: [`EventLoop::defer`](crate::EventLoop::defer) makes each call at once.
    pub no_batching: bool,
}

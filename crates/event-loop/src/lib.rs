//! An event loop built around io_uring, in the lineage of QEMU's AioContext and IOThread.
//!
//! One thread, one ring. The loop watches file descriptors, carries out file I/O, runs timers, tasks
//! and bottom halves, takes work from other threads, and busy-polls for an adaptive window before
//! it sleeps. Everything that one iteration queues goes out with the system call that waits.
//!
//! Two styles live side by side: completions that advance preallocated slots ([`IoTarget`],
//! [`Handler`]) for the hot path, and futures ([`EventLoop::spawn`]) for what takes many steps.
//!
//! It knows nothing of disks.

mod blocking;
mod bottom_half;
mod buf;
mod clock;
mod deferred;
mod event_loop;
mod flag;
mod handle;
mod handlers;
mod inbox;
mod io_thread;
mod iteration;
pub mod oneshot;
mod op;
pub mod polling;
mod readiness;
pub mod ring;
mod shut_down;
mod slots;
mod stats;
pub mod sync;
mod task;
mod thread_pool;
mod timers;

pub use bottom_half::BottomHalf;
pub use buf::{AlignedBuf, IoBufs};
pub use clock::{Clock, MonotonicClock};
pub use deferred::DeferredCall;
pub use event_loop::{EventLoop, LoopConfig};
pub use handle::{LoopGone, LoopHandle};
pub use handlers::{Handler, HandlerId, Progress, Trigger};
pub use io_thread::{IoThread, IoThreadConfig, SpawnError};
pub use op::{Engine, IoOp, IoTarget, LoopFile};
pub use polling::policy::PollParams;
pub use readiness::Readiness;
pub use ring::setup::{Chosen, RingChoice, RingFlags, SetupError, TaskRun};
pub use stats::{Counter, LoopStats};
pub use thread_pool::ThreadPoolConfig;
pub use timers::TimerId;

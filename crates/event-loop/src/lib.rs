#![doc = include_str!("../README.md")]
#![warn(missing_debug_implementations)]

mod ablation;
mod blocking;
mod bottom_half;
mod buf;
mod cancel;
mod clock;
#[cfg(feature = "counting")]
pub mod counting;
mod debug;
mod deferred;
mod event_loop;
mod executor;
mod flag;
#[cfg(any(feature = "glib", feature = "tokio"))]
pub mod foreign;
mod gather;
mod handle;
mod handlers;
mod heap;
mod inbox;
mod io_thread;
mod iteration;
mod lanes;
mod latency;
mod linux_aio;
#[doc(hidden)]
pub mod mailbox;
mod meter;
pub mod oneshot;
mod op;
pub mod polling;
mod probes;
mod readiness;
mod registered;
pub mod ring;
mod scheduling;
mod shut_down;
mod signal;
mod slab;
mod slots;
mod stats;
pub mod sync;
mod task;
mod thread_pool;
mod timers;
mod transfer;

#[doc(hidden)]
pub use ablation::Ablation;
pub use bottom_half::BottomHalf;
pub use buf::{AlignedBuf, IoBufs, MemoryOwner};
pub use clock::{Clock, CpuShare, MonotonicClock};
pub use deferred::DeferredCall;
pub use event_loop::{EventLoop, LoopConfig};
pub use gather::Gather;
pub use handle::{LoopGone, LoopHandle};
pub use handlers::{Handler, HandlerId, Progress, Trigger};
pub use heap::{bound_heap, trim_heap};
pub use io_thread::{IoThread, IoThreadConfig, SpawnError, ThreadEnd};
pub use lanes::Lane;
pub use latency::{LATENCY_BUCKETS, Latencies, LatencyCounters};
pub use meter::{BUDGET, Meter, Turn};
pub use op::{BlockingCall, CallMemory, DeviceCommand, Engine, IoOp, IoTarget, LoopFile, count};
pub use polling::policy::{PollGoal, PollParams, PollPolicy};
pub use readiness::Readiness;
pub use registered::{LoopMemory, Place, Places};
pub use ring::setup::{Chosen, RingChoice, RingFlags, SetupError, TaskRun};
pub use ring::{command_and_wait, read_now, write_now};
pub use scheduling::Scheduling;
pub use signal::Signal;
pub use slab::{Pool, Slab};
pub use stats::{Counter, LoopStats};
pub use task::{Elapsed, JoinError, JoinHandle, Operation, take_turns, until};
pub use thread_pool::{ThreadBirth, ThreadPoolConfig, start_thread};
pub use timers::TimerId;
pub use transfer::Part;

#![doc = include_str!("../README.md")]

mod ablation;
mod blocking;
mod bottom_half;
mod buf;
mod clock;
#[cfg(feature = "counting")]
pub mod counting;
mod deferred;
mod event_loop;
mod executor;
mod flag;
#[cfg(any(feature = "glib", feature = "tokio"))]
pub mod foreign;
mod gather;
mod handle;
mod handlers;
mod inbox;
mod io_thread;
mod iteration;
mod linux_aio;
pub mod mailbox;
pub mod oneshot;
mod op;
pub mod polling;
mod readiness;
mod registered;
pub mod ring;
mod scheduling;
mod shut_down;
mod slots;
mod stats;
pub mod sync;
mod task;
mod thread_pool;
mod timers;
pub mod trace;

pub use ablation::Ablation;
pub use bottom_half::BottomHalf;
pub use buf::{AlignedBuf, IoBufs};
pub use clock::{Clock, MonotonicClock};
pub use deferred::DeferredCall;
pub use event_loop::{EventLoop, LoopConfig};
pub use gather::Gather;
pub use handle::{LoopGone, LoopHandle};
pub use handlers::{Handler, HandlerId, Progress, Trigger};
pub use io_thread::{IoThread, IoThreadConfig, SpawnError, ThreadEnd};
pub use op::{Engine, IoOp, IoTarget, LoopFile};
pub use polling::policy::{PollParams, PollPolicy};
pub use readiness::Readiness;
pub use registered::{LoopMemory, Place, Places};
pub use ring::setup::{Chosen, RingChoice, RingFlags, SetupError, TaskRun};
pub use scheduling::Scheduling;
pub use stats::{Counter, LoopStats};
pub use task::JoinHandle;
pub use thread_pool::ThreadPoolConfig;
pub use timers::TimerId;

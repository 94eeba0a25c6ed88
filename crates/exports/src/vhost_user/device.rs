//! What this server asks of a device: the seam between the protocol, which is the same for all
//! devices, and the device models.
//!
//! A device is seen from two sides, as everything here: [`Device`] by the control plane, shared
//! between threads; [`DeviceOnLoop`] and [`RunningQueue`] by the I/O thread that they live on.

#![forbid(unsafe_code)]

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use event_loop::EventLoop;
use guest_memory::MemoryView;
use nix::errno::Errno;
use queue::{Queue, QueueError};

use super::eventfd::EventFd;

/// A virtio device, as the control plane knows it.
pub trait Device: Send + Sync {
    /// Its own feature bits; those of queues and transport are the server's.
    fn features(&self) -> u64;

    /// The features that the driver took, of [`features`](Self::features) and the server's.
    fn set_features(&self, negotiated: u64);

    /// As after a power-on, its configuration included.
    fn reset(&self);

    /// How many queues it has.
    fn num_queues(&self) -> u16;

    /// Its configuration space as the driver sees it now.
    fn config_space(&self) -> Vec<u8>;

    /// Writes to its configuration space.
    ///
    /// # Errors
    ///
    /// Why not, for people.
    fn write_config(&self, offset: u32, data: &[u8]) -> Result<(), String>;

    /// Gets ready for queues on this loop. Called on the loop's thread, once.
    ///
    /// # Errors
    ///
    /// When the loop lacks what the device needs.
    fn attach(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn DeviceOnLoop>>;
}

/// Gets the result of a flush.
pub type FlushDone = Box<dyn FnOnce(Result<(), Errno>)>;

/// A device on one loop.
pub trait DeviceOnLoop {
    /// Starts a queue, disabled: it takes nothing before it is
    /// [enabled](RunningQueue::set_enabled).
    ///
    /// `kick` fires when the driver has put buffers in; without it the queue is to be polled.
    fn start_queue(
        &self,
        index: u16,
        queue: Queue,
        kick: Option<EventFd>,
        call: Option<EventFd>,
    ) -> Rc<dyn RunningQueue>;

    /// Makes everything that was answered so far durable, then calls `done`.
    fn flush(&self, done: FlushDone);
}

/// A queue at work on its loop.
pub trait RunningQueue {
    /// Enables or disables it. What waits in a queue that is enabled is taken at once.
    fn set_enabled(&self, enabled: bool);

    /// Sets the way out for signals; without one the driver polls.
    fn set_call(&self, call: Option<EventFd>);

    /// Sets where a broken queue is reported.
    fn set_err(&self, err: Option<EventFd>);

    /// Goes on in new memory. What is in flight finishes in the old, and keeps it mapped.
    ///
    /// # Errors
    ///
    /// The rings are not in the new memory; the queue then is broken.
    fn replace_memory(&self, memory: Rc<MemoryView>) -> Result<(), QueueError>;

    /// Takes no more buffers, finishes those in flight, then calls `done` with the next available
    /// index, maybe before this returns. The caller keeps the queue until then.
    fn stop(&self, done: Box<dyn FnOnce(u16)>);
}

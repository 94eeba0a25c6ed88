//! virtio-blk over vhost-user: a block node offered to a virtual machine.

#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use block::node::{BlockNode, Channel};
use block::request::{Completion, Op, Request};
use devices::virtio_blk::{self, DeviceConfig, QueueHandler, QueueStats};
use event_loop::{EventLoop, IoBufs, LoopHandle};
use guest_memory::MemoryView;
use nix::errno::Errno;
use queue::{Queue, QueueError};

use super::device::{Device, DeviceOnLoop, FlushDone, RunningQueue};
use super::error::ExportError;
use super::eventfd::EventFd;
use super::listener::Listen;
use super::server::{MAX_QUEUES, Server};

/// What `--export type=vhost-user-blk` says.
pub struct VhostUserBlkConfig {
    /// `id`: its name in messages.
    pub id: String,
    /// `addr`.
    pub listen: Listen,
    /// `node-name`.
    pub node: Arc<dyn BlockNode>,
    /// `iothread`: at least one; queue i is served by thread i, counted round.
    pub io_threads: Vec<LoopHandle>,
    /// `num-queues`: from 1 to 256.
    pub num_queues: u16,
    /// `writable`.
    pub writable: bool,
    /// Whether the guest finds the write cache off. It may switch it on.
    pub writethrough: bool,
    /// `logical-block-size`: bytes, a power of two from 512 to 2 MiB.
    pub logical_block_size: u32,
    /// Serial number; its first 20 bytes count.
    pub serial: String,
}

/// A block node offered over a vhost-user socket. Dropping it stops it without waiting.
pub struct VhostUserBlkExport {
    id: String,
    server: Server,
    io_threads: Vec<LoopHandle>,
    stats: Arc<[Arc<QueueStats>]>,
}

impl VhostUserBlkExport {
    /// Offers a node. When this returns front ends can connect.
    ///
    /// # Errors
    ///
    /// When the configuration is out of range, the socket cannot be listened on, or the node cannot
    /// be used from one of the I/O threads.
    pub async fn start(
        control_loop: EventLoop,
        config: VhostUserBlkConfig,
    ) -> Result<Self, ExportError> {
        let VhostUserBlkConfig { id, listen, node, io_threads, num_queues, .. } = config;
        if !(1..=MAX_QUEUES).contains(&num_queues) {
            let allowed = format!("num-queues must be from 1 to {MAX_QUEUES}, not {num_queues}");
            return Err(ExportError::Config(allowed));
        }
        let device = virtio_blk::Device::new(DeviceConfig {
            geometry: node.geometry(),
            num_queues,
            logical_block_size: config.logical_block_size,
            writable: config.writable,
            writethrough: config.writethrough,
            serial: config.serial,
        })
        .map_err(|error| ExportError::Config(error.to_string()))?;
        let stats: Arc<[_]> = (0..num_queues).map(|_| Arc::new(QueueStats::default())).collect();
        let blk =
            Arc::new(Blk { device: Arc::new(device), num_queues, node, stats: stats.clone() });
        let server = Server::start(control_loop, id.clone(), listen, blk, &io_threads).await?;
        Ok(VhostUserBlkExport { id, server, io_threads, stats })
    }

    /// `id`.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Whether a front end is connected.
    pub fn is_connected(&self) -> bool {
        self.server.is_connected()
    }

    /// What each queue has done since the export was started, by its index.
    pub fn queue_stats(&self) -> &[Arc<QueueStats>] {
        &self.stats
    }

    /// The threads that serve it: their statistics have the poll windows.
    pub fn io_threads(&self) -> &[LoopHandle] {
        &self.io_threads
    }

    /// Takes no more requests, finishes those in flight, flushes the node, removes the socket.
    ///
    /// # Errors
    ///
    /// When the flush failed, or a loop has stopped before.
    pub async fn stop(self) -> Result<(), ExportError> {
        self.server.stop().await
    }
}

/// The device as the server sees it.
struct Blk {
    device: Arc<virtio_blk::Device>,
    num_queues: u16,
    node: Arc<dyn BlockNode>,
    stats: Arc<[Arc<QueueStats>]>,
}

impl Device for Blk {
    fn features(&self) -> u64 {
        self.device.features()
    }

    fn set_features(&self, negotiated: u64) {
        self.device.set_features(negotiated);
    }

    fn reset(&self) {
        self.device.reset();
    }

    fn num_queues(&self) -> u16 {
        self.num_queues
    }

    fn config_space(&self) -> Vec<u8> {
        self.device.config_space().to_vec()
    }

    fn write_config(&self, offset: u32, data: &[u8]) -> Result<(), String> {
        self.device.write_config(offset, data).map_err(|error| error.to_string())
    }

    fn attach(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn DeviceOnLoop>> {
        let channel = self.node.clone().open_channel(event_loop)?;
        Ok(Rc::new(BlkOnLoop { event_loop: event_loop.clone(), blk: self, channel }))
    }
}

/// The device on one loop: its queues there share a channel to the node.
struct BlkOnLoop {
    event_loop: EventLoop,
    blk: Arc<Blk>,
    channel: Rc<dyn Channel>,
}

impl DeviceOnLoop for BlkOnLoop {
    fn start_queue(
        &self,
        index: u16,
        queue: Queue,
        kick: Option<EventFd>,
        call: Option<EventFd>,
    ) -> Rc<dyn RunningQueue> {
        let stats = self.blk.stats.get(usize::from(index)).cloned().unwrap_or_default();
        Rc::new(BlkQueue(QueueHandler::start(
            &self.event_loop,
            self.blk.device.clone(),
            self.channel.clone(),
            queue,
            kick.map(|kick| kick.fd().clone()),
            call.map(|call| call.fd().clone()),
            stats,
        )))
    }

    fn flush(&self, done: FlushDone) {
        /// Passes the answer on.
        struct Flushed(RefCell<Option<FlushDone>>);
        impl Completion for Flushed {
            fn complete(&self, _tag: u32, result: Result<(), Errno>, _bufs: IoBufs) {
                let done = self.0.borrow_mut().take();
                if let Some(done) = done {
                    done(result);
                }
            }
        }
        if self.blk.node.geometry().read_only {
            return done(Ok(()));
        }
        let to: Rc<dyn Completion> = Rc::new(Flushed(RefCell::new(Some(done))));
        self.channel.submit(Request::new(Op::Flush, 0, 0, IoBufs::new(), &to, 0));
    }
}

struct BlkQueue(Rc<QueueHandler>);

impl RunningQueue for BlkQueue {
    fn set_enabled(&self, enabled: bool) {
        self.0.set_enabled(enabled);
    }

    fn set_call(&self, call: Option<EventFd>) {
        self.0.set_call(call.map(|call| call.fd().clone()));
    }

    fn set_err(&self, err: Option<EventFd>) {
        self.0.set_err(err.map(|err| err.fd().clone()));
    }

    fn replace_memory(&self, memory: Rc<MemoryView>) -> Result<(), QueueError> {
        self.0.replace_memory(memory)
    }

    fn stop(&self, done: Box<dyn FnOnce(u16)>) {
        self.0.stop(done);
    }
}

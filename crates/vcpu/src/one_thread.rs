//! A guest and its device on one thread, for counting what a request costs.
//!
//! The guest puts `depth` requests into a queue, kicks once, and has the loop turned until all are
//! answered. Nothing depends on time, on a second thread or on chance, so each round is the same work
//! as the one before, to the instruction.

use std::rc::Rc;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, ensure};
use block::NodeRegistry;
use block::options::BlockdevOptions;
use devices::virtio::{Held, Virtqueue};
use devices::virtio_blk::start_queue;
use event_loop::{EventLoop, LoopConfig, Signal};
use guest_memory::MemoryView;
use guest_memory::test_util::{self, USER_BASE};
use queue::{Inflight, Queue};
use stats::QueueStats;

use crate::virtio_blk::{GuestQueue, Op, QueueArea, device};

/// Bytes of each request.
pub const REQUEST: u32 = 4096;

/// A queue, served on the thread that drives it.
pub struct OneThread {
    event_loop: EventLoop,
    handler: Rc<dyn Virtqueue>,
    stats: Arc<QueueStats>,
    guest: GuestQueue,
    depth: u16,
    blocks: u64,
    next_block: u64,
}

impl OneThread {
    /// Opens the disk and starts a queue of it. `record`: what is in flight is kept in a record, as it is
    /// with a front end that asks for one.
    ///
    /// # Errors
    ///
    /// The disk or the loop cannot be had, or the disk is smaller than a request.
    pub fn new(
        event_loop: LoopConfig,
        disk: &BlockdevOptions,
        depth: u16,
        record: bool,
    ) -> Result<OneThread> {
        let event_loop = EventLoop::new(event_loop).map_err(|error| anyhow!("{error}"))?;
        let node = NodeRegistry::new().open(disk).context("opening the disk")?;
        let geometry = node.geometry();
        let blocks = geometry.size / u64::from(REQUEST);
        ensure!(blocks > 0, "the disk is smaller than a request");
        let area = QueueArea { base: 0, depth, request_size: REQUEST };
        let memory = test_util::memfd_memory(&[(0, area.end())]).context("guest memory")?;
        let guest = GuestQueue::new(&memory, area, true)?;
        let setup = guest.setup();
        let size = setup.config.size;
        let in_flight = match record {
            true => {
                let memory = [(0, Inflight::region_len(size) as u64)];
                let memory = test_util::memfd_memory(&memory).context("memory for a record")?;
                let in_flight = Inflight::new(&memory, USER_BASE, size);
                Some(in_flight.map_err(|error| anyhow!("a record: {error}"))?)
            }
            false => None,
        };
        let queue = Queue::with_inflight(MemoryView::new(memory), setup.config, in_flight)
            .map_err(|error| anyhow!("a virtqueue: {error}"))?;
        let channel = node.open_channel(&event_loop).context("opening the disk on the loop")?;
        let stats = Arc::new(QueueStats::default());
        let handler = start_queue(
            &event_loop,
            Arc::new(device(geometry, 1)?),
            channel,
            queue,
            Some(setup.kick),
            Some(Signal::new(setup.call)),
            stats.clone(),
        );
        handler.set_enabled(true);
        Ok(OneThread { event_loop, handler, stats, guest, depth, blocks, next_block: 0 })
    }

    /// Reads `depth` requests at a time, `rounds` times.
    ///
    /// # Errors
    ///
    /// The loop or a request fails.
    pub fn read(&mut self, rounds: u64) -> Result<()> {
        for _ in 0..rounds {
            self.guest.enable_signals();
            for _ in 0..self.depth {
                let offset = self.next_block % self.blocks * u64::from(REQUEST);
                // A stride that is no power of two, so that neighbours are not read in a row.
                self.next_block += 17;
                self.guest.submit(Op::Read, offset, REQUEST)?.context("the queue is full")?;
            }
            self.guest.kick()?;
            while self.guest.in_flight() > 0 {
                match self.guest.reap()? {
                    Some(done) => ensure!(done.ok, "a request failed"),
                    None => turn(&self.event_loop)?,
                }
            }
        }
        Ok(())
    }

    /// The loop.
    pub fn event_loop(&self) -> &EventLoop {
        &self.event_loop
    }

    /// What the device has done.
    pub fn stats(&self) -> &QueueStats {
        &self.stats
    }

    /// Signals since this was asked last.
    ///
    /// # Errors
    ///
    /// read(2).
    pub fn take_signals(&mut self) -> Result<u64> {
        self.guest.take_signals()
    }
}

impl Drop for OneThread {
    fn drop(&mut self) {
        self.handler.stop(Held::Left, Box::new(|_| {}));
        if let Err(error) = self.event_loop.shut_down() {
            log::error!("the loop: {error}");
        }
    }
}

/// All that is done for the guest: the device's side is what this calls.
#[inline(never)]
fn turn(event_loop: &EventLoop) -> Result<()> {
    event_loop.run_once(true).context("turning the loop")
}

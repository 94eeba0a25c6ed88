//! A virtio-blk device on the machine's I/O threads, and the driver side of its queues.
//!
//! As with a real guest, the driver first lays out a queue in guest memory ([`GuestQueue::new`], on the thread that acts
//! as the vCPU), and then starts the device ([`VirtioBlk::start`]).

use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use block::node::{BlockNode, Geometry};
use devices::virtio::Held;
use devices::virtio_blk::{Device, DeviceConfig, start_queue};
use event_loop::{Signal, oneshot};
use guest_memory::{GuestMemory, MemoryView};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;
use queue::driver::Driver;
use queue::{Queue, QueueConfig, Segment};
use stats::QueueStats;

use crate::machine::{Machine, OnLoop};

/// The type of a request: virtio 1.3, section 5.2.6, VIRTIO_BLK_T_IN and _OUT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Read from the disk.
    Read,
    /// Write to the disk.
    Write,
}

/// VIRTIO_BLK_S_OK.
const STATUS_OK: u8 = 0;

/// Set-up of a queue for the device.
#[derive(Debug, Clone)]
pub struct QueueSetup {
    /// Its rings, and the negotiated features.
    pub config: QueueConfig,
    /// The kick eventfd.
    pub kick: Arc<OwnedFd>,
    /// The call eventfd.
    pub call: Arc<OwnedFd>,
}

/// A running virtio-blk device: I/O thread i, modulo their number, serves queue i. Dropping it stops the queues and waits
/// until nothing is in flight.
pub struct VirtioBlk {
    stats: Vec<Arc<QueueStats>>,
    on_loops: Vec<OnLoop>,
}

impl VirtioBlk {
    /// Starts a device on the machine's disk with these queues.
    ///
    /// # Errors
    ///
    /// A queue's rings are not in memory, or an I/O thread cannot use the disk.
    pub fn start(machine: &Machine, queues: &[QueueSetup]) -> Result<VirtioBlk> {
        Self::start_with(machine, machine.disk(), queues)
    }

    /// Starts a device on another disk.
    ///
    /// # Errors
    ///
    /// Those of [`start`](Self::start).
    pub fn start_with(
        machine: &Machine,
        disk: &Arc<dyn BlockNode>,
        queues: &[QueueSetup],
    ) -> Result<VirtioBlk> {
        let num_queues = u16::try_from(queues.len()).context("too many queues")?;
        let device = device(disk.geometry(), num_queues)?;
        let device = Arc::new(device);
        let stats: Vec<_> = queues.iter().map(|_| Arc::new(QueueStats::default())).collect();
        let mut started = VirtioBlk { stats, on_loops: Vec::new() };
        let threads = machine.io_threads().len();
        for index in 0..threads.min(queues.len()) {
            let ours = queues.iter().cloned().zip(started.stats.iter().cloned());
            let ours = ours.skip(index).step_by(threads).collect();
            let on_loop = start_queues(machine, disk, index, &device, ours)?;
            started.on_loops.push(on_loop);
        }
        Ok(started)
    }

    /// Returns the counters of each queue.
    pub fn stats(&self) -> &[Arc<QueueStats>] {
        &self.stats
    }
}

/// A device on a disk of this geometry, with all its features negotiated.
pub(crate) fn device(geometry: Geometry, num_queues: u16) -> Result<Device> {
    let device = Device::new(DeviceConfig {
        geometry,
        num_queues,
        logical_block_size: 512,
        writable: !geometry.read_only,
        writethrough: false,
        serial: "vcpu".into(),
    })
    .map_err(|error| anyhow!("the virtio-blk device: {error}"))?;
    device.set_features(device.features());
    Ok(device)
}

fn start_queues(
    machine: &Machine,
    disk: &Arc<dyn BlockNode>,
    index: usize,
    device: &Arc<Device>,
    queues: Vec<(QueueSetup, Arc<QueueStats>)>,
) -> Result<OnLoop> {
    let (device, disk, memory) = (device.clone(), disk.clone(), machine.memory().clone());
    OnLoop::start(machine.loop_of(index), move |event_loop| {
        let channel = disk.open_channel(event_loop).context("opening the disk on an I/O thread")?;
        let start = |(setup, stats): (QueueSetup, _)| {
            let queue = Queue::new(MemoryView::new(memory.clone()), setup.config)
                .map_err(|error| anyhow!("a virtqueue: {error}"))?;
            Ok(start_queue(
                event_loop,
                device.clone(),
                channel.clone(),
                queue,
                Some(setup.kick),
                Some(Signal::new(setup.call)),
                stats,
            ))
        };
        let handlers = queues.into_iter().map(start).collect::<Result<Vec<_>>>()?;
        handlers.iter().for_each(|handler| handler.set_enabled(true));
        Ok(async move {
            for handler in handlers {
                let (sender, stopped) = oneshot::channel();
                handler.stop(Held::Left, Box::new(move |_| sender.send(())));
                let _ = stopped.await;
            }
        })
    })
}

/// The memory of a queue and its requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueArea {
    /// The first byte, a multiple of 4096.
    pub base: u64,
    /// Maximum requests in flight; 1 to 32768.
    pub depth: u16,
    /// Bytes of the largest request.
    pub request_size: u32,
}

impl QueueArea {
    /// Offset of a request's status byte from its header.
    pub const STATUS_AT: u64 = 64;
    /// Offset of its descriptor table, which its data follows.
    const TABLE_AT: u64 = 128;
    const DATA_AT: u64 = 4096;

    /// Entries of the virtqueue: one per request, whose three descriptors are indirect.
    fn queue_size(&self) -> u16 {
        self.depth.next_power_of_two()
    }

    fn slots(&self) -> u64 {
        self.base + Driver::rings_len(self.queue_size()).next_multiple_of(4096)
    }

    /// Returns the address of a slot, which begins with its request's header (virtio 1.3, section 5.2.6). The status byte
    /// is at [`STATUS_AT`](Self::STATUS_AT).
    pub fn slot(&self, slot: u16) -> u64 {
        let size = Self::DATA_AT + u64::from(self.request_size).next_multiple_of(4096);
        self.slots() + u64::from(slot) * size
    }

    /// Returns the first address after the area.
    pub fn end(&self) -> u64 {
        self.slot(self.depth)
    }
}

/// The driver side of a queue, on the thread that acts as a vCPU.
///
/// Requests have one data buffer and use indirect descriptors, as in Linux's driver with VIRTIO_F_INDIRECT_DESC.
pub struct GuestQueue {
    memory: Rc<MemoryView>,
    driver: Driver,
    area: QueueArea,
    setup: QueueSetup,
    free: Vec<u16>,
    /// The slot of each chain in flight, by the chain's head.
    slot_of: Vec<u16>,
    kicks: u64,
    signals: u64,
}

/// An answered request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Done {
    /// The slot that [`GuestQueue::submit`] returned.
    pub slot: u16,
    /// Whether its status is VIRTIO_BLK_S_OK.
    pub ok: bool,
}

impl GuestQueue {
    /// Lays out an empty queue.
    ///
    /// # Errors
    ///
    /// The area is not in memory, or eventfd(2) fails.
    pub fn new(memory: &Arc<GuestMemory>, area: QueueArea, event_idx: bool) -> Result<GuestQueue> {
        ensure!(area.depth > 0, "a queue has a depth");
        let memory = MemoryView::new(memory.clone());
        let size = area.queue_size();
        let driver = Driver::new(&memory, area.base, size, event_idx)
            .map_err(|error| anyhow!("laying out a virtqueue: {error}"))?;
        let setup = QueueSetup { config: driver.config(), kick: eventfd()?, call: eventfd()? };
        Ok(GuestQueue {
            memory,
            driver,
            area,
            setup,
            free: (0..area.depth).rev().collect(),
            slot_of: vec![0; size.into()],
            kicks: 0,
            signals: 0,
        })
    }

    /// Returns the set-up for the device.
    pub fn setup(&self) -> QueueSetup {
        self.setup.clone()
    }

    /// Adds a request of `len` bytes, at most [`QueueArea::request_size`], to the queue. [`kick`](Self::kick) publishes it.
    /// Returns its slot, or `None` if all are in flight.
    ///
    /// # Errors
    ///
    /// The request is too long.
    pub fn submit(&mut self, op: Op, offset: u64, len: u32) -> Result<Option<u16>> {
        ensure!(len <= self.area.request_size, "a request of {len} bytes is too long");
        let Some(&slot) = self.free.last() else { return Ok(None) };
        let at = self.area.slot(slot);
        let mut header = [0; 16];
        header[0] = u8::from(op == Op::Write);
        header[8..].copy_from_slice(&(offset / 512).to_le_bytes());
        self.memory.write_bytes(at, &header)?;
        self.memory.write_u8(at + QueueArea::STATUS_AT, 0xff)?;
        let header = Segment { addr: at, len: 16 };
        let data = Segment { addr: at + QueueArea::DATA_AT, len };
        let status = Segment { addr: at + QueueArea::STATUS_AT, len: 1 };
        let table = at + QueueArea::TABLE_AT;
        let head = match op {
            Op::Read => self.driver.add_indirect(table, &[header], &[data, status]),
            Op::Write => self.driver.add_indirect(table, &[header, data], &[status]),
        }?;
        let Some(head) = head else { return Ok(None) };
        self.free.pop();
        self.slot_of[usize::from(head)] = slot;
        Ok(Some(slot))
    }

    /// Publishes submitted requests, and kicks the device if it requests that.
    ///
    /// # Errors
    ///
    /// write(2) on the eventfd.
    pub fn kick(&mut self) -> Result<()> {
        if self.driver.publish() {
            nix::unistd::write(&self.setup.kick, &1u64.to_ne_bytes()).context("kicking")?;
            self.kicks += 1;
        }
        Ok(())
    }

    /// Takes one answer.
    ///
    /// # Errors
    ///
    /// Never: the queue's area is in memory.
    pub fn reap(&mut self) -> Result<Option<Done>> {
        let Some(used) = self.driver.reap() else { return Ok(None) };
        let slot = self.slot_of[usize::from(used.head)];
        let status = self.memory.read_u8(self.area.slot(slot) + QueueArea::STATUS_AT)?;
        self.free.push(slot);
        Ok(Some(Done { slot, ok: status == STATUS_OK }))
    }

    /// Suppresses signals, as a driver does while it takes answers or polls.
    pub fn suppress_signals(&mut self) {
        self.driver.suppress_signals();
    }

    /// Requests a signal for the next answer. Returns `true` if an answer is available already.
    pub fn enable_signals(&mut self) -> bool {
        self.driver.enable_signals()
    }

    /// Requests a signal and sleeps until it comes, at most `limit`, unless an answer is available. Returns whether a
    /// signal came.
    ///
    /// # Errors
    ///
    /// ppoll(2) or read(2) on the eventfd.
    pub fn wait(&mut self, limit: Duration) -> Result<bool> {
        if self.driver.enable_signals() {
            return Ok(false);
        }
        let mut fds = [PollFd::new(self.setup.call.as_fd(), PollFlags::POLLIN)];
        match ppoll(&mut fds, Some(TimeSpec::from(limit)), None) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error).context("waiting for a signal"),
        }
        self.take_signals().map(|signals| signals > 0)
    }

    /// Resets the call eventfd. Returns the number of signals.
    ///
    /// # Errors
    ///
    /// read(2).
    pub fn take_signals(&mut self) -> Result<u64> {
        let signals = take_count(&self.setup.call)?;
        self.signals += signals;
        Ok(signals)
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        usize::from(self.area.depth) - self.free.len()
    }

    /// Kicks made so far.
    pub fn kicks(&self) -> u64 {
        self.kicks
    }

    /// Signals taken so far.
    pub fn signals(&self) -> u64 {
        self.signals
    }

    /// Returns the data of a slot.
    ///
    /// # Errors
    ///
    /// `len` extends beyond guest memory.
    pub fn data(&self, slot: u16, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.memory.read_bytes(self.area.slot(slot) + QueueArea::DATA_AT, &mut bytes)?;
        Ok(bytes)
    }
}

/// Resets an eventfd and returns its count.
pub(crate) fn take_count(eventfd: &OwnedFd) -> Result<u64> {
    let mut count = [0; 8];
    match nix::unistd::read(eventfd, &mut count) {
        Ok(_) => Ok(u64::from_ne_bytes(count)),
        Err(Errno::EAGAIN) => Ok(0),
        Err(error) => Err(error).context("reading the call eventfd"),
    }
}

fn eventfd() -> Result<Arc<OwnedFd>> {
    let fd = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC);
    Ok(Arc::new(fd.context("eventfd")?.into()))
}

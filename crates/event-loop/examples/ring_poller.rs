//! Serves a ring in shared memory as a virtio device does: by kicks while the loop sleeps, without them while it polls.
//!
//! The driver's side puts numbers into the ring, advances the available index and kicks if the device asks for kicks. The
//! device's side is a [`Handler`]: its eventfd wakes the loop, and `poll` looks at the index without a system call.
//!
//!     cargo run -p ringmill-event-loop --example ring_poller

use std::cell::Cell;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering, fence};

use event_loop::{EventLoop, Handler, LoopConfig, PollParams, Progress, Trigger, oneshot};
use nix::poll::PollFlags;
use nix::sys::eventfd::{EfdFlags, EventFd};

const SIZE: u16 = 256;
/// Entries that one call serves, so that other sources get their turn.
const TURN: usize = 64;

/// What both sides share; of a real virtqueue, guest memory.
struct Ring {
    entries: [AtomicU64; SIZE as usize],
    /// Free-running, written by the driver.
    available: AtomicU16,
    /// Free-running, written by the device.
    used: AtomicU16,
    /// The device looks at `available` by itself: a kick would be wasted.
    no_kick: AtomicBool,
}

/// The driver's side, on another thread.
struct Driver {
    ring: Arc<Ring>,
    kick: Arc<OwnedFd>,
    kicks: u64,
}

impl Driver {
    /// Offers `value`, and kicks if the device asks for it.
    fn put(&mut self, value: u64) -> io::Result<()> {
        let available = self.ring.available.load(Ordering::Relaxed);
        while available.wrapping_sub(self.ring.used.load(Ordering::Acquire)) == SIZE {
            std::thread::yield_now();
        }
        self.ring.entries[usize::from(available % SIZE)].store(value, Ordering::Relaxed);
        self.ring.available.store(available.wrapping_add(1), Ordering::Release);
        // Either this sees that kicks are wanted, or the device's last look sees the index.
        fence(Ordering::SeqCst);
        if !self.ring.no_kick.load(Ordering::Relaxed) {
            nix::unistd::write(&*self.kick, &1_u64.to_ne_bytes())?;
            self.kicks += 1;
        }
        Ok(())
    }
}

/// The device's side: adds up what it finds, until it finds 0.
struct Device {
    ring: Arc<Ring>,
    sum: Cell<u64>,
    done: Cell<Option<oneshot::Sender<u64>>>,
}

impl Device {
    fn has_more(&self) -> bool {
        self.ring.available.load(Ordering::Acquire) != self.ring.used.load(Ordering::Relaxed)
    }
}

impl Handler for Device {
    fn ready(&self, _events: u32) -> Progress {
        for _ in 0..TURN {
            if !self.has_more() {
                return Progress::Done;
            }
            let used = self.ring.used.load(Ordering::Relaxed);
            let value = self.ring.entries[usize::from(used % SIZE)].load(Ordering::Relaxed);
            self.ring.used.store(used.wrapping_add(1), Ordering::Release);
            self.sum.set(self.sum.get() + value);
            if value == 0
                && let Some(done) = self.done.take()
            {
                done.send(self.sum.get());
            }
        }
        Progress::More
    }

    fn can_poll(&self) -> bool {
        true
    }

    fn poll(&self) -> bool {
        self.has_more()
    }

    fn poll_begin(&self) {
        self.ring.no_kick.store(true, Ordering::Relaxed);
    }

    fn poll_end(&self) {
        self.ring.no_kick.store(false, Ordering::Relaxed);
        // The loop calls `poll` once more after this.
        fence(Ordering::SeqCst);
    }
}

/// Sends 1 to `count` through a ring; the sum and the number of kicks.
fn run(count: u64, poll: PollParams) -> Result<(u64, u64), Box<dyn std::error::Error>> {
    let kick = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?;
    let kick: Arc<OwnedFd> = Arc::new(kick.into());
    let ring = Arc::new(Ring {
        entries: std::array::from_fn(|_| AtomicU64::new(0)),
        available: AtomicU16::new(0),
        used: AtomicU16::new(0),
        no_kick: AtomicBool::new(false),
    });
    let (sender, sum) = oneshot::channel();
    let device = Device { ring: ring.clone(), sum: Cell::new(0), done: Cell::new(Some(sender)) };
    let event_loop = EventLoop::new(LoopConfig { poll, ..LoopConfig::default() })?;
    // Edge-triggered: the eventfd need not be read.
    let events = PollFlags::POLLIN.bits() as u32;
    event_loop.add_handler(kick.clone(), events, Trigger::Edge, Rc::new(device));

    let mut driver = Driver { ring, kick, kicks: 0 };
    let driving = std::thread::spawn(move || {
        (1..=count).chain([0]).try_for_each(|value| driver.put(value)).map(|()| driver.kicks)
    });
    let sum = event_loop.block_on(sum)??;
    let kicks = driving.join().map_err(|_| "the driver panicked")??;
    Ok((sum, kicks))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for (name, poll) in [("asleep", PollParams::OFF), ("polling", PollParams::default())] {
        let (sum, kicks) = run(1_000_000, poll)?;
        println!("{name}: the sum is {sum}, after {kicks} kicks");
    }
    Ok(())
}

#[test]
fn nothing_is_lost_with_kicks_and_without() {
    const COUNT: u64 = 100_000;
    let sum = COUNT * (COUNT + 1) / 2;
    let (by_kicks, kicks) = run(COUNT, PollParams::OFF).unwrap();
    // Each entry is announced: nothing looks for it otherwise.
    assert_eq!((by_kicks, kicks), (sum, COUNT + 1));
    assert_eq!(run(COUNT, PollParams::default()).unwrap().0, sum);
}

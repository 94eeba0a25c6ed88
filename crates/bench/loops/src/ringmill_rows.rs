//! The rows over ringmill's own interfaces: bottom halves, `IoTarget` with tokens.

use std::cell::{Cell, RefCell};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use event_loop::{AlignedBuf, Engine, EventLoop, IoBufs, IoOp, IoTarget, LoopFile};
use fastrand::Rng;

use crate::async_rows::{
    BATCH, BEFORE_WAKE, FIRING, FIRING_DELAY, FIRING_SPREAD, PENDING, SOCKETS, buffer_size,
    open_direct, socket_ring, spin,
};
use crate::conditions::Conditions;
use crate::meter::{Meter, median_us};
use crate::page::PAGE_SIZE;
use crate::ringmill::{nanoseconds, new_loop};
use crate::rows::Row;
use bench::host::affinity::bind_this_thread;
use bench::load::offsets::{Offsets, Order};

/// Measures on the calling thread.
pub(crate) fn measure(row: Row, conditions: &Conditions) -> Result<f64> {
    let event_loop = new_loop()?;
    let meter = match row {
        Row::TimerFire => Meter::of_cpu_time(conditions.run_time),
        _ => Meter::new(conditions.run_time),
    };
    let meter = match row {
        Row::Wake => return wake(&event_loop, conditions),
        Row::TimerLate => return timer_late(&event_loop, conditions),
        Row::TimerChurn => timer_churn(&event_loop, meter)?,
        Row::TimerFire => timer_fire(&event_loop, meter)?,
        Row::Ring(tokens) => ring(&event_loop, meter, tokens)?,
        Row::FileRead(depth) => reads(&event_loop, meter, &conditions.file, depth)?,
        Row::RamRead(depth) => reads(&event_loop, meter, &conditions.device, depth)?,
        _ => return Ok(f64::NAN),
    };
    Ok(meter)
}

fn wake(event_loop: &EventLoop, conditions: &Conditions) -> Result<f64> {
    let woken = Rc::new(Cell::new(false));
    let here = {
        let woken = woken.clone();
        event_loop.bottom_half(move || woken.set(true))
    };
    let (tell, told) = std::sync::mpsc::channel();
    let other_cpu = conditions.other_cpu;
    let echo = std::thread::spawn(move || -> Result<()> {
        bind_this_thread(other_cpu)?;
        let event_loop = new_loop()?;
        let there = event_loop.bottom_half(move || here.schedule());
        tell.send((there, event_loop.handle()))?;
        event_loop.run().context("the other loop")
    });
    let (there, other_loop) = told.recv().context("the other thread has failed")?;
    let begin = Instant::now();
    let mut times = Vec::new();
    while begin.elapsed() < conditions.run_time && !echo.is_finished() {
        spin(BEFORE_WAKE);
        let start = Instant::now();
        there.schedule();
        while !woken.replace(false) {
            event_loop.run_once(true)?;
        }
        times.push(start.elapsed() / 2);
    }
    other_loop.stop();
    echo.join().map_err(|_| anyhow::anyhow!("the other thread panicked"))??;
    Ok(median_us(times))
}

fn timer_late(event_loop: &EventLoop, conditions: &Conditions) -> Result<f64> {
    let fired = Rc::new(Cell::new(false));
    struct Fired(Rc<Cell<bool>>);
    impl IoTarget for Fired {
        fn complete(&self, _token: u32, _result: i32, _bufs: IoBufs) {
            self.0.set(true);
        }
    }
    let target: Rc<dyn IoTarget> = Rc::new(Fired(fired.clone()));
    let begin = Instant::now();
    let mut times = Vec::new();
    while begin.elapsed() < conditions.run_time {
        let deadline = Instant::now() + Duration::from_micros(100);
        let left = deadline.saturating_duration_since(Instant::now());
        event_loop.submit_timer(event_loop.now_ns() + nanoseconds(left), &target, 0);
        while !fired.replace(false) {
            event_loop.run_once(true)?;
        }
        times.push(Instant::now().saturating_duration_since(deadline));
    }
    Ok(median_us(times))
}

/// Counts completions.
struct Counted {
    meter: Meter,
    left: Cell<usize>,
}

impl IoTarget for Counted {
    fn complete(&self, _token: u32, _result: i32, _bufs: IoBufs) {
        self.left.set(self.left.get() - 1);
    }
}

fn timer_churn(event_loop: &EventLoop, meter: Meter) -> Result<f64> {
    let counted = Rc::new(Counted { meter, left: Cell::new(0) });
    let target: Rc<dyn IoTarget> = counted.clone();
    let mut random = Rng::with_seed(1);
    let start = event_loop.now_ns();
    let mut far = || start + (3600 << 30) + (random.u64(..) >> 22);
    for _ in 0..PENDING {
        event_loop.submit_timer(far(), &target, 0);
    }
    while counted.meter.add(BATCH as u64) {
        for _ in 0..BATCH {
            let timer = event_loop.submit_timer(far(), &target, 0);
            event_loop.cancel_timer(timer);
        }
        event_loop.run_once(false)?;
    }
    Ok(counted.meter.thousands())
}

fn timer_fire(event_loop: &EventLoop, meter: Meter) -> Result<f64> {
    let counted = Rc::new(Counted { meter, left: Cell::new(0) });
    let target: Rc<dyn IoTarget> = counted.clone();
    let mut random = Rng::with_seed(2);
    let mut goes_on = true;
    while goes_on {
        counted.left.set(FIRING);
        let start = event_loop.now_ns() + nanoseconds(FIRING_DELAY);
        for _ in 0..FIRING {
            event_loop.submit_timer(start + (random.u64(..) >> FIRING_SPREAD), &target, 0);
        }
        while counted.left.get() > 0 {
            event_loop.run_once(true)?;
        }
        goes_on = counted.meter.add_slow(FIRING as u64);
    }
    Ok(counted.meter.thousands())
}

/// Sockets that pass on what they get.
struct Ring {
    event_loop: EventLoop,
    meter: Meter,
    over: Cell<bool>,
    failed: Cell<i32>,
    /// What each reads from and writes to.
    sockets: Vec<(LoopFile, LoopFile)>,
    /// Each socket's description of memory that is not in flight: to write from while it reads, to
    /// read to while it writes.
    idle: Vec<RefCell<IoBufs>>,
    this: RefCell<Option<Rc<dyn IoTarget>>>,
}

/// Sets the token of a write apart from that of a read.
const WRITE: u32 = 1 << 31;

impl IoTarget for Ring {
    fn complete(&self, token: u32, result: i32, bufs: IoBufs) {
        let this = self.this.borrow();
        let Some(this) = &*this else { return };
        let (reader, writer) = &self.sockets[(token & !WRITE) as usize];
        let Ok(n) = u64::try_from(result) else {
            self.failed.set(result);
            return;
        };
        let i = (token & !WRITE) as usize;
        if token & WRITE != 0 {
            let read = IoOp::Read { offset: 0 };
            let idle = self.idle[i].replace(bufs);
            self.event_loop.submit(reader, read, Engine::Uring, idle, this, i as u32);
            return;
        }
        if !self.meter.add(n) {
            return self.over.set(true);
        }
        let write = IoOp::Write { offset: 0, dsync: false };
        let mut part = self.idle[i].take();
        part.set_part(&bufs, 0, n as usize, 1);
        self.idle[i].replace(bufs);
        self.event_loop.submit(writer, write, Engine::Uring, part, this, token | WRITE);
    }
}

fn buffer(size: usize) -> IoBufs {
    AlignedBuf::io_bufs(size, 64).unwrap_or_default()
}

fn ring(event_loop: &EventLoop, meter: Meter, tokens: usize) -> Result<f64> {
    let mut first = Vec::new();
    let mut sockets = Vec::new();
    for (reader, writer) in socket_ring()? {
        first.push(writer.try_clone().context("duplicating a socket")?);
        let register = |socket| event_loop.register_file(Arc::new(OwnedFd::from(socket)));
        sockets.push((register(reader), register(writer)));
    }
    let ring = Rc::new(Ring {
        event_loop: event_loop.clone(),
        meter,
        over: Cell::new(false),
        failed: Cell::new(0),
        sockets,
        idle: (0..SOCKETS).map(|_| RefCell::new(IoBufs::with_capacity(1))).collect(),
        this: RefCell::new(None),
    });
    let target: Rc<dyn IoTarget> = ring.clone();
    ring.this.replace(Some(target.clone()));
    for (i, (reader, _)) in ring.sockets.iter().enumerate() {
        let read = IoOp::Read { offset: 0 };
        let bufs = buffer(buffer_size(tokens));
        event_loop.submit(reader, read, Engine::Uring, bufs, &target, i as u32);
    }
    for socket in &mut first[..tokens] {
        std::io::Write::write_all(socket, b"t").context("sending a token")?;
    }
    while !ring.over.get() {
        event_loop.run_once(true)?;
        ensure!(ring.failed.get() == 0, "a socket's operation returned {}", ring.failed.get());
    }
    Ok(ring.meter.thousands())
}

/// Readers that read again what they have read.
struct Readers {
    event_loop: EventLoop,
    meter: Meter,
    file: LoopFile,
    offsets: RefCell<Offsets>,
    in_flight: Cell<usize>,
    over: Cell<bool>,
    failed: Cell<i32>,
    this: RefCell<Option<Rc<dyn IoTarget>>>,
}

impl Readers {
    fn read(&self, bufs: IoBufs) {
        let this = self.this.borrow();
        let Some(this) = &*this else { return };
        let read = IoOp::Read { offset: self.offsets.borrow_mut().next_offset() };
        self.in_flight.set(self.in_flight.get() + 1);
        self.event_loop.submit(&self.file, read, Engine::Uring, bufs, this, 0);
    }
}

impl IoTarget for Readers {
    fn complete(&self, _token: u32, result: i32, bufs: IoBufs) {
        self.in_flight.set(self.in_flight.get() - 1);
        if result != PAGE_SIZE as i32 {
            self.failed.set(result);
            self.over.set(true);
        }
        if !self.meter.add(1) {
            self.over.set(true);
        }
        if !self.over.get() {
            self.read(bufs);
        }
    }
}

fn reads(event_loop: &EventLoop, meter: Meter, path: &Path, depth: usize) -> Result<f64> {
    let (file, pages) = open_direct(path)?;
    let readers = Rc::new(Readers {
        event_loop: event_loop.clone(),
        meter,
        file: event_loop.register_file(Arc::new(OwnedFd::from(file))),
        offsets: RefCell::new(Offsets::new(Order::Random, pages, PAGE_SIZE as u64, 0, 1)),
        in_flight: Cell::new(0),
        over: Cell::new(false),
        failed: Cell::new(0),
        this: RefCell::new(None),
    });
    let target: Rc<dyn IoTarget> = readers.clone();
    readers.this.replace(Some(target));
    for _ in 0..depth {
        readers.read(AlignedBuf::io_bufs(PAGE_SIZE, PAGE_SIZE).context("out of memory")?);
    }
    while readers.in_flight.get() > 0 {
        event_loop.run_once(true)?;
    }
    ensure!(!readers.over.get() || readers.failed.get() == 0, "a read: {}", readers.failed.get());
    Ok(readers.meter.thousands())
}

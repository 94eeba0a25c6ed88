//! The rows for asynchronous runtimes, with the same code for each.

use std::cell::{Cell, RefCell};
use std::fs::{File, OpenOptions};
use std::future::{Future, poll_fn};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use fastrand::Rng;

use crate::conditions::Conditions;
use crate::executor::{Count, Executor};
use crate::meter::{Meter, median_us};
use crate::page::{PAGE_SIZE, Page};
use crate::rows::Row;
use crate::signal::Signal;
use bench::host::affinity::bind_this_thread;
use bench::load::offsets::{Offsets, Order};

/// Sockets in a ring.
pub(crate) const SOCKETS: usize = 100;
/// Timers pending in the background.
pub(crate) const PENDING: usize = 10_000;
/// Timers armed together to fire.
pub(crate) const FIRING: usize = 20_000;
/// Minimum deadline of those, from the first one's arming on.
pub(crate) const FIRING_DELAY: Duration = Duration::from_millis(8);
/// Shift of a random 64-bit number that is added to the deadline: up to 2^20 ns, about 1 ms.
pub(crate) const FIRING_SPREAD: u32 = 44;
/// Timers or tasks of one batch.
pub(crate) const BATCH: usize = 100;
/// Tasks that yield.
const YIELDING: usize = 64;
/// Maximum closures posted and not run.
const WINDOW: u64 = 4096;
/// How long the waking side spins before a wake-up, so that the other side sleeps.
pub(crate) const BEFORE_WAKE: Duration = Duration::from_micros(50);

/// Measures `row` on the calling thread.
pub(crate) fn measure<E: Executor>(row: Row, conditions: &Conditions) -> Result<Option<f64>> {
    let meter = Rc::new(match row {
        Row::TimerFire => Meter::of_cpu_time(conditions.run_time),
        _ => Meter::new(conditions.run_time),
    });
    let cpu = conditions.cpu;
    let run = {
        let meter = meter.clone();
        let conditions = conditions.clone();
        async move {
            match row {
                Row::Wake => return Ok(Some(wake::<E>(conditions).await)),
                Row::TimerLate => return Ok(Some(timer_late::<E>(&conditions).await)),
                Row::PostBusy => post::<E>(meter, &conditions, true).await?,
                Row::PostIdle => post::<E>(meter, &conditions, false).await?,
                Row::Ring(tokens) => ring::<E>(meter, tokens).await?,
                Row::TimerChurn => timer_churn::<E>(&meter).await,
                Row::TimerFire => timer_fire::<E>(&meter).await,
                Row::Spawn => spawn::<E>(&meter).await,
                Row::Switch => switch::<E>(meter).await,
                Row::Yield => yields::<E>(meter).await,
                Row::FileRead(depth) => reads::<E>(meter, &conditions.file, depth).await?,
                Row::RamRead(depth) => reads::<E>(meter, &conditions.device, depth).await?,
            }
            Ok(None)
        }
    };
    let figure: Result<Option<f64>> = E::block_on(cpu, run)?;
    Ok(figure?.or_else(|| Some(meter.thousands())))
}

/// Raised by one of several tasks when the measurement is over.
#[derive(Debug, Default)]
struct Over {
    is: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl Over {
    fn now(&self) {
        self.is.set(true);
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    async fn wait(&self) {
        poll_fn(|cx| {
            if self.is.get() {
                return Poll::Ready(());
            }
            self.waker.replace(Some(cx.waker().clone()));
            Poll::Pending
        })
        .await;
    }
}

async fn wake<E: Executor>(conditions: Conditions) -> f64 {
    let [here, there] = [(); 2].map(|()| Arc::new(Signal::default()));
    let over = Arc::new(AtomicBool::new(false));
    let echo = {
        let (here, there, over) = (here.clone(), there.clone(), over.clone());
        std::thread::spawn(move || {
            bind_this_thread(conditions.other_cpu)?;
            E::block_on(conditions.other_cpu, async move {
                loop {
                    there.wait().await;
                    if over.load(Ordering::Relaxed) {
                        break;
                    }
                    here.raise();
                }
            })
        })
    };
    let begin = Instant::now();
    let mut times = Vec::new();
    while begin.elapsed() < conditions.run_time && !echo.is_finished() {
        spin(BEFORE_WAKE);
        let start = Instant::now();
        there.raise();
        here.wait().await;
        times.push(start.elapsed() / 2);
    }
    over.store(true, Ordering::Relaxed);
    there.raise();
    match echo.join() {
        Ok(Ok(())) => median_us(times),
        _ => f64::NAN,
    }
}

/// Keeps the CPU for a while.
pub(crate) fn spin(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// Starts a thread that posts closures which increment the returned counter.
pub(crate) fn start_posting(
    cpu: usize,
    post: impl Fn(Count) + Send + 'static,
) -> Result<&'static AtomicU64> {
    // Leaked, so that a closure holds a plain reference.
    let done: &'static AtomicU64 = Box::leak(Box::default());
    std::thread::Builder::new()
        .spawn(move || {
            // An unbound thread would measure something else.
            if bind_this_thread(cpu).is_err() {
                return;
            }
            let mut posted: u64 = 0;
            loop {
                for _ in 0..64 {
                    post(Count(done));
                }
                posted += 64;
                while posted - done.load(Ordering::Relaxed) > WINDOW {
                    std::hint::spin_loop();
                }
            }
        })
        .context("starting a thread")?;
    Ok(done)
}

async fn post<E: Executor>(meter: Rc<Meter>, conditions: &Conditions, busy: bool) -> Result<()> {
    let (poster, run) = E::inbox();
    drop_join(E::spawn(run));
    let done = start_posting(conditions.other_cpu, poster)?;
    if busy {
        drop_join(E::spawn(async {
            loop {
                E::yield_now().await;
            }
        }));
    }
    // Checked rarely, so that an idle loop sleeps.
    let mut seen = 0;
    let mut goes_on = true;
    while goes_on {
        E::sleep_until(Instant::now() + Duration::from_millis(5)).await;
        let now = done.load(Ordering::Relaxed);
        goes_on = meter.add_slow(now - seen);
        seen = now;
    }
    Ok(())
}

/// Leaks a task's handle, as some runtimes cancel a task whose handle is dropped.
fn drop_join<T>(join: T) {
    std::mem::forget(join);
}

/// The pairs of a ring: each reads what the previous one writes.
pub(crate) fn socket_ring() -> Result<Vec<(UnixStream, UnixStream)>> {
    let pairs: std::io::Result<Vec<_>> = (0..SOCKETS).map(|_| UnixStream::pair()).collect();
    let (mut writers, mut readers): (Vec<_>, Vec<_>) =
        pairs.context("making socket pairs")?.into_iter().unzip();
    writers.rotate_left(1);
    for socket in readers.iter_mut().chain(&mut writers) {
        socket.set_nonblocking(true).context("making a socket non-blocking")?;
    }
    Ok(readers.into_iter().zip(writers).collect())
}

/// Bytes per read. One for several tokens, so that they are not read together. A single token is read with a larger
/// buffer, as usual for sockets, so that a short read shows that no more is available.
pub(crate) fn buffer_size(tokens: usize) -> usize {
    if tokens == 1 { 64 } else { 1 }
}

async fn ring<E: Executor>(meter: Rc<Meter>, tokens: usize) -> Result<()> {
    let over = Rc::new(Over::default());
    let mut first = Vec::new();
    for (i, (reader, writer)) in socket_ring()?.into_iter().enumerate() {
        if i < tokens {
            first.push(writer.try_clone().context("duplicating a socket")?);
        }
        let (mut reader, mut writer) = (E::socket(reader)?, E::socket(writer)?);
        let (meter, over) = (meter.clone(), over.clone());
        drop_join(E::spawn(async move {
            let mut buffer = vec![0; buffer_size(tokens)];
            let mut n;
            loop {
                (n, buffer) = E::read(&mut reader, buffer).await?;
                if !meter.add(n as u64) {
                    over.now();
                    return anyhow::Ok(());
                }
                buffer = E::write(&mut writer, buffer, n).await?;
            }
        }));
    }
    for mut socket in first {
        std::io::Write::write_all(&mut socket, b"t").context("sending a token")?;
    }
    over.wait().await;
    Ok(())
}

/// Polls a future once, to arm it.
fn poll_once<F: Future>(future: Pin<&mut F>, cx: &mut Context<'_>) {
    // Pending, or polled again later.
    let _ = future.poll(cx);
}

async fn timer_churn<E: Executor>(meter: &Meter) {
    let mut random = Rng::with_seed(1);
    let start = Instant::now();
    let mut far =
        || start + Duration::from_nanos(3600 << 30) + Duration::from_nanos(random.u64(..) >> 22);
    let mut pending: Vec<_> = (0..PENDING).map(|_| Box::pin(E::sleep_until(far()))).collect();
    let arm =
        |cx: &mut Context<'_>| pending.iter_mut().for_each(|timer| poll_once(timer.as_mut(), cx));
    once(arm).await;
    let mut goes_on = true;
    while goes_on {
        once(|cx| {
            for _ in 0..BATCH {
                let mut timer = pin!(E::sleep_until(far()));
                poll_once(timer.as_mut(), cx);
            }
        })
        .await;
        goes_on = meter.add(BATCH as u64);
        E::yield_now().await;
    }
}

/// Runs something that needs the task's context.
async fn once(f: impl FnOnce(&mut Context<'_>)) {
    let mut f = Some(f);
    poll_fn(|cx| {
        if let Some(f) = f.take() {
            f(cx);
        }
        Poll::Ready(())
    })
    .await;
}

async fn timer_fire<E: Executor>(meter: &Meter) {
    let mut random = Rng::with_seed(2);
    let mut goes_on = true;
    while goes_on {
        let start = Instant::now();
        let mut timers: Vec<_> = (0..FIRING)
            .map(|_| random.u64(..) >> FIRING_SPREAD)
            .map(|after| start + FIRING_DELAY + Duration::from_nanos(after))
            .map(|deadline| Box::pin(E::sleep_until(deadline)))
            .collect();
        once(|cx| timers.retain_mut(|timer| timer.as_mut().poll(cx).is_pending())).await;
        for timer in timers {
            timer.await;
        }
        goes_on = meter.add_slow(FIRING as u64);
    }
}

async fn timer_late<E: Executor>(conditions: &Conditions) -> f64 {
    let begin = Instant::now();
    let mut times = Vec::new();
    while begin.elapsed() < conditions.run_time {
        let deadline = Instant::now() + Duration::from_micros(100);
        E::sleep_until(deadline).await;
        times.push(Instant::now().saturating_duration_since(deadline));
    }
    median_us(times)
}

async fn spawn<E: Executor>(meter: &Meter) {
    let mut joins = Vec::with_capacity(BATCH);
    let mut sum: usize = 0;
    loop {
        joins.extend((0..BATCH).map(|i| E::spawn(async move { i })));
        for join in joins.drain(..) {
            sum += join.await;
        }
        if !meter.add(BATCH as u64) {
            break;
        }
    }
    std::hint::black_box(sum);
}

/// Passes the turn between tasks.
#[derive(Debug, Default)]
struct Turns {
    turn: Cell<usize>,
    wakers: [RefCell<Option<Waker>>; 2],
}

impl Turns {
    async fn wait(&self, me: usize) {
        poll_fn(|cx| {
            if self.turn.get() == me {
                return Poll::Ready(());
            }
            let mut waker = self.wakers[me].borrow_mut();
            if !waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
                *waker = Some(cx.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }

    fn pass_to(&self, other: usize) {
        self.turn.set(other);
        if let Some(waker) = &*self.wakers[other].borrow() {
            waker.wake_by_ref();
        }
    }
}

async fn switch<E: Executor>(meter: Rc<Meter>) {
    let (turns, over) = (Rc::new(Turns::default()), Rc::new(Over::default()));
    for me in 0..2 {
        let (turns, over, meter) = (turns.clone(), over.clone(), meter.clone());
        drop_join(E::spawn(async move {
            loop {
                turns.wait(me).await;
                if !meter.add(1) {
                    return over.now();
                }
                turns.pass_to(1 - me);
            }
        }));
    }
    over.wait().await;
}

async fn yields<E: Executor>(meter: Rc<Meter>) {
    let over = Rc::new(Over::default());
    for _ in 0..YIELDING {
        let (over, meter) = (over.clone(), meter.clone());
        drop_join(E::spawn(async move {
            while meter.add(1) {
                E::yield_now().await;
            }
            over.now();
        }));
    }
    over.wait().await;
}

/// Opens a file with O_DIRECT. Also returns its number of pages.
pub(crate) fn open_direct(path: &Path) -> Result<(File, u64)> {
    let open = || -> std::io::Result<(File, u64)> {
        let mut file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?;
        let size = std::io::Seek::seek(&mut file, std::io::SeekFrom::End(0))?;
        Ok((file, size))
    };
    let (file, size) = open().with_context(|| format!("opening {}", path.display()))?;
    Ok((file, size / PAGE_SIZE as u64))
}

async fn reads<E: Executor>(meter: Rc<Meter>, path: &Path, depth: usize) -> Result<()> {
    let (file, pages) = open_direct(path)?;
    let file = Rc::new(E::file(file, path).await?);
    let over = Rc::new(Over::default());
    let failed = Rc::new(Cell::new(None));
    for reader in 0..depth {
        let (file, meter, over, failed) =
            (file.clone(), meter.clone(), over.clone(), failed.clone());
        drop_join(E::spawn(async move {
            let (queue, queues) = (reader as u64, depth as u64);
            let mut offsets = Offsets::new(Order::Random, pages, PAGE_SIZE as u64, queue, queues);
            let mut page = Page::boxed();
            loop {
                page = match E::read_at(&file, page, offsets.next_offset()).await {
                    Ok(page) => page,
                    Err(error) => {
                        failed.set(Some(error));
                        return over.now();
                    }
                };
                if !meter.add(1) {
                    return over.now();
                }
            }
        }));
    }
    over.wait().await;
    failed.take().map_or(Ok(()), Err)
}

//! What all jobs that copy have in common: orders, pace, errors, several copies at once.

use std::future::{Future, poll_fn};
use std::io;
use std::ops::Range;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use event_loop::{EventLoop, mailbox, until};
use nix::errno::Errno;

use super::control::{Control, Report};
use super::copy::{Buffer, Failure, Side, flush};
use super::mirror::End;
use crate::graph::Edge;
use crate::node::{BlockNode, Channel};

/// How long it takes at most until an order is noticed, nanoseconds.
pub(super) const SLICE_NS: u64 = 20_000_000;
/// Bytes copied at once.
pub const CHUNK: u64 = 1 << 20;
/// Copies at once, at most.
const COPIES: u64 = 16;

/// The reaction to a failed request of a job.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnError {
    /// The job fails.
    #[default]
    Report,
    /// The job continues, and repeats the part later.
    Ignore,
    /// The job pauses.
    Stop,
    /// The job pauses if there is no space left, else it fails.
    Enospc,
}

/// Configuration of a worker.
pub struct WorkerConfig {
    /// Where it reads.
    pub source: Arc<Edge>,
    /// Where it writes.
    pub target: Arc<Edge>,
    /// Orders.
    pub control: Arc<Control>,
    /// Receives the worker's progress and end.
    pub reports: mailbox::Sender<Report>,
    /// When reading fails.
    pub on_source_error: OnError,
    /// When writing fails.
    pub on_target_error: OnError,
    /// Bytes of memory for data that is being copied.
    pub buf_size: u64,
}

/// A job's side on a loop.
pub struct Worker {
    pub(super) event_loop: EventLoop,
    pub(super) source: Rc<dyn Channel>,
    pub(super) target: Rc<dyn Channel>,
    pub(super) control: Arc<Control>,
    reports: mailbox::Sender<Report>,
    on_source_error: OnError,
    on_target_error: OnError,
    /// Memory that is not in use.
    pub(super) buffers: Vec<Buffer>,
    /// Most bytes of one copy of a mirror.
    pub(super) chunk: u64,
    /// Before this nothing more is to be begun, for the speed's sake.
    not_before: u64,
    /// The speed for which that was calculated.
    paced_for: u64,
    /// Whether the target has zeroes written faster than data.
    pub(super) zeroes_fast: bool,
    /// Filters below hold no request back any more.
    hastened: bool,
}

/// What [`Worker::pace`] has accounted for.
#[derive(Clone, Copy)]
pub(super) struct Paced {
    bytes: u64,
    /// How long other copies wait for it, nanoseconds.
    ns: u64,
    speed: u64,
}

/// A copied range, its memory, what was accounted for, and the result.
pub(super) type Copied = (Range<u64>, Buffer, Paced, Result<(), Failure>);
type Copy<'a> = Pin<Box<dyn Future<Output = Copied> + 'a>>;

/// Copies under way.
#[derive(Default)]
pub(super) struct Copies<'a>(Vec<Copy<'a>>);

impl<'a> Copies<'a> {
    pub(super) fn push(&mut self, copy: impl Future<Output = Copied> + 'a) {
        self.0.push(Box::pin(copy));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Waits for one of them; there is one.
    pub(super) async fn next(&mut self) -> Copied {
        poll_fn(|cx| {
            for index in 0..self.0.len() {
                if let Poll::Ready(copied) = self.0[index].as_mut().poll(cx) {
                    drop(self.0.swap_remove(index));
                    return Poll::Ready(copied);
                }
            }
            Poll::Pending
        })
        .await
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.control.set_busy(false);
        if self.hastened {
            self.source.drain_end();
            self.target.drain_end();
        }
    }
}

impl Worker {
    /// Opens both sides on this loop.
    ///
    /// # Errors
    ///
    /// One cannot be opened here, or there is no memory.
    pub fn new(config: WorkerConfig, event_loop: &EventLoop) -> io::Result<Worker> {
        let copies = (config.buf_size / CHUNK).clamp(1, COPIES);
        let buffers = (0..copies).map(|_| Buffer::new(CHUNK)).collect::<Option<Vec<_>>>();
        let zeroes_fast = config.target.geometry().write_zeroes;
        Ok(Worker {
            zeroes_fast,
            paced_for: 0,
            source: config.source.open_channel(event_loop)?,
            target: config.target.open_channel(event_loop)?,
            event_loop: event_loop.clone(),
            control: config.control,
            reports: config.reports,
            on_source_error: config.on_source_error,
            on_target_error: config.on_target_error,
            buffers: buffers.ok_or(io::Error::from(Errno::ENOMEM))?,
            chunk: config.buf_size.clamp(1, CHUNK),
            not_before: 0,
            hastened: false,
        })
    }

    pub(super) fn report(&self, report: Report) {
        // Nobody listens any more when the daemon ends.
        let _ = self.reports.send(report);
    }

    /// Reports that copying has ended: no request is in flight.
    pub(super) fn report_end(&self, end: Result<End, Option<Failure>>) {
        self.control.set_busy(false);
        self.report(Report::Ended(end));
    }

    /// Returns memory for one more copy, if one may begin now.
    pub(super) fn begin(&mut self) -> Option<Buffer> {
        if !self.is_early() && self.may_begin() { self.buffers.pop() } else { None }
    }

    /// Returns whether a request may begin now, whatever the speed. Nothing begins after a client has seen the job paused and
    /// not busy.
    pub(super) fn may_begin(&self) -> bool {
        if self.control.is_paused() {
            return false;
        }
        self.control.set_busy(true);
        !self.control.is_paused()
    }

    /// Waits for one of the copies; there is one. Those of a cancelled job are not throttled.
    ///
    /// Corrects what was accounted for the copy, and takes its memory back.
    pub(super) async fn next(
        &mut self,
        copies: &mut Copies<'_>,
    ) -> (Range<u64>, Result<(), Failure>) {
        let (range, mut buffer, paced, result) = self.hasten(copies.next()).await;
        let counted = std::mem::take(&mut buffer.counted);
        self.buffers.push(buffer);
        if result.is_ok() {
            self.correct(paced, counted);
        }
        (range, result)
    }

    /// Flushes the target.
    pub(super) async fn flush(&mut self) -> Result<(), Failure> {
        let target = self.target.clone();
        self.hasten(flush(&target)).await
    }

    /// Waits for requests of the job. Filters below do not hold the requests of a cancelled job back.
    async fn hasten<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        loop {
            if self.control.is_cancelled() && !self.hastened {
                self.hastened = true;
                self.source.drain_begin();
                self.target.drain_begin();
            }
            let slice = self.event_loop.sleep_until(self.event_loop.now_ns() + SLICE_NS);
            if let Ok(done) = until(work.as_mut(), slice).await {
                return done;
            }
        }
    }

    /// Accounts for `bytes` that are about to be copied, all of which may count for the speed.
    pub(super) fn pace(&mut self, bytes: u64) -> Paced {
        let speed = self.control.speed();
        let time = match speed {
            0 => 0,
            _ => u128::from(bytes) * 1_000_000_000 / u128::from(speed),
        };
        let ns = u64::try_from(time).unwrap_or(u64::MAX);
        let from = self.earliest().max(self.event_loop.now_ns());
        self.not_before = from.saturating_add(ns);
        Paced { bytes, ns, speed }
    }

    /// Accounts for a copy of which only `counted` bytes count for the speed.
    fn correct(&mut self, Paced { bytes, ns, speed }: Paced, counted: u64) {
        if counted < bytes && speed == self.paced_for {
            let uncounted = u128::from(ns) * u128::from(bytes - counted) / u128::from(bytes);
            let uncounted = u64::try_from(uncounted).unwrap_or(u64::MAX);
            self.not_before = self.not_before.saturating_sub(uncounted);
        }
    }

    /// Returns when the next copy may begin. A copy that began with another speed does not count.
    fn earliest(&mut self) -> u64 {
        let speed = self.control.speed();
        if std::mem::replace(&mut self.paced_for, speed) != speed {
            self.not_before = 0;
        }
        self.not_before
    }

    /// Whether nothing more is to be begun now, for the speed's sake.
    pub(super) fn is_early(&mut self) -> bool {
        self.control.speed() > 0 && self.event_loop.now_ns() < self.earliest()
    }

    /// Waits without requests in flight.
    pub(super) async fn idle(&mut self) {
        self.control.set_busy(false);
        self.wait().await;
    }

    /// Waits, but not so long that an order would wait.
    pub(super) async fn wait(&mut self) {
        let now = self.event_loop.now_ns();
        let until = match self.earliest() {
            later if later > now => later.min(now + SLICE_NS),
            _ => now + SLICE_NS,
        };
        self.event_loop.sleep_until(until).await;
    }

    /// Decides about a failure: continue, or fail. Returns why it continues: [`OnError::Ignore`] or [`OnError::Stop`].
    ///
    /// The failures of a cancelled job are not reported.
    pub(super) fn judge(&self, failure: Failure) -> Result<OnError, Failure> {
        if self.control.is_cancelled() {
            return Err(failure);
        }
        let action = self.react(failure);
        self.report(Report::Error(failure, action));
        match action {
            OnError::Report | OnError::Enospc => Err(failure),
            OnError::Ignore | OnError::Stop => Ok(action),
        }
    }

    /// Chooses the reaction to a failure: any but [`OnError::Enospc`]. Pauses the job if it is [`OnError::Stop`].
    pub(super) fn react(&self, failure: Failure) -> OnError {
        let action = self.reaction(failure);
        if action == OnError::Stop {
            self.control.set_paused(true);
        }
        action
    }

    /// Returns what [`react`](Self::react) chooses.
    pub(super) fn reaction(&self, failure: Failure) -> OnError {
        let policy = match failure.side {
            Side::Source => self.on_source_error,
            Side::Target => self.on_target_error,
        };
        match policy {
            OnError::Enospc if failure.errno == Errno::ENOSPC => OnError::Stop,
            OnError::Enospc => OnError::Report,
            other => other,
        }
    }
}

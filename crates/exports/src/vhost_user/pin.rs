//! A guest's memory, pinned: registered with the rings of the I/O threads that serve the guest.
//!
//! It is done beside the requests, which go the ordinary way until all of it is done: a thread of
//! its own sees to it that the pages are there, which may take seconds, and each I/O thread then
//! registers them a piece per iteration. What goes wrong costs speed, not the front end.

#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::Poll;

use event_loop::{EventLoop, JoinHandle, oneshot};
use guest_memory::{GuestMemory, MappedRegion, MemoryView, RegisteredRegion};
use nix::errno::Errno;
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

use super::worker::Ring;

/// Bytes populated at once: for how long memory may have to wait to be unmapped.
const CHUNK: u64 = 64 << 20;

/// What an export's threads share about the pinning of its guest's memory.
pub(crate) struct Pinning {
    export: String,
    /// It has failed on one of them, and that was said.
    failed: AtomicBool,
}

impl Pinning {
    pub(crate) fn new(export: String) -> Self {
        Pinning { export, failed: AtomicBool::new(false) }
    }

    /// Another front end: what it may pin is another question.
    pub(crate) fn forget_failure(&self) {
        self.failed.store(false, Ordering::Relaxed);
    }

    fn warn(&self, io_thread: &str, region: &MappedRegion, error: &io::Error) {
        if self.failed.swap(true, Ordering::Relaxed) {
            return;
        }
        let (id, addr, size) = (&self.export, region.guest_addr(), MiB(region.size()));
        let (call, advice) = advice(error);
        log::warn!(
            "export {id}: guest memory is not pinned, requests go on without: {call} of {size} at \
             guest address {addr:#x} failed on I/O thread {io_thread}: {error}: {advice}"
        );
    }
}

/// Bytes, for people.
struct MiB(u64);

impl std::fmt::Display for MiB {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} MiB", self.0.div_ceil(1 << 20))
    }
}

/// What was tried, and what to do about its failure.
fn advice(error: &io::Error) -> (&'static str, String) {
    const REGISTER: &str = "io_uring_register";
    let errno = error.raw_os_error().map(Errno::from_raw);
    match errno {
        None => ("registering", "needs io_uring, see ringmill probe".into()),
        Some(Errno::ENOMEM) => {
            let limit = match getrlimit(Resource::RLIMIT_MEMLOCK) {
                Ok((RLIM_INFINITY, _)) | Err(_) => "not limited".into(),
                Ok((soft, _)) => MiB(soft).to_string(),
            };
            let advice = format!(
                "RLIMIT_MEMLOCK is {limit}; it must hold the memory of all guests of this user, \
                 times the I/O threads of their exports: raise it (systemd: LimitMEMLOCK=), or \
                 leave pin-memory off"
            );
            (REGISTER, advice)
        }
        Some(Errno::EFAULT | Errno::EOPNOTSUPP) => {
            (REGISTER, "the guest's memory must be a memfd, or a file on tmpfs or hugetlbfs".into())
        }
        Some(Errno::EINVAL) => (REGISTER, "needs Linux 5.19".into()),
        Some(_) => (REGISTER, "leave pin-memory off".into()),
    }
}

/// Has a thread bring all pages of `memory` in. It does not keep the memory. What is received tells
/// that it is done, or has given up: registering does the rest then, only slower.
pub(crate) fn populate(memory: &GuestMemory, listeners: usize) -> Vec<oneshot::Receiver<()>> {
    let regions: Vec<_> = memory.regions().iter().map(Arc::downgrade).collect();
    let (done, receivers): (Vec<_>, _) = (0..listeners).map(|_| oneshot::channel()).unzip();
    let thread = std::thread::Builder::new().name("populate".into());
    // Where there is no thread to be had, the senders are dropped with the closure.
    let _ = thread.spawn(move || {
        regions.iter().for_each(populate_region);
        done.into_iter().for_each(|done: oneshot::Sender<()>| done.send(()));
    });
    receivers
}

fn populate_region(region: &Weak<MappedRegion>) {
    let mut offset = 0;
    while let Some(region) = region.upgrade()
        && offset < region.size()
        && region.populate(offset, CHUNK).is_ok()
    {
        offset += CHUNK;
    }
}

/// What of a guest's memory is registered with one I/O thread's loop, for one export.
pub(crate) struct Pinned {
    event_loop: EventLoop,
    pinning: Arc<Pinning>,
    /// The rings that run here, to be given another view when all is registered.
    rings: Rc<RefCell<BTreeMap<u16, Rc<Ring>>>>,
    regions: RefCell<Vec<RegisteredRegion>>,
    /// Ends the task.
    cancel: Cell<Option<oneshot::Sender<()>>>,
    task: Cell<Option<JoinHandle<()>>>,
}

impl Pinned {
    pub(crate) fn new(
        event_loop: EventLoop,
        pinning: Arc<Pinning>,
        rings: Rc<RefCell<BTreeMap<u16, Rc<Ring>>>>,
    ) -> Rc<Self> {
        Rc::new(Pinned {
            event_loop,
            pinning,
            rings,
            regions: RefCell::default(),
            cancel: Cell::default(),
            task: Cell::default(),
        })
    }

    /// A view of memory, with what is registered of it so far.
    pub(crate) fn view(&self, memory: Arc<GuestMemory>) -> Rc<MemoryView> {
        MemoryView::with_registered(memory, &self.regions.borrow())
    }

    /// Begins to register what is missing of `memory`, once it is populated, and then has the rings
    /// use it.
    pub(crate) fn register(
        self: Rc<Self>,
        memory: Arc<GuestMemory>,
        populated: oneshot::Receiver<()>,
    ) {
        self.interrupt();
        let earlier = self.task.take();
        let (cancel, cancelled) = oneshot::channel();
        self.cancel.set(Some(cancel));
        let me = self.clone();
        let task = self.event_loop.spawn(async move {
            if let Some(earlier) = earlier {
                let _ = earlier.await;
            }
            let work = pin!(me.register_all(memory, populated));
            until(cancelled, work).await;
        });
        self.task.set(Some(task));
    }

    /// Stops registering, from this moment on, until it is told to begin again.
    pub(crate) fn interrupt(&self) {
        drop(self.cancel.take());
    }

    /// Lets go of all that is not part of `memory`; `done` when that is so. Nothing uses it any more.
    pub(crate) fn retain(self: Rc<Self>, memory: Arc<GuestMemory>, done: oneshot::Sender<()>) {
        self.interrupt();
        let event_loop = self.event_loop.clone();
        event_loop.spawn(async move {
            if let Some(task) = self.task.take() {
                let _ = task.await;
            }
            let regions = self.regions.take();
            let stays = |region: &RegisteredRegion| {
                memory.regions().iter().any(|other| Arc::ptr_eq(other, region.region()))
            };
            let (stay, go): (Vec<_>, Vec<_>) = regions.into_iter().partition(stays);
            self.regions.replace(stay);
            for region in go {
                region.unregister().await;
            }
            // Before the answer, as the memory may be looked for to be gone.
            drop(memory);
            done.send(());
        });
    }

    async fn register_all(&self, memory: Arc<GuestMemory>, populated: oneshot::Receiver<()>) {
        let _ = populated.await;
        for region in memory.regions() {
            if self.has(region) {
                continue;
            }
            match RegisteredRegion::new(&self.event_loop, region.clone()).await {
                Ok(registered) => self.regions.borrow_mut().push(registered),
                Err(error) => {
                    self.pinning.warn(self.event_loop.handle().name(), region, &error);
                    let registered = self.regions.take();
                    self.use_registered(&memory);
                    for region in registered {
                        region.unregister().await;
                    }
                    return;
                }
            }
        }
        self.use_registered(&memory);
    }

    fn has(&self, region: &Arc<MappedRegion>) -> bool {
        self.regions.borrow().iter().any(|registered| Arc::ptr_eq(registered.region(), region))
    }

    /// Has all rings go on in the memory that they are in, with what is registered of it now.
    fn use_registered(&self, memory: &Arc<GuestMemory>) {
        let rings: Vec<_> = self.rings.borrow().values().cloned().collect();
        for ring in rings {
            // Their rings lie in it: they have been found there before.
            if let Err(error) = ring.queue.replace_memory(self.view(memory.clone())) {
                log::error!("export {}: {error}", self.pinning.export);
            }
        }
    }
}

/// Goes on with `work` until it is done or the sender of `end` is dropped.
async fn until(mut end: oneshot::Receiver<()>, mut work: Pin<&mut impl Future<Output = ()>>) {
    poll_fn(|cx| match Pin::new(&mut end).poll(cx) {
        Poll::Ready(_) => Poll::Ready(()),
        Poll::Pending => work.as_mut().poll(cx),
    })
    .await;
}

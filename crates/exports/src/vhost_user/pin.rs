//! A guest's memory, pinned: registered with the ring of an I/O thread that serves the guest.
//!
//! It is done beside the requests, which go the ordinary way until all of it is done: a thread of
//! its own ([`Pinning`]) brings the pages in, which may take seconds, and each I/O thread then
//! registers them a piece per iteration. What goes wrong costs speed, not the front end.

#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use event_loop::{EventLoop, JoinHandle, oneshot};
use guest_memory::{GuestMemory, Logging, MappedRegion, MemoryView, RegisteredRegion};

use super::pinning::Pinning;
use super::worker::Ring;

/// What of a guest's memory is registered with one I/O thread's loop, for one export.
pub(crate) struct Pinned {
    event_loop: EventLoop,
    pinning: Arc<Pinning>,
    logging: Logging,
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
        logging: Logging,
        rings: Rc<RefCell<BTreeMap<u16, Rc<Ring>>>>,
    ) -> Rc<Self> {
        Rc::new(Pinned {
            event_loop,
            pinning,
            logging,
            rings,
            regions: RefCell::default(),
            cancel: Cell::default(),
            task: Cell::default(),
        })
    }

    /// A view of memory, with what is registered of it so far.
    pub(crate) fn view(&self, memory: Arc<GuestMemory>) -> Rc<MemoryView> {
        MemoryView::with_logging(memory, &self.regions.borrow(), self.logging.clone())
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
        if populated.await.is_err() {
            // Other memory has come in between, and another task with it.
            return;
        }
        for region in memory.regions() {
            if self.has(region) {
                continue;
            }
            match RegisteredRegion::new(&self.event_loop, region.clone()).await {
                Ok(registered) => self.regions.borrow_mut().push(registered),
                Err(error) => {
                    self.pinning.warn_of(region, self.event_loop.handle().name(), &error);
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
                log::error!("export {}: {error}", self.pinning.export());
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

//! Pinning of a guest's memory: its registration with the ring of an I/O thread.
//!
//! Requests use unregistered memory until all memory is registered. First a separate thread
//! ([`Pinning`]) populates the pages, which may take seconds. Then each I/O thread registers one piece
//! per iteration. A failure costs speed, not the connection.

#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use event_loop::{EventLoop, JoinHandle, oneshot, until};
use guest_memory::{GuestMemory, Logging, MappedRegion, MemoryView, RegisteredRegion};

use super::pinning::Pinning;
use super::worker::Ring;

/// The registered part of a guest's memory on one I/O thread, for one export.
pub(crate) struct Pinned {
    event_loop: EventLoop,
    pinning: Arc<Pinning>,
    logging: Logging,
    /// The running rings of this thread, which get a new view when all is registered.
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

    /// A view of memory with the parts registered so far.
    pub(crate) fn view(&self, memory: Arc<GuestMemory>) -> Rc<MemoryView> {
        MemoryView::with_logging(memory, &self.regions.borrow(), self.logging.clone())
    }

    /// Registers the missing parts of `memory`, once they are populated, and then lets the rings
    /// use them.
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
            let _ = until(cancelled, me.register_all(memory, populated)).await;
        });
        self.task.set(Some(task));
    }

    /// Stops registering at once, until the next [`register`](Self::register).
    pub(crate) fn interrupt(&self) {
        drop(self.cancel.take());
    }

    /// Unregisters all parts that do not belong to `memory`, which are no longer in use, then informs `done`.
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
            // Before the answer: the receiver may check that the memory is unmapped.
            drop(memory);
            done.send(());
        });
    }

    async fn register_all(&self, memory: Arc<GuestMemory>, populated: oneshot::Receiver<()>) {
        if populated.await.is_err() {
            // Memory has changed meanwhile, and another task registers it.
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

    /// Gives all rings a view of their memory with the registered parts.
    fn use_registered(&self, memory: &Arc<GuestMemory>) {
        let rings: Vec<_> = self.rings.borrow().values().cloned().collect();
        for ring in rings {
            // The rings lie in this memory, which was checked before.
            if let Err(error) = ring.queue.replace_memory(self.view(memory.clone())) {
                log::error!("export {}: {error}", self.pinning.export());
            }
        }
    }
}

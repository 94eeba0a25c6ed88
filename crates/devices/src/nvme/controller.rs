//! The controller on the control loop: registers and life (sections 3.1, 7.3 and 7.6).

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use block::node::Geometry;
use event_loop::{EventLoop, LoopGone, mailbox, oneshot};
use guest_memory::{GuestMemory, MemoryView};
use nix::errno::Errno;

use super::admin::{Admin, Queues};
use super::bits::{
    ACQ, AQA, ASQ, CAP, CAPABILITIES, CC, CSTS, CSTS_CFS, CSTS_RDY, CSTS_SHST, CSTS_SHST_COMPLETE,
    CSTS_SHST_UNDER_WAY, Configuration, DoorbellOf, INTMC, INTMS, MAX_IO_QUEUES, PAGE, REGISTERS,
    VERSION, VS,
};
use super::doorbell_page::DoorbellPage;
use super::events::{Event, Events};
use super::features::Features;
use super::namespace::{ControllerConfig, DoorbellMode, Namespace};
use super::queues::ADMIN_BELLS;
use super::saved::{self, Restored, SavedQueues};
use super::shared::{Doorbells, Messages, Shared, SharedMemory};
use super::worker::{Attachment, Notice, Order};
use crate::saved::{Invalid, Words};
use stats::InFlight;
use stats::QueueStats;

/// An NVMe controller, on the control loop: registers, the admin queue, its life.
///
/// Its I/O queues are where its [`Attachment`]s were attached.
pub struct Controller {
    pub(super) event_loop: EventLoop,
    pub(super) config: ControllerConfig,
    pub(super) shared: Arc<Shared>,
    pub(super) workers: Vec<WorkerEnd>,
    /// For the admin queue.
    pub(super) messages: Box<dyn Messages>,
    pub(super) me: Weak<Controller>,
    /// The doorbells, if they are mapped.
    pub(super) page: RefCell<Option<DoorbellPage>>,
    pub(super) state: RefCell<ControllerState>,
}

/// The controller's end of a worker. A completion queue and its submission queues are with one worker.
pub(super) struct WorkerEnd {
    doorbells: Arc<Doorbells>,
    orders: mailbox::Sender<Order>,
    gone: Cell<Option<oneshot::Receiver<()>>>,
}

impl WorkerEnd {
    pub(super) fn order(&self, order: Order) {
        // An order that cannot be sent is dropped with its answer's sender, which ends the wait.
        let _ = self.orders.send(order);
    }
}

pub(super) struct ControllerState {
    pub(super) cc: Configuration,
    csts: u32,
    aqa: u32,
    asq: u64,
    acq: u64,
    /// INTMS, which has no effect on MSI-X.
    masked: u32,
    /// A reset waits for commands to end.
    is_resetting: bool,
    /// Takes no admin commands and reports no events.
    pub(super) is_paused: bool,
    /// Wait until the worker carries out nothing for the admin queue.
    waiting: Vec<oneshot::Sender<()>>,
    /// Counts resets. Commands of earlier lives get no completion.
    pub(super) life: u64,
    pub(super) memory: Rc<MemoryView>,
    pub(super) admin: Option<Admin>,
    pub(super) queues: Queues,
    pub(super) features: Features,
    pub(super) events: Events,
    /// Namespaces that have another size since the driver has read their list.
    pub(super) changed: Vec<u32>,
}

impl Controller {
    /// Returns a controller without memory, and a part of it for each I/O thread.
    ///
    /// A thread takes its part of the queues on with its [`Attachment`]. `threads`: the number of I/O threads, at
    /// least 1.
    ///
    /// Completion queue n is with thread (n - 1) modulo their number, and its submission queues with it.
    ///
    /// # Errors
    ///
    /// `EINVAL`: the number of queues, namespaces or threads is out of range. There is no eventfd.
    pub fn new(
        event_loop: &EventLoop,
        config: ControllerConfig,
        messages: Box<dyn Messages>,
        threads: usize,
    ) -> io::Result<(Rc<Self>, Vec<Attachment>)> {
        if !(1..=MAX_IO_QUEUES).contains(&config.num_queues)
            || config.namespaces.is_empty()
            || threads == 0
        {
            return Err(Errno::EINVAL.into());
        }
        let page = match config.doorbells {
            DoorbellMode::Mapped => Some(DoorbellPage::new()?),
            DoorbellMode::Auto | DoorbellMode::Trapped => None,
        };
        let shared = Arc::new(Shared {
            memory: SharedMemory::new(),
            page: page.as_ref().map(|page| SharedMemory::with(page.memory())),
            write_cache: AtomicBool::new(config.write_cache),
            namespaces: config.namespaces.iter().map(Namespace::new).collect(),
            errors: Default::default(),
            stats: (0..config.num_queues).map(|_| Arc::default()).collect(),
        });
        let (mut workers, mut attachments) = (Vec::new(), Vec::new());
        let mut told_by = Vec::new();
        for _ in 0..threads {
            let (orders, receiver) = mailbox::channel();
            let (notices, told) = mailbox::channel();
            let (is_gone, gone) = oneshot::channel();
            let doorbells = Arc::new(Doorbells::new(config.num_queues)?);
            attachments.push(Attachment {
                shared: shared.clone(),
                doorbells: doorbells.clone(),
                orders: receiver,
                notices,
                gone: is_gone,
            });
            workers.push(WorkerEnd { doorbells, orders, gone: Cell::new(Some(gone)) });
            told_by.push(told);
        }
        let queues = Queues::new(config.num_queues);
        let controller = Rc::new_cyclic(|me| Controller {
            event_loop: event_loop.clone(),
            config,
            shared,
            workers,
            messages,
            me: me.clone(),
            page: RefCell::new(page),
            state: RefCell::new(ControllerState {
                cc: Configuration::default(),
                csts: 0,
                aqa: 0,
                asq: 0,
                acq: 0,
                masked: 0,
                is_resetting: false,
                is_paused: false,
                waiting: Vec::new(),
                life: 0,
                memory: MemoryView::new(Arc::default()),
                admin: None,
                queues,
                features: Features::default(),
                events: Events::default(),
                changed: Vec::new(),
            }),
        });
        for mut told in told_by {
            let weak = Rc::downgrade(&controller);
            event_loop.spawn(async move {
                while let Some(notice) = told.receive().await {
                    let Some(controller) = weak.upgrade() else { return };
                    match notice {
                        Notice::BadDoorbell => controller.happened(Event::BadDoorbell),
                        Notice::AdminDoorbell => controller.take_admin_page(),
                        Notice::Fatal => controller.fail(),
                    }
                }
            });
        }
        Ok((controller, attachments))
    }

    /// Which worker has a completion queue and its submission queues.
    fn owner(&self, cqid: u16) -> usize {
        usize::from(cqid.saturating_sub(1)) % self.workers.len()
    }

    /// Returns the I/O thread of an I/O queue pair. Both are numbered from 0.
    pub fn thread_of(&self, queue: usize) -> usize {
        queue % self.workers.len()
    }

    /// Reads registers from byte `offset` of BAR 0 on (section 3.1).
    ///
    /// What there is no register for reads as 0.
    pub fn mmio_read(&self, offset: u64, data: &mut [u8]) {
        let registers = self.state.borrow().registers();
        data.fill(0);
        let Ok(offset) = usize::try_from(offset) else { return };
        for (to, from) in data.iter_mut().zip(registers.iter().skip(offset)) {
            *to = *from;
        }
    }

    /// Writes registers from `offset` of BAR 0 on: 4 or 8 bytes.
    ///
    /// Other writes take no effect (section 3.1).
    pub fn mmio_write(&self, offset: u64, data: &[u8]) {
        let (words, rest) = data.as_chunks();
        if !offset.is_multiple_of(4) || !rest.is_empty() || words.len() > 2 {
            return;
        }
        for (at, word) in (offset..).step_by(4).zip(words) {
            self.write(at, u32::from_le_bytes(*word));
        }
    }

    fn write(&self, at: u64, value: u32) {
        if let Some(bell) = DoorbellOf::at(at) {
            if let Some(page) = self.page_view() {
                page.set(bell, value);
            }
            return self.ring(bell, value);
        }
        if at == CC {
            return self.configure(Configuration::new(value));
        }
        let state = &mut *self.state.borrow_mut();
        let low = |register: &mut u64| *register = *register & !0xffff_ffff | u64::from(value);
        let high = |register: &mut u64| {
            *register = *register & 0xffff_ffff | u64::from(value) << 32;
        };
        match at {
            INTMS => state.masked |= value,
            INTMC => state.masked &= !value,
            AQA => state.aqa = value & 0x0fff_0fff,
            ASQ => low(&mut state.asq),
            ACQ => low(&mut state.acq),
            at if at == ASQ + 4 => high(&mut state.asq),
            at if at == ACQ + 4 => high(&mut state.acq),
            _ => {}
        }
    }

    pub(super) fn ring(&self, bell: DoorbellOf, value: u32) {
        let is_bad = {
            let state = &mut *self.state.borrow_mut();
            let Some(admin) = &mut state.admin else { return };
            match bell {
                DoorbellOf::Submission(0) => admin.submission.set_tail(value).is_err(),
                DoorbellOf::Completion(0) => admin.completion.set_head(value).is_err(),
                DoorbellOf::Submission(_) | DoorbellOf::Completion(_) => {
                    let cqid = state.queues.completion_of(bell);
                    let worker = cqid.and_then(|cqid| self.workers.get(self.owner(cqid)));
                    if let Some(worker) = worker {
                        return worker.doorbells.ring(bell, value);
                    }
                    state.events.happened(Event::NoSuchDoorbell);
                    false
                }
            }
        };
        if is_bad {
            self.state.borrow_mut().events.happened(Event::BadDoorbell);
        }
        self.run_admin();
    }

    fn configure(&self, cc: Configuration) {
        let before = std::mem::replace(&mut self.state.borrow_mut().cc, cc);
        match (before.is_enabled(), cc.is_enabled()) {
            (false, true) => self.enable(),
            (true, false) => self.begin_reset(),
            (false, false) | (true, true) => {}
        }
        match (before.is_shutdown(), cc.is_shutdown()) {
            (false, true) => self.shut_down(),
            (true, false) => self.state.borrow_mut().csts &= !CSTS_SHST,
            (false, false) | (true, true) => {}
        }
    }

    /// CC.EN is set. After a reset, the controller is ready when the commands before it have ended.
    fn enable(&self) {
        let state = &mut *self.state.borrow_mut();
        if state.is_resetting {
            return;
        }
        let (submissions, completions) = (state.aqa & 0xfff, state.aqa >> 16 & 0xfff);
        let (asq, acq) = (state.asq & !(PAGE - 1), state.acq & !(PAGE - 1));
        let admin = Admin::new((asq, submissions + 1), (acq, completions + 1));
        match admin.filter(|_| state.cc.is_valid()) {
            Some(admin) => {
                state.admin = Some(admin);
                state.csts = CSTS_RDY;
                if let Some(page) = self.page_view() {
                    ADMIN_BELLS.iter().for_each(|bell| page.clear(*bell));
                    self.watch_admin();
                }
            }
            None => state.csts = CSTS_CFS,
        }
    }

    /// CC.EN is cleared.
    fn begin_reset(&self) {
        let life = {
            let state = &mut *self.state.borrow_mut();
            state.life += 1;
            state.is_resetting = true;
            state.admin = None;
            state.queues.clear();
            state.features = Features::default();
            state.events = Events::default();
            state.changed.clear();
            state.life
        };
        self.shared.write_cache.store(self.config.write_cache, Ordering::Relaxed);
        let (ended, me) = (self.order_all(Order::Reset), self.me.clone());
        self.event_loop.spawn(async move {
            // A worker that is gone has no commands.
            ended.await;
            if let Some(me) = me.upgrade() {
                me.end_reset(life);
            }
        });
    }

    fn end_reset(&self, life: u64) {
        let is_enabled = {
            let state = &mut *self.state.borrow_mut();
            if state.life != life {
                return;
            }
            (state.is_resetting, state.csts) = (false, 0);
            state.cc.is_enabled()
        };
        if is_enabled {
            self.enable();
        }
        self.tell_idle();
    }

    /// CC.SHN announces that power will go: what was written is made durable.
    fn shut_down(&self) {
        let life = {
            let state = &mut *self.state.borrow_mut();
            state.csts = state.csts & !CSTS_SHST | CSTS_SHST_UNDER_WAY;
            state.life
        };
        let (flushed, me) = (self.flush(), self.me.clone());
        self.event_loop.spawn(async move {
            // CSTS has no value for a failed flush. The node reports the failure.
            let _ = flushed.await;
            let Some(me) = me.upgrade() else { return };
            {
                let state = &mut *me.state.borrow_mut();
                if state.life == life && state.csts & CSTS_SHST == CSTS_SHST_UNDER_WAY {
                    state.csts = state.csts & !CSTS_SHST | CSTS_SHST_COMPLETE;
                }
            }
            me.tell_idle();
        });
    }

    /// A queue is not memory: only a reset helps.
    #[cold]
    pub(super) fn fail(&self) {
        let mut state = self.state.borrow_mut();
        if state.csts & CSTS_RDY != 0 {
            state.csts |= CSTS_CFS;
        }
    }

    /// Reports an event to the driver.
    pub(super) fn happened(&self, event: Event) {
        self.state.borrow_mut().events.happened(event);
        self.run_admin();
    }

    /// Gives the worker of a completion queue an order.
    pub(super) fn order(&self, cqid: u16, order: Order) {
        if let Some(worker) = self.workers.get(self.owner(cqid)) {
            worker.order(order);
        }
    }

    /// Gives each worker an order. Completes when each has answered, or is gone.
    pub(super) fn order_all<T, F: Fn(oneshot::Sender<T>) -> Order>(
        &self,
        order: F,
    ) -> impl Future<Output = Vec<Result<T, LoopGone>>> + use<T, F> {
        let ask = |worker: &WorkerEnd| {
            let (answer, answered) = oneshot::channel();
            worker.order(order(answer));
            answered
        };
        oneshot::all(self.workers.iter().map(ask).collect())
    }

    /// Exchanges the guest's memory. Commands that have begun finish in the old.
    pub fn set_memory(&self, memory: Arc<GuestMemory>) {
        self.state.borrow_mut().memory = MemoryView::new(memory.clone());
        self.shared.memory.set(memory);
    }

    /// Takes the controller to the state after a power-on.
    ///
    /// Commands under way end without a completion.
    pub fn reset(&self) {
        {
            let state = &mut *self.state.borrow_mut();
            (state.cc, state.csts, state.masked) = (Configuration::default(), 0, 0);
            (state.aqa, state.asq, state.acq) = (0, 0, 0);
        }
        self.begin_reset();
    }

    /// Completes when the commands that have begun before have ended.
    ///
    /// Nothing uses memory then that the controller had before it was exchanged.
    ///
    /// # Errors
    ///
    /// An I/O thread is gone.
    pub fn settle(&self) -> impl Future<Output = Result<(), LoopGone>> + use<> {
        let settled = self.order_all(Order::Settle);
        async move { settled.await.into_iter().collect() }
    }

    /// Makes durable what was written to the namespaces.
    ///
    /// # Errors
    ///
    /// The receiver completes with the errno of the first failed flush, or with [`LoopGone`] if the I/O thread is
    /// gone.
    pub fn flush(&self) -> oneshot::Receiver<Result<(), Errno>> {
        let (answer, flushed) = oneshot::channel();
        // The nodes are flushed, whichever thread the writes came by.
        if let Some(first) = self.workers.first() {
            first.order(Order::Flush(answer));
        }
        flushed
    }

    /// Returns the commands under way, each with its I/O queue, numbered from 0.
    pub fn in_flight(&self) -> impl Future<Output = Vec<(u64, InFlight)>> + use<> {
        let asked = self.order_all(Order::InFlight);
        // A thread that is gone has none.
        async move { asked.await.into_iter().flatten().flatten().collect() }
    }

    /// Sets the geometry of namespace number `place`, from 0. A new size is an event.
    pub fn set_geometry(&self, place: usize, geometry: &Geometry) {
        let Some(namespace) = self.shared.namespaces.get(place) else { return };
        if !namespace.resize(geometry.size) {
            return;
        }
        let nsid = place as u32 + 1;
        let wants_notice = {
            let state = &mut *self.state.borrow_mut();
            if !state.changed.contains(&nsid) {
                state.changed.push(nsid);
            }
            state.features.wants_namespace_notices()
        };
        if wants_notice {
            self.happened(Event::NamespaceChanged);
        }
    }

    /// Returns the counters of each I/O queue.
    pub fn stats(&self) -> &[Arc<QueueStats>] {
        &self.shared.stats
    }

    /// Takes no more commands, and completes with the state.
    ///
    /// The commands that have begun are answered then. Registers are not to be written until it is to
    /// [`resume`](Self::resume).
    ///
    /// # Errors
    ///
    /// The I/O thread is gone.
    pub fn pause(self: &Rc<Self>) -> impl Future<Output = Result<Vec<u8>, LoopGone>> + use<> {
        self.state.borrow_mut().is_paused = true;
        let me = self.clone();
        async move {
            loop {
                let (idle, is_idle) = oneshot::channel();
                {
                    let state = &mut *me.state.borrow_mut();
                    if state.is_idle() {
                        break;
                    }
                    state.waiting.push(idle);
                }
                is_idle.await?;
            }
            me.order_all(Order::Pause).await.into_iter().collect::<Result<(), _>>()?;
            let saved = me.order_all(Order::Save).await;
            let io = SavedQueues::joined(saved.into_iter().collect::<Result<Vec<_>, _>>()?);
            let write_cache = me.shared.write_cache.load(Ordering::Relaxed);
            let state = me.state.borrow();
            Ok(saved::bytes(|words| state.save(write_cache, words), &io))
        }
    }

    /// Goes on after a [`pause`](Self::pause), whether it has completed or not.
    pub fn resume(&self) {
        self.state.borrow_mut().is_paused = false;
        self.workers.iter().for_each(|worker| worker.order(Order::Resume));
        self.run_admin();
    }

    /// Parses the state of a [paused](Self::pause) controller.
    ///
    /// The result is for [`restore`](Self::restore).
    ///
    /// # Errors
    ///
    /// [`Invalid`].
    pub fn check(&self, state: &[u8]) -> Result<Restored, Invalid> {
        Restored::parse(state, self.config.num_queues, self.shared.namespaces.len())
    }

    /// Goes on with the state of another controller, in the memory that was set before.
    pub fn restore(&self, restored: Restored) {
        let Restored { cc, csts, aqa, asq, acq, masked, write_cache, .. } = restored;
        let Restored { admin, features, events, changed, queues, io, .. } = restored;
        {
            let state = &mut *self.state.borrow_mut();
            (state.cc, state.csts, state.masked) = (cc, csts, masked);
            (state.aqa, state.asq, state.acq) = (aqa, asq, acq);
            (state.admin, state.queues) = (admin, queues);
            (state.features, state.events, state.changed) = (features, events, changed);
        }
        self.shared.write_cache.store(write_cache, Ordering::Relaxed);
        let parts = io.divided(self.workers.len(), |cqid| self.owner(cqid));
        for (worker, part) in self.workers.iter().zip(parts) {
            worker.order(Order::Restore(part));
        }
        if self.shared.page.is_some() && self.state.borrow().admin.is_some() {
            self.watch_admin();
        }
        self.run_admin();
    }

    /// Workers have carried something out for the admin queue.
    pub(super) fn tell_idle(&self) {
        let waiting = std::mem::take(&mut self.state.borrow_mut().waiting);
        waiting.into_iter().for_each(|idle| idle.send(()));
    }

    /// Takes the queues off their threads. Completes when their commands have ended.
    pub fn end(self: Rc<Self>) -> impl Future<Output = ()> {
        let gone: Vec<_> = self.workers.iter().filter_map(|worker| worker.gone.take()).collect();
        drop(self);
        async move {
            for gone in gone {
                // A thread that is gone has no queues.
                let _ = gone.await;
            }
        }
    }
}

impl ControllerState {
    /// Whether the worker carries out nothing for the admin queue.
    fn is_idle(&self) -> bool {
        !self.is_resetting
            && self.csts & CSTS_SHST != CSTS_SHST_UNDER_WAY
            && self.admin.as_ref().is_none_or(|admin| !admin.is_busy)
    }

    /// Writes its state, without the I/O queues.
    fn save(&self, write_cache: bool, words: &mut Words) {
        words.put(self.cc.0);
        words.put(self.csts);
        words.put(self.aqa);
        words.put(self.asq);
        words.put(self.acq);
        words.put(self.masked);
        words.put(write_cache);
        words.put(self.admin.is_some());
        if let Some(Admin { submission, completion, .. }) = &self.admin {
            submission.save(words);
            completion.save(words);
        }
        self.features.save(words);
        self.events.save(words);
        words.list(self.changed.iter(), |words, nsid| words.put(*nsid));
    }

    fn registers(&self) -> [u8; REGISTERS] {
        let mut bytes = [0; REGISTERS];
        let mut put = |at: usize, value: &[u8]| {
            for (to, from) in bytes.iter_mut().skip(at).zip(value) {
                *to = *from;
            }
        };
        put(CAP, &CAPABILITIES.to_le_bytes());
        put(VS, &VERSION.to_le_bytes());
        put(INTMS as usize, &self.masked.to_le_bytes());
        put(INTMC as usize, &self.masked.to_le_bytes());
        put(CC as usize, &self.cc.0.to_le_bytes());
        put(CSTS as usize, &self.csts.to_le_bytes());
        put(AQA as usize, &self.aqa.to_le_bytes());
        put(ASQ as usize, &self.asq.to_le_bytes());
        put(ACQ as usize, &self.acq.to_le_bytes());
        bytes
    }
}

impl std::fmt::Debug for Controller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Controller({} namespaces)", self.shared.namespaces.len())
    }
}

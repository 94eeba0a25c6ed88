//! What runs a loop's tasks: their slots, their wakers, the list of those that are ready.
//!
//! In steady state a task costs one allocation, its own: slots are used again, and so are wakers,
//! once nobody outside holds on to one. A wake-up from the loop's own thread, while the loop turns,
//! goes straight to the list; from elsewhere it is a message.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::task::{Context, Wake, Waker};

use crate::flag::Flag;
use crate::handle::{Message, Shared};
use crate::slots::{GENERATION_MASK, SlotId};

/// What a slot runs.
pub(crate) trait Task {
    /// Goes on with it. `true`: it is done.
    fn poll(&self, cx: &mut Context<'_>) -> bool;

    /// Drops it unfinished.
    fn cancel(&self);
}

/// A loop's tasks.
pub(crate) struct Tasks {
    slots: RefCell<Slots>,
    ready: Rc<ReadyList>,
}

#[derive(Default)]
struct Slots {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

struct Slot {
    /// Of the wakers: it changes when somebody outside still holds those before.
    generation: u32,
    /// They stay for the next task. Behind a pointer, since they are borrowed while the table may
    /// grow, and moving them to and fro costs as much as all else.
    wakers: Option<Rc<Wakers>>,
    /// None: the slot is free, or its task is being polled.
    task: Option<Rc<dyn Task>>,
}

/// The same waker twice: as the loop uses it, and as futures do.
struct Wakers {
    own: Arc<TaskWaker>,
    given: Waker,
}

/// Tasks that are ready, in order.
struct ReadyList {
    shared: Arc<Shared>,
    list: RefCell<VecDeque<SlotId>>,
}

thread_local! {
    /// The list of the loop that turns on this thread.
    static TURNING: Cell<Option<Rc<ReadyList>>> = const { Cell::new(None) };
}

/// Until it is dropped, wake-ups on this thread go straight to a loop's list.
pub(crate) struct Turning(Option<Rc<ReadyList>>);

impl Drop for Turning {
    fn drop(&mut self) {
        // A thread that is ending turns no loop.
        let _ = TURNING.try_with(|turning| turning.set(self.0.take()));
    }
}

/// Runs `call` as if no loop turned on this thread: what a simulation has happen outside.
#[cfg(any(test, feature = "sim"))]
pub fn elsewhere(call: impl FnOnce()) {
    let _turning = Turning(TURNING.take());
    call();
}

/// Wakes a task from any thread.
pub(crate) struct TaskWaker {
    id: SlotId,
    /// A message for it is on its way.
    woken: Flag,
    /// Stands in the ready list. Only the loop's thread uses it: atomic for the language's sake.
    listed: AtomicBool,
    shared: Arc<Shared>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.wake_here() && self.woken.raise() {
            // A loop that is gone has dropped the task.
            let _ = self.shared.send(Message::WakeTask(self.clone()));
        }
    }
}

impl TaskWaker {
    /// On the thread that turns its loop, lists the task. `false`: this is another.
    fn wake_here(&self) -> bool {
        let wake = |turning: &Cell<Option<Rc<ReadyList>>>| {
            let list = turning.take();
            let is_here = list.as_ref().is_some_and(|list| Arc::ptr_eq(&list.shared, &self.shared));
            if let Some(list) = &list
                && is_here
            {
                list.push(self);
            }
            turning.set(list);
            is_here
        };
        TURNING.try_with(wake).unwrap_or(false)
    }
}

impl ReadyList {
    fn push(&self, waker: &TaskWaker) {
        if !waker.listed.load(Ordering::Relaxed) {
            waker.listed.store(true, Ordering::Relaxed);
            self.list.borrow_mut().push_back(waker.id);
        }
    }
}

/// Polls in an iteration, if not more tasks than that were ready as it began (contract E11).
const MAX_POLLS: usize = 64;

impl Tasks {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Tasks {
            slots: RefCell::default(),
            ready: Rc::new(ReadyList { shared, list: RefCell::default() }),
        }
    }

    /// The loop begins to turn on this thread.
    pub(crate) fn begin_turn(&self) -> Turning {
        Turning(TURNING.replace(Some(self.ready.clone())))
    }

    pub(crate) fn has_ready(&self) -> bool {
        !self.ready.list.borrow().is_empty()
    }

    /// A waker's message has come.
    pub(crate) fn make_ready(&self, waker: &TaskWaker) {
        // Before the task runs, so that a wake-up meanwhile counts.
        waker.woken.lower();
        self.ready.push(waker);
    }

    /// Takes in a task, which is ready.
    pub(crate) fn add(&self, task: Rc<dyn Task>) {
        let mut slots = self.slots.borrow_mut();
        let Slots { slots, free } = &mut *slots;
        let index = free.pop().unwrap_or_else(|| {
            slots.push(Slot { generation: 0, wakers: None, task: None });
            slots.len() as u32 - 1
        });
        let slot = &mut slots[index as usize];
        let id = SlotId { index, generation: slot.generation };
        let wakers = slot.wakers.get_or_insert_with(|| self.new_wakers(id));
        self.ready.push(&wakers.own);
        slot.task = Some(task);
    }

    fn new_wakers(&self, id: SlotId) -> Rc<Wakers> {
        let own = Arc::new(TaskWaker {
            id,
            woken: Flag::new(false),
            listed: AtomicBool::new(false),
            shared: self.ready.shared.clone(),
        });
        Rc::new(Wakers { given: own.clone().into(), own })
    }

    /// Polls tasks that are ready: as many as there are now, or up to [`MAX_POLLS`] if more become
    /// ready meanwhile; what is left is for the next iteration.
    pub(crate) fn run_ready(&self) {
        let now = self.ready.list.borrow().len();
        if now == 0 {
            return;
        }
        for _ in 0..now.max(MAX_POLLS) {
            let id = self.ready.list.borrow_mut().pop_front();
            let Some(id) = id else { return };
            self.run(id);
        }
    }

    fn run(&self, id: SlotId) {
        let Some((task, wakers)) = self.slots.borrow_mut().take(id) else { return };
        let done = task.poll(&mut Context::from_waker(&wakers.given));
        {
            let mut slots = self.slots.borrow_mut();
            let Some(slot) = slots.slots.get_mut(id.index as usize) else { return };
            if !done {
                slot.task = Some(task);
                return;
            }
            if !wakers.are_ours_alone() {
                slot.generation = slot.generation.wrapping_add(1) & GENERATION_MASK;
                slot.wakers = None;
            }
            slots.free.push(id.index);
        }
        // Outside of the borrow: what the task drops may be anybody's.
        drop(task);
    }

    /// Drops all tasks. `false`: there was none.
    pub(crate) fn clear(&self) -> bool {
        self.ready.list.borrow_mut().clear();
        // Dropping a future may wake or spawn others: outside the borrow.
        let tasks: Vec<_> = {
            let mut slots = self.slots.borrow_mut();
            slots.free.clear();
            slots.slots.drain(..).collect()
        };
        let mut any = false;
        for slot in tasks {
            if let Some(task) = slot.task {
                any = true;
                task.cancel();
            }
        }
        any
    }
}

impl Drop for Tasks {
    fn drop(&mut self) {
        self.clear();
    }
}

impl Slots {
    /// The task that stood in the list, to be polled. None: it had ended before.
    fn take(&mut self, id: SlotId) -> Option<(Rc<dyn Task>, Rc<Wakers>)> {
        let slot = self.slots.get_mut(id.index as usize)?;
        if slot.generation != id.generation {
            return None;
        }
        let wakers = slot.wakers.clone()?;
        // Before the task runs, so that a wake-up meanwhile counts; and without one, or the slot's
        // next task could not be listed.
        wakers.own.listed.store(false, Ordering::Relaxed);
        Some((slot.task.take()?, wakers))
    }
}

impl Wakers {
    /// Nobody else can wake the task any more, nor is a message on its way: the next one of the slot
    /// may have them.
    fn are_ours_alone(&self) -> bool {
        let alone = Arc::strong_count(&self.own) == 2;
        // Pairs with the release with which the last other one was dropped.
        fence(Ordering::Acquire);
        alone
    }
}

//! Runs a loop's tasks: their slots, their wakers, the ready list.
//!
//! In steady state a task costs one allocation, its own. Slots are reused, and so are wakers that nothing
//! else holds. A wake-up on the loop's own thread during an iteration appends to the ready list. Other
//! wake-ups send a message.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::task::{Context, Wake, Waker};

use crate::flag::Flag;
use crate::handle::{Message, Shared};
use crate::slab::Pool;
use crate::slots::{GENERATION_MASK, SlotId};

/// A task in a slot.
pub(crate) trait Task {
    /// Polls the task. Returns `true` if it is done.
    fn poll(&self, cx: &mut Context<'_>) -> bool;

    /// Drops the task unfinished.
    fn cancel(&self);
}

/// A loop's tasks.
pub(crate) struct Tasks {
    slots: RefCell<Pool<TaskSlot>>,
    ready: Rc<ReadyList>,
}

struct TaskSlot {
    /// Generation of the wakers. It changes if something outside still holds the old ones.
    generation: u32,
    /// Kept for the slot's next task. Behind a pointer, since they are borrowed while the table may grow,
    /// and copying them would cost as much as the rest.
    wakers: Option<Rc<Wakers>>,
    /// `None` if the slot is free or its task is being polled.
    task: Option<Rc<dyn Task>>,
}

/// The same waker in two forms: for the loop, and for futures.
pub(crate) struct Wakers {
    own: Arc<TaskWaker>,
    given: Waker,
}

/// Tasks that are ready, in order.
struct ReadyList {
    shared: Arc<Shared>,
    list: RefCell<VecDeque<SlotId>>,
}

thread_local! {
    /// The ready list of the loop that runs an iteration on this thread.
    static TURNING: Cell<Option<Rc<ReadyList>>> = const { Cell::new(None) };
}

/// While this exists, wake-ups on this thread append to the loop's ready list.
pub(crate) struct Turning(Option<Rc<ReadyList>>);

impl Drop for Turning {
    fn drop(&mut self) {
        // Fails on a thread that is ending, which runs no iteration.
        let _ = TURNING.try_with(|turning| turning.set(self.0.take()));
    }
}

/// Runs `call` as if no loop ran on this thread, for a simulation's outside events.
#[cfg(any(test, feature = "sim"))]
pub fn elsewhere(call: impl FnOnce()) {
    let _turning = Turning(TURNING.take());
    call();
}

/// Wakes a task from any thread.
pub(crate) struct TaskWaker {
    id: SlotId,
    /// A wake-up message is in the inbox.
    woken: Flag,
    /// The task is in the ready list. Used only by the loop's thread; atomic so that the type is `Sync`.
    listed: AtomicBool,
    shared: Arc<Shared>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.wake_here() && self.woken.raise() {
            // Fails if the loop has ended, which has dropped the task.
            let _ = self.shared.send(Message::WakeTask(self.clone()));
        }
    }
}

impl TaskWaker {
    /// Appends the task to the ready list, if its loop runs on this thread. Returns `false` otherwise.
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

/// Maximum polls per iteration, unless more tasks were ready at its beginning (fairness contract).
const MAX_POLLS: usize = 64;

impl Tasks {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Tasks {
            slots: RefCell::default(),
            ready: Rc::new(ReadyList { shared, list: RefCell::default() }),
        }
    }

    /// Directs wake-ups on this thread to the ready list.
    pub(crate) fn enter_iteration(&self) -> Turning {
        Turning(TURNING.replace(Some(self.ready.clone())))
    }

    pub(crate) fn has_ready(&self) -> bool {
        !self.ready.list.borrow().is_empty()
    }

    /// Handles a waker's message.
    pub(crate) fn make_ready(&self, waker: &TaskWaker) {
        // Lowered before the poll, so that a wake-up during the poll counts.
        waker.woken.lower();
        self.ready.push(waker);
    }

    /// Adds a task, which is ready.
    pub(crate) fn add(&self, task: Rc<dyn Task>) -> (SlotId, Rc<Wakers>) {
        let mut slots = self.slots.borrow_mut();
        let (index, slot) =
            slots.take_or_add(|_| TaskSlot { generation: 0, wakers: None, task: None });
        let id = SlotId { index, generation: slot.generation };
        let wakers = slot.wakers.get_or_insert_with(|| self.new_wakers(id));
        self.ready.push(&wakers.own);
        slot.task = Some(task);
        (id, wakers.clone())
    }

    /// Removes a task that is not being polled, without cancelling it.
    pub(crate) fn remove(&self, id: SlotId) {
        let mut slots = self.slots.borrow_mut();
        let slot = slots.get_mut(id.index).filter(|slot| slot.generation == id.generation);
        let Some(task) = slot.and_then(|slot| slot.task.take()) else { return };
        Self::free(&mut slots, id.index);
        // Outside of the borrow, as the task's drop may run any code.
        drop(slots);
        drop(task);
    }

    /// Frees the slot of a task that has ended.
    fn free(slots: &mut Pool<TaskSlot>, index: u32) {
        let Some(slot) = slots.get_mut(index) else { return };
        if !slot.wakers.as_ref().is_some_and(|wakers| wakers.are_ours_alone()) {
            slot.generation = slot.generation.wrapping_add(1) & GENERATION_MASK;
            slot.wakers = None;
        }
        slots.give(index);
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

    /// Polls ready tasks: all that are ready now, or up to [`MAX_POLLS`] if more become ready meanwhile. The
    /// rest is polled in the next iteration.
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
        let Some((task, wakers)) = self.take(id) else { return };
        let done = task.poll(&mut Context::from_waker(&wakers.given));
        {
            let mut slots = self.slots.borrow_mut();
            let Some(slot) = slots.get_mut(id.index) else { return };
            if !done {
                slot.task = Some(task);
                return;
            }
            Self::free(&mut slots, id.index);
        }
        // Outside of the borrow, as the task's drop may run any code.
        drop(task);
    }

    /// Drops all tasks. Returns `false` if there were none.
    pub(crate) fn clear(&self) -> bool {
        self.ready.list.borrow_mut().clear();
        // Dropping a future may wake or spawn others: outside the borrow.
        let mut slots = self.slots.take();
        let mut any = false;
        for task in slots.iter_mut().filter_map(|slot| slot.task.take()) {
            any = true;
            task.cancel();
        }
        any
    }

    /// Takes the task of a list entry, to poll it. `None` if the task has ended.
    fn take(&self, id: SlotId) -> Option<(Rc<dyn Task>, Rc<Wakers>)> {
        let mut slots = self.slots.borrow_mut();
        let slot = slots.get_mut(id.index).filter(|slot| slot.generation == id.generation)?;
        let wakers = slot.wakers.clone()?;
        // Cleared before the poll, so that a wake-up during the poll counts. Also cleared for an ended task,
        // as the slot's next task could not be listed otherwise.
        wakers.own.listed.store(false, Ordering::Relaxed);
        Some((slot.task.take()?, wakers))
    }
}

impl Drop for Tasks {
    fn drop(&mut self) {
        self.clear();
    }
}

impl Wakers {
    /// The waker for futures.
    pub(crate) fn given(&self) -> &Waker {
        &self.given
    }

    /// Wakes the task.
    pub(crate) fn wake(&self) {
        self.given.wake_by_ref();
    }

    /// Whether nothing else holds these wakers, and no message for them is in the inbox. The slot's next
    /// task may then reuse them.
    fn are_ours_alone(&self) -> bool {
        let alone = Arc::strong_count(&self.own) == 2;
        // Pairs with the release of the last other holder's drop.
        fence(Ordering::Acquire);
        alone
    }
}

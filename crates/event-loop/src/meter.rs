//! Meters: what one iteration spends on work that strangers choose the amount of (fairness contract).
//!
//! A guest, a client or an image decides how many tables a request walks and how many ranges a command has. Such work is
//! charged in units of about a microsecond. Once an iteration has spent [`BUDGET`], metered work waits for the next
//! iteration, so that all other sources of the thread have their turn in between.
//!
//! Each tenant has a [`Meter`]. Tenants that wait are served in turns, tasks of one tenant in order.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// Units that an iteration spends on metered work. The last step may exceed them.
pub const BUDGET: u64 = 300;

/// The budget of a loop.
#[derive(Default)]
pub(crate) struct Budget {
    /// Units spent in this iteration.
    spent: Cell<u64>,
    /// The most units spent in one iteration.
    most: Cell<u64>,
    /// Tenants with tasks that wait, in the order of their turns.
    waiting: RefCell<VecDeque<Rc<Tenant>>>,
    next_ticket: Cell<u64>,
}

/// A tenant's tasks that wait, in order.
#[derive(Default)]
struct Tenant {
    tasks: RefCell<VecDeque<(u64, Waker)>>,
}

impl Budget {
    /// An iteration ends: the next one has the whole budget. Its first waiting task is made ready.
    #[inline]
    pub(crate) fn refill(&self) {
        if self.spent.get() > 0 {
            self.end_turns();
        }
    }

    #[cold]
    fn end_turns(&self) {
        let spent = self.spent.replace(0);
        self.most.set(self.most.get().max(spent));
        self.wake_first();
    }

    #[inline]
    fn is_over(&self) -> bool {
        self.spent.get() >= BUDGET
    }

    /// Wakes the next task.
    fn wake_first(&self) {
        let waiting = self.waiting.borrow();
        if let Some(tenant) = waiting.front()
            && let Some((_, waker)) = tenant.tasks.borrow().front()
        {
            waker.wake_by_ref();
        }
    }
}

/// A tenant's share of its loop's budget, such as that of an image or a connection.
///
/// Clones are the same tenant. See the [module](self).
#[derive(Clone)]
pub struct Meter {
    budget: Rc<Budget>,
    tenant: Rc<Tenant>,
}

impl Meter {
    pub(crate) fn new(budget: &Rc<Budget>) -> Meter {
        Meter { budget: budget.clone(), tenant: Rc::default() }
    }

    /// Charges work that was done: so many units of about a microsecond.
    #[inline]
    pub fn charge(&self, units: u64) {
        self.budget.spent.set(self.budget.spent.get().saturating_add(units));
    }

    /// Whether the iteration's budget is spent: no more metered work should begin.
    #[inline]
    fn is_over(&self) -> bool {
        self.budget.is_over()
    }

    /// Returns whether sources that are no tasks are to stop.
    ///
    /// They come first in an iteration, and leave half of its budget to the tasks.
    #[inline]
    pub fn is_half_over(&self) -> bool {
        self.budget.spent.get() >= BUDGET / 2
    }

    /// Waits until metered work may begin: at once, or in a later iteration.
    #[inline]
    pub fn turn(&self) -> Turn<'_> {
        Turn { meter: self, ticket: None }
    }

    /// Returns the most units that one iteration of the loop has spent.
    pub fn most(&self) -> u64 {
        self.budget.most.get().max(self.budget.spent.get())
    }

    /// Whether other tenants wait.
    fn others_wait(&self) -> bool {
        let waiting = self.budget.waiting.borrow();
        waiting.len() > usize::from(!self.tenant.tasks.borrow().is_empty())
    }

    fn enqueue(&self, waker: Waker) -> u64 {
        let ticket = self.budget.next_ticket.get();
        self.budget.next_ticket.set(ticket.wrapping_add(1));
        let mut tasks = self.tenant.tasks.borrow_mut();
        if tasks.is_empty() {
            self.budget.waiting.borrow_mut().push_back(self.tenant.clone());
        }
        tasks.push_back((ticket, waker));
        ticket
    }

    /// Whether it is the turn of the task with this ticket.
    fn is_first(&self, ticket: u64) -> bool {
        let waiting = self.budget.waiting.borrow();
        waiting.front().is_some_and(|tenant| Rc::ptr_eq(tenant, &self.tenant))
            && self.tenant.tasks.borrow().front().is_some_and(|(first, _)| *first == ticket)
    }

    /// Removes a task. The tenant's next one waits for the turns of all others.
    fn dequeue(&self, ticket: u64) {
        let was_first = self.is_first(ticket);
        {
            let mut tasks = self.tenant.tasks.borrow_mut();
            tasks.retain(|(other, _)| *other != ticket);
            let mut waiting = self.budget.waiting.borrow_mut();
            if was_first || tasks.is_empty() {
                waiting.retain(|tenant| !Rc::ptr_eq(tenant, &self.tenant));
                if !tasks.is_empty() {
                    waiting.push_back(self.tenant.clone());
                }
            }
        }
        if was_first {
            self.budget.wake_first();
        }
    }
}

/// Waits for a turn, see [`Meter::turn`].
#[must_use = "futures do nothing unless awaited"]
pub struct Turn<'a> {
    meter: &'a Meter,
    /// Of a task that waits.
    ticket: Option<u64>,
}

impl Future for Turn<'_> {
    type Output = ();

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let meter = self.meter;
        match self.ticket {
            None if !meter.is_over() && !meter.others_wait() => Poll::Ready(()),
            None => {
                self.ticket = Some(meter.enqueue(cx.waker().clone()));
                Poll::Pending
            }
            Some(ticket) if !meter.is_over() && meter.is_first(ticket) => {
                self.ticket = None;
                meter.dequeue(ticket);
                Poll::Ready(())
            }
            Some(ticket) => {
                let mut tasks = meter.tenant.tasks.borrow_mut();
                let own = tasks.iter_mut().find(|(other, _)| *other == ticket);
                if let Some((_, waker)) = own {
                    waker.clone_from(cx.waker());
                }
                Poll::Pending
            }
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.meter.dequeue(ticket);
        }
    }
}

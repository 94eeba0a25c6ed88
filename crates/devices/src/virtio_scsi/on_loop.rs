//! The device on one loop: its queues there, and the orders that concern them.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use block::node::Channel;
use event_loop::{EventLoop, Signal};
use queue::Queue;

use super::control::Control;
use super::device::Device;
use super::events::Events;
use super::requests::Requests;
use super::tasks::{Order, Tally};
use super::wire::{CONTROL_QUEUE, EVENT_QUEUE};
use crate::virtio::{VirtQueueWorker, Virtqueue};
use stats::QueueStats;

/// A device on one loop.
pub struct DeviceOnLoop {
    event_loop: EventLoop,
    device: Arc<Device>,
    /// To each logical unit's node.
    channels: Rc<[Rc<dyn Channel>]>,
    /// The part's number in the device.
    id: u64,
    requests: RefCell<Vec<Weak<VirtQueueWorker<Requests>>>>,
    events: RefCell<Weak<VirtQueueWorker<Events>>>,
}

impl DeviceOnLoop {
    /// Gets ready for queues on this loop.
    ///
    /// `channels` go to the nodes of the logical units, in their order.
    pub fn new(
        event_loop: &EventLoop,
        device: Arc<Device>,
        channels: Vec<Rc<dyn Channel>>,
    ) -> Rc<Self> {
        let (id, mut orders) = device.add_part();
        let part = Rc::new(DeviceOnLoop {
            event_loop: event_loop.clone(),
            device,
            channels: channels.into(),
            id,
            requests: RefCell::default(),
            events: RefCell::default(),
        });
        let weak = Rc::downgrade(&part);
        event_loop.spawn(async move {
            while let Some(order) = orders.receive().await {
                // Without the part there are no queues, and nothing to wait for.
                let Some(part) = weak.upgrade() else { return };
                part.carry_out(order);
            }
        });
        part
    }

    /// Starts the queue `index`, disabled.
    ///
    /// `kick` fires when the driver has put buffers in; without it the queue is looked at only while
    /// the loop polls. `stats` are those of a request queue.
    pub fn start_queue(
        &self,
        index: u16,
        queue: Queue,
        kick: Option<Arc<OwnedFd>>,
        call: Option<Signal>,
        stats: Arc<QueueStats>,
    ) -> Rc<dyn Virtqueue> {
        let device = self.device.clone();
        match index {
            CONTROL_QUEUE => {
                VirtQueueWorker::start(&self.event_loop, queue, kick, call, Control { device })
            }
            EVENT_QUEUE => {
                let events =
                    VirtQueueWorker::start(&self.event_loop, queue, kick, call, Events { device });
                self.events.replace(Rc::downgrade(&events));
                events
            }
            _ => {
                let size = queue.size();
                let of_queue = |channel: &Rc<dyn Channel>| {
                    channel.for_queue().unwrap_or_else(|| channel.clone())
                };
                let channels = self.channels.iter().map(of_queue).collect();
                let service = Requests::new(device, channels, size, stats);
                let requests = VirtQueueWorker::start(&self.event_loop, queue, kick, call, service);
                let mut list = self.requests.borrow_mut();
                list.retain(|queue| queue.strong_count() > 0);
                list.push(Rc::downgrade(&requests));
                requests
            }
        }
    }

    fn carry_out(&self, order: Order) {
        let queues: Vec<_> = self.requests.borrow().iter().filter_map(Weak::upgrade).collect();
        match order {
            Order::End { tasks, response, done } => {
                let tally = Tally::new(done);
                for queue in queues {
                    queue.end_tasks(tasks, response, tally.clone());
                }
            }
            Order::Count { tasks, answer } => {
                answer.send(queues.iter().map(|queue| queue.count_tasks(tasks)).sum());
            }
            Order::TellEvents => {
                let events = self.events.borrow().upgrade();
                if let Some(events) = events {
                    events.process_batch();
                }
            }
        }
    }
}

impl Drop for DeviceOnLoop {
    fn drop(&mut self) {
        self.device.remove_part(self.id);
    }
}

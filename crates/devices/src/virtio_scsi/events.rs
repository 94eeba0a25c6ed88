//! The event queue: its buffers stay in the ring until an event occurs.

use std::cell::RefMut;
use std::ffi::CStr;
use std::rc::Rc;
use std::sync::Arc;

use queue::{Chain, SegmentsError};
use trace::trace;

use super::device::Device;
use super::probes;
use super::wire::{EVENT_SIZE, VIRTIO_SCSI_T_PARAM_CHANGE, event};
use crate::virtio::{Broken, VirtQueueWorker, VirtioBackend};

/// CAPACITY DATA HAS CHANGED: the additional sense code, and its qualifier above it (5.6.6.3).
const CAPACITY_CHANGED: u32 = 0x2a | 0x09 << 8;

/// The event queue's service. An event without a buffer waits for one, so no event is missed.
pub(crate) struct Events {
    pub(crate) device: Arc<Device>,
}

impl VirtioBackend for Events {
    const NAME: &'static str = "virtio-scsi event queue";

    fn trace_name(&self) -> &CStr {
        self.device.trace_name()
    }

    fn wants_chains(&self) -> bool {
        self.device.has_event()
    }

    fn process(
        worker: &Rc<VirtQueueWorker<Self>>,
        chain: RefMut<'_, Chain>,
    ) -> Result<u32, Broken> {
        let buffer = chain.writable();
        if (buffer.len() as usize) < EVENT_SIZE {
            let short = SegmentsError::Short { wanted: EVENT_SIZE as u32, len: buffer.len() };
            return Err(Broken::Part("an event's buffer", short));
        }
        let bytes = match worker.service.device.take_event() {
            Some(lun) => {
                let (kind, reason) = (VIRTIO_SCSI_T_PARAM_CHANGE, CAPACITY_CHANGED);
                trace!(probes::virtio_scsi_event(worker.service.trace_name(), lun, kind, reason));
                event(kind, lun, reason)
            }
            // No event is pending: VIRTIO_SCSI_T_NO_EVENT.
            None => [0; EVENT_SIZE],
        };
        buffer.write(&worker.queue.memory(), &bytes).map_err(Broken::Buffer)?;
        worker.add_used(chain.head(), EVENT_SIZE as u32);
        Ok(0)
    }
}

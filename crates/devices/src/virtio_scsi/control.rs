//! The control queue: task management, and asynchronous notification (5.6.6.2).

use std::cell::RefMut;
use std::ffi::CStr;
use std::rc::Rc;
use std::sync::Arc;

use queue::{Chain, SegmentsError};
use trace::trace;

use super::device::Device;
use super::lun::Attention;
use super::probes;
use super::tasks::{Order, Tasks};
use super::wire::{
    Address, Response, TaskManagement, VIRTIO_SCSI_T_AN_QUERY, VIRTIO_SCSI_T_AN_SUBSCRIBE,
    VIRTIO_SCSI_T_TMF, VIRTIO_SCSI_T_TMF_ABORT_TASK, VIRTIO_SCSI_T_TMF_ABORT_TASK_SET,
    VIRTIO_SCSI_T_TMF_CLEAR_ACA, VIRTIO_SCSI_T_TMF_CLEAR_TASK_SET,
    VIRTIO_SCSI_T_TMF_I_T_NEXUS_RESET, VIRTIO_SCSI_T_TMF_LOGICAL_UNIT_RESET,
    VIRTIO_SCSI_T_TMF_QUERY_TASK, VIRTIO_SCSI_T_TMF_QUERY_TASK_SET,
};
use crate::virtio::{Broken, VirtQueueWorker, VirtioBackend};

/// What the control queue does.
pub(crate) struct Control {
    pub(crate) device: Arc<Device>,
}

impl VirtioBackend for Control {
    const NAME: &'static str = "virtio-scsi control queue";

    fn trace_name(&self) -> &CStr {
        self.device.trace_name()
    }

    fn process(
        worker: &Rc<VirtQueueWorker<Self>>,
        chain: RefMut<'_, Chain>,
    ) -> Result<u32, Broken> {
        let memory = worker.queue.memory();
        let part = |error| Broken::Part("a control request", error);
        let (kind, rest) = chain.readable().split_array::<4>(&memory).map_err(part)?;
        // The response is the last byte of each.
        let short = SegmentsError::Short { wanted: 1, len: 0 };
        let (front, response_addr) =
            chain.writable().split_last().ok_or(Broken::Part("a control response", short))?;
        let head = chain.head();
        let written = front.len() + 1;
        let response = match u32::from_le_bytes(kind) {
            VIRTIO_SCSI_T_TMF => {
                let (bytes, _) = rest.split_array(&memory).map_err(part)?;
                drop(chain);
                let request = TaskManagement::from_bytes(bytes);
                let worker = worker.clone();
                let event_loop = worker.event_loop.clone();
                // It may have to wait for other loops.
                event_loop.spawn(async move {
                    let device = &worker.service.device;
                    let (tag, subtype) = (request.id, request.function);
                    trace!(probes::virtio_scsi_tmf_req(device.trace_name(), tag, subtype));
                    let response = manage(device, request).await;
                    trace!(probes::virtio_scsi_tmf_resp(device.trace_name(), tag, response as u8));
                    let result = memory.write_u8(response_addr, response as u8);
                    worker.add_used(head, if result.is_ok() { written } else { 0 });
                    if let Err(error) = result {
                        worker.break_queue(&format_args!("a control response: {error}"));
                    }
                });
                return Ok(0);
            }
            VIRTIO_SCSI_T_AN_QUERY | VIRTIO_SCSI_T_AN_SUBSCRIBE => {
                let (lun, _) = rest.split_array(&memory).map_err(part)?;
                // None of these events can come: what a disk has to tell are parameter changes.
                front.write(&memory, &[0; 4]).map_err(Broken::Buffer)?;
                match find(&worker.service.device, Address::from_bytes(lun)) {
                    Ok(_) => Response::Ok,
                    Err(response) => response,
                }
            }
            _ => Response::Failure,
        };
        memory.write_u8(response_addr, response as u8).map_err(Broken::Buffer)?;
        worker.add_used(head, written);
        Ok(0)
    }
}

/// The number of a logical unit that is there.
fn find(device: &Device, address: Address) -> Result<u16, Response> {
    match address {
        Address::OtherTarget => Err(Response::BadTarget),
        Address::Lun(number) => {
            number.filter(|number| device.lun(*number).is_some()).ok_or(Response::IncorrectLun)
        }
    }
}

/// Carries out a task management function (SAM-5, 7).
async fn manage(device: &Device, request: TaskManagement) -> Response {
    let TaskManagement { function, address, id } = request;
    let lun = match find(device, address) {
        Ok(lun) => lun,
        // Of the target, whatever the logical unit.
        Err(Response::IncorrectLun) if function == VIRTIO_SCSI_T_TMF_I_T_NEXUS_RESET => 0,
        Err(response) => return response,
    };
    let one = Tasks { lun: Some(lun), id: Some(id) };
    let set = Tasks { lun: Some(lun), id: None };
    match function {
        VIRTIO_SCSI_T_TMF_ABORT_TASK => end(device, one, Response::Aborted).await,
        VIRTIO_SCSI_T_TMF_ABORT_TASK_SET | VIRTIO_SCSI_T_TMF_CLEAR_TASK_SET => {
            end(device, set, Response::Aborted).await;
        }
        VIRTIO_SCSI_T_TMF_LOGICAL_UNIT_RESET => {
            end(device, set, Response::Reset).await;
            if let Some(lun) = device.lun(lun) {
                lun.attend(Attention::Reset);
            }
        }
        VIRTIO_SCSI_T_TMF_I_T_NEXUS_RESET => {
            end(device, Tasks { lun: None, id: None }, Response::Reset).await;
            device.luns().iter().for_each(|lun| lun.attend(Attention::NexusLoss));
        }
        VIRTIO_SCSI_T_TMF_QUERY_TASK | VIRTIO_SCSI_T_TMF_QUERY_TASK_SET => {
            let tasks = if function == VIRTIO_SCSI_T_TMF_QUERY_TASK { one } else { set };
            if count(device, tasks).await > 0 {
                return Response::FunctionSucceeded;
            }
        }
        // There is no ACA condition, so it is clear (5.6.6.2).
        VIRTIO_SCSI_T_TMF_CLEAR_ACA => {}
        _ => return Response::FunctionRejected,
    }
    Response::Ok
}

/// Ends tasks on all loops, and waits until the driver can see it.
async fn end(device: &Device, tasks: Tasks, response: Response) {
    for ended in device.order_all(|done| Order::End { tasks, response, done }) {
        // A loop that is gone has no tasks.
        let _ = ended.await;
    }
}

/// How many of these tasks there are on all loops.
async fn count(device: &Device, tasks: Tasks) -> usize {
    let mut sum = 0;
    for answer in device.order_all(|answer| Order::Count { tasks, answer }) {
        sum += answer.await.unwrap_or(0);
    }
    sum
}

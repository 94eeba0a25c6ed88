//! Trace events of virtio-scsi, named as QEMU's.

trace::events! {
    /// A command begins; `lun` is -1 where there is no such logical unit, `cmd` the operation code.
    virtio_scsi_cmd_req(dev: text, queue: u64, req: u64, lun: i64, tag: hex, cmd: hex);
    /// A command ends, with its `VIRTIO_SCSI_S_*` and its SCSI status.
    virtio_scsi_cmd_resp(dev: text, queue: u64, req: u64, tag: hex, response: u64, status: u64);
    /// A task management function (`VIRTIO_SCSI_T_TMF_*`) begins; `tag` is that of the task, if the function
    /// has one.
    virtio_scsi_tmf_req(dev: text, tag: hex, subtype: u64);
    /// A task management function has ended, with its `VIRTIO_SCSI_S_*`.
    virtio_scsi_tmf_resp(dev: text, tag: hex, response: u64);
    /// The driver receives an event (`VIRTIO_SCSI_T_*`) of a logical unit.
    virtio_scsi_event(dev: text, lun: u64, event: u64, reason: hex);
}

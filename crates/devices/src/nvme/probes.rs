//! Trace events of NVMe, named as QEMU's.

trace::events! {
    /// An admin command is taken from its queue.
    pci_nvme_admin_cmd(s: hex, cid: u64, opcode: hex);
    /// A command is taken from an I/O queue; `slba` is the first block of commands that have one.
    pci_nvme_io_cmd(s: hex, sqid: u64, cid: u64, nsid: u64, opcode: hex, slba: u64);
    /// A command is answered, with the status of the specification: type in bits 8 to 10, code below. Of the admin queue,
    /// `sqid` is 0.
    pci_nvme_enqueue_req_completion(s: hex, sqid: u64, cid: u64, status: hex);
}

//! Trace events of virtio-blk, named as QEMU's.

trace::events! {
    /// A read request begins.
    virtio_blk_handle_read(dev: text, queue: u64, req: u64, sector: u64, nsectors: u64);
    /// A write request begins.
    virtio_blk_handle_write(dev: text, queue: u64, req: u64, sector: u64, nsectors: u64);
    /// A request of another `VIRTIO_BLK_T_*` begins; -1 for a malformed one.
    virtio_blk_handle_other(dev: text, queue: u64, req: u64, kind: i64);
    /// A request ends, with its `VIRTIO_BLK_S_*`.
    virtio_blk_req_complete(dev: text, queue: u64, req: u64, status: u64);
}

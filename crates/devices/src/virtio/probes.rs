//! Trace events of virtqueues, named as QEMU's.

trace::events! {
    /// A queue is processed: its driver has kicked, or polling found requests (`polled`).
    virtio_queue_notify(dev: text, queue: u64, polled: u64);
    /// The driver of a queue is signalled.
    virtio_notify(dev: text, queue: u64);
}

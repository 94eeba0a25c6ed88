//! Trace events of the file drivers.

trace::events! {
    /// A `file` or `host_device` node begins an operation on its image, by any engine.
    file_submit(node: text, req: u64, op: text, offset: u64, bytes: u64);
    /// The operation has ended: bytes, or a negative errno.
    file_complete(node: text, req: u64, ret: i64);
}

//! Trace events of NBD connections, named as QEMU's.

trace::events! {
    /// A request (`NBD_CMD_*`) of an NBD client has arrived; of a write, its header.
    nbd_receive_request(client: i64, cookie: hex, flags: hex, kind: u64, from: u64, len: u64);
    /// A simple reply is sent, with an error (`NBD_E*`) or 0, and as many bytes of data.
    nbd_co_send_simple_reply(client: i64, cookie: hex, error: u64, len: u64);
    /// A structured or extended reply without data is sent.
    nbd_co_send_chunk_done(client: i64, cookie: hex);
    /// A structured or extended reply with data is sent.
    nbd_co_send_chunk_read(client: i64, cookie: hex, offset: u64, size: u64);
    /// A structured or extended reply with an error is sent.
    nbd_co_send_chunk_error(client: i64, cookie: hex, err: u64);
    /// A structured or extended reply with the extents of a context is sent.
    nbd_co_send_extents(client: i64, cookie: hex, extents: u64, context_id: u64);
}

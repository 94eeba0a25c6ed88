//! Trace events of the loop. Names and arguments are QEMU's where QEMU has the event.

mod operation;

trace::events! {
    /// A loop begins to busy-poll, for `max_ns` at most; `timeout` is the time to its next timer.
    run_poll_handlers_begin(ctx: hex, max_ns: u64, timeout: i64);
    /// Busy-polling has stopped: something was found (`progress`), or the time is up.
    run_poll_handlers_end(ctx: hex, progress: u64, timeout: i64);
    /// A loop's poll window grows.
    poll_grow(ctx: hex, old: u64, new: u64);
    /// A loop's poll window shrinks.
    poll_shrink(ctx: hex, old: u64, new: u64);
    /// A handler had an event and is polled from now on.
    poll_add(ctx: hex, node: hex, fd: i64, revents: hex);
    /// A handler is no longer polled: it is removed, or had no event for long.
    poll_remove(ctx: hex, node: hex, fd: i64);
    /// An operation (`IORING_OP_*`) is queued for the ring.
    add_sqe(ctx: hex, user_data: hex, opcode: u64, fd: i64, off: u64);
    /// A completion is taken from the ring; more may follow of a poll.
    cqe_handler(ctx: hex, user_data: hex, res: i64);
    /// An operation is handed to the thread pool.
    thread_pool_submit_aio(ctx: hex, user_data: hex, fd: i64);
    /// The loop has the result of an operation of the thread pool.
    thread_pool_complete_aio(ctx: hex, user_data: hex, ret: i64);
}

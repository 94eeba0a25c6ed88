//! The table of events. Names and arguments are QEMU's where QEMU has the event. Events of device models and
//! block drivers are here too, as all events form one provider.
//!
//! A row defines a module of the event's name with the [`Event`], its semaphore and two functions.
//! `docs/TRACING.md` has the same table for users; a test compares the two.

#![allow(unsafe_code)]
#![allow(
    missing_docs,
    reason = "an implementation detail of `trace!`; the rows describe the events"
)]

use super::{Arg, Event, Format};

/// The meaning of the table's argument kinds: the parameter's type, its size and sign in a probe's note, the
/// word passed to the probe, and its format in the log.
macro_rules! kind {
    (u64 type) => { u64 };
    (u64 size) => { "8" };
    (u64 word $value:ident) => { $value };
    (u64 shows) => { "{}" };
    (u64 shown $value:ident) => { $value };
    (u64 format) => { Format::Unsigned };

    (i64 type) => { i64 };
    (i64 size) => { "-8" };
    (i64 word $value:ident) => { $value };
    (i64 shows) => { "{}" };
    (i64 shown $value:ident) => { $value };
    (i64 format) => { Format::Signed };

    (hex shows) => { "{:#x}" };
    (hex format) => { Format::Hex };
    (hex $($what:tt)+) => { kind!(u64 $($what)+) };

    (text type) => { &std::ffi::CStr };
    (text size) => { "8" };
    (text word $value:ident) => { $value.as_ptr() };
    (text shows) => { "{}" };
    (text shown $value:ident) => { $value.to_string_lossy() };
    (text format) => { Format::Text };
}

macro_rules! trace_events {
    ($($(#[doc = $help:literal])+ $name:ident($($arg:ident: $kind:ident),+);)+) => {
        /// All events, in the order of the table.
        pub static EVENTS: &[&Event] = &[$(&$name::EVENT),+];

        $($(#[doc = $help])+
        pub mod $name {
            use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};

            use super::*;

            // SAFETY: a section of ordinary, writable data, with the conventional name. A static without
            // an initial value would be in .bss, where the kernel cannot find it.
            #[unsafe(link_section = ".probes")]
            static SEMAPHORE: AtomicU16 = AtomicU16::new(0);

            pub static EVENT: Event = Event {
                name: stringify!($name),
                help: concat!($($help),+).trim_ascii(),
                args: &[$(Arg { name: stringify!($arg), format: kind!($kind format) }),+],
                semaphore: &SEMAPHORE,
                logged: AtomicBool::new(false),
            };

            #[inline(always)]
            pub fn is_enabled() -> bool {
                SEMAPHORE.load(Ordering::Relaxed) != 0
            }

            /// Out of line, so that there is one probe per event, whatever the number of its call sites.
            #[cold]
            #[inline(never)]
            pub fn fire($($arg: kind!($kind type)),+) {
                sdt!($name, SEMAPHORE, $(kind!($kind size) => kind!($kind word $arg)),+);
                if EVENT.is_logged() {
                    $crate::trace::log::write(format_args!(
                        concat!(stringify!($name), $(" ", stringify!($arg), " ", kind!($kind shows)),+),
                        $(kind!($kind shown $arg)),+
                    ));
                }
            }
        })+
    };
}

trace_events! {
    /// A loop begins to busy-poll, for `max_ns` at most; `timeout` is the time to its next timer.
    run_poll_handlers_begin(ctx: hex, max_ns: u64, timeout: i64);
    /// It has stopped: something was found (`progress`), or the time is up.
    run_poll_handlers_end(ctx: hex, progress: u64, timeout: i64);
    /// A loop's poll window grows.
    poll_grow(ctx: hex, old: u64, new: u64);
    /// A loop's poll window shrinks.
    poll_shrink(ctx: hex, old: u64, new: u64);
    /// A handler, having had an event, joins those that are polled.
    poll_add(ctx: hex, node: hex, fd: i64, revents: hex);
    /// A handler leaves them, removed or without an event for long.
    poll_remove(ctx: hex, node: hex, fd: i64);

    /// An operation (`IORING_OP_*`) is queued for the ring.
    add_sqe(ctx: hex, user_data: hex, opcode: u64, fd: i64, off: u64);
    /// Its completion is taken from the ring; more may follow of a poll.
    cqe_handler(ctx: hex, user_data: hex, res: i64);
    /// An operation is handed to the thread pool.
    thread_pool_submit_aio(ctx: hex, user_data: hex, fd: i64);
    /// Its result is back on the loop.
    thread_pool_complete_aio(ctx: hex, user_data: hex, ret: i64);

    /// A `file` or `host_device` node begins an operation on its image, by whatever engine.
    file_submit(node: text, req: u64, op: text, offset: u64, bytes: u64);
    /// The operation is done: bytes, or a negative errno.
    file_complete(node: text, req: u64, ret: i64);

    /// A queue is looked at: its driver has kicked, or polling found requests (`polled`).
    virtio_queue_notify(dev: text, queue: u64, polled: u64);
    /// The driver of a queue is signalled.
    virtio_notify(dev: text, queue: u64);
    /// A read request begins.
    virtio_blk_handle_read(dev: text, queue: u64, req: u64, sector: u64, nsectors: u64);
    /// A write request begins.
    virtio_blk_handle_write(dev: text, queue: u64, req: u64, sector: u64, nsectors: u64);
    /// A request of another `VIRTIO_BLK_T_*` begins; -1 for one that is refused as it is.
    virtio_blk_handle_other(dev: text, queue: u64, req: u64, kind: i64);
    /// A request ends, with its `VIRTIO_BLK_S_*`.
    virtio_blk_req_complete(dev: text, queue: u64, req: u64, status: u64);

    /// A command begins; `lun` is -1 where there is no such logical unit, `cmd` the operation code.
    virtio_scsi_cmd_req(dev: text, queue: u64, req: u64, lun: i64, tag: hex, cmd: hex);
    /// It ends, with its `VIRTIO_SCSI_S_*` and its SCSI status.
    virtio_scsi_cmd_resp(dev: text, queue: u64, req: u64, tag: hex, response: u64, status: u64);
    /// A task management function (`VIRTIO_SCSI_T_TMF_*`) begins; `tag` is that of the task, if it is
    /// for one.
    virtio_scsi_tmf_req(dev: text, tag: hex, subtype: u64);
    /// It has ended, with its `VIRTIO_SCSI_S_*`.
    virtio_scsi_tmf_resp(dev: text, tag: hex, response: u64);
    /// The driver is told of an event (`VIRTIO_SCSI_T_*`) of a logical unit.
    virtio_scsi_event(dev: text, lun: u64, event: u64, reason: hex);

    /// A request (`NBD_CMD_*`) of an NBD client has come; of a write the header.
    nbd_receive_request(client: i64, cookie: hex, flags: hex, kind: u64, from: u64, len: u64);
    /// A simple reply is sent, with an error (`NBD_E*`) or 0, and as many bytes of data.
    nbd_co_send_simple_reply(client: i64, cookie: hex, error: u64, len: u64);
    /// A structured or extended reply without data is sent.
    nbd_co_send_chunk_done(client: i64, cookie: hex);
    /// One with data is.
    nbd_co_send_chunk_read(client: i64, cookie: hex, offset: u64, size: u64);
    /// One with an error is.
    nbd_co_send_chunk_error(client: i64, cookie: hex, err: u64);
    /// One with extents of a context is.
    nbd_co_send_extents(client: i64, cookie: hex, extents: u64, context_id: u64);

    /// A register of an AHCI port is written, on the writer's thread.
    ahci_port_write(s: hex, port: u64, offset: hex, val: hex);
    /// An AHCI drive begins a command; `offset` and `bytes` are 0 where it has none.
    ahci_cmd_begin(s: hex, port: u64, slot: u64, op: text, offset: u64, bytes: u64);
    /// It has ended, with the bits of its ATA error register, or -1 where it never got to the drive.
    ahci_cmd_end(s: hex, port: u64, slot: u64, error: i64);
}

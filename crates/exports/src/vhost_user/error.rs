//! Errors of requests and exports, in words for an operator.

#![forbid(unsafe_code)]

use std::io;

use event_loop::LoopGone;
use queue::QueueError;

use super::eventfd::NotEventfd;
use super::session::{MAX_MEM_SLOTS, MAX_QUEUE_SIZE};
use super::wire::WireError;
use crate::message_socket::SocketError;

/// A message that does not fit the session.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// Bits of virtio features that were not offered.
    #[error("features {0:#x} were not offered")]
    Features(u64),
    /// Bits of protocol features that were not offered.
    #[error("protocol features {0:#x} were not offered")]
    ProtocolFeatures(u64),
    /// There is no such queue.
    #[error("queue {index} does not exist, there are {num_queues}")]
    QueueIndex {
        /// The index in the message.
        index: u32,
        /// Number of queues.
        num_queues: usize,
    },
    /// The queue is larger than [`MAX_QUEUE_SIZE`].
    #[error("queue size {0} is over the maximum, {MAX_QUEUE_SIZE}")]
    QueueSize(u16),
    /// Not allowed while a ring runs.
    #[error("cannot change while ring {index} is running")]
    Running {
        /// The running ring's index.
        index: u16,
    },
    /// A ring cannot start because a message is missing.
    #[error("ring {index} cannot start without {missing}")]
    Incomplete {
        /// The ring's index.
        index: u16,
        /// The missing request.
        missing: &'static str,
    },
    /// Memory for the log without VHOST_USER_PROTOCOL_F_LOG_SHMFD.
    #[error("a log in shared memory (VHOST_USER_PROTOCOL_F_LOG_SHMFD) was not agreed on")]
    Log,
    /// Not an eventfd.
    #[error(transparent)]
    NotEventfd(#[from] NotEventfd),
    /// The descriptor is not a UNIX stream socket.
    #[error("the file descriptor is no unix stream socket")]
    NotSocket,
    /// The device does not accept this write to its configuration space.
    #[error("{0}")]
    Config(String),
}

/// A front end without shared memory has rings where the message with its regions has none.
fn advice(error: &QueueError) -> &'static str {
    if matches!(error, QueueError::Ring(guest_memory::Error::RingOutside { .. })) {
        "; is the guest's memory shared (share=on)?"
    } else {
        ""
    }
}

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestError {
    /// It is malformed.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// It does not fit the session.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The memory cannot be used.
    #[error(transparent)]
    Memory(#[from] guest_memory::Error),
    /// More memory than the front end may map.
    #[error(
        "{needed:#x} bytes of memory would be mapped for the guest and the log of a migration, max-memory is {max:#x}"
    )]
    MaxMemory {
        /// Bytes that would be mapped.
        needed: u64,
        /// The limit.
        max: u64,
    },
    /// Too many regions.
    #[error("more than {MAX_MEM_SLOTS} memory regions")]
    MemSlots,
    /// A ring cannot be set up, or its memory was removed.
    #[error("ring {index}: {}{}", .error.in_full(), advice(.error))]
    Ring {
        /// The ring's index.
        index: u16,
        /// The reason.
        error: QueueError,
    },
    /// The memory for in-flight records is too small.
    #[error("{size} bytes are no room for the rings' requests in flight: {needed} are")]
    InflightSize {
        /// Its size in bytes.
        size: u64,
        /// The size that the rings need.
        needed: u64,
    },
    /// The memory for in-flight records could shrink.
    #[error("the file is no memfd that is sealed against shrinking")]
    InflightNotSealed,
    /// The memory for in-flight records cannot be created.
    #[error("no memory for the requests in flight: {0}")]
    InflightMemory(io::Error),
    /// The memory for a migration's log cannot be used.
    #[error("the memory for the log of a migration cannot be used: {0}")]
    LogMemory(guest_memory::Error),
    /// A migration's log ends before the guest's memory or the ring's place in it.
    #[error(
        "the log of a migration has bits for guest addresses up to {end:#x}, needed are \
                 those up to {needed:#x}"
    )]
    LogSize {
        /// The guest address at which the log ends.
        end: u64,
        /// The guest address up to which a log is needed.
        needed: u64,
    },
    /// A descriptor cannot be duplicated for a handover.
    #[error("a descriptor cannot be duplicated: {0}")]
    HandOver(io::Error),
    /// The I/O thread has stopped.
    #[error(transparent)]
    LoopGone(#[from] LoopGone),
}

/// Why a connection ended, apart from an ordinary disconnection or a stop of the export.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectionError {
    /// Malformed bytes; the start of the next message is unknown.
    #[error("{0}")]
    Framing(WireError),
    /// A failed request for which the front end awaits no answer.
    #[error("{request}: {error}")]
    Request {
        /// Its name.
        request: String,
        /// The reason.
        error: RequestError,
    },
    /// The front end disconnected within a message.
    #[error("front end left in the middle of a message")]
    CutShort,
    /// The front end did not complete a message, or did not take a reply, in time.
    #[error("front end does not send the rest of a message, or read its replies")]
    Late,
    /// Too many of its requests failed.
    #[error("too many requests were refused")]
    TooManyRefused,
    /// A system call failed.
    #[error("{call} failed: {error}")]
    Os {
        /// The call.
        call: &'static str,
        /// The reason.
        error: io::Error,
    },
}

impl From<SocketError> for ConnectionError {
    fn from(error: SocketError) -> Self {
        match error {
            SocketError::CutShort => ConnectionError::CutShort,
            SocketError::Late => ConnectionError::Late,
            SocketError::Os { call, error } => ConnectionError::Os { call, error },
        }
    }
}

/// Why an export cannot start, or did not end well.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The configuration contradicts itself.
    #[error("{0}")]
    Config(String),
    /// The socket cannot be listened on.
    #[error("{}", listen_failed(.socket, .call, .error))]
    Listen {
        /// Its path, or a substitute for it.
        socket: String,
        /// The failed call.
        call: &'static str,
        /// The reason.
        #[source]
        error: io::Error,
    },
    /// Another process listens on the socket.
    #[error("cannot listen on {socket}: another process does; stop it, or use another path")]
    SocketInUse {
        /// Its path.
        socket: String,
    },
    /// The device cannot work on an I/O thread.
    #[error("cannot work on I/O thread {io_thread}: {}", words_of(error))]
    Attach {
        /// The thread.
        io_thread: String,
        /// The reason.
        #[source]
        error: io::Error,
    },
    /// Written data may not be on stable storage.
    #[error("flush failed: {}", words_of(.0))]
    Flush(#[source] io::Error),
    /// A loop has stopped.
    #[error(transparent)]
    LoopGone(#[from] LoopGone),
}

/// Returns the system's words, without the number that the standard library appends.
fn words_of(error: &io::Error) -> String {
    let text = error.to_string();
    let number = error.raw_os_error().map(|errno| format!(" (os error {errno})"));
    number.and_then(|number| text.strip_suffix(&number)).unwrap_or(&text).to_owned()
}

/// Why a socket is not listened on. For bind(2) in QSD's wording.
fn listen_failed(socket: &str, call: &str, error: &io::Error) -> String {
    let why = words_of(error);
    match call {
        "bind" => format!("Failed to bind socket to {socket}: {why}"),
        _ => format!("cannot listen on {socket}: {call} failed: {why}"),
    }
}

#[cfg(test)]
mod tests {
    use nix::errno::Errno;

    use super::*;

    #[test]
    fn reasons_have_no_number() {
        let error = io::Error::from_raw_os_error(Errno::EBADF as i32);
        assert_eq!(
            listen_failed("file descriptor 77", "fcntl", &error),
            "cannot listen on file descriptor 77: fcntl failed: Bad file descriptor"
        );
        let error = ExportError::Flush(io::Error::from_raw_os_error(Errno::EIO as i32));
        assert_eq!(error.to_string(), "flush failed: Input/output error");
    }
}

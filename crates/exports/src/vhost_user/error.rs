//! Errors of requests and exports, in words for an operator.

#![forbid(unsafe_code)]

use std::fmt;
use std::io;

use event_loop::LoopGone;
use nix::errno::Errno;
use queue::QueueError;

use super::eventfd::NotEventfd;
use super::session::{MAX_MEM_SLOTS, MAX_QUEUE_SIZE};
use super::wire::WireError;

/// A message that does not fit the session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SessionError {
    /// Bits of virtio features that were not offered.
    Features(u64),
    /// Bits of protocol features that were not offered.
    ProtocolFeatures(u64),
    /// There is no such queue.
    QueueIndex {
        /// The index in the message.
        index: u32,
        /// Number of queues.
        num_queues: usize,
    },
    /// The queue is larger than [`MAX_QUEUE_SIZE`].
    QueueSize(u16),
    /// Not allowed while a ring runs.
    Running {
        /// The running ring's index.
        index: u16,
    },
    /// A ring cannot start because a message is missing.
    Incomplete {
        /// The ring's index.
        index: u16,
        /// The missing request.
        missing: &'static str,
    },
    /// Memory for the log without VHOST_USER_PROTOCOL_F_LOG_SHMFD.
    Log,
    /// Not an eventfd.
    NotEventfd(NotEventfd),
    /// The descriptor is not a UNIX stream socket.
    NotSocket,
    /// The device does not accept this write to its configuration space.
    Config(String),
}

impl From<NotEventfd> for SessionError {
    fn from(error: NotEventfd) -> Self {
        SessionError::NotEventfd(error)
    }
}

impl fmt::Display for SessionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SessionError::Features(bits) => write!(f, "features {bits:#x} were not offered"),
            SessionError::ProtocolFeatures(bits) => {
                write!(f, "protocol features {bits:#x} were not offered")
            }
            SessionError::QueueIndex { index, num_queues } => {
                write!(f, "queue {index} does not exist, there are {num_queues}")
            }
            SessionError::QueueSize(size) => {
                write!(f, "queue size {size} is over the maximum, {MAX_QUEUE_SIZE}")
            }
            SessionError::Running { index } => {
                write!(f, "cannot change while ring {index} is running")
            }
            SessionError::Incomplete { index, missing } => {
                write!(f, "ring {index} cannot start without {missing}")
            }
            SessionError::Log => f.write_str(
                "a log in shared memory (VHOST_USER_PROTOCOL_F_LOG_SHMFD) was not agreed on",
            ),
            SessionError::NotEventfd(error) => error.fmt(f),
            SessionError::NotSocket => f.write_str("the file descriptor is no unix stream socket"),
            SessionError::Config(reason) => f.write_str(reason),
        }
    }
}

impl std::error::Error for SessionError {}

/// Why a request failed.
#[derive(Debug)]
pub(crate) enum RequestError {
    /// It is malformed.
    Wire(WireError),
    /// It does not fit the session.
    Session(SessionError),
    /// The memory cannot be used.
    Memory(guest_memory::Error),
    /// Too many regions.
    MemSlots,
    /// A ring cannot be set up, or its memory was removed.
    Ring {
        /// The ring's index.
        index: u16,
        /// The reason.
        error: QueueError,
    },
    /// The memory for in-flight records is too small.
    InflightSize {
        /// Its size in bytes.
        size: u64,
        /// The size that the rings need.
        needed: u64,
    },
    /// The memory for in-flight records could shrink.
    InflightNotSealed,
    /// The memory for in-flight records cannot be created.
    InflightMemory(io::Error),
    /// The memory for a migration's log cannot be used.
    LogMemory(guest_memory::Error),
    /// A migration's log ends before the guest's memory or the ring's place in it.
    LogSize {
        /// The guest address at which the log ends.
        end: u64,
        /// The guest address up to which a log is needed.
        needed: u64,
    },
    /// A descriptor cannot be duplicated for a handover.
    HandOver(io::Error),
    /// The I/O thread has stopped.
    LoopGone(LoopGone),
}

impl From<WireError> for RequestError {
    fn from(error: WireError) -> Self {
        RequestError::Wire(error)
    }
}

impl From<SessionError> for RequestError {
    fn from(error: SessionError) -> Self {
        RequestError::Session(error)
    }
}

impl From<guest_memory::Error> for RequestError {
    fn from(error: guest_memory::Error) -> Self {
        RequestError::Memory(error)
    }
}

impl From<LoopGone> for RequestError {
    fn from(error: LoopGone) -> Self {
        RequestError::LoopGone(error)
    }
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RequestError::Wire(error) => error.fmt(f),
            RequestError::Session(error) => error.fmt(f),
            RequestError::Memory(error) => error.fmt(f),
            RequestError::MemSlots => write!(f, "more than {MAX_MEM_SLOTS} memory regions"),
            RequestError::Ring { index, error } => {
                write!(f, "ring {index}: {error}")?;
                match std::error::Error::source(error) {
                    Some(source) => write!(f, ": {source}"),
                    None => Ok(()),
                }
            }
            RequestError::InflightSize { size, needed } => {
                write!(
                    f,
                    "{size} bytes are no room for the rings' requests in flight: {needed} are"
                )
            }
            RequestError::InflightNotSealed => {
                f.write_str("the file is no memfd that is sealed against shrinking")
            }
            RequestError::InflightMemory(error) => {
                write!(f, "no memory for the requests in flight: {error}")
            }
            RequestError::LogMemory(error) => {
                write!(f, "the memory for the log of a migration cannot be used: {error}")
            }
            RequestError::LogSize { end, needed } => write!(
                f,
                "the log of a migration has bits for guest addresses up to {end:#x}, needed are \
                 those up to {needed:#x}"
            ),
            RequestError::HandOver(error) => {
                write!(f, "a descriptor cannot be duplicated: {error}")
            }
            RequestError::LoopGone(error) => error.fmt(f),
        }
    }
}

/// Why a connection ended, apart from an ordinary disconnection or a stop of the export.
#[derive(Debug)]
pub(crate) enum ConnectionError {
    /// Malformed bytes; the start of the next message is unknown.
    Framing(WireError),
    /// A failed request for which the front end awaits no answer.
    Request {
        /// Its name.
        request: String,
        /// The reason.
        error: RequestError,
    },
    /// The front end disconnected within a message.
    CutShort,
    /// The front end did not complete a message, or did not take a reply, in time.
    Late,
    /// Too many of its requests failed.
    TooManyRefused,
    /// A system call failed.
    Os {
        /// The call.
        call: &'static str,
        /// The reason.
        error: io::Error,
    },
}

impl fmt::Display for ConnectionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConnectionError::Framing(error) => error.fmt(f),
            ConnectionError::Request { request, error } => write!(f, "{request}: {error}"),
            ConnectionError::CutShort => f.write_str("front end left in the middle of a message"),
            ConnectionError::Late => {
                f.write_str("front end does not send the rest of a message, or read its replies")
            }
            ConnectionError::TooManyRefused => f.write_str("too many requests were refused"),
            ConnectionError::Os { call, error } => write!(f, "{call} failed: {error}"),
        }
    }
}

/// Why an export cannot start, or did not end well.
#[derive(Debug)]
pub enum ExportError {
    /// The configuration contradicts itself.
    Config(String),
    /// The socket cannot be listened on.
    Listen {
        /// Its path, or a substitute for it.
        socket: String,
        /// The failed call.
        call: &'static str,
        /// The reason.
        error: io::Error,
    },
    /// Another process listens on the socket.
    SocketInUse {
        /// Its path.
        socket: String,
    },
    /// The device cannot work on an I/O thread.
    Attach {
        /// The thread.
        io_thread: String,
        /// The reason.
        error: io::Error,
    },
    /// Written data may not be on stable storage.
    Flush(io::Error),
    /// A loop has stopped.
    LoopGone(LoopGone),
}

impl From<LoopGone> for ExportError {
    fn from(error: LoopGone) -> Self {
        ExportError::LoopGone(error)
    }
}

impl fmt::Display for ExportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExportError::Config(reason) => f.write_str(reason),
            // QSD's wording.
            ExportError::Listen { socket, call: "bind", error } => {
                write!(f, "Failed to bind socket to {socket}: ")?;
                match error.raw_os_error() {
                    Some(errno) => f.write_str(Errno::from_raw(errno).desc()),
                    None => error.fmt(f),
                }
            }
            ExportError::Listen { socket, call, error } => {
                write!(f, "cannot listen on {socket}: {call} failed: {error}")
            }
            ExportError::SocketInUse { socket } => write!(
                f,
                "cannot listen on {socket}: another process does; stop it, or use another path"
            ),
            ExportError::Attach { io_thread, error } => {
                write!(f, "cannot work on I/O thread {io_thread}: {error}")
            }
            ExportError::Flush(error) => write!(f, "flush failed: {error}"),
            ExportError::LoopGone(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ExportError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            ExportError::Listen { error, .. }
            | ExportError::Attach { error, .. }
            | ExportError::Flush(error) => Some(error),
            _ => None,
        }
    }
}

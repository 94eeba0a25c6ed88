//! Why a request is refused, or an export cannot be: in words for an operator.

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
    /// Virtio features that were not offered.
    Features(u64),
    /// Protocol features that were not offered.
    ProtocolFeatures(u64),
    /// There is no such queue.
    QueueIndex {
        /// The one named.
        index: u32,
        /// How many there are.
        num_queues: usize,
    },
    /// The queue is larger than any served here.
    QueueSize(u16),
    /// That cannot change while a ring runs.
    Running {
        /// The ring that runs.
        index: u16,
    },
    /// A ring is to be started of which not all is known.
    Incomplete {
        /// The ring.
        index: u16,
        /// The request that should have come before.
        missing: &'static str,
    },
    /// The log's memory comes without VHOST_USER_PROTOCOL_F_LOG_SHMFD.
    Log,
    /// Not an eventfd.
    NotEventfd(NotEventfd),
    /// A descriptor that is no unix stream socket where there has to be one.
    NotSocket,
    /// The device does not take that write to its configuration space.
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
    /// It does not fit.
    Session(SessionError),
    /// The memory cannot be used.
    Memory(guest_memory::Error),
    /// Too many regions.
    MemSlots,
    /// A ring cannot be set up, or has lost its memory.
    Ring {
        /// Which.
        index: u16,
        /// Why.
        error: QueueError,
    },
    /// Memory for the requests in flight is too small.
    InflightSize {
        /// What there is, bytes.
        size: u64,
        /// What the rings need.
        needed: u64,
    },
    /// Memory for the requests in flight that could shrink.
    InflightNotSealed,
    /// Memory for the requests in flight cannot be made.
    InflightMemory(io::Error),
    /// The memory for the log of a migration cannot be used.
    LogMemory(guest_memory::Error),
    /// The log of a migration ends before the guest's memory, or a ring's place in it, does.
    LogSize {
        /// Where there are bits up to, a guest address.
        end: u64,
        /// Where bits are needed up to.
        needed: u64,
    },
    /// A descriptor cannot be duplicated for who takes over.
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

/// Why a connection ended, other than by the front end's leave or our own.
#[derive(Debug)]
pub(crate) enum ConnectionError {
    /// The bytes make no sense, and where the next message begins is unknown.
    Framing(WireError),
    /// A request failed that the front end waits for no answer to.
    Request {
        /// Its name.
        request: String,
        /// Why.
        error: RequestError,
    },
    /// The front end left in the middle of a message.
    CutShort,
    /// It has begun a message and not ended it in time, or not taken a reply.
    Late,
    /// It goes on sending requests that fail.
    TooManyRefused,
    /// A system call failed.
    Os {
        /// Which.
        call: &'static str,
        /// Why.
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

/// Why an export cannot be started, or did not end well.
#[derive(Debug)]
pub enum ExportError {
    /// The configuration does not fit together.
    Config(String),
    /// The socket cannot be listened on.
    Listen {
        /// Its path, or what stands for it.
        socket: String,
        /// What was tried.
        call: &'static str,
        /// Why not.
        error: io::Error,
    },
    /// Somebody else listens on the socket.
    SocketInUse {
        /// Its path.
        socket: String,
    },
    /// The device cannot work on an I/O thread.
    Attach {
        /// The thread.
        io_thread: String,
        /// Why not.
        error: io::Error,
    },
    /// What was written may not be on stable storage.
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
            // As QSD says it.
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

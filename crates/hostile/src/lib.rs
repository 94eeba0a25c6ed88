//! Front ends and clients that violate every rule, or ask what costs much, while other clients must not notice.
//!
//! An [`Attack`] runs on its own thread, round after round, until its [`Running`] is dropped.
//! After any reaction of the daemon (a refusal, a close, none) it tries again.

#![forbid(unsafe_code)]

mod clients;
mod costly;
mod front_end;
pub mod images;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

use crate::images::Costly;

/// How long an attacker waits for an answer that may not come.
const PATIENCE: Duration = Duration::from_millis(100);

/// The targets of an attack.
#[derive(Debug, Clone)]
pub struct Target {
    /// The socket of a vhost-user-blk export with two queues or more, the attacker's own.
    pub vhost_user: PathBuf,
    /// The unix socket of an NBD server with an export named `hostile`, and one of the image that the attack needs.
    pub nbd: PathBuf,
    /// The unix socket of an NBD server that wants TLS. A daemon has one NBD server: where there is this
    /// one, `nbd` is another daemon's.
    pub nbd_tls: Option<PathBuf>,
    /// The unix socket of a monitor.
    pub monitor: PathBuf,
    /// [`Costly::SharedTables`].
    pub shared_tables: Option<PathBuf>,
}

/// What serves an attack.
enum By {
    /// The I/O thread of [`Target::vhost_user`].
    Queue,
    /// The I/O thread of an export of [`Target::nbd`]: an image's, or `hostile`.
    Nbd(Option<Costly>),
    /// The control thread, over any socket but [`Target::nbd_tls`].
    Control,
    /// The control thread, which opens an image.
    Opening(Costly),
    /// The control thread, over [`Target::nbd_tls`].
    Tls,
}

macro_rules! attacks {
    ($($(#[$doc:meta])* $name:ident = $text:literal, $round:path, $by:expr;)*) => {
        /// A kind of attack.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Attack { $($(#[$doc])* $name),* }

        impl Attack {
            /// All of them.
            pub const ALL: &[Attack] = &[$(Attack::$name),*];

            /// In a few words.
            pub fn name(self) -> &'static str {
                match self { $(Attack::$name => $text),* }
            }

            fn by(self) -> By {
                match self { $(Attack::$name => $by),* }
            }

            /// Runs until the daemon ends the connection, or the round is complete.
            fn round(self, target: &Target, go_on: &GoOn) -> io::Result<()> {
                match self { $(Attack::$name => $round(target, go_on)),* }
            }
        }
    };
}

impl Attack {
    /// Whether it is served by an I/O thread; else by the control thread alone.
    pub fn is_on_io_thread(self) -> bool {
        matches!(self.by(), By::Queue | By::Nbd(_))
    }

    /// Whether it is served by the I/O thread of an NBD export.
    pub fn is_on_nbd_thread(self) -> bool {
        matches!(self.by(), By::Nbd(_))
    }

    /// Whether it goes to [`Target::nbd_tls`].
    pub fn is_over_tls(self) -> bool {
        matches!(self.by(), By::Tls)
    }

    /// The image that it needs.
    pub fn image(self) -> Option<Costly> {
        match self.by() {
            By::Nbd(image) => image,
            By::Opening(image) => Some(image),
            By::Queue | By::Control | By::Tls => None,
        }
    }
}

attacks! {
    /// Kicks without requests, as fast as it can.
    Kicks = "a flood of kicks", front_end::kicks, By::Queue;
    /// A ring full of reads of 1 MiB, always.
    LargeReads = "large reads", front_end::large_reads, By::Queue;
    /// Random bytes in its rings, and kicks.
    Rubbish = "rubbish in its rings", front_end::rubbish, By::Queue;
    /// Its queues stopped, started and reset without end.
    Resets = "resets without end", front_end::resets, By::Queue;
    /// Connects, asks, and is gone.
    Connections = "connections without end", front_end::connections, By::Control;
    /// Memory of 64 TiB without a page in it, or what is left.
    SparseMemory = "regions of 64 TiB", front_end::sparse_memory, By::Control;
    /// A guest of 1 GiB uses all of it, and leaves.
    LargeMemory = "a guest of 1 GiB that leaves", front_end::large_memory, By::Control;
    /// Memory in a file on a disk, with holes punched into it.
    Holes = "holes in a file as memory", front_end::holes, By::Queue;
    /// Half a message, and silence; others wait behind.
    HalfMessages = "half messages", front_end::half_messages, By::Control;
    /// Memory tables that cannot be mapped.
    BadMemory = "unmappable memory", front_end::bad_memory, By::Control;
    /// Descriptors that are not what they should be.
    WrongDescriptors = "wrong descriptors", front_end::wrong_descriptors, By::Control;
    /// Memory that shrinks under its rings.
    ShrunkMemory = "memory that shrinks", front_end::shrunk_memory, By::Queue;
    /// A call eventfd that blocks, and is full, and requests to be answered.
    FullCall = "a full call eventfd", front_end::full_call, By::Queue;
    /// Handshakes and half requests, and silence.
    NbdHalf = "NBD: half requests", clients::nbd_half, By::Control;
    /// Options without end, as long as they may be.
    NbdOptions = "NBD: long options", clients::nbd_options, By::Control;
    /// Reads, and does not take the replies.
    NbdDeaf = "NBD: replies unread", clients::nbd_deaf, By::Nbd(None);
    /// Connects and leaves.
    NbdConnections = "NBD: connections without end", clients::nbd_connections, By::Control;
    /// Begins TLS's handshake, and never ends it.
    NbdTls = "NBD: TLS handshakes without end", clients::nbd_tls, By::Tls;
    /// Reads of 1 MiB, and leaves.
    NbdLeaves = "NBD: reads, and gone", costly::read_and_leave, By::Control;
    /// Zeroes on a sparse disk of 2 PiB.
    NbdZeroes = "NBD: zeroes on 2 PiB", costly::zeroes, By::Nbd(Some(Costly::Sparse));
    /// Discards, likewise.
    NbdTrims = "NBD: trims on 2 PiB", costly::trims, By::Nbd(Some(Costly::Sparse));
    /// Asks what is allocated, likewise.
    NbdStatus = "NBD: block status on 2 PiB", costly::status, By::Nbd(Some(Costly::Sparse));
    /// Asks eight empty bitmaps over 16 TiB.
    NbdBitmaps = "NBD: dirty bitmaps of 16 TiB", costly::bitmaps, By::Nbd(Some(Costly::Bitmaps));
    /// Reads sectors in compressed clusters of 64 KiB.
    NbdDeflate = "NBD: sectors in deflate, 64 KiB", costly::deflate, By::Nbd(Some(Costly::Deflate));
    /// The same in clusters of 2 MiB.
    NbdZstd = "NBD: sectors in zstd, 2 MiB", costly::zstd, By::Nbd(Some(Costly::Zstd));
    /// Opens an image that takes long to repair.
    QmpOpens = "QMP: an image to repair", clients::qmp_opens, By::Opening(Costly::SharedTables);
    /// A line without an end.
    QmpEndless = "QMP: an endless line", clients::qmp_endless, By::Control;
    /// Asks, and does not take the answers.
    QmpDeaf = "QMP: answers unread", clients::qmp_deaf, By::Control;
}

/// Whether an attack has to continue.
pub(crate) struct GoOn(Arc<Shared>);

impl GoOn {
    /// Counts a blow. Returns whether to continue.
    fn blow(&self) -> bool {
        self.0.blows.fetch_add(1, Ordering::Relaxed);
        self.is_wanted()
    }

    /// Whether to continue.
    fn is_wanted(&self) -> bool {
        !self.0.stop.load(Ordering::Relaxed)
    }
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    blows: AtomicU64,
}

/// An attack under way. It ends when this is dropped.
#[derive(Debug)]
pub struct Running {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Attack {
    /// Starts the attack; if a CPU is given, on that one and at the lowest priority.
    ///
    /// # Errors
    ///
    /// There is no thread.
    pub fn begin(self, target: Target, cpu: Option<usize>) -> io::Result<Running> {
        let shared = Arc::new(Shared::default());
        let go_on = GoOn(shared.clone());
        let thread = std::thread::Builder::new().name("stranger".into()).spawn(move || {
            if let Some(cpu) = cpu {
                // A client of the victim on the same CPU goes first.
                let _ = rustix::process::nice(19);
                let mut set = CpuSet::new();
                // If the CPU does not exist, the thread stays where it is.
                let _ = set.set(cpu).and_then(|()| sched_setaffinity(Pid::from_raw(0), &set));
            }
            while go_on.is_wanted() {
                if self.round(&target, &go_on).is_err() {
                    // The daemon may not listen for a moment.
                    std::thread::sleep(Duration::from_micros(100));
                }
            }
        })?;
        Ok(Running { shared, thread: Some(thread) })
    }
}

impl Running {
    /// The number of blows so far: kicks, messages, connections.
    pub fn blows(&self) -> u64 {
        self.shared.blows.load(Ordering::Relaxed)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

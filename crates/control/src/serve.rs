//! `serve`: one image, the short way. Comes down to the same steps as a QSD command line.

pub(crate) mod web;

use std::ffi::OsString;
use std::path::PathBuf;

use block::options::{
    Aio, Backing, BlockdevOptions, BlockdevRef, Cache, Discard, Driver, FileOptions, ImageDraft,
    Locking, NodeDraft, Qcow2Options, RawOptions, UrlOptions,
};

use crate::address::check_socket_path;
use crate::attach::{self, AttachOptions};
use crate::error::OptionError;
use crate::export::{
    Addr, AhciOptions, AllowOther, Doorbells, ExportKind, ExportOptions, FuseOptions,
    MAX_NVME_QUEUES, MAX_QUEUES, NvmeOptions, STALL_TIMEOUT_MS, VhostUserOptions,
};
use crate::logging::{LogDraft, LogOptions};
use crate::object::{IothreadOptions, ObjectOptions, SecretOptions};
use crate::place::OneOf;
use crate::rows::{
    BLOCK_SIZE_HELP, MAX_MEMORY_DEFAULT, MAX_MEMORY_HELP, PIN_MEMORY_HELP, ThreadDraft, block_size,
};
use crate::sandbox::{SandboxDraft, SandboxOptions};
use crate::stopping::{StopDraft, StopTimeout};
use crate::storage_daemon::{Action, PIDFILE_HELP, Step};
use crate::table::{Field, Need, Row, put};
use crate::trace::{self, TraceOptions};

/// The `node-name` of the served image.
pub const SERVED_NODE: &str = "disk0";
/// The `id` of its export.
const EXPORT: &str = "export0";
/// The most I/O threads.
const MAX_IOTHREADS: i64 = 64;

/// Options of `serve`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServeOptions {
    /// The image: a file, a block device or a URL.
    pub image: PathBuf,
    /// Of an image on a web server: where that is.
    pub web: Option<Box<UrlOptions>>,
    /// `--object`: secrets that the options of the image refer to.
    pub secrets: Vec<SecretOptions>,
    /// `--overlay`: the image that has the writes, above one on a web server.
    pub overlay: Option<PathBuf>,
    /// `--localize`: copy the whole image to the overlay, with at most so many bytes per second. 0: no limit.
    pub localize: Option<u64>,
    /// `--cache-dir`, with the cache's file once that is known, and `--cache-size`.
    pub cache_dir: CacheDir,
    /// `--format`. `None`: detected from the image's header, or from the name of a new image.
    pub format: Option<ServeFormat>,
    /// `--size`: make the image with this many bytes when it is missing. A multiple of 512.
    pub size: Option<u64>,
    /// Of `mount`: the file. `None`: of `serve`.
    pub mount: Option<FuseOptions>,
    /// Of `attach`: its own options. `None`: of `serve` or `mount`.
    pub attach: Option<AttachOptions>,
    /// `--as`: the device that the guest sees.
    pub device: ServeDevice,
    /// `--socket`: where the front end connects, at most 107 bytes.
    pub socket: PathBuf,
    /// `--queues`: request queues the guest may use.
    pub queues: u16,
    /// `--iothreads`: threads that serve them; at most as many as queues.
    pub iothreads: u16,
    /// `--read-only`: open and offer the image read-only.
    pub read_only: bool,
    /// `--cache`.
    pub cache: CacheMode,
    /// `--aio`; `None` means io_uring where the kernel offers it, else threads.
    pub aio: Option<Aio>,
    /// `--discard`.
    pub discard: Discard,
    /// `--locking`.
    pub locking: Locking,
    /// `--block-size` in bytes: a power of two from 512 to 2 MiB.
    pub block_size: u32,
    /// `--pin-memory`: keep the guest's memory registered with io_uring.
    pub pin_memory: bool,
    /// `--max-memory`: bytes of memory that a front end may have mapped. `None`: by the machine's memory.
    pub max_memory: Option<u64>,
    /// `--poll-max-ns`: longest time to busy-poll before sleeping, nanoseconds.
    pub poll_max_ns: Option<u64>,
    /// `--pidfile`: where to write the process's id once everything is ready.
    pub pidfile: Option<PathBuf>,
    /// `--trace`.
    pub trace: TraceOptions,
    /// `--sandbox` and `--user`.
    pub sandbox: SandboxOptions,
    /// `--log-level` and `--log-format`.
    pub log: LogOptions,
    /// `--stop-timeout`.
    pub stop_timeout: StopTimeout,
}

/// A cache of an image on a server, which outlives the process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CacheDir {
    /// `--cache-dir`: the folder of caches.
    pub folder: Option<PathBuf>,
    /// `--cache-size`: bytes that the cache takes up at most. 0: no limit.
    pub max_size: u64,
}

/// `--cache`: QEMU's cache modes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CacheMode {
    /// Past the page cache; the guest sees a disk with a write cache and flushes it.
    #[default]
    None,
    /// Through the page cache; the guest flushes.
    Writeback,
    /// Through the page cache; every write is flushed before it is answered.
    Writethrough,
    /// Past the page cache; every write is flushed before it is answered.
    Directsync,
    /// Through the page cache; flushes are ignored.
    Unsafe,
}

impl CacheMode {
    /// Whether it goes past the page cache.
    fn is_direct(self) -> bool {
        matches!(self, CacheMode::None | CacheMode::Directsync)
    }
}

/// The device that a guest sees.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ServeDevice {
    /// virtio-blk over vhost-user.
    #[default]
    VirtioBlk,
    /// An NVMe controller over vfio-user.
    Nvme,
    /// An AHCI controller over vfio-user.
    Ahci,
}

/// The format of the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServeFormat {
    /// Raw.
    Raw,
    /// Raw, because no header was found. Guest writes that would make a qcow2 image are refused: the
    /// next start would open it as qcow2, with the files that its header names.
    ProbedRaw,
    /// A qcow2 image.
    Qcow2,
}

impl ServeFormat {
    /// Returns the format as a value of `--format`.
    pub fn name(self) -> &'static str {
        match self {
            ServeFormat::Raw => "raw",
            ServeFormat::ProbedRaw => "probed-raw",
            ServeFormat::Qcow2 => "qcow2",
        }
    }
}

/// What the image turned out to be, once looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageKind {
    /// A regular file.
    File,
    /// A block device.
    BlockDevice,
    /// An overlay that needs its image on a web server no more.
    Localized,
}

impl ServeOptions {
    pub(crate) fn new(image: PathBuf) -> Self {
        Self {
            image,
            web: None,
            secrets: Vec::new(),
            overlay: None,
            localize: None,
            cache_dir: CacheDir::default(),
            format: None,
            size: None,
            mount: None,
            attach: None,
            device: ServeDevice::default(),
            socket: PathBuf::new(),
            queues: 8,
            iothreads: 1,
            read_only: false,
            cache: CacheMode::default(),
            aio: None,
            discard: Discard::Unmap,
            locking: Locking::Auto,
            block_size: 512,
            pin_memory: false,
            max_memory: None,
            poll_max_ns: None,
            pidfile: None,
            trace: TraceOptions::default(),
            sandbox: SandboxOptions::default(),
            log: LogOptions::default(),
            stop_timeout: StopTimeout::default(),
        }
    }

    /// Returns the image's name for messages.
    pub fn shown(&self) -> String {
        self.web.as_ref().map_or_else(|| self.image.display().to_string(), |web| web.shown())
    }

    /// Returns the node of the image.
    pub(crate) fn node(&self, kind: ImageKind, format: ServeFormat) -> BlockdevOptions {
        let file =
            FileOptions { filename: self.image.clone(), aio: self.aio, locking: self.locking };
        let driver = match (&self.web, kind) {
            (Some(web), ImageKind::File | ImageKind::BlockDevice) => {
                UrlOptions::clone(web).driver()
            }
            (None, ImageKind::File) | (_, ImageKind::Localized) => Driver::file(file.clone()),
            (None, ImageKind::BlockDevice) => Driver::host_device(file.clone()),
        };
        let is_template = self.overlay.is_some();
        let common = |name, driver| BlockdevOptions {
            read_only: self.read_only,
            discard: self.discard,
            cache: Cache {
                direct: self.cache.is_direct(),
                no_flush: self.cache == CacheMode::Unsafe,
            },
            ..BlockdevOptions::new(name, driver)
        };
        let inline = |options| BlockdevRef::Inline(Box::new(options));
        let below = |driver| {
            let common = common(None, driver);
            inline(BlockdevOptions { read_only: common.read_only || is_template, ..common })
        };
        let qcow2 =
            |file, backing| Driver::from(Qcow2Options { file, backing, ..Qcow2Options::default() });
        let driver = match format {
            ServeFormat::Qcow2 => qcow2(below(driver), Backing::Implicit),
            ServeFormat::ProbedRaw if !self.read_only && !is_template => Driver::from(RawOptions {
                file: below(driver),
                offset: 0,
                size: None,
                keep_raw: true,
            }),
            ServeFormat::ProbedRaw | ServeFormat::Raw => driver,
        };
        let cache = self.cache_file(format).filter(|_| kind != ImageKind::Localized);
        let is_cached = cache.is_some();
        let driver = match cache {
            None => driver,
            Some(cache) => {
                // Written although the disk is read-only. Flushes count, as what is stored is to be right after a power cut.
                let below = |driver| {
                    let common = common(None, driver);
                    let cache = Cache { no_flush: false, ..common.cache };
                    inline(BlockdevOptions { read_only: false, cache, ..common })
                };
                let file = Driver::file(FileOptions { filename: cache, ..file.clone() });
                let source = common(None, driver);
                let source = inline(BlockdevOptions { read_only: true, ..source });
                let cache = below(qcow2(below(file), Backing::Node(source)));
                Driver::caching(cache, self.cache_dir.max_size)
            }
        };
        let driver = match &self.overlay {
            None => driver,
            Some(overlay) => {
                let file = Driver::file(FileOptions { filename: overlay.clone(), ..file });
                let file = inline(common(None, file));
                match (kind, &self.web) {
                    (ImageKind::Localized, _) => qcow2(file, Backing::None),
                    // The options choose the server: what the overlay's header says does not count.
                    (ImageKind::File | ImageKind::BlockDevice, web) => {
                        let overlay = qcow2(file, Backing::Node(below(driver)));
                        match web {
                            Some(_) if !is_cached => {
                                Driver::copy_on_read(inline(common(None, overlay)))
                            }
                            Some(_) | None => overlay,
                        }
                    }
                }
            }
        };
        common(Some(SERVED_NODE), driver)
    }

    /// Returns what to create, as the steps of a QSD command line.
    pub fn steps(&self, kind: ImageKind, format: ServeFormat) -> Vec<Step> {
        let iothreads: Vec<String> = (0..self.iothreads).map(|n| format!("io{n}")).collect();
        let node = self.node(kind, format);
        let addr = Addr::Unix { path: self.socket.clone() };
        let kind = match (&self.mount, self.device) {
            (Some(mount), _) => ExportKind::Fuse(mount.clone()),
            (None, ServeDevice::Ahci) => ExportKind::VfioUserAhci(AhciOptions {
                addr,
                serial: None,
                more_drives: Vec::new(),
                max_memory: self.max_memory,
            }),
            (None, ServeDevice::Nvme) => ExportKind::VfioUserNvme(NvmeOptions {
                addr,
                serial: None,
                num_queues: self.queues,
                doorbells: Doorbells::Auto,
                more_namespaces: Vec::new(),
                max_memory: self.max_memory,
            }),
            (None, ServeDevice::VirtioBlk) => ExportKind::VhostUserBlk(VhostUserOptions {
                addr,
                num_queues: Some(self.queues),
                logical_block_size: self.block_size,
                pin_memory: self.pin_memory,
                max_memory: self.max_memory,
                ..VhostUserOptions::default()
            }),
        };
        let export = ExportOptions {
            allow_inactive: false,
            id: EXPORT.to_owned(),
            node_name: SERVED_NODE.to_owned(),
            writable: !self.read_only,
            writethrough: matches!(self.cache, CacheMode::Writethrough | CacheMode::Directsync),
            iothreads: iothreads.clone(),
            fixed_iothread: false,
            stall_timeout_ms: STALL_TIMEOUT_MS,
            kind,
        };
        let objects = iothreads.into_iter().map(|id| {
            let poll_max_ns = self.poll_max_ns;
            let iothread = IothreadOptions { id, poll_max_ns, ..IothreadOptions::default() };
            Action::Object(ObjectOptions::Iothread(iothread))
        });
        let secrets = self.secrets.iter().cloned();
        let secrets = secrets.map(|secret| Action::Object(ObjectOptions::Secret(secret)));
        let rest = [Action::Blockdev(node), Action::Export(export)];
        let image = self.shown();
        let command = if self.mount.is_some() { "mount" } else { "serve" };
        secrets
            .chain(objects)
            .chain(rest)
            .map(|action| Step { origin: format!("{command} {image}"), action })
            .collect()
    }
}

impl ImageDraft for ServeOptions {
    fn aio(&mut self) -> &mut Option<Aio> {
        &mut self.aio
    }

    fn locking(&mut self) -> &mut Locking {
        &mut self.locking
    }
}

impl NodeDraft for ServeOptions {
    type Discard = Discard;

    fn discard(&mut self) -> &mut Discard {
        &mut self.discard
    }
}

impl ThreadDraft for ServeOptions {
    fn poll_max_ns(&mut self) -> &mut Option<u64> {
        &mut self.poll_max_ns
    }
}

impl SandboxDraft for ServeOptions {
    fn sandbox(&mut self) -> &mut SandboxOptions {
        &mut self.sandbox
    }
}

impl LogDraft for ServeOptions {
    fn log(&mut self) -> &mut LogOptions {
        &mut self.log
    }
}

impl StopDraft for ServeOptions {
    fn stop_timeout(&mut self) -> &mut StopTimeout {
        &mut self.stop_timeout
    }
}

/// The options of the command line.
pub(crate) static OPTIONS: &[Field<ServeOptions>] = &[
    FORMAT,
    SIZE,
    web::OVERLAY,
    web::LOCALIZE,
    web::LOCALIZE_SPEED,
    web::CACHE_DIR,
    web::CACHE_SIZE,
    web::URL_OPTS,
    web::OBJECT,
    Row::default("as", "virtio-blk", "device that the guest sees").at(&OneOf {
        at: |serve: &mut ServeOptions| &mut serve.device,
        words: &[
            ("virtio-blk", ServeDevice::VirtioBlk, "a virtio-blk device, over vhost-user"),
            (
                "nvme",
                ServeDevice::Nvme,
                "an NVMe controller, over vfio-user: for guests without virtio drivers",
            ),
            (
                "ahci",
                ServeDevice::Ahci,
                "an AHCI controller with a SATA drive, over vfio-user: for old guests",
            ),
        ],
    }),
    Row::optional(
        "socket",
        "the image's name and .sock, in the current directory",
        "socket the virtual machine connects to",
    )
    .path(|serve, path| {
        check_socket_path("socket", &path)?;
        put(&mut serve.socket, path)
    }),
    Row::default("queues", "8", "request queues the guest may use; QEMU asks for one per vCPU")
        .int(1..=MAX_QUEUES as i64, |serve, queues| match u16::try_from(queues) {
            Ok(queues) => put(&mut serve.queues, queues),
            Err(_) => Err(OptionError::new("number out of range")),
        }),
    IOTHREADS,
    READ_ONLY,
    CACHE,
    ServeOptions::AIO,
    // A guest that gives space back means it.
    Field {
        need: Need::Default("unmap"),
        help: "what happens to the guest's discard requests",
        ..ServeOptions::DISCARD
    },
    ServeOptions::LOCKING,
    Row::default("block-size", "512", BLOCK_SIZE_HELP)
        .bytes(|serve, bytes| put(&mut serve.block_size, block_size("block-size", bytes)?)),
    Row::optional("pin-memory", "off", PIN_MEMORY_HELP).flag(|serve| serve.pin_memory = true),
    Row::optional("max-memory", MAX_MEMORY_DEFAULT, MAX_MEMORY_HELP)
        .bytes(|serve, bytes| put(&mut serve.max_memory, Some(bytes))),
    ServeOptions::POLL_MAX_NS,
    PIDFILE,
    ServeOptions::STOP_TIMEOUT,
    TRACE,
    ServeOptions::SANDBOX,
    ServeOptions::USER,
    ServeOptions::LOG_LEVEL,
    ServeOptions::LOG_FORMAT,
];

/// The options of `mount`.
pub(crate) static MOUNT: &[Field<ServeOptions>] = &[
    FORMAT,
    SIZE,
    web::OVERLAY,
    web::LOCALIZE,
    web::LOCALIZE_SPEED,
    web::CACHE_DIR,
    web::CACHE_SIZE,
    web::URL_OPTS,
    web::OBJECT,
    Row::optional(
        "growable",
        "a write past the end fails",
        "let writes past the end make the disk longer",
    )
    .flag(|serve| of_mount(serve).growable = true),
    Row::default("allow-other", "auto", "users that reach the file").at(&OneOf {
        at: |serve: &mut ServeOptions| &mut of_mount(serve).allow_other,
        words: &[
            ("off", AllowOther::Off, "the user that mounts it alone"),
            ("on", AllowOther::On, "all users, as the file's owner and mode say"),
            ("auto", AllowOther::Auto, "as on if the system allows it, else as off"),
        ],
    }),
    Field { name: "iothreads", help: "threads that serve the file", ..IOTHREADS },
    READ_ONLY,
    CACHE,
    ServeOptions::AIO,
    Field {
        need: Need::Default("unmap"),
        help: "what happens to the ranges that fallocate(2) frees",
        ..ServeOptions::DISCARD
    },
    ServeOptions::LOCKING,
    ServeOptions::POLL_MAX_NS,
    PIDFILE,
    ServeOptions::STOP_TIMEOUT,
    TRACE,
    ServeOptions::SANDBOX,
    ServeOptions::USER,
    ServeOptions::LOG_LEVEL,
    ServeOptions::LOG_FORMAT,
];

fn of_mount(serve: &mut ServeOptions) -> &mut FuseOptions {
    serve.mount.get_or_insert_default()
}

pub(crate) const FORMAT: Field<ServeOptions> = Row::optional(
    "format",
    "by the image's header; of an image that is made, by its name",
    "format of the image; one in another format than these is refused",
)
.at(&OneOf {
    at: |serve: &mut ServeOptions| &mut serve.format,
    words: &[
        ("raw", ServeFormat::Raw, "the image's bytes are the disk's, whatever they are"),
        (
            "probed-raw",
            ServeFormat::ProbedRaw,
            "the same, but the guest cannot write a qcow2 header: what an image without a \
         header is served as",
        ),
        ("qcow2", ServeFormat::Qcow2, "a qcow2 image"),
    ],
});

pub(crate) const SIZE: Field<ServeOptions> = Row::optional(
    "size",
    "the image must exist",
    "make the image, with this size, when it is missing; an image that exists is never \
         resized",
)
.bytes(|serve, bytes| {
    if bytes == 0 || bytes % 512 != 0 {
        return Err(OptionError::new("Specified size is not a positive multiple of 512"));
    }
    put(&mut serve.size, Some(bytes))
});

pub(crate) const IOTHREADS: Field<ServeOptions> = Row::default(
    "iothreads",
    "1",
    "threads that serve the queues, dealt out in turn; at most one per queue",
)
.int(1..=MAX_IOTHREADS, |serve, threads| match u16::try_from(threads) {
    Ok(threads) => put(&mut serve.iothreads, threads),
    Err(_) => Err(OptionError::new("number out of range")),
});

pub(crate) const READ_ONLY: Field<ServeOptions> =
    Row::optional("read-only", "the guest may write", "open the image read-only, and offer it so")
        .flag(|serve| serve.read_only = true);

pub(crate) const CACHE: Field<ServeOptions> =
    Row::default("cache", "none", "cache mode, by QEMU's names").at(&OneOf {
        at: |serve: &mut ServeOptions| &mut serve.cache,
        words: &[
            ("none", CacheMode::None, "bypass the host's page cache"),
            ("writeback", CacheMode::Writeback, "use the host's page cache"),
            ("writethrough", CacheMode::Writethrough, "use the page cache, flush after each write"),
            ("directsync", CacheMode::Directsync, "bypass the page cache, flush after each write"),
            ("unsafe", CacheMode::Unsafe, "use the page cache, ignore flushes"),
        ],
    });

const PIDFILE: Field<ServeOptions> = Row::optional("pidfile", "", PIDFILE_HELP)
    .path(|serve, path| put(&mut serve.pidfile, Some(path)));

pub(crate) const TRACE: Field<ServeOptions> = Row::optional("trace", "none", trace::HELP)
    .text(trace::META, |serve, text| trace::read(&text, &mut serve.trace));

/// What takes no options to decide: the image from the positional arguments.
pub(crate) fn start(arguments: Vec<OsString>) -> Result<ServeOptions, OptionError> {
    let mut arguments = arguments.into_iter();
    let image = arguments.next().filter(|image| !image.is_empty()).ok_or_else(|| {
        OptionError::new("serve: an image is missing")
            .hint("Usage: ringmill serve <image> [options]")
    })?;
    match arguments.next() {
        Some(extra) => {
            Err(OptionError::new(format!("{}: Unexpected argument", extra.to_string_lossy()))
                .hint("serve takes one image; use storage-daemon for several."))
        }
        None => web::start(ServeOptions::new(PathBuf::from(image))),
    }
}

/// The same of `mount`: the image and the file.
pub(crate) fn start_mount(arguments: Vec<OsString>) -> Result<ServeOptions, OptionError> {
    const USAGE: &str = "Usage: ringmill mount <image> <file> [options]";
    let mut arguments = arguments.into_iter().filter(|argument| !argument.is_empty());
    let (Some(image), Some(file)) = (arguments.next(), arguments.next()) else {
        return Err(OptionError::new("mount: an image and a file are needed").hint(USAGE));
    };
    if let Some(extra) = arguments.next() {
        let message = format!("{}: Unexpected argument", extra.to_string_lossy());
        return Err(OptionError::new(message).hint(USAGE));
    }
    let mount = FuseOptions { mountpoint: PathBuf::from(file), ..FuseOptions::default() };
    let serve = web::start(ServeOptions::new(PathBuf::from(image)))?;
    Ok(ServeOptions { mount: Some(mount), ..serve })
}

/// Refuses what a device cannot be given.
fn check_device(serve: &ServeOptions) -> Result<(), OptionError> {
    let name = match serve.device {
        ServeDevice::VirtioBlk => return Ok(()),
        ServeDevice::Nvme => "nvme",
        ServeDevice::Ahci => "ahci",
    };
    let refused = |why: &str, option: &str| {
        let error = OptionError::new(format!("--as {name}: {why}"));
        Err(error.hint(format!("Leave {option} out.")))
    };
    if serve.block_size != 512 {
        return refused("blocks have 512 bytes", "--block-size");
    }
    if serve.pin_memory {
        return refused("memory cannot be pinned", "--pin-memory");
    }
    if serve.iothreads > 1 {
        return refused("one thread serves all queues", "--iothreads");
    }
    if serve.device == ServeDevice::Nvme && serve.queues > MAX_NVME_QUEUES {
        return Err(OptionError::new(format!(
            "--queues: nvme has at most {MAX_NVME_QUEUES} queues"
        )));
    }
    Ok(())
}

/// What takes all options to decide.
pub(crate) fn finish(mut serve: ServeOptions) -> Result<ServeOptions, OptionError> {
    web::check(&serve)?;
    if let Some(attach) = &serve.attach {
        attach::check(&serve, attach)?;
        // Its monitor is for the image alone.
        serve.sandbox.paths.get_or_insert_default();
    }
    // Without an overlay, nothing can be written.
    let has_overlay =
        serve.overlay.is_some() || serve.attach.as_ref().is_some_and(|attach| attach.snapshot);
    serve.read_only |= serve.web.is_some() && !has_overlay;
    if serve.aio == Some(Aio::Native) && !serve.cache.is_direct() {
        return Err(OptionError::new("--aio native: requires a cache mode without the page cache")
            .hint("Add --cache none, which is the default, or --cache directsync."));
    }
    check_device(&serve)?;
    let has_socket = serve.mount.is_none() && serve.attach.is_none();
    if serve.iothreads > serve.queues && has_socket {
        return Err(OptionError::new(format!(
            "--iothreads {}: more threads than queues ({})",
            serve.iothreads, serve.queues
        ))
        .hint("A queue is served by one thread. Raise --queues."));
    }
    if serve.socket.as_os_str().is_empty() && has_socket {
        let name = match (&serve.overlay, &serve.web) {
            (Some(overlay), _) => overlay.file_name().map(ToOwned::to_owned),
            (None, Some(web)) => web.file_name().map(OsString::from),
            (None, None) => serve.image.file_name().map(ToOwned::to_owned),
        };
        let Some(mut socket) = name else {
            return Err(OptionError::new(format!("{}: not an image", serve.shown())));
        };
        socket.push(".sock");
        serve.socket = PathBuf::from(socket);
        check_socket_path("socket", &serve.socket).map_err(|_| {
            OptionError::new("the image's name is too long for a socket's")
                .hint("Choose the socket's name with --socket.")
        })?;
    }
    Ok(serve)
}

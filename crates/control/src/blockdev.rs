//! `--blockdev`: block nodes. Produces the `block` crate's options.

use std::path::PathBuf;

use block::options::{
    Aio, BlockdevOptions, BlockdevRef, Cache, DetectZeroes, Discard, Driver, FileOptions, Locking,
    NullOptions, RawOptions,
};

use crate::error::OptionError;
use crate::scalar::{IDENTIFIER_HINT, is_identifier};
use crate::table::{self, Choice, Context, Field, Kind, Need, Row};
use crate::value::{Object, Value};

/// The deepest nesting of nodes in nodes.
const MAX_DEPTH: usize = 32;

/// The size of a null node when none is given, as in QSD.
const NULL_SIZE: u64 = 1 << 30;

/// A node while its options are read. What was not given stays `None`, because a nested node takes
/// some of that from the node it lies in.
#[derive(Default)]
pub(crate) struct Draft {
    inherited: Inherited,
    node_name: Option<String>,
    read_only: Option<bool>,
    auto_read_only: bool,
    discard: Option<Discard>,
    detect_zeroes: DetectZeroes,
    direct: Option<bool>,
    no_flush: Option<bool>,
    filename: PathBuf,
    aio: Option<Aio>,
    locking: Locking,
    offset: u64,
    size: Option<u64>,
    file: Option<BlockdevRef>,
    latency_ns: u64,
    read_zeroes: bool,
}

/// What a node defined inside another takes from it when it does not say otherwise. QSD has the
/// same rule; nodes referred to by name take nothing.
#[derive(Clone, Copy, Default)]
struct Inherited {
    read_only: bool,
    cache: Cache,
    // A nested node passes discards on: the outer node has already decided.
    discard: Discard,
}

impl Draft {
    fn read_only(&self) -> bool {
        self.read_only.unwrap_or(self.inherited.read_only)
    }

    fn cache(&self) -> Cache {
        Cache {
            direct: self.direct.unwrap_or(self.inherited.cache.direct),
            no_flush: self.no_flush.unwrap_or(self.inherited.cache.no_flush),
        }
    }

    fn discard(&self) -> Discard {
        self.discard.unwrap_or(self.inherited.discard)
    }
}

/// Options that every driver has.
pub(crate) static COMMON: &[Field<Draft>] = &[
    Field {
        name: "node-name",
        kind: Kind::Text {
            meta: "<node-name>",
            set: |node, name| {
                if !is_identifier(&name) {
                    return Err(OptionError::new(format!("Invalid node-name: '{name}'"))
                        .hint(IDENTIFIER_HINT));
                }
                if name.len() > 31 {
                    return Err(OptionError::new("Node name too long")
                        .hint("A node name has at most 31 characters."));
                }
                node.node_name = Some(name);
                Ok(())
            },
        },
        need: Need::Optional("none, which only nested nodes may have"),
        help: "name of the node, for exports and other nodes to refer to",
    },
    Field {
        name: "discard",
        kind: Kind::Choice(&[
            Choice {
                name: "ignore",
                help: "answer discards, do nothing",
                set: |node| put(&mut node.discard, Some(Discard::Ignore)),
            },
            Choice {
                name: "unmap",
                help: "give the space back",
                set: |node| put(&mut node.discard, Some(Discard::Unmap)),
            },
        ]),
        need: Need::Default("ignore"),
        help: "what becomes of discard requests; nested nodes pass them on by default",
    },
    Field {
        name: "cache",
        kind: Kind::Group(&[
            Field {
                name: "direct",
                kind: Kind::Bool(|node, on| put(&mut node.direct, Some(on))),
                need: Need::Default("off"),
                help: "bypass the host's page cache (O_DIRECT); nested nodes inherit it",
            },
            Field {
                name: "no-flush",
                kind: Kind::Bool(|node, on| put(&mut node.no_flush, Some(on))),
                need: Need::Default("off"),
                help: "ignore flushes: fast, and unsafe when the host dies; nested nodes inherit it",
            },
        ]),
        need: Need::Default(""),
        help: "",
    },
    Field {
        name: "active",
        kind: Kind::Bool(|_, on| match on {
            true => Ok(()),
            false => Err(OptionError::not_yet("Parameter 'active' with value 'off'")),
        }),
        need: Need::Default("on"),
        help: "activate the node; only on so far",
    },
    Field {
        name: "read-only",
        kind: Kind::Bool(|node, on| put(&mut node.read_only, Some(on))),
        need: Need::Default("off"),
        help: "forbid writing; nested nodes inherit it",
    },
    Field {
        name: "auto-read-only",
        kind: Kind::Bool(|node, on| put(&mut node.auto_read_only, on)),
        need: Need::Default("off"),
        help: "open the image read-only when it cannot be opened for writing",
    },
    Field {
        name: "detect-zeroes",
        kind: Kind::Choice(&[
            Choice {
                name: "off",
                help: "writes are writes",
                set: |node| put(&mut node.detect_zeroes, DetectZeroes::Off),
            },
            Choice {
                name: "on",
                help: "zeroes become write-zeroes requests",
                set: |node| put(&mut node.detect_zeroes, DetectZeroes::On),
            },
            Choice {
                name: "unmap",
                help: "zeroes become write-zeroes requests that may unmap",
                set: |node| put(&mut node.detect_zeroes, DetectZeroes::Unmap),
            },
        ]),
        need: Need::Default("off"),
        help: "turn writes of zeroes into write-zeroes requests; unmap needs discard=unmap",
    },
    Field {
        name: "force-share",
        kind: Kind::Bool(|_, on| match on {
            true => Err(OptionError::not_yet("Parameter 'force-share' with value 'on'")
                .hint("locking=off opens an image that another program has locked.")),
            false => Ok(()),
        }),
        need: Need::Default("off"),
        help: "share the image with programs that have locked it; only off so far",
    },
];

/// Options of `file` and `host_device`.
static FILE: &[Field<Draft>] = &[
    Field {
        name: "filename",
        kind: Kind::Path(|node, path| {
            if path.as_os_str().as_encoded_bytes().contains(&0) {
                return Err(OptionError::new("Parameter 'filename' contains a NUL byte"));
            }
            put(&mut node.filename, path)
        }),
        need: Need::Required,
        help: "path of the image",
    },
    Field {
        name: "pr-manager",
        kind: Kind::Text {
            meta: "<id>",
            set: |_, id| {
                Err(OptionError::new(format!("No persistent reservation manager with id '{id}'"))
                    .hint("Persistent reservations are not supported by ringmill yet."))
            },
        },
        need: Need::Optional("none"),
        help: "helper for persistent reservations; not supported so far",
    },
    Field {
        name: "locking",
        kind: Kind::Choice(&[
            Choice {
                name: "auto",
                help: "lock where the file system can",
                set: |node| put(&mut node.locking, Locking::Auto),
            },
            Choice {
                name: "on",
                help: "lock, or fail",
                set: |node| put(&mut node.locking, Locking::On),
            },
            Choice {
                name: "off",
                help: "do not lock",
                set: |node| put(&mut node.locking, Locking::Off),
            },
        ]),
        need: Need::Default("auto"),
        help: "lock the image against other programs, as QEMU does",
    },
    Field {
        name: "aio",
        kind: Kind::Choice(&[
            Choice {
                name: "threads",
                help: "a pool of threads with blocking system calls",
                set: |node| put(&mut node.aio, Some(Aio::Threads)),
            },
            Choice {
                name: "io_uring",
                help: "the event loop's ring",
                set: |node| put(&mut node.aio, Some(Aio::IoUring)),
            },
            Choice {
                name: "native",
                help: "Linux AIO; needs cache.direct=on",
                set: |node| put(&mut node.aio, Some(Aio::Native)),
            },
        ]),
        need: Need::Optional("io_uring where the kernel offers it, else threads"),
        help: "who carries out reads and writes",
    },
    Field {
        name: "aio-max-batch",
        // A tuning hint: the loop submits what is queued once per iteration, so nothing waits for
        // a batch to fill, and no data depends on where one is cut.
        kind: Kind::Int { range: 0..=i64::MAX, set: |_, _| Ok(()) },
        need: Need::Default("0"),
        help: "most requests handed to the kernel at once; without effect, as each iteration of \
               the loop hands over what it has",
    },
    Field {
        name: "drop-cache",
        // Migration is what it is about, and there is none.
        kind: Kind::Bool(|_, _| Ok(())),
        need: Need::Default("on"),
        help: "drop the page cache after migration; without effect, as nothing migrates",
    },
    Field {
        name: "x-check-cache-dropped",
        kind: Kind::Bool(|_, on| match on {
            true => Err(OptionError::not_yet("Parameter 'x-check-cache-dropped' with value 'on'")),
            false => Ok(()),
        }),
        need: Need::Default("off"),
        help: "check that migration dropped the page cache; only off so far",
    },
];

/// Options of `raw`.
static RAW: &[Field<Draft>] = &[
    Field {
        name: "file",
        kind: Kind::Nested {
            meta: "<node-name>",
            rows: || {
                vec![Row {
                    name: "<option>".to_owned(),
                    value: "<value>".to_owned(),
                    need: Need::Optional("none"),
                    help: "options of a node defined in place: file.driver=file,file.filename=…",
                }]
            },
            read: |node, value, at| {
                let inherited = Inherited {
                    read_only: node.read_only(),
                    cache: node.cache(),
                    discard: Discard::Unmap,
                };
                node.file = Some(read_ref(value, inherited, at)?);
                Ok(())
            },
        },
        need: Need::Required,
        help: "the node below, by name",
    },
    Field {
        name: "offset",
        kind: Kind::Bytes(|node, bytes| put(&mut node.offset, bytes)),
        need: Need::Default("0"),
        help: "first byte of the node below that is used",
    },
    Field {
        name: "size",
        kind: Kind::Bytes(|node, bytes| {
            if bytes % 512 != 0 {
                return Err(OptionError::new("Specified size is not multiple of 512"));
            }
            put(&mut node.size, Some(bytes))
        }),
        need: Need::Optional("up to the end of the node below"),
        help: "number of bytes of the node below that are used, a multiple of 512",
    },
];

/// Options of `null-co` and `null-aio`.
static NULL: &[Field<Draft>] = &[
    Field {
        name: "size",
        kind: Kind::Bytes(|node, bytes| put(&mut node.size, Some(bytes))),
        need: Need::Default("1G"),
        help: "size of the disk",
    },
    Field {
        name: "latency-ns",
        kind: Kind::Int {
            range: 0..=i64::MAX,
            set: |node, ns| put(&mut node.latency_ns, ns.unsigned_abs()),
        },
        need: Need::Default("0"),
        help: "how long each request takes, in nanoseconds",
    },
    Field {
        name: "read-zeroes",
        kind: Kind::Bool(|node, on| put(&mut node.read_zeroes, on)),
        need: Need::Default("off"),
        help: "clear the buffers of reads; off leaves them as they are",
    },
];

fn put<V>(into: &mut V, value: V) -> table::Set {
    *into = value;
    Ok(())
}

/// A block driver: a row of the table of drivers.
pub(crate) struct DriverRow {
    /// Its name.
    pub(crate) name: &'static str,
    /// What it is for.
    pub(crate) help: &'static str,
    /// The options it has beside [`COMMON`].
    pub(crate) fields: &'static [Field<Draft>],
    build: fn(&'static str, Draft) -> Result<Driver, OptionError>,
}

/// The drivers there are.
pub(crate) static DRIVERS: &[DriverRow] = &[
    DriverRow {
        name: "file",
        help: "a regular file",
        fields: FILE,
        build: |name, node| Ok(Driver::File(file(name, node)?)),
    },
    DriverRow {
        name: "host_device",
        help: "a block device of the host",
        fields: FILE,
        build: |name, node| Ok(Driver::HostDevice(file(name, node)?)),
    },
    DriverRow {
        name: "raw",
        help: "a part of, or all of, another node",
        fields: RAW,
        build: |_, node| {
            let file = node.file.ok_or_else(|| table::missing("file"))?;
            Ok(Driver::Raw(RawOptions { file, offset: node.offset, size: node.size }))
        },
    },
    DriverRow {
        name: "null-co",
        help: "reads and writes nothing, and answers at once; for measuring",
        fields: NULL,
        build: |_, node| Ok(Driver::NullCo(null(&node))),
    },
    DriverRow {
        name: "null-aio",
        help: "the same, answered from the event loop",
        fields: NULL,
        build: |_, node| Ok(Driver::NullAio(null(&node))),
    },
];

fn file(driver: &str, node: Draft) -> Result<FileOptions, OptionError> {
    if node.filename.as_os_str().is_empty() {
        return Err(OptionError::new(format!("The '{driver}' block driver requires a file name")));
    }
    Ok(FileOptions { filename: node.filename, aio: node.aio, locking: node.locking })
}

fn null(node: &Draft) -> NullOptions {
    NullOptions {
        size: node.size.unwrap_or(NULL_SIZE),
        latency_ns: node.latency_ns,
        read_zeroes: node.read_zeroes,
    }
}

/// The rows of a driver's table, those of all drivers included.
pub(crate) fn rows(driver: &DriverRow) -> Vec<Row> {
    COMMON.iter().chain(driver.fields).flat_map(Field::rows).collect()
}

/// Reads one `--blockdev`.
pub(crate) fn read(object: Object, at: &Context) -> Result<BlockdevOptions, OptionError> {
    let node = read_node(object, Inherited::default(), at)?;
    if node.node_name.is_none() {
        return Err(OptionError::new("'node-name' must be specified for the root node"));
    }
    Ok(node)
}

/// A node by name or in place.
fn read_ref(value: Value, inherited: Inherited, at: &Context) -> Result<BlockdevRef, OptionError> {
    match value {
        Value::Text(name) => Ok(BlockdevRef::Name(name)),
        Value::Object(_) if at.depth > MAX_DEPTH => {
            Err(OptionError::new(format!("'{}' is nested too deeply", at.whole()))
                .hint(format!("At most {MAX_DEPTH} nodes may lie in one another.")))
        }
        Value::Object(object) => {
            Ok(BlockdevRef::Inline(Box::new(read_node(object, inherited, at)?)))
        }
        _ => Err(table::wrong_type(at.whole(), "BlockdevRef")),
    }
}

fn read_node(
    mut object: Object,
    inherited: Inherited,
    at: &Context,
) -> Result<BlockdevOptions, OptionError> {
    let names = || DRIVERS.iter().map(|driver| driver.name);
    let full_name = at.full("driver");
    let name = match table::take(&mut object, "driver") {
        Some(name) => table::text(name, &full_name, at)?,
        None => {
            let known: Vec<&str> = names().collect();
            return Err(
                table::missing(&full_name).hint(format!("Known drivers: {}", known.join(", ")))
            );
        }
    };
    let driver = DRIVERS
        .iter()
        .find(|driver| driver.name == name)
        .ok_or_else(|| table::not_accepted("driver", at, &name, names()))?;

    let mut node = Draft { inherited, ..Draft::default() };
    table::read(COMMON, &mut node, &mut object, at)?;
    table::read(driver.fields, &mut node, &mut object, at)?;
    let known = COMMON.iter().chain(driver.fields).map(|field| field.name);
    let known = ["driver"].into_iter().chain(known);
    table::refuse_rest(&object, at, &format!("driver '{name}'"), known)?;

    let discard = node.discard();
    if node.detect_zeroes == DetectZeroes::Unmap && discard != Discard::Unmap {
        return Err(OptionError::new(
            "setting detect-zeroes to unmap is not allowed without setting discard operation \
             to unmap",
        ));
    }
    Ok(BlockdevOptions {
        node_name: node.node_name.clone(),
        read_only: node.read_only(),
        auto_read_only: node.auto_read_only,
        discard,
        detect_zeroes: node.detect_zeroes,
        cache: node.cache(),
        driver: (driver.build)(driver.name, node)?,
    })
}

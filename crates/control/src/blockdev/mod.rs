//! `--blockdev`: block nodes. Produces the `block` crate's options.
//!
//! A driver is a [`DriverRow`] in a file of its own and a line in [`DRIVERS`].

mod blkdebug;
mod elsewhere;
mod file;
mod nbd;
mod null;
mod qcow2;
mod raw;
mod throttle;
mod write;

pub use write::blockdev_option;

use block::options::{BlockdevOptions, BlockdevRef, Cache, DetectZeroes, Discard, Driver};

use crate::error::OptionError;
use crate::rows::NodeDraft;
use crate::scalar::{IDENTIFIER_HINT, is_identifier};
use crate::shape::{Member, Shape, Union, Variant};
use crate::table::{self, Choice, Context, Field, Kind, Need, only_off, put};
use crate::value::{Object, Value};

/// The drivers there are.
pub(crate) static DRIVERS: &[&DriverRow] = &[
    &file::FILE,
    &file::HOST_DEVICE,
    &raw::RAW,
    &qcow2::QCOW2,
    &null::NULL_CO,
    &null::NULL_AIO,
    &nbd::NBD,
    &throttle::THROTTLE,
    &blkdebug::BLKDEBUG,
];

/// The deepest nesting of nodes in nodes.
const MAX_DEPTH: usize = 32;

/// A block driver: a row of the table of drivers.
pub(crate) struct DriverRow {
    /// Its name.
    pub(crate) name: &'static str,
    /// What it is for.
    pub(crate) help: &'static str,
    /// A whole value of the option, with the nodes `disk0` and `disk1` there to refer to.
    pub(crate) example: &'static str,
    /// The options it has beside [`COMMON`].
    pub(crate) own: &'static dyn Own,
}

/// A driver's own options, the type that they are read into erased: an [`OwnTable`].
pub(crate) trait Own: Sync {
    /// Reads them out of `object`, in which nothing else is left.
    fn read(
        &self,
        object: Object,
        inherited: Inherited,
        at: &Context,
        driver: &str,
    ) -> Result<Driver, OptionError>;

    /// What they are.
    fn members(&self) -> Vec<Member>;
}

/// A driver's own options, and the driver made of them.
struct OwnTable<T: 'static> {
    fields: &'static [Field<T>],
    /// Nothing given yet. A driver with nodes below keeps what those inherit.
    start: fn(Inherited) -> T,
    build: fn(T) -> Result<Driver, OptionError>,
}

impl<T> Own for OwnTable<T> {
    fn read(
        &self,
        mut object: Object,
        inherited: Inherited,
        at: &Context,
        driver: &str,
    ) -> Result<Driver, OptionError> {
        let mut draft = (self.start)(inherited);
        table::read(self.fields, &mut draft, &mut object, at)?;
        let known = table::names(COMMON).chain(table::names(self.fields));
        let known = ["driver"].into_iter().chain(known);
        table::refuse_rest(&object, at, &format!("driver '{driver}'"), known)?;
        (self.build)(draft)
    }

    fn members(&self) -> Vec<Member> {
        table::members(self.fields)
    }
}

/// What a node defined inside another takes from it when it does not say otherwise. QSD has the
/// same rule; nodes referred to by name take nothing.
#[derive(Clone, Copy, Default)]
pub(crate) struct Inherited {
    read_only: bool,
    cache: Cache,
    discard: Discard,
}

/// What every driver has, while it is read. What was not given stays `None`, because a nested node
/// takes some of that from the node it lies in.
#[derive(Default)]
struct Common {
    inherited: Inherited,
    node_name: Option<String>,
    read_only: Option<bool>,
    auto_read_only: bool,
    discard: Option<Discard>,
    detect_zeroes: DetectZeroes,
    inactive: bool,
    direct: Option<bool>,
    no_flush: Option<bool>,
}

impl NodeDraft for Common {
    fn set_discard(&mut self, discard: Discard) {
        self.discard = Some(discard);
    }
}

impl Common {
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

    /// For nodes defined inside this one.
    fn bequest(&self) -> Inherited {
        // A nested node passes discards on: the outer node has already decided.
        Inherited { read_only: self.read_only(), cache: self.cache(), discard: Discard::Unmap }
    }
}

/// Options that every driver has.
static COMMON: &[Field<Common>] = &[
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
    Common::DISCARD,
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
        kind: Kind::Bool(|node, on| put(&mut node.inactive, !on)),
        need: Need::Default("on"),
        help: "open and lock the image; off: leave it to others, until blockdev-set-active",
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
    Field::unoffered("force-share", |node, value, name, at| {
        only_off(node, value, name, at).map_err(|error| {
            error.hint("locking=off opens an image that another program has locked.")
        })
    }),
];

/// What a node may have.
pub(crate) fn options() -> Union {
    let variant = |driver: &&DriverRow| Variant {
        name: driver.name,
        help: driver.help,
        example: driver.example,
        members: driver.own.members(),
    };
    Union {
        tag: "driver",
        help: "how the node is read and written",
        common: table::members(COMMON),
        variants: DRIVERS.iter().map(variant).collect(),
    }
}

/// A node, which can have nodes below.
pub(crate) fn shape() -> Shape {
    Shape::Named("node", options)
}

/// A node below another, which [`read_ref`] reads.
fn node_shape() -> Shape {
    Shape::Either(vec![Shape::Text("<node-name>"), shape()])
}

/// Reads one `--blockdev`.
pub(crate) fn read(object: Object, at: &Context) -> Result<BlockdevOptions, OptionError> {
    let node = read_node(object, Inherited::default(), at)?;
    if node.node_name.is_none() {
        return Err(OptionError::new("'node-name' must be specified for the root node"));
    }
    Ok(node)
}

/// Reads the nodes of `blockdev-reopen`.
pub(crate) fn read_all(value: Value, at: &Context) -> Result<Vec<BlockdevOptions>, OptionError> {
    let Value::List(nodes) = value else { return Err(table::wrong_type(at.whole(), "array")) };
    let read = |(n, node)| {
        let prefix = format!("{}[{n}].", at.whole());
        let at = Context { prefix, ..at.clone() };
        let Value::Object(object) = node else {
            return Err(table::wrong_type(at.whole(), "object"));
        };
        let node = read_node(object, Inherited::default(), &at)?;
        match node.node_name {
            Some(_) => Ok(node),
            None => Err(OptionError::new("node-name not specified")),
        }
    };
    nodes.into_iter().enumerate().map(read).collect()
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
    if let Some(refusal) = elsewhere::refusal(&name) {
        return Err(refusal);
    }
    let driver = DRIVERS
        .iter()
        .find(|driver| driver.name == name)
        .ok_or_else(|| table::not_accepted("driver", at, &name, names()))?;

    let mut node = Common { inherited, ..Common::default() };
    table::read(COMMON, &mut node, &mut object, at)?;
    let discard = node.discard();
    let built = driver.own.read(object, node.bequest(), at, driver.name)?;
    if node.detect_zeroes == DetectZeroes::Unmap && discard != Discard::Unmap {
        return Err(OptionError::new(
            "setting detect-zeroes to unmap is not allowed without setting discard operation \
             to unmap",
        ));
    }
    Ok(BlockdevOptions {
        read_only: node.read_only(),
        cache: node.cache(),
        node_name: node.node_name,
        auto_read_only: node.auto_read_only,
        discard,
        detect_zeroes: node.detect_zeroes,
        active: !node.inactive,
        driver: built,
    })
}

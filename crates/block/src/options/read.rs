//! `--blockdev`: the options of all drivers, and the reader of nodes.

use ::options::place::{Checked, Of, OneOf};
use ::options::scalar::{IDENTIFIER_HINT, is_identifier};
use ::options::shape::{Shape, Union, Variant};
use ::options::table::{self, Context, Field, Row};
use ::options::{Object, OptionError, Value};

use super::elsewhere;
use super::rows::NodeDraft;
use super::{BlockdevOptions, BlockdevRef, Cache, DetectZeroes, Discard};
use crate::driver::DriverKind;
use crate::drivers;
use crate::registry::MAX_CHAIN;

/// The deepest nesting of nodes in nodes: the longest chain of images, with the topmost image and the lowest one's file, and
/// some more.
const MAX_DEPTH: usize = MAX_CHAIN + 4;

/// Options that a node defined inside another inherits unless it sets them, and what they are read for.
///
/// QSD has the same rule; nodes referred to by name inherit nothing.
#[derive(Clone, Copy, Default)]
pub struct Inherited {
    /// `read-only`.
    pub read_only: bool,
    /// `auto-read-only`.
    pub auto_read_only: bool,
    /// `force-share`.
    pub force_share: bool,
    /// `cache`.
    pub cache: Cache,
    /// `discard`.
    pub discard: Discard,
    /// The options are those of `blockdev-reopen`.
    pub reopens: bool,
}

/// What every driver has, while it is read. What was not given stays `None`, because a nested node
/// takes some of that from the node it lies in.
#[derive(Default)]
pub(super) struct Common {
    inherited: Inherited,
    node_name: Option<String>,
    read_only: Option<bool>,
    auto_read_only: Option<bool>,
    force_share: Option<bool>,
    discard: Option<Discard>,
    detect_zeroes: DetectZeroes,
    active: Option<bool>,
    direct: Option<bool>,
    no_flush: Option<bool>,
}

impl NodeDraft for Common {
    type Discard = Option<Discard>;

    fn discard(&mut self) -> &mut Option<Discard> {
        &mut self.discard
    }
}

impl Common {
    /// What gives a node these options.
    pub(super) fn of(options: &BlockdevOptions) -> Common {
        // None is left out by mistake when there is one more. The driver has a table of its own.
        let BlockdevOptions {
            ref node_name,
            read_only,
            // See `write::node`.
            stays_read_only: _,
            auto_read_only,
            force_share,
            discard,
            detect_zeroes,
            active,
            cache: Cache { direct, no_flush },
            driver: _,
        } = *options;
        Common {
            inherited: Inherited::default(),
            node_name: node_name.clone(),
            read_only: Some(read_only),
            auto_read_only: Some(auto_read_only),
            force_share: Some(force_share),
            discard: Some(discard),
            detect_zeroes,
            active: Some(active),
            direct: Some(direct),
            no_flush: Some(no_flush),
        }
    }

    fn read_only(&self) -> bool {
        self.read_only.unwrap_or(self.inherited.read_only)
    }

    fn auto_read_only(&self) -> bool {
        self.auto_read_only.unwrap_or(self.inherited.auto_read_only)
    }

    fn force_share(&self) -> bool {
        self.force_share.unwrap_or(self.inherited.force_share)
    }

    fn cache(&self) -> Cache {
        Cache {
            direct: self.direct.unwrap_or(self.inherited.cache.direct),
            no_flush: self.no_flush.unwrap_or(self.inherited.cache.no_flush),
        }
    }

    fn discards(&self) -> Discard {
        self.discard.unwrap_or(self.inherited.discard)
    }

    /// For nodes defined inside this one.
    fn bequest(&self) -> Inherited {
        // A nested node passes discards on: the outer node has already decided.
        Inherited {
            read_only: self.read_only(),
            auto_read_only: self.auto_read_only(),
            force_share: self.force_share(),
            cache: self.cache(),
            discard: Discard::Unmap,
            reopens: self.inherited.reopens,
        }
    }
}

/// Options that every driver has.
pub(super) static COMMON: &[Field<Common>] = &[
    Row::optional(
        "node-name",
        "none, which only nested nodes may have",
        "name of the node, for exports and other nodes to refer to",
    )
    .at(&Checked {
        meta: "<node-name>",
        check: check_name,
        at: |node: &mut Common| &mut node.node_name,
    }),
    Common::DISCARD,
    Row::default("cache", "", "").group(&[
        Row::default(
            "direct",
            "off",
            "bypass the host's page cache (O_DIRECT); nested nodes inherit it",
        )
        .at(&Of(|node: &mut Common| &mut node.direct)),
        Row::default(
            "no-flush",
            "off",
            "ignore flushes: fast, and unsafe when the host dies; nested nodes inherit it",
        )
        .at(&Of(|node: &mut Common| &mut node.no_flush)),
    ]),
    Row::default(
        "active",
        "on",
        "open and lock the image; off: leave it to others, until blockdev-set-active",
    )
    .at(&Of(|node: &mut Common| &mut node.active)),
    Row::default("read-only", "off", "forbid writing; nested nodes inherit it")
        .at(&Of(|node: &mut Common| &mut node.read_only)),
    Row::default(
        "auto-read-only",
        "off",
        "open the image read-only when it cannot be opened for writing; nested nodes \
         inherit it",
    )
    .at(&Of(|node: &mut Common| &mut node.auto_read_only)),
    Row::default(
        "detect-zeroes",
        "off",
        "turn writes of zeroes into write-zeroes requests; unmap needs discard=unmap",
    )
    .at(&OneOf {
        at: |node: &mut Common| &mut node.detect_zeroes,
        words: &[
            ("off", DetectZeroes::Off, "writes are writes"),
            ("on", DetectZeroes::On, "zeroes become write-zeroes requests"),
            ("unmap", DetectZeroes::Unmap, "zeroes become write-zeroes requests that may unmap"),
        ],
    }),
    Row::default(
        "force-share",
        "off",
        "read an image that others may write to meanwhile; needs read-only=on; nested nodes inherit it",
    )
    .at(&Of(|node: &mut Common| &mut node.force_share)),
];

fn check_name(name: &Option<String>) -> table::Set {
    let name = name.as_deref().unwrap_or_default();
    if !is_identifier(name) {
        return Err(OptionError::new(format!("Invalid node-name: '{name}'")).hint(IDENTIFIER_HINT));
    }
    if name.len() > 31 {
        return Err(
            OptionError::new("Node name too long").hint("A node name has at most 31 characters.")
        );
    }
    Ok(())
}

/// Returns the options of nodes, by driver.
pub fn node_options() -> Union {
    let variant = |driver: &DriverKind| Variant {
        name: driver.name,
        help: driver.help,
        example: driver.example,
        members: driver.options.members(),
    };
    Union {
        tag: "driver",
        help: "how the node is read and written",
        common: table::members(COMMON),
        variants: drivers::all().map(variant).collect(),
    }
}

/// Returns the shape of a node, which can have nodes below.
pub fn node_shape() -> Shape {
    Shape::Named("node", node_options)
}

/// Returns the shape of a node below another, which [`read_ref`] reads.
pub fn ref_shape() -> Shape {
    Shape::Either(vec![Shape::Text("<node-name>"), node_shape()])
}

/// Returns the names of the options that every driver has.
pub(crate) fn common_names() -> impl Iterator<Item = &'static str> {
    ["driver"].into_iter().chain(table::names(COMMON))
}

/// Reads one `--blockdev`.
///
/// # Errors
///
/// In QSD's words.
pub fn read_blockdev(object: Object, at: &Context) -> Result<BlockdevOptions, OptionError> {
    let node = read_node(object, Inherited::default(), Purpose::Opened, at)?;
    if node.node_name.is_none() {
        return Err(OptionError::new("'node-name' must be specified for the root node"));
    }
    Ok(node)
}

/// Reads the nodes of `blockdev-reopen`.
///
/// # Errors
///
/// In QSD's words.
pub fn read_blockdevs(value: Value, at: &Context) -> Result<Vec<BlockdevOptions>, OptionError> {
    let Value::List(nodes) = value else { return Err(table::wrong_type(at.whole(), "array")) };
    let read = |(n, node)| {
        let at = at.item(n);
        let Value::Object(object) = node else {
            return Err(table::wrong_type(at.whole(), "object"));
        };
        check_reopened_name(&object)?;
        let inherited = Inherited { reopens: true, ..Inherited::default() };
        let node = read_node(object, inherited, Purpose::Reopened, &at)?;
        match node.node_name {
            Some(_) => Ok(node),
            None => Err(OptionError::new("node-name not specified")),
        }
    };
    nodes.into_iter().enumerate().map(read).collect()
}

/// Refuses a name that no node has, in words that differ from those for a new node.
fn check_reopened_name(object: &Object) -> Result<(), OptionError> {
    match table::look(object, "node-name") {
        Some(Value::Text(name)) if !is_identifier(name) => {
            Err(OptionError::new(format!("Failed to find node with node-name='{name}'")))
        }
        _ => Ok(()),
    }
}

/// Reads a node below another: by name or in place.
///
/// # Errors
///
/// In QSD's words.
pub fn read_ref(
    value: Value,
    inherited: Inherited,
    at: &Context,
) -> Result<BlockdevRef, OptionError> {
    match value {
        Value::Text(name) => Ok(BlockdevRef::Name(name)),
        Value::Object(_) if at.depth > MAX_DEPTH => {
            Err(OptionError::new(format!("'{}' is nested too deeply", at.whole()))
                .hint(format!("At most {MAX_DEPTH} nodes may lie in one another.")))
        }
        Value::Object(object) => {
            let node = read_node(object, inherited, Purpose::Opened, at)?;
            Ok(BlockdevRef::Inline(Box::new(node)))
        }
        _ => Err(table::wrong_type(at.whole(), "BlockdevRef")),
    }
}

/// What a node's options are read for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// The node is opened.
    Opened,
    /// It is open, and is opened again.
    Reopened,
}

fn read_node(
    mut object: Object,
    inherited: Inherited,
    purpose: Purpose,
    at: &Context,
) -> Result<BlockdevOptions, OptionError> {
    let names = || drivers::all().map(|driver| driver.name);
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
    let driver = drivers::all()
        .find(|driver| driver.name == name)
        .ok_or_else(|| table::not_accepted("driver", at, &name, names()))?;

    let mut node = Common { inherited, ..Common::default() };
    table::read(COMMON, &mut node, &mut object, at)?;
    let shares_writable = node.force_share() && !node.read_only();
    // Before the nodes inside, which inherit both, are refused in other words.
    if shares_writable && purpose == Purpose::Reopened {
        return Err(OptionError::new("Cannot change the option 'force-share'"));
    }
    let discard = node.discards();
    let built = driver.options.read(object, node.bequest(), at, driver.name)?;
    if shares_writable {
        return Err(OptionError::new("force-share=on can only be used with read-only images"));
    }
    if node.detect_zeroes == DetectZeroes::Unmap && discard != Discard::Unmap {
        return Err(OptionError::new(
            "setting detect-zeroes to unmap is not allowed without setting discard operation \
             to unmap",
        ));
    }
    Ok(BlockdevOptions {
        read_only: node.read_only(),
        stays_read_only: node.read_only == Some(true),
        auto_read_only: node.auto_read_only(),
        force_share: node.force_share(),
        cache: node.cache(),
        node_name: node.node_name,
        discard,
        detect_zeroes: node.detect_zeroes,
        active: node.active.unwrap_or(true),
        driver: built,
    })
}

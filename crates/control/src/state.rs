//! The text of a state file, and how its options are merged with those of the command line.
//!
//! The file has two lists of options: the present configuration, and the command line of the last start. The second list
//! distinguishes changes of the command line from changes by a monitor's commands, as in a three-way merge:
//!
//! | command line | commands | result |
//! |---|---|---|
//! | as before | changed or removed an option | as commands left it |
//! | changed, added or removed an option | did not change it | as the command line has it |
//! | changed an option | changed it in the same way | as both have it |
//! | added an option | added it in another way | as the command line has it, with a warning |
//! | changed an option | changed it in another way | the start is refused |
//!
//! An addition is refused, too, if what commands have added is above a node of that name, or if an export would offer
//! another node: a guest would see old data, or write below an overlay.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use block::driver::Needs;
use block::options::{BlockdevOptions, BlockdevRef};
use serde_json::{Map, Value as Json, json};

use crate::cli::read_options;
use crate::error::OptionError;
use crate::export::ExportNeeds;
use crate::inventory::Inventory;
use crate::json;
use crate::masked;
use crate::nbd_server::NbdAddr;
use crate::storage_daemon::{Action, Step};
use crate::value::{Object, Value};

/// The first member of a state file. Its value is the format's version.
const MAGIC: &str = "ringmill-state";
/// The version that is written, and the only version that is read.
const VERSION: i64 = 1;
const COMMAND_LINE: &str = "command-line";
const OPTIONS: &str = "options";
/// Optional: what identifies the files of the nodes.
const FILES: &str = "files";

/// The contents of a state file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SavedState {
    /// Configuration on the command line of the last start.
    pub command_line: Vec<Step>,
    /// Options that make the present configuration.
    pub options: Vec<Step>,
    /// Identity of each file that the nodes have open, by absolute path, in the form of the state file's user. `None`: the
    /// file is kept without identities.
    pub files: Option<Map<String, Json>>,
}

/// The steps of a start with a state file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Merged {
    /// Steps of the command line, including steps that are no configuration.
    pub given: Vec<Step>,
    /// Steps of the state file, and steps that depend on these. They come after `given`.
    pub kept: Vec<Step>,
    /// Changes of the command line since the last start, one line each.
    pub changes: Vec<String>,
    /// What the command line defines in place of the state file, one line each.
    pub warnings: Vec<String>,
}

/// Identifies what an option defines. No two options have the same key.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    // In the order in which the options can be carried out.
    Object(String),
    NbdServer,
    Node(String),
    Export(String),
}

impl Key {
    /// Returns the key. `None`: the option is no configuration, and stays as on the command line.
    fn of(action: &Action) -> Option<Key> {
        match action {
            Action::Object(object) => Some(Key::Object(object.id().to_owned())),
            Action::NbdServer(_) => Some(Key::NbdServer),
            Action::Blockdev(node) => Some(Key::Node(node.node_name.clone().unwrap_or_default())),
            Action::Export(export) => Some(Key::Export(export.id.clone())),
            Action::Chardev(_) | Action::Monitor(_) | Action::Metrics(_) => None,
        }
    }

    fn rank(&self) -> u8 {
        match self {
            Key::Object(_) => 0,
            Key::NbdServer => 1,
            Key::Node(_) => 2,
            Key::Export(_) => 3,
        }
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Key::Object(id) => write!(f, "object '{id}'"),
            Key::NbdServer => f.write_str("the NBD server"),
            Key::Node(name) => write!(f, "node '{name}'"),
            Key::Export(id) => write!(f, "export '{id}'"),
        }
    }
}

/// Returns the command line's options that are configuration.
///
/// They have the form of a state file.
pub fn configuration(steps: &[Step]) -> Vec<String> {
    let configuration = steps.iter().filter(|step| Key::of(&step.action).is_some());
    configuration.map(|step| step.origin.clone()).collect()
}

impl SavedState {
    /// Returns the text of a state file without identities of files.
    pub fn text(command_line: &[String], options: &[String]) -> String {
        SavedState::text_with(command_line, options, None)
    }

    /// Returns the text of a state file.
    pub fn text_with(
        command_line: &[String],
        options: &[String],
        files: Option<&Map<String, Json>>,
    ) -> String {
        let mut document = json!({MAGIC: VERSION, COMMAND_LINE: command_line, OPTIONS: options});
        if let Some(files) = files {
            document[FILES] = Json::Object(files.clone());
        }
        format!("{document:#}\n")
    }

    /// Reads a state file's text.
    ///
    /// # Errors
    ///
    /// The text is not that of a state file, has another version, or has an option that cannot be
    /// read.
    pub fn parse(text: &str) -> Result<SavedState, OptionError> {
        let document = json::parse(text)?;
        let member = |name: &str| document.iter().find(|(own, _)| own == name).map(|(_, own)| own);
        match member(MAGIC) {
            Some(Value::Integer(VERSION)) => {}
            Some(Value::Integer(other)) => {
                return Err(OptionError::new(format!(
                    "the format has version {other}, and this program knows version {VERSION}"
                )));
            }
            _ => return Err(OptionError::new(format!("not a state file: '{MAGIC}' is missing"))),
        }
        let known = [MAGIC, COMMAND_LINE, OPTIONS, FILES];
        if let Some((other, _)) = document.iter().find(|(name, _)| !known.contains(&&**name)) {
            return Err(OptionError::new(format!("unknown member '{other}'")));
        }
        let list = |name| options(&document, name).map_err(|error| error.of(name));
        let files = serde_json::from_str::<Json>(text).ok().and_then(|mut document| {
            let Json::Object(files) = document[FILES].take() else { return None };
            Some(files)
        });
        if files.is_none() && member(FILES).is_some() {
            return Err(OptionError::new(format!("'{FILES}' is no object")));
        }
        Ok(SavedState { command_line: list(COMMAND_LINE)?, options: list(OPTIONS)?, files })
    }

    /// Returns whether commands of a monitor have changed the configuration of the command line.
    pub fn is_changed(&self) -> bool {
        let (before, now) = (by_key(&self.command_line), by_key(&self.options));
        let actions = now.values().map(|step| &step.action);
        !before.values().map(|step| &step.action).eq(actions)
    }

    /// Merges the state with the command line `given` of this start.
    ///
    /// # Errors
    ///
    /// The command line and commands of a monitor have changed the same thing in different ways, or the
    /// result does not fit together.
    pub fn merge(&self, given: &[Step]) -> Result<Merged, OptionError> {
        let all = [&self.command_line, given, &self.options].map(by_key);
        let keys: BTreeSet<&Key> = all.iter().flat_map(BTreeMap::keys).collect();
        let (mut result, mut changes) = (BTreeMap::new(), Vec::new());
        let mut warnings = Vec::new();
        for key in keys {
            let [before, now, kept] = [&all[0], &all[1], &all[2]].map(|all| all.get(key).copied());
            let is_same = |one: Option<&Step>, other: Option<&Step>| {
                one.map(|step| &step.action) == other.map(|step| &step.action)
            };
            let step = if is_same(now, before) || is_same(now, kept) {
                kept
            } else if is_same(kept, before) {
                let what = match (before, now) {
                    (None, _) => "added",
                    (_, None) => "removed",
                    (Some(_), Some(_)) => "changed",
                };
                changes.push(format!("{what} {key}"));
                now
            } else if let (None, Some(now), Some(kept)) = (before, now, kept)
                && self.may_be_replaced(key, now, kept)
            {
                warnings.push(format!(
                    "{key} is on the command line and in the state file: the command line's is used, {}, and not {}",
                    now.shown(),
                    kept.shown()
                ));
                Some(now)
            } else {
                return Err(conflict(key, before, now, kept));
            };
            result.extend(step.map(|step| (key.clone(), step)));
        }
        let (given, kept) = in_order(given, &self.options, result)?;
        Ok(Merged { given, kept, changes, warnings })
    }

    /// Whether an option that both have added may be the command line's: no overlay or filter that commands have put
    /// above a node gets another one below it, and no export another node.
    fn may_be_replaced(&self, key: &Key, now: &Step, kept: &Step) -> bool {
        match (&now.action, &kept.action) {
            (Action::Export(now), Action::Export(kept)) => now.nodes().eq(kept.nodes()),
            (Action::Blockdev(_), _) => !self.options.iter().any(|step| match &step.action {
                Action::Blockdev(node) => is_above(node, key),
                _ => false,
            }),
            _ => true,
        }
    }
}

fn options(document: &Object, name: &str) -> Result<Vec<Step>, OptionError> {
    let Some((_, Value::List(list))) = document.iter().find(|(own, _)| own == name) else {
        return Err(OptionError::new("a list of options is missing"));
    };
    let text = |value: &Value| match value {
        Value::Text(option) => Ok(option.clone()),
        other => Err(OptionError::new(format!("{other:?} is no option"))),
    };
    let steps = read_options(&list.iter().map(text).collect::<Result<Vec<_>, _>>()?)?;
    let mut keys = Vec::new();
    for step in &steps {
        let key = Key::of(&step.action);
        let key =
            key.ok_or_else(|| masked::of(OptionError::new("no configuration"), &step.origin))?;
        keys.push(key);
    }
    keys.sort();
    match keys.windows(2).find(|pair| pair.first() == pair.last()) {
        Some(twice) => Err(OptionError::new(format!("{} is defined twice", twice[0]))),
        None => Ok(steps),
    }
}

fn by_key(steps: &[Step]) -> BTreeMap<Key, &Step> {
    steps.iter().filter_map(|step| Some((Key::of(&step.action)?, step))).collect()
}

/// Whether a node refers to the node with that key.
fn is_above(node: &BlockdevOptions, key: &Key) -> bool {
    node.driver.children().into_iter().any(|child| match child.node {
        BlockdevRef::Name(name) => *key == Key::Node(name.clone()),
        BlockdevRef::Inline(below) => is_above(below, key),
    })
}

fn conflict(
    key: &Key,
    before: Option<&Step>,
    now: Option<&Step>,
    kept: Option<&Step>,
) -> OptionError {
    let did = |step: Option<&Step>| match (before, step) {
        (None, _) => "added",
        (_, None) => "removed",
        (Some(_), Some(_)) => "changed",
    };
    let last = before.map_or_else(
        || "Without that option".to_owned(),
        |step| format!("With the option as it was, {},", step.shown()),
    );
    let kept_is = kept.map_or("nothing".to_owned(), Step::shown);
    OptionError::new(format!(
        "{key} was {} on the command line, and {} by commands of a monitor",
        did(now),
        did(kept)
    ))
    .hint(format!(
        "{last} the daemon starts with what commands have left: {kept_is}. Without the state file it starts \
         from the command line alone."
    ))
}

/// Splits the result into steps that are as on the command line and refer only to each other, and all others. In
/// both lists, each step refers to earlier ones only.
fn in_order(
    given: &[Step],
    kept: &[Step],
    mut result: BTreeMap<Key, &Step>,
) -> Result<(Vec<Step>, Vec<Step>), OptionError> {
    let (mut inventory, mut first) = (Inventory::default(), Vec::new());
    for step in given {
        let key = Key::of(&step.action);
        let is_wanted = |key: &Key| result.get(key).is_some_and(|is| is.action == step.action);
        if key.as_ref().is_none_or(is_wanted)
            && let Ok(with) = inventory.with(step)
        {
            inventory = with;
            first.push(step.clone());
            key.map(|key| result.remove(&key));
        }
    }
    // The state file's order, then the command line's.
    let place = |step: &Step| kept.iter().chain(given).position(|other| other == step);
    let mut rest: Vec<_> = result.into_iter().collect();
    rest.sort_by_key(|(key, step)| (key.rank(), place(step)));
    let mut then = Vec::new();
    while !rest.is_empty() {
        let before = rest.len();
        let mut wrong = None;
        rest.retain(|(_, step)| match inventory.with(step) {
            Ok(with) => {
                inventory = with;
                then.push((*step).clone());
                false
            }
            Err(error) => {
                wrong.get_or_insert(masked::of(error, &step.origin));
                true
            }
        });
        if let (Some(wrong), true) = (wrong, rest.len() == before) {
            return Err(wrong);
        }
    }
    Ok((first, then))
}

/// Returns the steps that are no configuration: those of a monitor.
pub fn without_configuration(steps: Vec<Step>) -> Vec<Step> {
    steps.into_iter().filter(|step| Key::of(&step.action).is_none()).collect()
}

/// Returns the option's first relative path.
///
/// Such a path depends on the daemon's working directory.
pub fn relative_path(action: &Action) -> Option<&Path> {
    let path = |path: &'_ Path| path.is_relative();
    match action {
        Action::Blockdev(node) => relative_path_of_node(node),
        Action::Export(export) => {
            let ExportNeeds { socket, mountpoint, pins_memory: _, ublk: _, vduse: _ } =
                export.kind.needs();
            socket.or(mountpoint)
        }
        Action::NbdServer(server) => match &server.addr {
            NbdAddr::Unix { path } => Some(path.as_path()),
            NbdAddr::Abstract { .. }
            | NbdAddr::Vsock { .. }
            | NbdAddr::Inet { .. }
            | NbdAddr::Fd { .. } => None,
        },
        Action::Object(object) => object.path(),
        Action::Chardev(_) | Action::Monitor(_) | Action::Metrics(_) => None,
    }
    .filter(|found| path(found))
}

fn relative_path_of_node(node: &BlockdevOptions) -> Option<&Path> {
    let Needs { files, sockets, .. } = node.driver.needs();
    let own = files.into_iter().chain(sockets).find(|path| path.is_relative());
    let below = || {
        node.driver.children().into_iter().find_map(|child| match child.node {
            BlockdevRef::Inline(options) => relative_path_of_node(options),
            BlockdevRef::Name(_) => None,
        })
    };
    own.or_else(below)
}

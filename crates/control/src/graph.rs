//! Whether what a command line defines fits together, before any of it is carried out.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;

use block::options::{BlockdevOptions, BlockdevRef, Driver};

use crate::error::OptionError;
use crate::export::{Addr, ExportOptions};
use crate::storage_daemon::{Action, Step};

/// Checks that names are defined once and before they are used, and that what is writable can be.
///
/// # Errors
///
/// The first step that does not fit, in the order of the command line, with its option in front.
pub fn check(steps: &[Step]) -> Result<(), OptionError> {
    let mut graph = Graph::default();
    steps
        .iter()
        .try_for_each(|step| graph.add(&step.action).map_err(|error| error.of(&step.origin)))
}

#[derive(Default)]
struct Graph {
    /// Nodes by name, with whether they are read-only and whether what lies below them is.
    nodes: HashMap<String, Access>,
    iothreads: HashSet<String>,
    exports: HashSet<String>,
    sockets: HashMap<Socket, String>,
}

#[derive(Clone, Copy)]
struct Access {
    read_only: bool,
    below_read_only: bool,
}

#[derive(PartialEq, Eq, Hash)]
enum Socket {
    Path(PathBuf),
    Fd(i32),
}

impl Graph {
    fn add(&mut self, action: &Action) -> Result<(), OptionError> {
        match action {
            Action::Object(iothread) => {
                if !self.iothreads.insert(iothread.id.clone()) {
                    let id = &iothread.id;
                    return Err(OptionError::new(format!(
                        "attempt to add duplicate property '{id}' to object (type 'container')"
                    ))
                    .hint(format!("There is an object with id '{id}' already.")));
                }
                Ok(())
            }
            Action::Blockdev(node) => self.node(node).map(drop),
            Action::Export(export) => self.export(export),
        }
    }

    fn node(&mut self, node: &BlockdevOptions) -> Result<Access, OptionError> {
        let below_read_only = match &node.driver {
            Driver::Raw(raw) => {
                let below = match &raw.file {
                    BlockdevRef::Inline(below) => self.node(below)?,
                    BlockdevRef::Name(name) => self.find(name, name)?,
                };
                below.read_only || below.below_read_only
            }
            Driver::File(_) | Driver::HostDevice(_) | Driver::NullCo(_) | Driver::NullAio(_) => {
                false
            }
        };
        let access = Access { read_only: node.read_only, below_read_only };
        if let Some(name) = &node.node_name {
            if self.nodes.contains_key(name) {
                return Err(OptionError::new(format!("Duplicate nodes with node-name='{name}'")));
            }
            self.nodes.insert(name.clone(), access);
        }
        Ok(access)
    }

    /// A node by name. QSD's sentence also names a device, which there is none of in exports.
    fn find(&self, name: &str, device: &str) -> Result<Access, OptionError> {
        self.nodes.get(name).copied().ok_or_else(|| {
            OptionError::new(format!("Cannot find device='{device}' nor node-name='{name}'"))
                .hint(known("Nodes", self.nodes.keys()))
        })
    }

    fn export(&mut self, export: &ExportOptions) -> Result<(), OptionError> {
        let id = &export.id;
        if self.exports.contains(id) {
            return Err(OptionError::new(format!("Block export id '{id}' is already in use")));
        }
        for node in export.nodes() {
            let access = self.find(node, "")?;
            if export.writable && access.read_only {
                return Err(OptionError::new("Cannot export read-only node as writable"));
            }
            if export.writable && access.below_read_only {
                return Err(OptionError::new("Block node is read-only")
                    .hint(format!("'{node}' lies on a node that is read-only.")));
            }
        }
        if let Some(unknown) = export.iothreads.iter().find(|id| !self.iothreads.contains(*id)) {
            return Err(OptionError::new(format!("iothread \"{unknown}\" not found"))
                .hint(known("I/O threads", self.iothreads.iter())));
        }
        let mut seen = HashSet::new();
        if let Some(twice) = export.iothreads.iter().find(|id| !seen.insert(*id)) {
            return Err(OptionError::new(format!("iothread \"{twice}\" is given twice")));
        }
        let socket = match &export.vhost_user().addr {
            Addr::Unix { path } => Socket::Path(path.clone()),
            Addr::Fd { fd } => Socket::Fd(*fd),
        };
        if let Some(other) = self.sockets.insert(socket, id.clone()) {
            return Err(OptionError::new(format!("Export '{other}' has the same address"))
                .hint("Each export needs a socket of its own."));
        }
        self.exports.insert(id.clone());
        Ok(())
    }
}

fn known<'a>(what: &str, names: impl Iterator<Item = &'a String>) -> String {
    let mut names: Vec<&str> = names.map(String::as_str).collect();
    names.sort_unstable();
    match names.as_slice() {
        [] => format!("{what} defined before it: none"),
        names => format!("{what} defined before it: {}", names.join(", ")),
    }
}

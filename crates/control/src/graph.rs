//! What has been defined and who uses it, by name: whether something new fits, and something old may
//! go. Both the command line, before any of it is carried out, and the daemon, at each change, ask it.

mod activity;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use block::options::{BlockdevOptions, BlockdevRef, Driver};

use crate::chardev::ChardevBackend;
use crate::error::OptionError;
use crate::export::{self, Addr, ExportKind, ExportOptions};
use crate::fd::FdName;
use crate::nbd_server::NbdServerOptions;
use crate::storage_daemon::{Action, Step};

/// Everything there is, by name.
///
/// A value: each change gives a new one, so that whoever could not carry a change out after all still
/// has what was before.
#[derive(Debug, Clone, Default)]
pub struct Graph {
    nodes: BTreeMap<String, Node>,
    /// Of each its type.
    objects: BTreeMap<String, &'static str>,
    exports: BTreeMap<String, Export>,
    chardevs: BTreeMap<String, Chardev>,
    jobs: BTreeMap<String, Job>,
    /// If there is one, the objects that it refers to.
    nbd_server: Option<Vec<String>>,
}

#[derive(Debug, Clone, Default)]
struct Node {
    access: Access,
    /// What lies behind the image, of those below.
    backing: Option<String>,
    /// Nodes below that have names: those referred to, and those defined in place.
    uses: Vec<String>,
    owns: Vec<String>,
    /// Objects that it refers to.
    objects: Vec<String>,
    /// Defined inside another one.
    nested: bool,
    inactive: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct Access {
    read_only: bool,
    below_read_only: bool,
}

#[derive(Debug, Clone)]
struct Export {
    nodes: Vec<String>,
    writable: bool,
    /// Those it refers to.
    objects: Vec<String>,
    address: Address,
    allow_inactive: bool,
}

/// What no two exports can share.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Address {
    Path(PathBuf),
    Fd(FdName),
    /// A name on the NBD server.
    Nbd(String),
}

/// A job that copies one node to another.
#[derive(Debug, Clone)]
struct Job {
    kind: &'static str,
    source: String,
    target: String,
}

#[derive(Debug, Clone)]
struct Chardev {
    stdio: bool,
    /// A monitor is on it.
    used: bool,
}

impl Graph {
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

    /// With something more.
    ///
    /// # Errors
    ///
    /// Why it does not fit in, in QSD's words where QSD has the case.
    pub fn with(&self, action: &Action) -> Result<Graph, OptionError> {
        let mut graph = self.clone();
        graph.add(action)?;
        Ok(graph)
    }

    /// All objects: their names, and of which type they are.
    pub fn objects(&self) -> impl Iterator<Item = (&str, &'static str)> {
        self.objects.iter().map(|(id, kind)| (id.as_str(), *kind))
    }

    /// Without an object.
    ///
    /// # Errors
    ///
    /// There is none of that name, or something uses it.
    pub fn without_object(&self, id: &str) -> Result<Graph, OptionError> {
        let mut graph = self.clone();
        if graph.objects.remove(id).is_none() {
            return Err(OptionError::new(format!("object '{id}' not found")));
        }
        if graph.uses_object(id) {
            let message = match self.objects.get(id) {
                Some(&"throttle-group") => {
                    format!("Cannot delete throttle group '{id}' with active references")
                }
                _ => format!("object '{id}' is in use, can not be deleted"),
            };
            return Err(OptionError::new(message));
        }
        Ok(graph)
    }

    /// Without a node, and those that were defined inside it.
    ///
    /// # Errors
    ///
    /// There is none of that name, it was defined inside another one, or somebody uses it or one that
    /// would go with it.
    pub fn without_node(&self, name: &str) -> Result<Graph, OptionError> {
        let Some(node) = self.nodes.get(name) else {
            let message = format!("Failed to find node with node-name='{name}'");
            return Err(OptionError::new(message));
        };
        if node.nested {
            return Err(OptionError::new(format!("Node {name} is not owned by the monitor")));
        }
        let mut graph = self.clone();
        let mut going = vec![name.to_owned()];
        while let Some(next) = going.pop() {
            graph.free_of_jobs(&next)?;
            if graph.exports.values().any(|export| export.nodes.contains(&next)) {
                return Err(OptionError::new(format!("Node {next} is in use")));
            }
            if let Some(node) = graph.nodes.remove(&next) {
                going.extend(node.owns);
            }
            if graph.nodes.values().any(|node| node.uses.contains(&next)) {
                return Err(OptionError::new(format!("Block device {next} is in use")));
            }
        }
        Ok(graph)
    }

    /// Without the NBD server. Its exports are to go with it.
    ///
    /// # Errors
    ///
    /// There is none.
    pub fn without_nbd_server(&self) -> Result<Graph, OptionError> {
        let mut graph = self.clone();
        match graph.nbd_server.take() {
            Some(_) => Ok(graph),
            None => Err(OptionError::new("NBD server not running")),
        }
    }

    /// The export that `nbd-server-add` asks for, which cannot be written to where its node cannot.
    ///
    /// # Errors
    ///
    /// There is no such node, or no export can have that name.
    pub fn nbd_export(
        &self,
        device: &str,
        name: &str,
        description: &str,
        writable: bool,
    ) -> Result<ExportOptions, OptionError> {
        if self.nbd_server.is_none() {
            return Err(OptionError::new("NBD server not running"));
        }
        let access = self.find(device, device)?;
        let can_write = !access.read_only && !access.below_read_only;
        export::nbd_export(device, name, description, writable && can_write)
    }

    /// Whether that export is one of the NBD server's; `None`: there is none.
    pub fn is_nbd_export(&self, id: &str) -> Option<bool> {
        self.exports.get(id).map(|export| matches!(export.address, Address::Nbd(_)))
    }

    /// The exports of the NBD server.
    pub fn nbd_exports(&self) -> impl Iterator<Item = &String> {
        let of_server = |export: &&Export| matches!(export.address, Address::Nbd(_));
        self.exports.iter().filter(move |(_, export)| of_server(export)).map(|(id, _)| id)
    }

    /// Without an export, if there is one of that name.
    #[must_use]
    pub fn without_export(&self, id: &str) -> Graph {
        let mut graph = self.clone();
        graph.exports.remove(id);
        graph
    }

    /// With a job of that kind that copies `source` to `target`.
    ///
    /// # Errors
    ///
    /// The name is no name or another job has it, there is no such node, or a job has it already.
    pub fn with_job(
        &self,
        id: &str,
        kind: &'static str,
        source: &str,
        target: &str,
    ) -> Result<Graph, OptionError> {
        for name in [source, target] {
            self.find(name, name)?;
            self.is_active(name)?;
            self.free_of_jobs(name)?;
        }
        if self.lies_on(target, source) {
            let message =
                format!("Node '{target}' lies on '{source}', which is to be copied to it");
            return Err(OptionError::new(message));
        }
        let mut graph = self.clone();
        let job = Job { kind, source: source.to_owned(), target: target.to_owned() };
        graph.jobs.insert(id.to_owned(), job);
        Ok(graph)
    }

    /// Whether what is written to `above` may come to `below`, or what is read from it from there.
    fn lies_on(&self, above: &str, below: &str) -> bool {
        let Some(node) = self.nodes.get(above) else { return false };
        let mut children = node.uses.iter().chain(&node.owns).chain(&node.backing);
        children.any(|child| child == below || self.lies_on(child, below))
    }

    /// Without a job, if there is one of that name.
    #[must_use]
    pub fn without_job(&self, id: &str) -> Graph {
        let mut graph = self.clone();
        graph.jobs.remove(id);
        graph
    }

    /// Checks that no job uses a node.
    ///
    /// # Errors
    ///
    /// One does.
    pub fn free_of_jobs(&self, node: &str) -> Result<(), OptionError> {
        match self.jobs.values().find(|job| job.source == node || job.target == node) {
            Some(job) => Err(OptionError::new(format!(
                "Node '{node}' is busy: block device is in use by block job: {}",
                job.kind
            ))),
            None => Ok(()),
        }
    }

    /// With all that used node `old` using `new` instead, but for `new` itself. A node that was defined
    /// inside another one is gone then, if `new` does not lie on it.
    #[must_use]
    pub fn with_replaced(&self, old: &str, new: &str) -> Graph {
        let mut graph = self.clone();
        let rename = |name: &mut String| {
            if name == old {
                new.clone_into(name);
            }
        };
        graph.exports.values_mut().flat_map(|export| &mut export.nodes).for_each(rename);
        for (name, node) in &mut graph.nodes {
            if name == new {
                continue;
            }
            node.uses.iter_mut().for_each(rename);
            let before = node.owns.len();
            node.owns.retain(|owned| owned != old);
            if node.owns.len() < before {
                node.uses.push(new.to_owned());
            }
        }
        if graph.nodes.get(old).is_some_and(|node| node.nested) {
            // It goes with the new one, if that lies on it, else now.
            match graph.nodes.get_mut(new) {
                Some(above) if above.uses.iter().any(|name| name == old) => {
                    above.uses.retain(|name| name != old);
                    above.owns.push(old.to_owned());
                }
                _ => drop(graph.nodes.remove(old)),
            }
        }
        graph
    }

    /// With a node's other options.
    ///
    /// # Errors
    ///
    /// There is no such node, a job uses it, or it is not to be written any more and somebody does.
    pub fn with_reopened(&self, options: &BlockdevOptions) -> Result<Graph, OptionError> {
        let name = options.node_name.as_deref().unwrap_or_default();
        self.free_of_jobs(name)?;
        self.is_active(name)?;
        let mut graph = self.clone();
        let Some(node) = graph.nodes.get_mut(name) else {
            let message = format!("Failed to find node with node-name='{name}'");
            return Err(OptionError::new(message));
        };
        node.access.read_only = options.read_only;
        let owns = &node.owns;
        let children = options.driver.children().into_iter();
        let named = children.filter_map(|(_, child)| match child {
            BlockdevRef::Name(name) if !owns.contains(name) => Some(name.clone()),
            _ => None,
        });
        node.uses = named.collect();
        if options.read_only && graph.is_written(name) {
            let message = "Cannot make block node read-only, there is a writer on it";
            return Err(OptionError::new(message));
        }
        graph.tell_above(name, options.read_only);
        Ok(graph)
    }

    /// Whether an export may write to a node, or to one that writes to it.
    fn is_written(&self, name: &str) -> bool {
        self.exports.values().any(|e| e.writable && e.nodes.iter().any(|node| node == name))
            || self
                .above(name)
                .any(|(above, node)| !node.access.read_only && self.is_written(above))
    }

    /// The nodes that write to a node.
    fn above<'a>(&'a self, name: &'a str) -> impl Iterator<Item = (&'a String, &'a Node)> {
        self.nodes.iter().filter(move |(_, node)| {
            node.uses.iter().chain(&node.owns).any(|below| below == name)
                && node.backing.as_deref() != Some(name)
        })
    }

    /// Notes in those above a node whether it can be written.
    fn tell_above(&mut self, name: &str, read_only: bool) {
        let above: Vec<String> = self.above(name).map(|(above, _)| above.clone()).collect();
        for above in above {
            if let Some(node) = self.nodes.get_mut(&above) {
                node.access.below_read_only = read_only;
                let read_only = read_only || node.access.read_only;
                self.tell_above(&above, read_only);
            }
        }
    }

    fn add(&mut self, action: &Action) -> Result<(), OptionError> {
        match action {
            Action::Object(object) => {
                match self.objects.insert(object.id().to_owned(), object.type_name()) {
                    Some(_) => Err(duplicate(object.id())),
                    None => Ok(()),
                }
            }
            Action::Blockdev(node) => self.node(node, &mut Node::default()).map(drop),
            Action::Export(export) => self.export(export),
            Action::Chardev(chardev) => {
                let stdio = chardev.backend == ChardevBackend::Stdio;
                if self.chardevs.contains_key(&chardev.id) {
                    return Err(duplicate(&chardev.id));
                }
                if stdio && self.chardevs.values().any(|other| other.stdio) {
                    return Err(OptionError::new("cannot use stdio by multiple character devices"));
                }
                self.chardevs.insert(chardev.id.clone(), Chardev { stdio, used: false });
                Ok(())
            }
            Action::Monitor(monitor) => {
                let id = &monitor.chardev;
                let defined = known("Character devices", self.chardevs.keys());
                let Some(chardev) = self.chardevs.get_mut(id) else {
                    let message = format!("chardev \"{id}\" not found");
                    return Err(OptionError::new(message).hint(defined));
                };
                if std::mem::replace(&mut chardev.used, true) {
                    return Err(OptionError::new(format!("chardev '{id}' is already in use")));
                }
                Ok(())
            }
            // They are asked for by nobody here.
            Action::Metrics(_) => Ok(()),
            Action::NbdServer(server) => self.nbd_server(server),
        }
    }

    /// Whether something refers to that object.
    fn uses_object(&self, id: &str) -> bool {
        let by_exports = self.exports.values().flat_map(|export| &export.objects);
        let by_nodes = self.nodes.values().flat_map(|node| &node.objects);
        let by_server = self.nbd_server.iter().flatten();
        by_exports.chain(by_nodes).chain(by_server).any(|object| object == id)
    }

    fn nbd_server(&mut self, server: &NbdServerOptions) -> Result<(), OptionError> {
        if self.nbd_server.is_some() {
            return Err(OptionError::new("NBD server already running"));
        }
        let mut objects = Vec::new();
        let of = |kind: &str| {
            let all = self.objects.iter().filter(|(_, own)| own.starts_with(kind));
            known("Objects of that kind", all.map(|(id, _)| id))
        };
        if let Some(id) = &server.tls_creds {
            match self.objects.get(id) {
                None => {
                    return Err(OptionError::new(format!("No TLS credentials with id '{id}'"))
                        .hint(of("tls-creds")));
                }
                Some(kind) if !kind.starts_with("tls-creds") => {
                    let message = format!("Object with id '{id}' is not TLS credentials");
                    return Err(OptionError::new(message).hint(of("tls-creds")));
                }
                Some(_) => objects.push(id.clone()),
            }
        }
        if let Some(id) = &server.tls_authz {
            if server.tls_creds.is_none() {
                return Err(OptionError::new("Parameter 'tls-authz' needs 'tls-creds'"));
            }
            match self.objects.get(id) {
                Some(kind) if kind.starts_with("authz") => objects.push(id.clone()),
                Some(_) => {
                    let message = format!("Object with id '{id}' is not an authorization object");
                    return Err(OptionError::new(message).hint(of("authz")));
                }
                None => {
                    return Err(OptionError::new(format!(
                        "No authorization object with id '{id}'"
                    ))
                    .hint(of("authz")));
                }
            }
        }
        self.nbd_server = Some(objects);
        Ok(())
    }

    /// Adds a node to the nodes, and its name to those that `above` has below it.
    fn node(&mut self, options: &BlockdevOptions, above: &mut Node) -> Result<Access, OptionError> {
        let mut node = Node::default();
        let mut below_read_only = false;
        if let Driver::Throttle(throttle) = &options.driver {
            node.objects.push(self.throttle_group(&throttle.throttle_group)?);
        }
        for (role, child) in options.driver.children() {
            let below = match child {
                BlockdevRef::Inline(below) => self.node(below, &mut node)?,
                BlockdevRef::Name(name) => {
                    node.uses.push(name.clone());
                    if role == "backing" {
                        node.backing = Some(name.clone());
                    }
                    self.find(name, name)?
                }
            };
            // What lies behind an image is not written to.
            below_read_only |= role != "backing" && (below.read_only || below.below_read_only);
        }
        node.access = Access { read_only: options.read_only, below_read_only };
        let access = node.access;
        let Some(name) = &options.node_name else {
            above.uses.append(&mut node.uses);
            above.owns.append(&mut node.owns);
            above.objects.append(&mut node.objects);
            return Ok(access);
        };
        if self.nodes.contains_key(name) {
            return Err(OptionError::new(format!("Duplicate nodes with node-name='{name}'")));
        }
        for owned in &node.owns {
            if let Some(owned) = self.nodes.get_mut(owned) {
                owned.nested = true;
            }
        }
        above.owns.push(name.clone());
        self.nodes.insert(name.clone(), node);
        self.with_options_active(options)?;
        Ok(access)
    }

    fn throttle_group(&self, id: &str) -> Result<String, OptionError> {
        let is_group =
            |id: &str| self.objects.get(id).is_some_and(|kind| *kind == "throttle-group");
        if is_group(id) {
            return Ok(id.to_owned());
        }
        let groups = self.objects.keys().filter(|id| is_group(id));
        Err(OptionError::new(format!("Throttle group '{id}' does not exist"))
            .hint(known("Throttle groups", groups)))
    }

    /// A node by name. QSD's sentence also names a device, which there is none of in exports.
    fn find(&self, name: &str, device: &str) -> Result<Access, OptionError> {
        self.nodes.get(name).map(|node| node.access).ok_or_else(|| {
            OptionError::new(format!("Cannot find device='{device}' nor node-name='{name}'"))
                .hint(known("Nodes", self.nodes.keys()))
        })
    }

    fn export(&mut self, export: &ExportOptions) -> Result<(), OptionError> {
        let id = &export.id;
        if self.exports.contains_key(id) {
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
        let is_thread = |id: &String| self.objects.get(id).is_some_and(|kind| *kind == "iothread");
        if let Some(unknown) = export.iothreads.iter().find(|id| !is_thread(id)) {
            let threads = self.objects.keys().filter(|id| is_thread(id));
            return Err(OptionError::new(format!("iothread \"{unknown}\" not found"))
                .hint(known("I/O threads", threads)));
        }
        let mut seen = BTreeSet::new();
        if let Some(twice) = export.iothreads.iter().find(|id| !seen.insert(*id)) {
            return Err(OptionError::new(format!("iothread \"{twice}\" is given twice")));
        }
        let address = match &export.kind {
            ExportKind::Nbd(_) if self.nbd_server.is_none() => {
                return Err(OptionError::new("NBD server not running")
                    .hint("--nbd-server comes before it."));
            }
            ExportKind::Nbd(nbd) => Address::Nbd(nbd.name.clone()),
            ExportKind::VhostUserBlk(options) | ExportKind::VhostUserScsi { options, .. } => {
                match &options.addr {
                    Addr::Unix { path } => Address::Path(path.clone()),
                    Addr::Fd { fd } => Address::Fd(fd.clone()),
                }
            }
        };
        if let Some((other, _)) = self.exports.iter().find(|(_, other)| other.address == address) {
            return Err(match address {
                Address::Nbd(name) => {
                    OptionError::new(format!("NBD server already has export named '{name}'"))
                }
                _ => OptionError::new(format!("Export '{other}' has the same address"))
                    .hint("Each export needs a socket of its own."),
            });
        }
        let (nodes, objects) = (export.nodes().cloned().collect(), export.iothreads.clone());
        let (writable, allow_inactive) = (export.writable, export.allow_inactive);
        let export = Export { nodes, writable, objects, address, allow_inactive };
        if !allow_inactive {
            // As QSD does it.
            export.nodes.iter().for_each(|node| self.activate(node, &mut Vec::new()));
        }
        self.exports.insert(id.clone(), export);
        Ok(())
    }
}

fn duplicate(id: &str) -> OptionError {
    let message = format!("attempt to add duplicate property '{id}' to object (type 'container')");
    OptionError::new(message).hint(format!("There is an object with id '{id}' already."))
}

fn known<'a>(what: &str, names: impl Iterator<Item = &'a String>) -> String {
    let names: Vec<&str> = names.map(String::as_str).collect();
    match names.as_slice() {
        [] => format!("{what} defined before it: none"),
        names => format!("{what} defined before it: {}", names.join(", ")),
    }
}

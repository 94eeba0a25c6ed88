//! The inventory: everything that is defined, by name, with its options and its users. Checks that an addition fits, and
//! that nothing in use is removed.
//!
//! The command line is checked as a whole before any part is carried out; the daemon checks each change. An upgrade and
//! the state file get the options that make the present configuration.

mod activity;
mod configuration;
mod height;
mod nbd;
mod permissions;
mod reopen;

use std::collections::{BTreeMap, BTreeSet};

use block::driver::ChildOption;
use block::options::{BlockdevOptions, BlockdevRef};
use block::permissions::ChildUse;

pub use configuration::check_configuration;
pub use permissions::Steady;

use crate::chardev::ChardevBackend;
use crate::error::OptionError;
use crate::export::{Address, ExportOptions, SizeUse};
use crate::masked;
use crate::storage_daemon::{Action, Step};
use crate::value::Value;

/// All definitions, by name.
///
/// Each change returns a new value, so a caller that cannot carry the change out keeps the previous one.
#[derive(Debug, Clone, Default)]
pub struct Inventory {
    nodes: BTreeMap<String, Node>,
    objects: BTreeMap<String, Object>,
    exports: BTreeMap<String, Export>,
    chardevs: BTreeMap<String, Chardev>,
    jobs: BTreeMap<String, Job>,
    nbd_server: Option<NbdServer>,
    /// The options of items that cannot be removed: character devices, monitors, metrics.
    fixed: Vec<String>,
    /// Serial number of the next item.
    next_serial: u64,
}

#[derive(Debug, Clone)]
struct Object {
    /// Order of addition, as of all items: later ones have higher numbers.
    serial: u64,
    kind: &'static str,
    /// The option that makes it.
    option: String,
    /// Properties that were set after the object was made.
    properties: Vec<(String, Value)>,
}

#[derive(Debug, Clone)]
struct NbdServer {
    serial: u64,
    /// The option that makes it.
    option: String,
    /// Objects that it refers to.
    objects: Vec<String>,
}

#[derive(Debug, Clone)]
struct Node {
    serial: u64,
    read_only: bool,
    /// Also if the node that it is defined in is opened for writing.
    stays_read_only: bool,
    force_share: bool,
    children: Vec<Child>,
    /// Objects that it refers to.
    objects: Vec<String>,
    /// Defined inside another one.
    nested: bool,
    inactive: bool,
    /// The job that it is the filter of. Its child is the job's source, also if other filters are between.
    filter_of: Option<String>,
}

/// A node below another one.
#[derive(Debug, Clone)]
struct Child {
    role: &'static str,
    used_as: ChildUse,
    name: String,
    /// The child is defined inside the node above, not referred to by name.
    owned: bool,
}

impl Node {
    fn lies_on(&self, name: &str) -> bool {
        self.children.iter().any(|child| child.name == name)
    }
}

#[derive(Debug, Clone)]
struct Export {
    serial: u64,
    options: ExportOptions,
    /// The option that makes it.
    option: String,
    /// The nodes that it offers now. A snapshot or a mirror replaces those of the options.
    nodes: Vec<String>,
    /// What the export has to do with the node's size.
    size_use: SizeUse,
}

/// A job that copies.
#[derive(Debug, Clone)]
struct Job {
    serial: u64,
    kind: &'static str,
    source: String,
    /// The node it writes to, if that is another one.
    target: Option<String>,
    /// The chain of images that it works on.
    chain: ChainUse,
    /// The name of its filter above the source, if it has one.
    filter: Option<String>,
    source_use: SourceUse,
}

/// What a job does with its source, besides reading all of it.
#[derive(Debug, Clone, Copy, Default)]
pub struct SourceUse {
    /// It discards in the source what it has copied.
    pub discards: bool,
    /// It copies what the source's topmost image stores.
    pub of_top: bool,
}

/// The kind of a job that is a `block_resize`.
const RESIZE: &str = "resize";
/// The kind of a job that repairs the image in a node, before a node of the image is opened.
const REPAIR: &str = "repair";
/// The kind of a job that opens a node: of the node, and of those that its options refer to.
const OPENING: &str = "opening";
/// The kind of a `block-stream`.
const STREAM: &str = "stream";

/// The chain of images that a job works on.
#[derive(Debug, Clone, Default)]
pub struct ChainUse {
    /// All images.
    pub images: Vec<String>,
    /// The images that no other job may have. Conflicts are found in this order.
    pub own: Vec<String>,
    /// The image above those that are committed. It gets another image behind it.
    pub overlay: Option<String>,
    /// The images that leave the chain.
    pub dropped: Vec<String>,
    /// The image behind those that a stream drops. Another stream may write to it.
    pub base: Option<String>,
    /// The images that keep the image behind them until the job's end.
    pub links: Vec<String>,
    /// The image that the job writes to. `None`: it bears no other options of the images.
    pub writes: Option<String>,
}

impl Job {
    fn uses(&self, node: &str) -> bool {
        self.has(node) || self.chain.images.iter().any(|name| name == node)
    }

    /// Whether no other job may have a node.
    fn has(&self, node: &str) -> bool {
        self.source == node
            || self.filter.as_deref() == Some(node)
            || self.target.as_deref() == Some(node)
            || self.chain.own.iter().any(|name| name == node)
    }

    /// The error of a command for which the node is not free.
    fn conflict(&self, node: &str) -> OptionError {
        OptionError::new(match self.kind {
            RESIZE => format!("Node '{node}' is busy: it is being resized"),
            REPAIR => format!("Node '{node}' is busy: the image in it is being repaired"),
            OPENING => {
                format!("Node '{node}' is busy: it, or a node that refers to it, is being opened")
            }
            kind => {
                format!("Node '{node}' is busy: block device is in use by block job: {kind}")
            }
        })
    }
}

#[derive(Debug, Clone)]
struct Chardev {
    stdio: bool,
    /// Where the client is, for people.
    filename: String,
    /// A monitor is on it.
    used: bool,
}

impl Inventory {
    /// Checks that names are defined once and before they are used.
    ///
    /// Also checks that what is writable can be.
    ///
    /// # Errors
    ///
    /// The first step that does not fit, in the order of the command line, with its option in front.
    pub fn check(steps: &[Step]) -> Result<(), OptionError> {
        let mut inventory = Inventory::default();
        steps.iter().try_for_each(|step| {
            inventory.add(step).map_err(|error| masked::of(error, &step.origin))
        })
    }

    /// Returns the inventory with one item more.
    ///
    /// # Errors
    ///
    /// Why it does not fit in, in QSD's words where QSD has the case.
    pub fn with(&self, step: &Step) -> Result<Inventory, OptionError> {
        let mut inventory = self.clone();
        inventory.add(step)?;
        Ok(inventory)
    }

    /// Returns the options of an export, and the nodes that it offers now.
    pub fn export(&self, id: &str) -> Option<(&ExportOptions, &[String])> {
        self.exports.get(id).map(|export| (&export.options, &export.nodes[..]))
    }

    /// Returns the nodes that an export offers now. Empty, if there is no such export.
    pub fn nodes_of(&self, export: &str) -> &[String] {
        self.export(export).map_or(&[], |(_, nodes)| nodes)
    }

    /// Returns whether `is` holds for a node that an export offers now.
    pub fn any_node(&self, export: &str, is: impl Fn(&str) -> bool) -> bool {
        self.nodes_of(export).iter().any(|node| is(node))
    }

    /// Returns all objects: their names, and of which type they are.
    pub fn objects(&self) -> impl Iterator<Item = (&str, &'static str)> {
        self.objects.iter().map(|(id, object)| (id.as_str(), object.kind))
    }

    /// Returns all character devices.
    ///
    /// Each has its name, a text that says where its clients are, and whether a monitor is on it.
    pub fn chardevs(&self) -> impl Iterator<Item = (&str, &str, bool)> {
        self.chardevs
            .iter()
            .map(|(id, device)| (id.as_str(), device.filename.as_str(), device.used))
    }

    /// Returns the inventory with the names that were generated for the nodes inside a node when it was opened.
    ///
    /// `opened` returns the name of the child of a node, by the child's role. Jobs refer to these nodes by their names.
    #[must_use]
    pub fn with_generated_names(
        &self,
        top: &str,
        opened: impl Fn(&str, &str) -> Option<String>,
    ) -> Inventory {
        let mut inventory = self.clone();
        let mut above = vec![top.to_owned()];
        while let Some(name) = above.pop() {
            let Some(mut node) = inventory.nodes.remove(&name) else { continue };
            for child in node.children.iter_mut().filter(|child| child.owned) {
                if child.name.starts_with('#')
                    && let Some(generated) = opened(&name, child.role)
                    && let Some(below) = inventory.nodes.remove(&child.name)
                {
                    child.name.clone_from(&generated);
                    inventory.nodes.insert(generated, below);
                }
                above.push(child.name.clone());
            }
            inventory.nodes.insert(name, node);
        }
        inventory
    }

    /// Returns the inventory without an object.
    ///
    /// # Errors
    ///
    /// There is none of that name, or something uses it.
    pub fn without_object(&self, id: &str) -> Result<Inventory, OptionError> {
        let mut inventory = self.clone();
        if inventory.objects.remove(id).is_none() {
            return Err(OptionError::new(format!("object '{id}' not found")));
        }
        if inventory.uses_object(id) {
            let message = match self.kind_of_object(id) {
                Some("throttle-group") => {
                    format!("Cannot delete throttle group '{id}' with active references")
                }
                _ => format!("object '{id}' is in use, can not be deleted"),
            };
            return Err(OptionError::new(message));
        }
        Ok(inventory)
    }

    /// Returns the inventory without a node and the nodes defined inside it.
    ///
    /// # Errors
    ///
    /// There is no such node, it was defined inside another one, or one of the nodes to be removed is in use.
    pub fn without_node(&self, name: &str) -> Result<Inventory, OptionError> {
        let Some(node) = self.nodes.get(name) else {
            let message = format!("Failed to find node with node-name='{name}'");
            return Err(OptionError::new(message));
        };
        if node.nested {
            return Err(OptionError::new(format!("Node {name} is not owned by the monitor")));
        }
        self.is_no_backing(name)?;
        let mut inventory = self.clone();
        let mut going = vec![name.to_owned()];
        while let Some(next) = going.pop() {
            inventory.free_of_jobs(&next)?;
            if inventory.exports.values().any(|export| export.nodes.contains(&next)) {
                return Err(OptionError::new(format!("Node {next} is in use")));
            }
            if let Some(node) = inventory.nodes.remove(&next) {
                let owned = node.children.into_iter().filter(|child| child.owned);
                going.extend(owned.map(|child| child.name));
            }
            if inventory.nodes.values().any(|node| node.lies_on(&next)) {
                return Err(OptionError::new(format!("Block device {next} is in use")));
            }
        }
        Ok(inventory)
    }

    /// Returns the inventory without an export, if there is one of that name.
    #[must_use]
    pub fn without_export(&self, id: &str) -> Inventory {
        let mut inventory = self.clone();
        inventory.exports.remove(id);
        inventory
    }

    /// Returns the inventory with a job that copies `source` to `target`, and then may discard what it has copied.
    ///
    /// `filter` is the name of the job's filter. No option can refer to a name that begins with `#`.
    ///
    /// # Errors
    ///
    /// The name is no name or another job has it, there is no such node, or a job has it already. Backups of a node can
    /// run side by side.
    pub fn with_job(
        &self,
        id: &str,
        kind: &'static str,
        source: &str,
        target: &str,
        filter: &str,
        source_use: SourceUse,
    ) -> Result<Inventory, OptionError> {
        let discards = source_use.discards;
        for name in [source, target] {
            self.find(name, name)?;
            self.is_active(name)?;
            let shares = name == source && kind == "backup" && !discards;
            if !shares || !self.is_only_backed_up(name) {
                self.free_of_jobs(name)?;
            }
        }
        let fleeces = kind == "backup" && self.is_behind(source, target);
        if self.lies_on(target, source) && !fleeces {
            let message =
                format!("Node '{target}' lies on '{source}', which is to be copied to it");
            return Err(OptionError::new(message));
        }
        // An image between the two has what another backup has copied: what the source was at another moment.
        let mut targets = self.jobs.values().filter_map(|job| job.target.as_deref());
        if let Some(between) = targets.find(|other| fleeces && self.is_behind(other, target)) {
            self.free_of_jobs(between)?;
        }
        self.is_no_backing(target)?;
        let mut inventory = self.clone();
        let serial = inventory.serial();
        let job = Job {
            serial,
            kind,
            source: source.to_owned(),
            target: Some(target.to_owned()),
            chain: ChainUse::default(),
            filter: Some(filter.to_owned()),
            source_use,
        };
        inventory.add_job(id, job);
        inventory.check_permissions()?;
        Ok(inventory)
    }

    /// Returns the inventory with a job that works on a chain of images.
    ///
    /// The source is one of the images of `chain`. `filter`: the name of the filter above the source, if there is one.
    ///
    /// # Errors
    ///
    /// A node is inactive, a job has it already, or another user changes the source's size.
    pub fn with_chain_job(
        &self,
        id: &str,
        kind: &'static str,
        source: &str,
        chain: ChainUse,
        filter: Option<String>,
    ) -> Result<Inventory, OptionError> {
        chain.images.iter().try_for_each(|image| self.is_active(image))?;
        self.is_free_for(&chain)?;
        self.check_chain(source)?;
        let mut inventory = self.clone();
        let serial = inventory.serial();
        let source = source.to_owned();
        let source_use = SourceUse::default();
        let job = Job { serial, kind, source, target: None, chain, filter, source_use };
        inventory.add_job(id, job);
        Ok(inventory)
    }

    /// Checks that no job has an image that a job on a chain needs for itself, and that neither removes the other's base.
    ///
    /// A stream may write to the base of another stream, which does not read it.
    fn is_free_for(&self, chain: &ChainUse) -> Result<(), OptionError> {
        let with = |has: &dyn Fn(&Job) -> bool| self.jobs.values().find(|job| has(job));
        for (place, image) in chain.own.iter().enumerate() {
            let Some(job) = with(&|job| job.has(image)) else { continue };
            // As in QSD, the filter of a stream is met before its source.
            let filter = job.filter.as_deref().filter(|filter| !filter.starts_with('#'));
            let is_source = place > 0 && job.kind == STREAM && job.source == *image;
            return Err(job.conflict(filter.filter(|_| is_source).unwrap_or(image)));
        }
        for image in &chain.own {
            if let Some(job) = with(&|job| job.chain.overlay.as_ref() == Some(image)) {
                return Err(job.conflict(image));
            }
        }
        if let Some(overlay) = &chain.overlay
            && let Some(job) =
                with(&|job| job.has(overlay) || job.chain.overlay.as_ref() == Some(overlay))
        {
            return Err(job.conflict(overlay));
        }
        for image in &chain.dropped {
            if let Some(job) = with(&|job| job.chain.base.as_ref() == Some(image)) {
                return Err(job.conflict(image));
            }
        }
        let Some(base) = &chain.base else { return Ok(()) };
        let stays = |job: &Job| job.chain.writes.is_some() && !job.chain.dropped.contains(base);
        with(&|job| job.has(base) && !stays(job)).map_or(Ok(()), |job| Err(job.conflict(base)))
    }

    /// Returns a name for the filter of a job that gives it none. No option can refer to it.
    pub fn unnamed_filter(job: &str) -> String {
        format!("#filter-of-{job}")
    }

    /// Adds a job, and its filter as a node.
    fn add_job(&mut self, id: &str, mut job: Job) {
        // The registry refuses the name of another node later. Until then, the permissions need another name.
        if job.filter.as_ref().is_some_and(|filter| self.nodes.contains_key(filter)) {
            job.filter = Some(Self::unnamed_filter(id));
        }
        if let Some(filter) = job.filter.clone().filter(|filter| !filter.starts_with('#')) {
            let (used_as, name) = (job.source_use(), job.source.clone());
            let node = Node {
                serial: job.serial,
                read_only: self.is_read_only(&job.source),
                stays_read_only: false,
                force_share: false,
                children: vec![Child { role: "file", used_as, name, owned: false }],
                objects: Vec::new(),
                nested: false,
                inactive: false,
                filter_of: Some(id.to_owned()),
            };
            self.nodes.insert(filter, node);
        }
        self.jobs.insert(id.to_owned(), job);
    }

    /// The source of a job, for the name of the job's filter. Other names are returned as they are.
    fn below_filter<'a>(&'a self, name: &'a str) -> &'a str {
        let node = self.nodes.get(name).filter(|node| node.filter_of.is_some());
        node.and_then(|node| node.children.first()).map_or(name, |child| &child.name)
    }

    /// Returns the inventory with another image behind `overlay`, or none.
    ///
    /// Of the images between, `dropped`, those that were defined inside a node above them are gone.
    #[must_use]
    pub fn with_backing(&self, overlay: &str, dropped: &[String], base: Option<&str>) -> Inventory {
        let mut inventory = self.clone();
        let mut owns = false;
        if let Some(node) = inventory.nodes.get_mut(overlay) {
            owns = node.children.iter().any(|child| child.role == "backing" && child.owned);
            let place = node.children.iter().position(|child| child.role == "backing");
            match (place.and_then(|place| node.children.get_mut(place)), base) {
                (Some(child), Some(base)) => base.clone_into(&mut child.name),
                (Some(_), None) => node.children.retain(|child| child.role != "backing"),
                (None, _) => return inventory,
            }
        }
        // What the overlay owned goes, with all that it owned, until a node that was defined by itself.
        let mut going: Vec<String> = dropped.iter().take_while(|_| owns).cloned().collect();
        while let Some(name) = going.pop() {
            if Some(name.as_str()) != base
                && inventory.nodes.get(&name).is_some_and(|node| node.nested)
            {
                let gone = inventory.nodes.remove(&name);
                let children = gone.into_iter().flat_map(|node| node.children);
                going.extend(children.filter(|child| child.owned).map(|child| child.name));
            }
        }
        let nested =
            base.and_then(|base| inventory.nodes.get(base)).is_some_and(|node| node.nested);
        if let Some(node) = inventory.nodes.get_mut(overlay) {
            let children = node.children.iter_mut().filter(|child| child.role == "backing");
            children.for_each(|child| child.owned = nested);
        }
        inventory
    }

    /// Returns the inventory with a node that can be written to.
    #[must_use]
    pub fn with_writable(&self, name: &str) -> Inventory {
        self.with_read_only(name, false)
    }

    /// Returns the inventory with a node that is read-only, or no longer is, and the nodes that are defined within it.
    #[must_use]
    pub fn with_read_only(&self, name: &str, read_only: bool) -> Inventory {
        let mut inventory = self.clone();
        let mut names = vec![name.to_owned()];
        while let Some(name) = names.pop() {
            if let Some(node) = inventory.nodes.get_mut(&name) {
                node.read_only = read_only;
                let within = node.children.iter().filter(|child| child.owned && writes_to(child));
                names.extend(within.map(|child| child.name.clone()));
            }
        }
        inventory
    }

    /// Whether a node is read-only: its options say so, or it is behind an overlay.
    pub fn is_read_only(&self, name: &str) -> bool {
        self.nodes.get(name).is_some_and(|node| node.read_only)
    }

    /// Checks that a node can be opened for writing, with the nodes below it.
    ///
    /// # Errors
    ///
    /// One of these has `read-only=on`, and has not inherited it.
    pub fn check_writable(&self, name: &str) -> Result<(), OptionError> {
        let Some(node) = self.nodes.get(name) else { return Ok(()) };
        for child in node.children.iter().filter(|child| writes_to(child)) {
            let stays = |below: &Node| below.read_only && (!child.owned || below.stays_read_only);
            if self.nodes.get(&child.name).is_some_and(stays) {
                return Err(OptionError::new("Block node is read-only")
                    .hint(format!("'{name}' lies on '{}', which is read-only.", child.name)));
            }
            self.check_writable(&child.name)?;
        }
        Ok(())
    }

    /// Whether `image` is one of the images behind `overlay`.
    fn is_behind(&self, image: &str, overlay: &str) -> bool {
        let Some(node) = self.nodes.get(overlay) else { return false };
        let mut backing = node.children.iter().filter(|child| child.role == "backing");
        backing.any(|child| child.name == image || self.is_behind(image, &child.name))
    }

    /// Whether what is written to `above` may come to `below`, or what is read from it from there.
    fn lies_on(&self, above: &str, below: &str) -> bool {
        let Some(node) = self.nodes.get(above) else { return false };
        let mut children = node.children.iter().map(|child| &child.name);
        children.any(|child| child == below || self.lies_on(child, below))
    }

    /// Whether a node is another one, or lies on it as a filter or window: no image in between is the topmost one.
    fn shows(&self, above: &str, below: &str) -> bool {
        let passes = |child: &Child| match child.used_as {
            ChildUse::Filtered
            | ChildUse::Preallocated
            | ChildUse::Window
            | ChildUse::CopyBeforeWrite
            | ChildUse::CopyAndDiscard
            | ChildUse::CopyOnRead
            | ChildUse::Snapshot => self.shows(&child.name, below),
            ChildUse::Metadata
            | ChildUse::Encrypted
            | ChildUse::Data
            | ChildUse::Backing
            | ChildUse::CopyTarget => false,
        };
        above == below || self.nodes.get(above).is_some_and(|node| node.children.iter().any(passes))
    }

    /// Checks that a node is no backing image.
    ///
    /// # Errors
    ///
    /// The node is the backing image of another node.
    pub fn is_no_backing(&self, name: &str) -> Result<(), OptionError> {
        let is_backing = |node: &Node| {
            node.children.iter().any(|child| child.role == "backing" && child.name == name)
        };
        match self.nodes.iter().find(|(_, node)| is_backing(node)) {
            Some((above, _)) => Err(OptionError::new(format!(
                "Node '{name}' is busy: node is used as backing hd of '{above}'"
            ))),
            None => Ok(()),
        }
    }

    /// Returns the inventory without a job, if there is one of that name. Users of its filter use its source.
    #[must_use]
    pub fn without_job(&self, id: &str) -> Inventory {
        let is_its_filter = |node: &Node| node.filter_of.as_deref() == Some(id);
        let filter = self.nodes.iter().find(|(_, node)| is_its_filter(node)).map(|(name, _)| name);
        let mut inventory = match filter {
            Some(filter) => self.with_replaced(filter, self.below_filter(filter)),
            None => self.clone(),
        };
        inventory.nodes.retain(|_, node| !is_its_filter(node));
        inventory.jobs.remove(id);
        inventory
    }

    /// Checks that no job uses a node.
    ///
    /// # Errors
    ///
    /// One does.
    pub fn free_of_jobs(&self, node: &str) -> Result<(), OptionError> {
        match self.jobs.values().find(|job| job.uses(node)) {
            Some(job) => Err(job.conflict(node)),
            None => Ok(()),
        }
    }

    /// Whether all jobs that use a node are backups of it to other nodes.
    fn is_only_backed_up(&self, node: &str) -> bool {
        let mut users = self.jobs.values().filter(|job| job.uses(node));
        users.all(|job| job.kind == "backup" && job.source == node)
    }

    /// Checks that an overlay can be put above a node. Only backups that leave its data may use the node, and no job may need
    /// it as the topmost image of a source. It must not be getting another size.
    ///
    /// # Errors
    ///
    /// Another job uses the node, or a node above it.
    pub fn can_get_overlay(&self, node: &str) -> Result<(), OptionError> {
        if !self.is_only_backed_up(node) {
            self.free_of_jobs(node)?;
        }
        self.has_fixed_size(node)?;
        // The overlay would be the topmost image, and get the discards.
        let needs_it = |job: &&Job| {
            (job.source_use.of_top || job.source_use.discards) && self.shows(&job.source, node)
        };
        match self.jobs.values().find(needs_it) {
            Some(job) => self.free_of_jobs(&job.source),
            None => Ok(()),
        }
    }

    /// Returns the inventory with an image put above a node.
    ///
    /// All users of `node` use `overlay` instead, also jobs that copy `node`. `overlay` reads from `node`, which is
    /// read-only from then on.
    ///
    /// # Errors
    ///
    /// Two users of a node exclude each other.
    pub fn with_overlay(&self, node: &str, overlay: &str) -> Result<Inventory, OptionError> {
        let mut inventory = self.with_replaced(node, overlay);
        inventory.move_jobs(node, overlay);
        if let Some(below) = inventory.nodes.get_mut(node) {
            below.read_only = true;
        }
        inventory.check_height(overlay)?;
        inventory.check_permissions()?;
        Ok(inventory)
    }

    /// Returns the inventory without an image above a node.
    ///
    /// What used the image uses `node`, which can be written to again. `owner`: the node that it was
    /// [defined in](Self::owner).
    ///
    /// # Errors
    ///
    /// Two users of a node exclude each other.
    pub fn without_overlay(
        &self,
        node: &str,
        overlay: &str,
        read_only: bool,
        owner: Option<&str>,
    ) -> Result<Inventory, OptionError> {
        let mut inventory = self.clone();
        inventory.nodes.remove(overlay);
        let mut inventory = inventory.with_replaced(overlay, node);
        if let Some(owner) = owner.and_then(|owner| inventory.nodes.get_mut(owner))
            && let Some(child) = owner.children.iter_mut().find(|child| child.name == node)
        {
            child.owned = true;
        }
        let mut inventory = inventory.with_read_only(node, read_only);
        inventory.move_jobs(overlay, node);
        // The nodes inside the image, at all depths.
        loop {
            let is_left =
                |(name, node): &(&String, &Node)| node.nested && !inventory.is_owned(name);
            let Some(left) = inventory.nodes.iter().find(is_left).map(|(name, _)| name.clone())
            else {
                break;
            };
            inventory.nodes.remove(&left);
        }
        inventory.check_permissions()?;
        Ok(inventory)
    }

    /// Has jobs that copy node `old` copy `new`.
    fn move_jobs(&mut self, old: &str, new: &str) {
        for job in self.jobs.values_mut().filter(|job| job.source == old) {
            new.clone_into(&mut job.source);
        }
    }

    /// Returns the node that a node is defined inside of, if that is there.
    pub fn owner(&self, name: &str) -> Option<&str> {
        let owns =
            |node: &Node| node.children.iter().any(|child| child.owned && child.name == name);
        self.nodes.iter().find(|(_, node)| owns(node)).map(|(above, _)| above.as_str())
    }

    /// Whether a node is defined inside another one that is there.
    fn is_owned(&self, name: &str) -> bool {
        self.owner(name).is_some()
    }

    /// Returns the inventory in which users of node `old` use `new` instead.
    ///
    /// Only `new` itself may still use `old`. A node that was defined inside another one is gone then, if `new` does
    /// not lie on it.
    #[must_use]
    pub fn with_replaced(&self, old: &str, new: &str) -> Inventory {
        let mut inventory = self.clone();
        for name in inventory.exports.values_mut().flat_map(|export| &mut export.nodes) {
            if name == old {
                new.clone_into(name);
            }
        }
        let above = inventory.nodes.iter_mut().filter(|(name, _)| *name != new);
        for child in above.flat_map(|(_, node)| &mut node.children) {
            if child.name == old {
                *child = Child { name: new.to_owned(), owned: false, ..child.clone() };
            }
        }
        if inventory.nodes.get(old).is_some_and(|node| node.nested) {
            // It goes with the new one, if that lies on it, else now.
            let above =
                inventory.nodes.get_mut(new).into_iter().flat_map(|node| &mut node.children);
            match above.filter(|child| child.name == old).last() {
                Some(child) => child.owned = true,
                None => drop(inventory.nodes.remove(old)),
            }
        }
        inventory
    }

    /// Whether writes to this node would reach a read-only node below.
    fn lies_on_read_only(&self, name: &str) -> bool {
        let Some(node) = self.nodes.get(name) else { return false };
        node.children.iter().filter(|child| writes_to(child)).any(|child| {
            self.nodes.get(&child.name).is_some_and(|below| below.read_only)
                || self.lies_on_read_only(&child.name)
        })
    }

    fn serial(&mut self) -> u64 {
        self.next_serial += 1;
        self.next_serial
    }

    fn add(&mut self, step: &Step) -> Result<(), OptionError> {
        let option = step.origin.clone();
        match &step.action {
            Action::Object(object) => {
                let (serial, kind, properties) = (self.serial(), object.type_name(), Vec::new());
                let made = Object { serial, kind, option, properties };
                match self.objects.insert(object.id().to_owned(), made) {
                    Some(_) => Err(duplicate(object.id())),
                    None => Ok(()),
                }
            }
            Action::Blockdev(node) => {
                let name = self.node(node)?;
                self.check_height(&name)?;
                self.check_permissions()
            }
            Action::Export(export) => self.add_export(export, option),
            Action::Chardev(chardev) => {
                let stdio = chardev.backend == ChardevBackend::Stdio;
                if self.chardevs.contains_key(&chardev.id) {
                    return Err(duplicate(&chardev.id));
                }
                if stdio && self.chardevs.values().any(|other| other.stdio) {
                    return Err(OptionError::new("cannot use stdio by multiple character devices"));
                }
                let filename = chardev.backend.to_string();
                let device = Chardev { stdio, filename, used: false };
                self.chardevs.insert(chardev.id.clone(), device);
                self.fixed.push(option);
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
                self.fixed.push(option);
                Ok(())
            }
            // The metrics server refers to nothing in the inventory.
            Action::Metrics(_) => {
                self.fixed.push(option);
                Ok(())
            }
            Action::NbdServer(server) => self.nbd_server(server, option),
        }
    }

    /// The type of an object. `None`: there is none of that name.
    fn kind_of_object(&self, id: &str) -> Option<&'static str> {
        self.objects.get(id).map(|object| object.kind)
    }

    /// The names of all objects of a type.
    fn objects_of<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = &'a String> {
        self.objects.iter().filter(move |(_, object)| object.kind == kind).map(|(id, _)| id)
    }

    /// Whether something refers to that object.
    fn uses_object(&self, id: &str) -> bool {
        let by_exports = self.exports.values().flat_map(|export| &export.options.iothreads);
        let by_nodes = self.nodes.values().flat_map(|node| &node.objects);
        let by_server = self.nbd_server.iter().flat_map(|server| &server.objects);
        by_exports.chain(by_nodes).chain(by_server).any(|object| object == id)
    }

    /// Adds a node, after those that are defined inside it. Returns its name.
    fn node(&mut self, options: &BlockdevOptions) -> Result<String, OptionError> {
        let mut objects = Vec::new();
        for (kind, id) in options.driver.objects() {
            objects.push(self.object(kind, id)?);
        }
        let mut children = Vec::new();
        for ChildOption { role, used_as, node: child } in options.driver.children() {
            let of_child = |error: OptionError| of_child(error, role);
            let (name, owned) = match child {
                BlockdevRef::Inline(below) => (self.node(below).map_err(of_child)?, true),
                BlockdevRef::Name(name) => {
                    self.find(name, name).map_err(of_child)?;
                    (name.clone(), false)
                }
            };
            if used_as.always_writes() && self.is_read_only(&name) {
                return Err(OptionError::new("Block node is read-only").hint(format!(
                    "{} writes to node '{name}', also when nothing else does.",
                    options.driver.kind().name
                )));
            }
            children.push(Child { role, used_as, name, owned });
        }
        let serial = self.serial();
        // No option can refer to a generated name: names in options have no '#'. The node's own name follows when it
        // is open: `with_generated_names`.
        let name = options.node_name.clone().unwrap_or_else(|| format!("#new{serial:03}"));
        if self.nodes.contains_key(&name) {
            return Err(OptionError::new(format!("Duplicate nodes with node-name='{name}'")));
        }
        for child in children.iter().filter(|child| child.owned) {
            if let Some(below) = self.nodes.get_mut(&child.name) {
                below.nested = true;
            }
        }
        let (nested, inactive) = (false, false);
        let BlockdevOptions { read_only, stays_read_only, force_share, .. } = *options;
        let node = Node {
            serial,
            read_only,
            stays_read_only,
            force_share,
            children,
            objects,
            nested,
            inactive,
            filter_of: None,
        };
        self.nodes.insert(name.clone(), node);
        self.with_options_active(&name, options)?;
        Ok(name)
    }

    /// The id of an object that a node needs, which is there.
    fn object(&self, kind: &str, id: &str) -> Result<String, OptionError> {
        if kind == "throttle-group" {
            return self.throttle_group(id);
        }
        if self.kind_of_object(id) == Some(kind) {
            return Ok(id.to_owned());
        }
        let others = self.objects_of(kind);
        let message = match kind {
            "tls-creds-x509" => format!("No TLS credentials with id '{id}'"),
            "secret" => format!("No secret with id '{id}'"),
            kind => format!("Object '{id}' of type '{kind}' does not exist"),
        };
        Err(OptionError::new(message).hint(known(&format!("Objects of type '{kind}'"), others)))
    }

    fn throttle_group(&self, id: &str) -> Result<String, OptionError> {
        if self.kind_of_object(id) == Some("throttle-group") {
            return Ok(id.to_owned());
        }
        Err(OptionError::new(format!("Throttle group '{id}' does not exist"))
            .hint(known("Throttle groups", self.objects_of("throttle-group"))))
    }

    /// A node by name. QSD's sentence also names a device, which there is none of in exports.
    fn find(&self, name: &str, device: &str) -> Result<&Node, OptionError> {
        self.nodes.get(name).filter(|_| !name.starts_with('#')).ok_or_else(|| {
            let named = self.nodes.keys().filter(|name| !name.starts_with('#'));
            OptionError::new(format!("Cannot find device='{device}' nor node-name='{name}'"))
                .hint(known("Nodes", named))
        })
    }

    fn add_export(&mut self, export: &ExportOptions, option: String) -> Result<(), OptionError> {
        let id = &export.id;
        if self.exports.contains_key(id) {
            return Err(OptionError::new(format!("Block export id '{id}' is already in use")));
        }
        for node in export.nodes() {
            if self.find(node, "")?.read_only && export.writable {
                return Err(OptionError::new("Cannot export read-only node as writable"));
            }
            if export.writable && self.lies_on_read_only(node) {
                return Err(OptionError::new("Block node is read-only")
                    .hint(format!("'{node}' lies on a node that is read-only.")));
            }
        }
        let is_thread = |id: &String| self.kind_of_object(id) == Some("iothread");
        if let Some(unknown) = export.iothreads.iter().find(|id| !is_thread(id)) {
            return Err(OptionError::new(format!("iothread \"{unknown}\" not found"))
                .hint(known("I/O threads", self.objects_of("iothread"))));
        }
        let mut seen = BTreeSet::new();
        if let Some(twice) = export.iothreads.iter().find(|id| !seen.insert(*id)) {
            return Err(OptionError::new(format!("iothread \"{twice}\" is given twice")));
        }
        let address = export.kind.address();
        if matches!(address, Address::Nbd(_)) && self.nbd_server.is_none() {
            return Err(
                OptionError::new("NBD server not running").hint("--nbd-server comes before it.")
            );
        }
        let is_chosen_later = address == Address::Ublk(None);
        let taken = |other: &Export| !is_chosen_later && other.options.kind.address() == address;
        if let Some((other, _)) = self.exports.iter().find(|(_, other)| taken(other)) {
            return Err(address.taken(other));
        }
        let (serial, nodes) = (self.serial(), export.nodes().cloned().collect());
        let size_use = match export.kind.size_use() {
            SizeUse::Fixed => SizeUse::Follows,
            other => other,
        };
        let is_fixed = export.kind.size_use() == SizeUse::Fixed;
        let export = Export { serial, options: export.clone(), option, nodes, size_use };
        if !export.options.allow_inactive {
            // As QSD does it.
            export.nodes.iter().for_each(|node| self.activate(node, &mut Vec::new()));
        }
        self.exports.insert(id.clone(), export);
        self.check_permissions()?;
        // As in QSD: an NBD export claims a fixed size only after all its other permissions were
        // granted.
        if let Some(export) = self.exports.get_mut(id).filter(|_| is_fixed) {
            export.size_use = SizeUse::Fixed;
            self.check_permissions()?;
        }
        Ok(())
    }
}

/// Whether writes to a node may become writes to this child.
fn writes_to(child: &Child) -> bool {
    child.used_as != ChildUse::Backing
}

fn duplicate(id: &str) -> OptionError {
    let message = format!("attempt to add duplicate property '{id}' to object (type 'container')");
    OptionError::new(message).hint(format!("There is an object with id '{id}' already."))
}

/// Returns the error as one of a child's definition. Only backing files get a prefix, as in QSD.
fn of_child(error: OptionError, role: &str) -> OptionError {
    match role {
        "backing" => OptionError {
            message: format!("Could not open backing file: {}", error.message),
            ..error
        },
        _ => error,
    }
}

fn known<'a>(what: &str, names: impl Iterator<Item = &'a String>) -> String {
    let names: Vec<&str> = names.map(String::as_str).collect();
    match names.as_slice() {
        [] => format!("{what} defined before it: none"),
        names => format!("{what} defined before it: {}", names.join(", ")),
    }
}

//! All nodes of a process, by name, and how they are opened.

mod activity;
mod apart;
mod chain;
mod close;
mod context;
mod describe;
mod hand_over;
mod locks;
mod paths;
mod reopen;
mod resize;
mod track;

use std::any::Any;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use event_loop::{IoThread, IoThreadConfig, LoopConfig, ThreadBirth, mailbox, oneshot};
use nix::unistd::geteuid;

pub(crate) use self::activity::ToRead;
pub use self::apart::{OpenedApart, Opening, Threads};
pub use self::context::OpenContext;
use self::locks::is_used;
use self::resize::Resizing;
pub use self::track::BitmapsAbove;
use crate::connections::{Connections, Credentials};
use crate::driver::ChildOption;
use crate::drivers::file::ImageLock;
use crate::drivers::qcow2::{Damage, Damages, DirtyImage, Journals};
use crate::drivers::throttle::ThrottleGroup;
use crate::error::OpenError;
use crate::graph::{Edge, HeldEdges, hold};
use crate::inherited::{Images, Inherited};
use crate::node::BlockNode;
use crate::options::{BlockdevOptions, BlockdevRef, DetectZeroes, Discard};
use crate::permissions::Claim;
use crate::services::DriverServices;
use crate::track::{ThresholdSender, Tracking};

/// Longest node name, bytes: QEMU's limit.
const MAX_NAME: usize = 31;

/// Maximum number of images behind an image.
///
/// An image may name itself as its backing file, or another one that names it. Opening and closing images, and requests to
/// them, take stack per image: see record 0172.
pub const MAX_CHAIN: usize = 256;

/// The nodes of a process, by `node-name`.
///
/// The registry keeps nodes that were opened by name. A nested node lives as long as the node on top of it.
///
/// Each user of a node, including a node on top, gets an [`Edge`] to it, so that another node can replace it.
#[derive(Default)]
pub struct NodeRegistry {
    nodes: BTreeMap<String, Entry>,
    /// All that were handed out and are in use.
    edges: RefCell<Vec<Weak<Edge>>>,
    /// Edges returned by [`NodeRegistry::get`]: their users are neither nodes nor jobs.
    users: RefCell<Vec<Weak<Edge>>>,
    throttle_groups: BTreeMap<String, Arc<ThrottleGroup>>,
    credentials: Credentials,
    /// The number of names that were generated, also on other threads.
    generated: Arc<AtomicU32>,
    /// Given to the nodes inside a node that is opened again.
    names_to_give: GeneratedNames,
    /// State that a node which is opened anew takes over, by the node's name.
    kept: BTreeMap<String, Weak<dyn Any + Send + Sync>>,
    /// The names of nodes with state in `kept` or `locks` that this part of a registry has added.
    remembered: BTreeSet<String>,
    /// Of nodes' images.
    locks: BTreeMap<String, Weak<ImageLock>>,
    /// Made for the node that is being opened.
    connections: Connections,
    /// Reconnects `nbd` nodes, once there is one. I/O threads may be confined to places without a network.
    connector: Option<Arc<IoThread>>,
    /// Called first on that thread.
    connector_birth: ThreadBirth,
    /// Dropped after the nodes: some wait for the end of what they have begun.
    services: Arc<DriverServices>,
    /// That open nodes.
    threads: Threads,
    /// Set while an inactive node's image is opened: takes no locks, neither of the image nor of
    /// images that it names.
    looks: bool,
    /// Set while nodes are opened whose images are repaired by the caller.
    repairs_apart: bool,
    /// An image that could not be opened because of that.
    dirty: Option<DirtyImage>,
    /// Complete when nodes are closed that other threads close.
    closing: Vec<oneshot::Receiver<()>>,
    resizing: Resizing,
    /// Of qcow2 images.
    journals: Option<Journals>,
    /// Where damage of qcow2 images is reported.
    damages: Option<Damages>,
    /// Where exceeded write thresholds are reported.
    thresholds: Option<ThresholdSender>,
    /// Images handed over that no node has taken yet,
    inherited: Inherited,
    /// nodes behind overlays that another process had open for writing, to store their bitmaps,
    storing: BTreeSet<String>,
    /// and images that are open.
    images: Images,
}

/// The generated names of the nodes inside a node, for nodes that are opened in their places.
#[derive(Clone, Default)]
pub struct GeneratedNames(BTreeMap<(String, &'static str), String>);

struct Entry {
    node: Kept,
    /// What the node was opened with, but for changes of its backing image and of `read_only`. `children` has what lies below
    /// now: [`NodeRegistry::options`].
    options: BlockdevOptions,
    children: Vec<Child>,
    /// Otherwise an [`InactiveNode`](crate::drivers::inactive::InactiveNode) stands for it.
    active: bool,
    /// What jobs have put between the node and its users: the users' first, the node's last.
    filters: Vec<JobFilter>,
    /// What watches the node's writes. `node` is a [`Tracked`](crate::track::Tracked) then.
    tracking: Option<Arc<Tracking>>,
}

/// A filter that a job has put between a node and the node's users.
#[derive(Clone)]
pub struct JobFilter {
    /// The filter.
    pub node: Arc<dyn BlockNode>,
    /// Name of the driver that QEMU has for it.
    pub driver: &'static str,
    /// The role of the node below.
    pub role: &'static str,
    /// The node that the filter lists as its child `target`.
    pub target: Option<String>,
}

impl JobFilter {
    /// Returns its name.
    pub fn name(&self) -> &str {
        self.node.name()
    }
}

enum Kept {
    /// Opened by name.
    Top(Arc<dyn BlockNode>),
    /// Nested; the node on top keeps it.
    Nested(Weak<dyn BlockNode>),
}

/// A node below another one.
#[derive(Clone)]
pub struct Child {
    /// The child's role: `file`, `backing`, ….
    pub role: &'static str,
    /// The way to it.
    pub edge: Arc<Edge>,
}

/// A node that is open.
#[derive(Clone)]
pub struct NodeInfo<'a> {
    /// Its name, which may have been generated.
    pub name: &'a str,
    /// The node.
    pub node: Arc<dyn BlockNode>,
    /// The options that the node was opened with.
    pub options: &'a BlockdevOptions,
    /// The nodes that lie below it.
    pub children: &'a [Child],
    /// Whether it is open: `blockdev-set-active`.
    pub active: bool,
}

impl Entry {
    fn node(&self) -> Option<Arc<dyn BlockNode>> {
        match &self.node {
            Kept::Top(node) => Some(node.clone()),
            Kept::Nested(node) => node.upgrade(),
        }
    }
}

/// A node that was opened and is not registered yet.
struct Opened {
    name: String,
    node: Arc<dyn BlockNode>,
    options: BlockdevOptions,
    /// Whether it is open. A node inside an inactive one is inactive, whatever its options say.
    active: bool,
    children: Vec<Child>,
    /// Present if the image has dirty bitmaps.
    tracking: Option<Arc<Tracking>>,
}

impl Opened {
    fn into_entry(self, node: Kept) -> (String, Entry) {
        let Opened { name, options, active, children, tracking, .. } = self;
        (name, Entry { node, options, children, active, filters: Vec::new(), tracking })
    }

    fn into_nested(self) -> (String, Entry) {
        let held = Kept::Nested(Arc::downgrade(&self.node));
        self.into_entry(held)
    }
}

impl NodeRegistry {
    /// Returns an empty registry.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets what a thread that reconnects to NBD servers does first.
    #[must_use]
    pub fn with_connector_birth(self, connector_birth: ThreadBirth) -> Self {
        NodeRegistry { connector_birth, ..self }
    }

    /// Returns what a thread calls first that connects to servers.
    pub(crate) fn connector_birth(&self) -> &ThreadBirth {
        &self.connector_birth
    }

    /// Sets the daemon's services for drivers.
    #[must_use]
    pub fn with_services(self, services: DriverServices) -> Self {
        NodeRegistry { services: Arc::new(services), ..self }
    }

    /// Returns the daemon's services for drivers.
    pub fn services(&self) -> &Arc<DriverServices> {
        &self.services
    }

    /// Sets the folder of the journals that hold qcow2 metadata across a kill.
    ///
    /// The folder is in memory, or at least outlasts the process. Without it, each write to new clusters waits for
    /// the disk.
    ///
    /// # Errors
    ///
    /// The folder cannot be made, or other users may access it.
    pub fn with_journals(self, folder: &Path) -> io::Result<Self> {
        self.with_journals_of(folder, geteuid().as_raw())
    }

    /// Sets the folder of the journals for a process that becomes another user.
    ///
    /// `user` is that user's ID. The process opens everything afterwards. It is root, as only root gives a folder
    /// away. Otherwise like [`with_journals`](Self::with_journals).
    ///
    /// # Errors
    ///
    /// It cannot be made, or cannot be given to that user. `AlreadyExists`: it is not that user's alone, or this
    /// process' own.
    pub fn with_journals_of(self, folder: &Path, user: u32) -> io::Result<Self> {
        Ok(NodeRegistry { journals: Some(Journals::in_folder(folder, user)?), ..self })
    }

    /// Sets what returns the folders in which other daemons of this host may have journals.
    ///
    /// These are looked into if an image's journal is missing. The function is called then, on the thread that opens the
    /// image. A registry without a folder of journals does not look.
    #[must_use]
    pub fn with_journals_besides(
        self,
        folders: impl Fn() -> Vec<PathBuf> + Send + Sync + 'static,
    ) -> Self {
        let folders = Arc::new(folders);
        let journals = self.journals.map(|journals| journals.besides(folders));
        NodeRegistry { journals, ..self }
    }

    /// Returns a receiver of damage in qcow2 images.
    ///
    /// Covers images that are opened after this call. Each image reports its first damage only.
    pub fn damages(&mut self) -> mailbox::Receiver<Damage> {
        let (damages, receiver) = mailbox::channel();
        self.damages = Some(Arc::new(damages));
        receiver
    }

    /// Makes a throttle group known to nodes that are opened from now on.
    pub fn add_throttle_group(&mut self, name: &str, group: Arc<ThrottleGroup>) {
        self.throttle_groups.insert(name.to_owned(), group);
    }

    /// Returns the throttle group of that name.
    pub fn throttle_group(&self, name: &str) -> Option<&Arc<ThrottleGroup>> {
        self.throttle_groups.get(name)
    }

    /// Returns the names of all throttle groups.
    pub fn throttle_groups(&self) -> impl Iterator<Item = &str> {
        self.throttle_groups.keys().map(String::as_str)
    }

    /// Removes a throttle group. Nodes that use the group keep it.
    pub fn remove_throttle_group(&mut self, name: &str) {
        self.throttle_groups.remove(name);
    }

    /// Returns the TLS credentials that nodes opened from now on can use.
    pub fn credentials(&mut self) -> &mut Credentials {
        &mut self.credentials
    }

    /// Returns the same, as they are.
    pub fn known_credentials(&self) -> &Credentials {
        &self.credentials
    }

    /// Opens a node, after the nodes nested in its options.
    ///
    /// If a node fails, none stays open.
    ///
    /// An `nbd` node connects to its server, and blocks for as long as connecting takes: see [`Connections`].
    ///
    /// # Errors
    ///
    /// In QEMU's words where QEMU has the error, with what to do about it as the hint.
    pub fn open(&mut self, options: &BlockdevOptions) -> Result<Arc<dyn BlockNode>, OpenError> {
        self.open_connected(options, Connections::default())?;
        self.get(options.node_name.as_deref().unwrap_or_default())
    }

    /// Opens a node without a user, with connections made beforehand.
    ///
    /// Waits for no server. [`get`](Self::get) returns the node.
    ///
    /// # Errors
    ///
    /// As of [`open`](Self::open).
    pub fn open_connected(
        &mut self,
        options: &BlockdevOptions,
        connections: Connections,
    ) -> Result<(), OpenError> {
        let opening = self.begin_opening(options, connections)?;
        self.finish_opening(opening.carry_out())
    }

    /// Has images that must be repaired not be opened: repairing may take hours.
    ///
    /// [`take_dirty_image`](Self::take_dirty_image) returns it when opening has failed.
    pub fn set_repairs_apart(&mut self, apart: bool) {
        self.repairs_apart = apart;
    }

    /// Returns the image that has to be repaired before the last node can be opened.
    pub fn take_dirty_image(&mut self) -> Option<DirtyImage> {
        self.dirty.take()
    }

    /// Opens a node for a job, under a name that [`filter_name`](Self::filter_name) has returned.
    ///
    /// The node stays until [`remove`](Self::remove), also without users.
    ///
    /// # Errors
    ///
    /// As of [`open`](Self::open).
    pub async fn open_for_a_job(
        &mut self,
        name: &str,
        options: &BlockdevOptions,
        connections: Connections,
    ) -> Result<(), OpenError> {
        let opening = self.begin_opening_as(name.to_owned(), options, connections);
        let opened = opening.on_a_thread().await?;
        self.finish_opening(opened)
    }

    /// Returns the node of that name for a user, with its images locked.
    ///
    /// # Errors
    ///
    /// No node has this name, the hint lists the nodes; or an image is in use.
    pub fn get(&self, name: &str) -> Result<Arc<dyn BlockNode>, OpenError> {
        self.lock_images(name, &[])?;
        let edge = self.get_edge(name)?;
        let mut users = self.users.borrow_mut();
        users.retain(|edge| edge.strong_count() > 0);
        users.push(Arc::downgrade(&edge));
        Ok(edge)
    }

    /// Holds the requests of all users that [got](Self::get) a node.
    pub fn hold_all(&self) -> impl Future<Output = HeldEdges> + use<> {
        hold(self.all_users())
    }

    fn all_users(&self) -> Vec<Arc<Edge>> {
        self.users.borrow().iter().filter_map(Weak::upgrade).collect()
    }

    fn get_edge(&self, name: &str) -> Result<Arc<Edge>, OpenError> {
        // A user of any filter goes through all of them: the name of a lower one is no way around those above.
        let name = self.below_filter(name);
        Ok(match self.filters(&name).first() {
            Some(filter) => self.edge_to(filter.node.clone()),
            None => self.edge_to(self.node(&name)?),
        })
    }

    /// Returns the node of that name for a job, below the filters that other jobs may have put over it.
    ///
    /// # Errors
    ///
    /// As of [`get`](Self::get).
    pub fn edge_below_filter(&self, name: &str) -> Result<Arc<Edge>, OpenError> {
        self.lock_images(name, &[])?;
        Ok(self.edge_to(self.node(name)?))
    }

    /// Returns the filters that jobs have put over a node: the users' first, the node's last.
    pub fn filters(&self, name: &str) -> &[JobFilter] {
        self.nodes.get(name).map_or(&[], |entry| &entry.filters)
    }

    /// Adds a filter to a node, below the filters that the node has. Later lookups of the node return the topmost one.
    ///
    /// The caller has the users of the node itself use the filter. The filters above are among these users.
    pub fn add_filter(&mut self, name: &str, filter: JobFilter) {
        if let Some(entry) = self.nodes.get_mut(name) {
            entry.filters.push(filter);
        }
    }

    /// Takes all filters of a node away from it, for [`set_filters`](Self::set_filters).
    pub fn take_filters(&mut self, name: &str) -> Vec<JobFilter> {
        self.nodes.get_mut(name).map(|entry| std::mem::take(&mut entry.filters)).unwrap_or_default()
    }

    /// Sets the filters of a node. The caller has the lowest one use the node.
    pub fn set_filters(&mut self, name: &str, filters: Vec<JobFilter>) {
        if let Some(entry) = self.nodes.get_mut(name) {
            entry.filters = filters;
        }
    }

    /// Removes a filter of a node. The caller has the users of the filter use what lies
    /// [below](Self::below_filter_of).
    pub fn remove_filter(&mut self, name: &str, filter: &str) {
        if let Some(entry) = self.nodes.get_mut(name) {
            entry.filters.retain(|other| other.name() != filter);
        }
    }

    /// Returns what lies below a filter of a node: the next filter, or the node itself.
    ///
    /// # Errors
    ///
    /// There is no such node.
    pub fn below_filter_of(
        &self,
        name: &str,
        filter: &str,
    ) -> Result<Arc<dyn BlockNode>, OpenError> {
        let mut filters = self.filters(name).iter();
        match filters.find(|other| other.name() == filter).and_then(|_| filters.next()) {
            Some(next) => Ok(next.node.clone()),
            None => self.node(name),
        }
    }

    /// Returns the filters of all jobs, each with the name of the node that it is above.
    pub fn job_filters(&self) -> impl Iterator<Item = (&str, &JobFilter)> {
        let all = self.nodes.iter();
        all.flat_map(|(name, entry)| entry.filters.iter().map(move |filter| (&**name, filter)))
    }

    /// Returns whether a job's filter has that name.
    pub fn is_filter(&self, name: &str) -> bool {
        self.job_filters().any(|(_, filter)| filter.name() == name)
    }

    /// Returns a name for a filter: the wanted one, or a generated one.
    ///
    /// # Errors
    ///
    /// The wanted name is not well formed, or a node has it.
    pub fn filter_name(&mut self, wanted: Option<&str>) -> Result<String, OpenError> {
        match wanted {
            Some(name) => self.new_name(name),
            None => Ok(self.generate_name()),
        }
    }

    /// Returns the node of that name itself, for an edge to be pointed to it.
    ///
    /// # Errors
    ///
    /// As of [`get`](Self::get).
    pub fn node(&self, name: &str) -> Result<Arc<dyn BlockNode>, OpenError> {
        self.nodes.get(name).and_then(Entry::node).ok_or_else(|| {
            let known: Vec<_> = self.names().collect();
            OpenError::new(format!("Cannot find device='{name}' nor node-name='{name}'")).with_hint(
                if known.is_empty() {
                    "There are no nodes yet: define it first".to_owned()
                } else {
                    format!("Known nodes: {}", known.join(", "))
                },
            )
        })
    }

    fn given_options(&self, name: &str) -> Option<&BlockdevOptions> {
        self.nodes.get(name).map(|entry| &entry.options)
    }

    fn edge_to(&self, node: Arc<dyn BlockNode>) -> Arc<Edge> {
        let edge = Edge::new(node);
        let mut edges = self.edges.borrow_mut();
        edges.retain(|edge| edge.strong_count() > 0);
        edges.push(Arc::downgrade(&edge));
        edge
    }

    /// Returns the edges of all that use the node of that name now.
    pub fn edges(&self, name: &str) -> Vec<Arc<Edge>> {
        let edges: Vec<_> = self.edges.borrow().iter().filter_map(Weak::upgrade).collect();
        edges.into_iter().filter(|edge| edge.node().name() == name).collect()
    }

    /// Returns the names of all nodes, nested ones included, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.nodes.iter().filter(|(_, entry)| entry.node().is_some()).map(|(name, _)| &**name)
    }

    /// Returns all nodes, nested ones included, in alphabetical order.
    pub fn all(&self) -> impl Iterator<Item = NodeInfo<'_>> {
        self.nodes.keys().filter_map(|name| self.info(name))
    }

    /// Returns the description of the node of that name, if there is one.
    pub fn info(&self, name: &str) -> Option<NodeInfo<'_>> {
        let (name, entry) = self.nodes.get_key_value(name)?;
        let (options, children) = (&entry.options, &*entry.children);
        let (node, active) = (entry.node()?, entry.active);
        Some(NodeInfo { name, node, options, children, active })
    }

    /// Closes a node that was opened by name.
    ///
    /// # Errors
    ///
    /// There is no such node, it is nested in another one, or it is in use.
    pub fn remove(&mut self, name: &str) -> Result<(), OpenError> {
        drop(self.take_out(name)?);
        self.forget_closed();
        Ok(())
    }

    fn take_out(&mut self, name: &str) -> Result<Entry, OpenError> {
        match self.nodes.get(name).map(|entry| &entry.node) {
            Some(Kept::Top(_)) if !self.edges(name).is_empty() => Err(OpenError::new(format!(
                "Node '{name}' is busy: node is used by an export or by another node"
            ))),
            Some(Kept::Top(_)) => self.nodes.remove(name).ok_or_else(|| not_found(name)),
            Some(Kept::Nested(_)) => {
                Err(OpenError::new(format!("Node '{name}' is not owned by the monitor")))
            }
            None => Err(not_found(name)),
        }
    }

    /// Opens one node under `name`, which is checked already. Adds the nodes nested in it to
    /// `nested`.
    fn open_tree(
        &mut self,
        name: String,
        options: &BlockdevOptions,
        nested: &mut Vec<Opened>,
    ) -> Result<Opened, OpenError> {
        if options.detect_zeroes == DetectZeroes::Unmap && options.discard != Discard::Unmap {
            return Err(OpenError::new(
                "setting detect-zeroes to unmap is not allowed without setting discard operation \
                 to unmap",
            ));
        }
        let opened_with = self.for_storing(&name, options);
        let mut children = Vec::new();
        for ChildOption { role, used_as, node } in opened_with.driver.children() {
            let edge =
                self.open_child((&name, role), node, nested).map_err(|e| e.of_child(role))?;
            if is_used(used_as, Claim::NOTHING, !opened_with.read_only) {
                self.lock_images(edge.node().name(), nested)?;
            }
            children.push(Child { role, edge });
        }
        let mut context = OpenContext {
            registry: self,
            name: &name,
            options: &opened_with,
            children: &mut children,
            nested,
        };
        let node = opened_with.driver.open(&mut context)?;
        let (node, tracking) = self.with_stored_bitmaps(&name, node);
        Ok(Opened { name, node, options: options.clone(), active: true, children, tracking })
    }

    /// Returns the thread that connects to NBD servers. The first such node starts the thread, which then
    /// lives as long as the registry.
    fn connector(&mut self) -> Result<Arc<IoThread>, OpenError> {
        let thread = match self.connector.take() {
            Some(thread) => thread,
            None => {
                let event_loop =
                    LoopConfig { name: "nbd-connect".into(), entries: 32, ..Default::default() };
                let config = IoThreadConfig { event_loop, ..Default::default() };
                let birth = self.connector_birth.clone();
                let thread = IoThread::spawn_with(config, move |_| birth.call())
                    .map_err(|error| OpenError::new(format!("I/O thread nbd-connect: {error}")))?;
                Arc::new(thread)
            }
        };
        Ok(self.connector.insert(thread).clone())
    }

    /// Opens a child of a node. `place`: the node's name, and the child's role.
    fn open_child(
        &mut self,
        place: (&str, &'static str),
        child: &BlockdevRef,
        nested: &mut Vec<Opened>,
    ) -> Result<Arc<Edge>, OpenError> {
        let options = match child {
            BlockdevRef::Name(name) => return self.get_edge(name),
            BlockdevRef::Inline(options) => options.as_ref(),
        };
        let name = self.child_name(place, options, nested)?;
        let opened = self.open_tree(name, options, nested)?;
        let edge = self.edge_to(opened.node.clone());
        nested.push(opened);
        Ok(edge)
    }

    /// Returns the name of a node that is defined inside another one: its own, or a generated one. `place`: the name of the
    /// other node, and the role of the one inside.
    fn child_name(
        &mut self,
        (above, role): (&str, &'static str),
        options: &BlockdevOptions,
        nested: &[Opened],
    ) -> Result<String, OpenError> {
        let name = match &options.node_name {
            Some(name) => self.new_name(name)?,
            None => match self.names_to_give.0.get(&(above.to_owned(), role)) {
                Some(name) if !self.looks && !self.nodes.contains_key(name) => name.clone(),
                _ => self.generate_name(),
            },
        };
        match name == above || nested.iter().any(|other| other.name == name) {
            true => Err(duplicate(&name)),
            false => Ok(name),
        }
    }

    /// Removes the entries of closed nested nodes. Removing one may close nodes below it, so this
    /// repeats until all are removed.
    fn forget_closed(&mut self) {
        loop {
            let before = self.nodes.len();
            self.nodes.retain(|_, entry| match &entry.node {
                Kept::Top(_) => true,
                Kept::Nested(node) => node.strong_count() > 0,
            });
            if self.nodes.len() == before {
                return;
            }
        }
    }

    fn new_name(&self, name: &str) -> Result<String, OpenError> {
        check_name(name)?;
        match self.nodes.get(name).and_then(Entry::node) {
            None if !self.is_filter(name) => Ok(name.to_owned()),
            _ => Err(duplicate(name)),
        }
    }

    /// Returns the names that were generated for the nodes inside a node, at all depths.
    pub fn generated_names(&self, name: &str) -> GeneratedNames {
        let mut names = GeneratedNames::default();
        for above in self.with_nested(name) {
            for Child { role, edge } in self.nodes.get(&above).map_or(&[][..], |e| &e.children) {
                let child = edge.node().name().to_owned();
                if check_name(&child).is_err() {
                    names.0.insert((above.clone(), role), child);
                }
            }
        }
        names
    }

    /// Sets the names of nodes that have none in options and are opened in these places from now on.
    ///
    /// Names that nodes have are not given again.
    pub fn set_generated_names(&mut self, names: GeneratedNames) {
        self.names_to_give = names;
    }

    fn generate_name(&mut self) -> String {
        let n = self.generated.fetch_add(1, Ordering::Relaxed);
        format!("#block{n:03}")
    }
}

/// The node that is that to the node called `name`.
fn child(children: &[Child], role: &str, name: &str) -> Result<Arc<dyn BlockNode>, OpenError> {
    let found = children.iter().find(|child| child.role == role);
    let missing = || OpenError::new(format!("Node '{name}' has no child '{role}'"));
    found.map(|child| child.edge.clone() as Arc<dyn BlockNode>).ok_or_else(missing)
}

fn not_found(name: &str) -> OpenError {
    OpenError::new(format!("Failed to find node with node-name='{name}'"))
}

fn duplicate(name: &str) -> OpenError {
    OpenError::new(format!("Duplicate nodes with node-name='{name}'"))
}

/// QEMU's rule: a letter, then letters, digits and `-._`.
fn check_name(name: &str) -> Result<(), OpenError> {
    if name.len() > MAX_NAME {
        return Err(OpenError::new("Node name too long")
            .with_hint(format!("'{name}' has {} bytes; {MAX_NAME} are the most", name.len())));
    }
    let well_formed = name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c));
    if well_formed {
        Ok(())
    } else {
        Err(OpenError::new(format!("Invalid node-name: '{name}'"))
            .with_hint("A letter, then letters, digits, '-', '.' and '_'"))
    }
}

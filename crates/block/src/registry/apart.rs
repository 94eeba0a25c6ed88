//! Opening nodes on another thread.
//!
//! An image or its server chooses how long opening takes: tables and bitmaps are read, and the image may be repaired.
//! The registry's thread goes on meanwhile: the other thread has a part of the registry, which is taken back at the end.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::io;
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};

use event_loop::oneshot;

use super::{Entry, Kept, NodeRegistry, Opened, duplicate};
use crate::connections::Connections;
use crate::error::OpenError;
use crate::options::{BlockdevOptions, BlockdevRef};

/// What a thread does before it ends.
type Work = Box<dyn FnOnce() + Send>;

/// The way to start threads that open nodes. The default: threads of the operating system.
#[derive(Clone, Default)]
pub struct Threads(Option<Arc<dyn Fn(Work) -> io::Result<()> + Send + Sync>>);

impl fmt::Debug for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Threads").field(&self.0.is_some()).finish()
    }
}

impl Threads {
    /// Returns threads that `start` starts.
    pub fn new(start: impl Fn(Work) -> io::Result<()> + Send + Sync + 'static) -> Threads {
        Threads(Some(Arc::new(start)))
    }

    /// `None`: the thread is not one of the operating system.
    fn start(&self, work: Work) -> io::Result<Option<JoinHandle<()>>> {
        match &self.0 {
            Some(start) => start(work).map(|()| None),
            None => thread::Builder::new().name("open".into()).spawn(work).map(Some),
        }
    }

    /// Does `work` on a new thread, which has ended on return. If the future is dropped, the thread still does its work.
    ///
    /// # Errors
    ///
    /// The thread cannot be started, or has ended without a result.
    fn run<T, F>(&self, work: F) -> impl Future<Output = Result<T, OpenError>> + use<T, F>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        let (done, ended) = oneshot::channel();
        let started = self.start(Box::new(move || done.send(work())));
        async move {
            let failed = |why| OpenError::new(format!("Could not open a node: {why}"));
            let thread =
                started.map_err(|error| OpenError::io("Could not start a thread", &error))?;
            let done = ended.await.map_err(|_| failed("its thread has ended"));
            // Nothing is left to do for the thread, so this does not wait for the work of a stranger.
            if let Some(thread) = thread {
                let _ = thread.join();
            }
            done
        }
    }
}

/// A node that is about to be opened: see [`NodeRegistry::begin_opening`].
pub struct Opening {
    part: Box<NodeRegistry>,
    name: String,
    options: BlockdevOptions,
}

/// A node that was opened, or not: see [`NodeRegistry::finish_opening`].
pub struct OpenedApart {
    part: Box<NodeRegistry>,
    opened: Result<(Opened, Vec<Opened>), OpenError>,
}

impl Opening {
    /// Opens the node on this thread.
    pub(super) fn carry_out(self) -> OpenedApart {
        let Opening { mut part, name, options } = self;
        let mut nested = Vec::new();
        let top = match options.active {
            true => part.open_tree(name, &options, &mut nested),
            false => part.open_inactive(name, &options, &mut nested),
        };
        OpenedApart { part, opened: top.map(|top| (top, nested)) }
    }

    /// Opens the node on a thread of its own.
    ///
    /// # Errors
    ///
    /// There is no such thread. Errors of the opening are in the value.
    pub fn on_a_thread(self) -> impl Future<Output = Result<OpenedApart, OpenError>> + use<> {
        let threads = self.part.threads.clone();
        threads.run(move || self.carry_out())
    }
}

impl Entry {
    /// The same node for another thread. `whole`: with the nodes below, which it keeps open.
    fn for_another_thread(&self, whole: bool) -> Entry {
        let node = match &self.node {
            Kept::Top(node) => Arc::downgrade(node),
            Kept::Nested(node) => Weak::clone(node),
        };
        Entry {
            node: Kept::Nested(node),
            options: self.options.clone(),
            children: if whole { self.children.clone() } else { Vec::new() },
            active: self.active,
            filters: if whole { self.filters.clone() } else { Vec::new() },
            tracking: self.tracking.clone(),
        }
    }
}

/// The nodes that options refer to by name, nested ones included.
fn named(options: &BlockdevOptions) -> Vec<String> {
    let (mut names, mut unseen) = (Vec::new(), vec![options]);
    while let Some(options) = unseen.pop() {
        for child in options.driver.children() {
            match child.node {
                BlockdevRef::Name(name) => names.push(name.clone()),
                BlockdevRef::Inline(below) => unseen.push(below),
            }
        }
    }
    names
}

impl NodeRegistry {
    /// Sets how threads are started that open nodes.
    #[must_use]
    pub fn with_threads(self, threads: Threads) -> Self {
        NodeRegistry { threads, ..self }
    }

    /// Begins to open a node without a user, with connections made beforehand.
    ///
    /// The registry is free meanwhile. The caller keeps the nodes that the options refer to as they are, until
    /// [`finish_opening`](Self::finish_opening).
    ///
    /// # Errors
    ///
    /// The name is wrong, or another node has it.
    pub fn begin_opening(
        &mut self,
        options: &BlockdevOptions,
        connections: Connections,
    ) -> Result<Opening, OpenError> {
        let Some(name) = &options.node_name else {
            return Err(OpenError::new("'node-name' must be specified for the root node"));
        };
        let name = self.new_name(name)?;
        Ok(self.begin_opening_as(name, options, connections))
    }

    pub(super) fn begin_opening_as(
        &mut self,
        name: String,
        options: &BlockdevOptions,
        connections: Connections,
    ) -> Opening {
        let options = self.without_filters(options).into_owned();
        let mut part = Box::new(self.part(named(&options)));
        part.connections = connections;
        Opening { part, name, options }
    }

    /// Adds a node that was opened.
    ///
    /// # Errors
    ///
    /// Those of [`open`](Self::open).
    pub fn finish_opening(&mut self, opened: OpenedApart) -> Result<(), OpenError> {
        let OpenedApart { part, opened } = opened;
        self.take_back(*part);
        let (top, nested) = opened?;
        let all = nested.iter().chain([&top]);
        for opened in all {
            if self.nodes.get(&opened.name).and_then(Entry::node).is_some()
                || self.is_filter(&opened.name)
            {
                return Err(duplicate(&opened.name));
            }
        }
        self.nodes.extend(nested.into_iter().map(Opened::into_nested));
        let held = Kept::Top(top.node.clone());
        self.nodes.extend([top.into_entry(held)]);
        Ok(())
    }

    /// Calls `work` with a part of the registry, on another thread. `around`: the nodes that `work` needs with those below.
    ///
    /// # Errors
    ///
    /// There is no such thread.
    pub(super) async fn apart<T: Send + 'static>(
        &mut self,
        around: Vec<String>,
        work: impl FnOnce(&mut NodeRegistry) -> T + Send + 'static,
    ) -> Result<T, OpenError> {
        let mut part = Box::new(self.part(around));
        part.connections = std::mem::take(&mut self.connections);
        let done = self.threads.run(move || {
            let result = work(&mut part);
            (part, result)
        });
        let (mut part, result) = done.await?;
        self.connections = std::mem::take(&mut part.connections);
        self.take_back(*part);
        Ok(result)
    }

    /// The same, for a node that is opened with these options.
    pub(super) fn around(name: &str, options: &BlockdevOptions) -> Vec<String> {
        let mut names = named(options);
        names.push(name.to_owned());
        names
    }

    /// What opening a node needs. Nodes that are not below those of `around` can be closed meanwhile.
    fn part(&mut self, around: Vec<String>) -> NodeRegistry {
        let mut nodes = BTreeMap::new();
        let mut next = around;
        while let Some(name) = next.pop() {
            let name = self.below_filter(&name);
            let Some(entry) = self.nodes.get(&name).filter(|_| !nodes.contains_key(&name)) else {
                continue;
            };
            next.extend(entry.children.iter().map(|child| child.edge.node().name().to_owned()));
            nodes.insert(name, entry.for_another_thread(true));
        }
        for (name, entry) in &self.nodes {
            let light = || entry.for_another_thread(false);
            nodes.entry(name.clone()).or_insert_with(light);
        }
        NodeRegistry {
            nodes,
            throttle_groups: self.throttle_groups.clone(),
            credentials: self.credentials.clone(),
            generated: self.generated.clone(),
            names_to_give: self.names_to_give.clone(),
            kept: self.kept.clone(),
            locks: self.locks.clone(),
            connector: self.connector.clone(),
            connector_birth: self.connector_birth.clone(),
            services: self.services.clone(),
            threads: self.threads.clone(),
            repairs_apart: self.repairs_apart,
            journals: self.journals.clone(),
            damages: self.damages.clone(),
            thresholds: self.thresholds.clone(),
            inherited: self.inherited.lend(),
            storing: self.storing.clone(),
            images: self.images.clone(),
            ..NodeRegistry::default()
        }
    }

    /// Closes a node that was opened by name, on another thread: closing writes what an image has in memory.
    ///
    /// The future completes when the node is closed. [`all_closed`](Self::all_closed) waits for it, too.
    ///
    /// # Errors
    ///
    /// As of [`remove`](Self::remove).
    pub fn remove_apart(
        &mut self,
        name: &str,
    ) -> Result<impl Future<Output = ()> + use<>, OpenError> {
        let entry = self.take_out(name)?;
        let ((end, ended), (done, closed)) = (oneshot::channel(), oneshot::channel());
        self.closing.push(ended);
        let work = move || {
            drop(entry);
            end.send(());
            done.send(());
        };
        if let Err(error) = self.threads.start(Box::new(work)) {
            // The work was dropped, and with it the node.
            log::warn!("node '{name}': closed without a thread of its own: {error}");
        }
        Ok(async move {
            let _ = closed.await;
        })
    }

    /// Forgets the nodes inside nodes that were [closed](Self::remove_apart).
    pub fn forget_removed(&mut self) {
        self.forget_closed();
    }

    /// Waits until nodes are closed that were [removed](Self::remove_apart).
    pub fn all_closed(&mut self) -> impl Future<Output = ()> + use<> {
        let closing = std::mem::take(&mut self.closing);
        async move { drop(oneshot::all(closing).await) }
    }

    /// Takes what has changed in a part.
    fn take_back(&mut self, part: NodeRegistry) {
        let NodeRegistry { edges, mut kept, mut locks, connector, inherited, dirty, .. } = part;
        self.dirty = dirty;
        self.edges.borrow_mut().append(&mut edges.into_inner());
        self.kept.retain(|_, state| state.strong_count() > 0);
        self.locks.retain(|_, lock| lock.strong_count() > 0);
        for name in part.remembered {
            self.kept.extend(kept.remove(&name).map(|state| (name.clone(), state)));
            self.locks.extend(locks.remove(&name).map(|lock| (name, lock)));
        }
        if self.connector.is_none() {
            self.connector = connector;
        }
        self.inherited.give_back(inherited);
        self.storing.retain(|name| part.storing.contains(name));
        self.images.merge(part.images);
    }
}

//! From a user of a node to the node it uses.

use std::fmt;
use std::io;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use event_loop::{EventLoop, oneshot, sync::lock};

use super::edge_channel::{EdgeChannel, EdgeCommand, EdgeSender};
use crate::node::{BlockNode, Channel, Geometry, GrowingFile, Watcher, Watchers};

/// A user's link to a node, which can be pointed to another node.
///
/// To the user the edge is the node that it leads to at the time.
pub struct Edge {
    /// The name of the node that it led to at first.
    name: String,
    state: Mutex<EdgeState>,
    watchers: Watchers,
}

struct EdgeState {
    node: Arc<dyn BlockNode>,
    /// Of all channels that are open through the edge.
    edge_senders: Vec<Arc<EdgeSender>>,
    /// A [`Drained`] holds it: channels that are opened meanwhile hold their requests from the start.
    drained: bool,
    /// Number of [`HeldEdges`]s.
    held: usize,
}

impl Edge {
    /// Returns an edge to `node`.
    pub fn new(node: Arc<dyn BlockNode>) -> Arc<Edge> {
        let name = node.name().to_owned();
        Arc::new(Edge {
            name,
            state: Mutex::new(EdgeState {
                node,
                edge_senders: Vec::new(),
                drained: false,
                held: 0,
            }),
            watchers: Watchers::default(),
        })
    }

    /// Returns the node that it leads to.
    pub fn node(&self) -> Arc<dyn BlockNode> {
        lock(&self.state).node.clone()
    }

    pub(super) fn forget(&self, edge_sender: &Arc<EdgeSender>) {
        let mut state = lock(&self.state);
        let place = state.edge_senders.iter().position(|other| Arc::ptr_eq(other, edge_sender));
        let edge_sender = place.map(|place| state.edge_senders.swap_remove(place));
        drop(state);
        drop(edge_sender);
    }
}

impl BlockNode for Edge {
    /// The name of the node that it led to at first; [`Edge::node`] knows the one that it leads to now.
    fn name(&self) -> &str {
        &self.name
    }

    fn known_name(&self) -> String {
        self.node().known_name()
    }

    fn geometry(&self) -> Geometry {
        self.node().geometry()
    }

    fn child(&self) -> Option<Arc<dyn BlockNode>> {
        Some(self.node())
    }

    fn growing_file(self: Arc<Self>) -> Option<Arc<dyn GrowingFile>> {
        self.node().growing_file()
    }

    fn compresses(&self) -> bool {
        self.node().compresses()
    }

    fn snapshot(&self) -> Option<Arc<dyn BlockNode>> {
        self.node().snapshot()
    }

    fn watch(&self, watcher: Watcher) {
        self.watchers.add(watcher.clone());
        self.node().watch(watcher);
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let (edge_sender, commands) = EdgeSender::new();
        // From here on it gets commands, which wait until the edge channel is there.
        let (node, holding) = {
            let mut state = lock(&self.state);
            state.edge_senders.push(edge_sender.clone());
            (state.node.clone(), state.drained || state.held > 0)
        };
        match node.open_channel(event_loop) {
            Ok(channel) => {
                Ok(EdgeChannel::new(self, (edge_sender, commands), event_loop, channel, holding))
            }
            Err(error) => {
                self.forget(&edge_sender);
                Err(error)
            }
        }
    }
}

/// Another change of the edge's child is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EdgeBusy;

impl fmt::Display for EdgeBusy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("another change of the block graph is in progress at this place")
    }
}

impl std::error::Error for EdgeBusy {}

/// Holds new requests at the edges and waits for all earlier ones.
///
/// The earlier requests have been answered then, on all loops.
///
/// No edge may lie below another one of the same call: what is held at the one would never be answered
/// to the other. Edges that lead to the same node never do.
///
/// # Errors
///
/// One is drained already; then nothing is held.
pub async fn drain(edges: Vec<Arc<Edge>>) -> Result<Drained, EdgeBusy> {
    let mut drained = Drained { edges: Vec::with_capacity(edges.len()) };
    let mut answers = Vec::new();
    for edge in edges {
        let mut state = lock(&edge.state);
        if std::mem::replace(&mut state.drained, true) {
            return Err(EdgeBusy);
        }
        for edge_sender in &state.edge_senders {
            let (sender, answer) = oneshot::channel();
            edge_sender.send(EdgeCommand::Hold(sender));
            answers.push(answer);
        }
        drop(state);
        drained.edges.push(edge);
    }
    for answer in answers {
        // A channel that is gone has nothing under way.
        let _ = answer.await;
    }
    Ok(drained)
}

/// Holds new requests at the edges during other changes of the graph there.
///
/// Otherwise like [`drain`].
pub async fn hold(edges: Vec<Arc<Edge>>) -> HeldEdges {
    let mut answers = Vec::new();
    for edge in &edges {
        let mut state = lock(&edge.state);
        state.held += 1;
        for edge_sender in &state.edge_senders {
            let (sender, answer) = oneshot::channel();
            edge_sender.send(EdgeCommand::Hold(sender));
            answers.push(answer);
        }
    }
    let held = HeldEdges { edges };
    for answer in answers {
        // A channel that is gone has nothing under way.
        let _ = answer.await;
    }
    held
}

/// Edges that hold requests, even if the graph changes there.
///
/// Dropping it resumes the requests.
#[must_use = "dropping it lets requests go on"]
pub struct HeldEdges {
    edges: Vec<Arc<Edge>>,
}

impl Drop for HeldEdges {
    fn drop(&mut self) {
        for edge in &self.edges {
            let mut state = lock(&edge.state);
            state.held -= 1;
            if state.held == 0 && !state.drained {
                state
                    .edge_senders
                    .iter()
                    .for_each(|edge_sender| edge_sender.send(EdgeCommand::GoOn));
            }
        }
    }
}

/// Edges that hold requests after a drain. Dropping it resumes the requests.
#[must_use = "dropping it lets requests go on"]
pub struct Drained {
    edges: Vec<Arc<Edge>>,
}

impl Drained {
    /// Has all edges lead to `node`, on all loops. Requests stay held.
    ///
    /// # Errors
    ///
    /// A loop cannot open a channel to it. Then all edges lead where they led.
    pub async fn point_to(&self, node: &Arc<dyn BlockNode>) -> io::Result<()> {
        let mut prepared: Vec<Arc<EdgeSender>> = Vec::new();
        let before: Vec<_>;
        loop {
            // Opening takes no lock of an edge's, so new channels may have come up meanwhile.
            let new = {
                let mut states: Vec<_> = self.edges.iter().map(|edge| lock(&edge.state)).collect();
                let edge_senders = states.iter().flat_map(|state| &state.edge_senders);
                let is_new = |edge_sender: &&Arc<EdgeSender>| {
                    !prepared.iter().any(|p| Arc::ptr_eq(p, edge_sender))
                };
                let new: Vec<_> = edge_senders.filter(is_new).cloned().collect();
                if new.is_empty() {
                    let replaced = states.iter_mut();
                    let replaced = replaced.map(|s| std::mem::replace(&mut s.node, node.clone()));
                    before = replaced.collect();
                    break;
                }
                new
            };
            prepared.extend(new.iter().cloned());
            let mut answers = Vec::new();
            for edge_sender in new {
                let (sender, answer) = oneshot::channel();
                edge_sender.send(EdgeCommand::Prepare(node.clone(), sender));
                answers.push(answer);
            }
            for answer in answers {
                // Of a channel that is gone nothing is wanted.
                if let Ok(opened) = answer.await {
                    opened?;
                }
            }
        }
        let mut answers = Vec::new();
        for edge in &self.edges {
            for edge_sender in &lock(&edge.state).edge_senders {
                let (sender, answer) = oneshot::channel();
                edge_sender.send(EdgeCommand::Switch(sender));
                answers.push(answer);
            }
        }
        for answer in answers {
            let _ = answer.await;
        }
        drop(before);
        for edge in &self.edges {
            edge.watchers.all().into_iter().for_each(|watcher| node.watch(watcher));
            edge.watchers.tell();
        }
        Ok(())
    }
}

impl Drained {
    /// Tells the users that the node's geometry may have changed.
    pub fn tell(&self) {
        self.edges.iter().for_each(|edge| edge.watchers.tell());
    }
}

impl fmt::Debug for Drained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.edges.iter().map(|edge| &edge.name)).finish()
    }
}

impl Drop for Drained {
    fn drop(&mut self) {
        for edge in &self.edges {
            let mut state = lock(&edge.state);
            state.drained = false;
            if state.held == 0 {
                state
                    .edge_senders
                    .iter()
                    .for_each(|edge_sender| edge_sender.send(EdgeCommand::GoOn));
            }
        }
    }
}

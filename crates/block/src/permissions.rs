//! What users of a node may do with it side by side: QEMU's block permissions.
//!
//! Each user of a node (a node above it, an export, a job, a command) *takes* some permissions and *shares*
//! some with the other users. [`check`] grants all of them or names the first two users that exclude each
//! other, in QEMU's words. The check is a pure function of the graph: each change is checked on a copy of
//! the graph before any of the change is carried out.
//!
//! Sources: the documentation of QEMU's `BlockPermission`, and qemu-storage-daemon's answers.
//! `tests/tests/permissions.rs` compares the two programs over generated commands.

use std::collections::BTreeMap;
use std::fmt;

/// A set of permissions.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Permissions(u8);

impl Permissions {
    /// No permission.
    pub const NONE: Permissions = Permissions(0);
    /// Reads that see the data that was written last.
    pub const CONSISTENT_READ: Permissions = Permissions(1);
    /// Writes that change what other users read.
    pub const WRITE: Permissions = Permissions(2);
    /// Writes that leave what other users read as it is.
    pub const WRITE_UNCHANGED: Permissions = Permissions(4);
    /// Changes of the size.
    pub const RESIZE: Permissions = Permissions(8);
    /// All permissions.
    pub const ALL: Permissions = Permissions(15);

    /// Returns the permissions in either set.
    #[must_use]
    pub const fn with(self, other: Permissions) -> Permissions {
        Permissions(self.0 | other.0)
    }

    /// Returns the permissions in both sets.
    #[must_use]
    pub const fn and(self, other: Permissions) -> Permissions {
        Permissions(self.0 & other.0)
    }

    /// Returns the permissions of this set that are not in the other one.
    #[must_use]
    pub const fn without(self, other: Permissions) -> Permissions {
        Permissions(self.0 & !other.0)
    }

    /// Returns whether the set has no permissions.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns whether the set has all permissions of `other`.
    pub const fn contains(self, other: Permissions) -> bool {
        other.without(self).is_empty()
    }
}

const NAMES: [(Permissions, &str); 4] = [
    (Permissions::CONSISTENT_READ, "consistent read"),
    (Permissions::WRITE, "write"),
    (Permissions::WRITE_UNCHANGED, "write unchanged"),
    (Permissions::RESIZE, "resize"),
];

impl fmt::Display for Permissions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = NAMES.iter().filter(|(permission, _)| self.contains(*permission));
        for (n, (_, name)) in names.enumerate() {
            let comma = if n == 0 { "" } else { ", " };
            write!(f, "{comma}{name}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Permissions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{self}}}")
    }
}

/// What a user of a node takes, and what it shares with the other users.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    /// The permissions that the user needs.
    pub takes: Permissions,
    /// The permissions that other users may have at the same time.
    pub shares: Permissions,
}

impl Claim {
    /// The claim of a user that does nothing.
    pub const NOTHING: Claim = Claim { takes: Permissions::NONE, shares: Permissions::ALL };

    /// Returns the claim of a user that reads the node, and also writes if `writes`.
    pub const fn of_reader(writes: bool) -> Claim {
        let write = if writes { Permissions::WRITE } else { Permissions::NONE };
        Claim { takes: Permissions::CONSISTENT_READ.with(write), ..Claim::NOTHING }
    }

    /// Returns the claim of two users together.
    #[must_use]
    pub const fn and(self, other: Claim) -> Claim {
        Claim { takes: self.takes.with(other.takes), shares: self.shares.and(other.shares) }
    }
}

/// The purpose of a child. The purpose decides what the node claims of the child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChildUse {
    /// The node is a filter: its users' claims apply to the child.
    Filtered,
    /// The node is a filter that makes the child longer, if its users may do so.
    Preallocated,
    /// The node shows a part of the child. The child's size must not change.
    Window,
    /// The child holds the metadata of an image format: no other user may write to it.
    Metadata,
    /// The child holds encrypted data, and a header that is not written.
    Encrypted,
    /// The child holds the data of an image whose metadata is elsewhere.
    Data,
    /// The child is read where the image above it has no data.
    Backing,
    /// The node keeps what the child held at one moment: writes must not bypass the node.
    CopyBeforeWrite,
    /// The same, and what was copied is discarded in the child.
    CopyAndDiscard,
    /// The node writes to the child what is about to be overwritten elsewhere.
    CopyTarget,
    /// The node is a filter that writes to the child what is read.
    CopyOnRead,
    /// The node shows what the child was, and uses nothing of what the child is.
    Snapshot,
}

impl ChildUse {
    /// Whether the child is written to although no user of the node writes: it cannot be read-only.
    pub fn always_writes(self) -> bool {
        match self {
            ChildUse::CopyOnRead | ChildUse::CopyTarget => true,
            ChildUse::Filtered
            | ChildUse::Preallocated
            | ChildUse::Window
            | ChildUse::Metadata
            | ChildUse::Encrypted
            | ChildUse::Data
            | ChildUse::Backing
            | ChildUse::CopyBeforeWrite
            | ChildUse::CopyAndDiscard
            | ChildUse::Snapshot => false,
        }
    }

    /// Returns what a node claims of a child with this use. `above`: the combined claims of the node's
    /// own users. `writable`: whether the node was opened for writing.
    pub(crate) fn claim(self, above: Claim, writable: bool) -> Claim {
        const CHANGES: Permissions = Permissions::WRITE.with(Permissions::RESIZE);
        let Claim { takes, shares } = above;
        match self {
            ChildUse::Filtered => above,
            ChildUse::Preallocated if takes.contains(CHANGES) => {
                Claim { takes, shares: shares.without(CHANGES) }
            }
            ChildUse::Preallocated => above,
            ChildUse::Window => Claim { takes, shares: shares.without(Permissions::RESIZE) },
            ChildUse::Metadata => {
                // A format may write metadata, whatever the format's users do.
                let own = if writable { CHANGES } else { Permissions::NONE };
                let takes = takes.with(Permissions::CONSISTENT_READ).with(own);
                Claim { takes, shares: shares.without(CHANGES) }
            }
            ChildUse::Encrypted => {
                let own = if writable { CHANGES } else { Permissions::NONE };
                let takes = takes.with(Permissions::CONSISTENT_READ).with(own);
                Claim { takes, shares: shares.without(Permissions::RESIZE) }
            }
            ChildUse::CopyBeforeWrite => Claim {
                takes: takes.with(Permissions::CONSISTENT_READ),
                shares: shares.without(CHANGES),
            },
            ChildUse::CopyAndDiscard => {
                let own = Permissions::CONSISTENT_READ.with(Permissions::WRITE);
                Claim { takes: takes.with(own), shares: shares.without(CHANGES) }
            }
            ChildUse::CopyTarget => Claim {
                takes: Permissions::WRITE,
                shares: Permissions::ALL.without(Permissions::RESIZE),
            },
            ChildUse::CopyOnRead => Claim {
                takes: takes.with(Permissions::WRITE_UNCHANGED),
                shares: shares.with(Permissions::WRITE_UNCHANGED),
            },
            ChildUse::Snapshot => Claim::NOTHING,
            ChildUse::Data => {
                let writes = Permissions::WRITE.with(Permissions::WRITE_UNCHANGED);
                let own = match takes.and(writes).is_empty() {
                    true => Permissions::NONE,
                    false => CHANGES,
                };
                Claim { takes: takes.with(own), shares: shares.without(Permissions::RESIZE) }
            }
            ChildUse::Backing => {
                // The backing image may change if the users of the image above share writes.
                let changes = match shares.contains(Permissions::WRITE) {
                    true => CHANGES,
                    false => Permissions::NONE,
                };
                Claim {
                    takes: takes.and(Permissions::CONSISTENT_READ),
                    shares: changes
                        .with(Permissions::CONSISTENT_READ)
                        .with(Permissions::WRITE_UNCHANGED),
                }
            }
        }
    }
}

/// The properties of a node that permissions depend on.
#[derive(Debug, Clone, Copy)]
pub struct NodeUse<'a> {
    /// Name of the node.
    pub name: &'a str,
    /// Whether the node was opened for writing.
    pub writable: bool,
    /// Whether the node is active. An inactive node takes no permission, and shares all.
    pub active: bool,
    /// Whether the node shares all that it uses, whatever its users do.
    pub force_share: bool,
    /// Order of addition: a node that was added later has a higher number.
    pub serial: u64,
}

/// A node that uses another one.
#[derive(Debug, Clone, Copy)]
pub struct EdgeUse<'a> {
    /// The name of the node above.
    pub parent: &'a str,
    /// The child's role in the node above: `file`, `backing`, ….
    pub role: &'a str,
    /// The name of the node below.
    pub child: &'a str,
    /// What the node above uses the child for.
    pub used_as: ChildUse,
}

/// A user that is not a node: an export, a job, a command.
#[derive(Debug, Clone, Copy)]
pub struct UserUse<'a> {
    /// Name of the node in use.
    pub node: &'a str,
    /// What the user claims of that node.
    pub claim: Claim,
    /// Order of addition, as in [`NodeUse::serial`].
    pub serial: u64,
    /// The job that it is, unless it is named like a user without a name.
    pub job: Option<JobUse<'a>>,
}

impl<'a> UserUse<'a> {
    /// A user without a name.
    pub fn new(node: &'a str, claim: Claim, serial: u64) -> Self {
        UserUse { node, claim, serial, job: None }
    }
}

/// A job, as messages name it.
#[derive(Debug, Clone, Copy)]
pub struct JobUse<'a> {
    /// Its type: `stream`, ….
    pub kind: &'a str,
    /// Its name.
    pub id: &'a str,
    /// What the node is to it.
    pub role: &'a str,
}

/// Two users of one node that exclude each other. `Display` gives QEMU's text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    node: String,
    permissions: String,
    required_by: String,
    unshared_by: String,
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Conflict { node, permissions, required_by, unshared_by } = self;
        write!(
            f,
            "Permission conflict on node '{node}': permissions '{permissions}' are both required by \
             {required_by} and unshared by {unshared_by}."
        )
    }
}

impl std::error::Error for Conflict {}

/// A user of a node, of either kind.
#[derive(Clone, Copy)]
struct Parent<'a> {
    claim: Claim,
    serial: u64,
    /// `None`: the user is not a node.
    edge: Option<EdgeUse<'a>>,
    job: Option<JobUse<'a>>,
}

impl Parent<'_> {
    /// Describes the user in QEMU's words.
    fn describe(&self, node: &str) -> String {
        if let Some(JobUse { kind, id, role }) = self.job {
            return format!("{kind} job '{id}' (uses node '{node}' as '{role}' child)");
        }
        match self.edge {
            None => format!("an unnamed block device (uses node '{node}' as 'root' child)"),
            Some(EdgeUse { parent, role, .. }) => {
                format!("node '{parent}' (uses node '{node}' as '{role}' child)")
            }
        }
    }
}

/// Checks that no user of a node takes what another user does not share.
///
/// The edges form no cycle. An edge or a user of a node that is not in `nodes` is left out.
///
/// # Errors
///
/// Returns the first conflict, searching from the top of the graph to its bottom.
pub fn check<'a>(
    nodes: impl IntoIterator<Item = NodeUse<'a>>,
    edges: impl IntoIterator<Item = EdgeUse<'a>>,
    users: impl IntoIterator<Item = UserUse<'a>>,
) -> Result<(), Conflict> {
    let nodes: BTreeMap<&str, NodeUse<'a>> =
        nodes.into_iter().map(|node| (node.name, node)).collect();
    let mut parents: BTreeMap<&str, Vec<Parent<'a>>> = BTreeMap::new();
    for UserUse { node, claim, serial, job } in users {
        let is_active = nodes.get(node).is_some_and(|node| node.active);
        let claim = if is_active { claim } else { Claim::NOTHING };
        parents.entry(node).or_default().push(Parent { claim, serial, edge: None, job });
    }
    let mut below: BTreeMap<&str, Vec<EdgeUse<'a>>> = BTreeMap::new();
    let mut missing_parents: BTreeMap<&str, usize> = BTreeMap::new();
    for edge in edges {
        if nodes.contains_key(edge.parent) && nodes.contains_key(edge.child) {
            below.entry(edge.parent).or_default().push(edge);
            *missing_parents.entry(edge.child).or_default() += 1;
        }
    }
    // Each node comes after all nodes above it.
    let mut next: Vec<&str> =
        nodes.keys().copied().filter(|name| !missing_parents.contains_key(name)).collect();
    while let Some(name) = next.pop() {
        let users = parents.remove(name).unwrap_or_default();
        find_conflict(name, &users)?;
        let above = users.iter().fold(Claim::NOTHING, |all, user| all.and(user.claim));
        let Some(&NodeUse { writable, active, force_share, serial, .. }) = nodes.get(name) else {
            continue;
        };
        for edge in below.remove(name).unwrap_or_default() {
            let claim = match active {
                true => edge.used_as.claim(above, writable),
                false => Claim::NOTHING,
            };
            let shares = if force_share { Permissions::ALL } else { claim.shares };
            let claim = Claim { shares, ..claim };
            let parent = Parent { claim, serial, edge: Some(edge), job: None };
            parents.entry(edge.child).or_default().push(parent);
            if let Some(missing) = missing_parents.get_mut(edge.child) {
                *missing -= 1;
                if *missing == 0 {
                    next.push(edge.child);
                }
            }
        }
    }
    Ok(())
}

/// Returns the first conflict between users of a node. The newest users come first, as in QEMU.
fn find_conflict(node: &str, users: &[Parent<'_>]) -> Result<(), Conflict> {
    let all = users.iter().fold(Claim::NOTHING, |all, user| all.and(user.claim));
    if all.shares.contains(all.takes) {
        return Ok(());
    }
    let mut newest: Vec<&Parent<'_>> = users.iter().collect();
    newest.sort_by_key(|user| std::cmp::Reverse(user.serial));
    for (at, unshares) in newest.iter().enumerate() {
        for (other, takes) in newest.iter().enumerate() {
            let permissions = takes.claim.takes.without(unshares.claim.shares);
            if at != other && !permissions.is_empty() {
                return Err(Conflict {
                    node: node.to_owned(),
                    permissions: permissions.to_string(),
                    required_by: takes.describe(node),
                    unshared_by: unshares.describe(node),
                });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "permissions_tests.rs"]
mod tests;

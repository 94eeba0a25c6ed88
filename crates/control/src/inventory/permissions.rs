//! Describes the inventory's users for [`block::permissions`].

use std::collections::BTreeMap;

use block::permissions::{ChildUse, Claim, EdgeUse, JobUse, NodeUse, Permissions, UserUse, check};

use super::{ChainUse, Export, Inventory, Job, OPENING, REPAIR, RESIZE, STREAM, SourceUse};
use crate::error::OptionError;
use crate::export::SizeUse;

impl Export {
    fn claim(&self) -> Claim {
        let writable = self.options.writable;
        let claim = Claim::of_reader(writable);
        match self.size_use {
            SizeUse::Changes { even_read_only } if writable || even_read_only => {
                Claim { takes: claim.takes.with(Permissions::RESIZE), ..claim }
            }
            SizeUse::Follows | SizeUse::Changes { .. } => claim,
            // NBD clients read the size once, when they connect.
            SizeUse::Fixed => Claim { shares: claim.shares.without(Permissions::RESIZE), ..claim },
        }
    }
}

impl Job {
    /// Returns what the job's filter above the source uses the source for.
    pub(super) fn source_use(&self) -> ChildUse {
        match self.kind {
            "mirror" | "commit" => ChildUse::Window,
            STREAM => ChildUse::Filtered,
            _ if self.source_use.discards => ChildUse::CopyAndDiscard,
            _ => ChildUse::CopyBeforeWrite,
        }
    }

    /// Returns what the job claims of its target.
    fn target_claim(&self) -> Claim {
        let shares = match self.kind {
            // The target is complete only at the end.
            "mirror" => Permissions::WRITE_UNCHANGED,
            _ => Permissions::ALL.without(Permissions::RESIZE),
        };
        Claim { takes: Permissions::WRITE, shares }
    }
}

/// A node of a chain that others may not write to, or not even read, while a job works on the chain.
#[derive(Debug, Clone, Copy)]
pub struct Steady<'a> {
    /// Its name.
    pub node: &'a str,
    /// Whether others may read it. The job changes what lies below other nodes.
    pub readable: bool,
    /// What the node is to the job. `None`: the job uses it as exports do.
    pub role: Option<&'static str>,
}

/// What `block_resize` needs of a node.
const RESIZES: Claim = Claim { takes: Permissions::RESIZE, ..Claim::NOTHING };

/// What the repair of an image needs of the node with its file.
const REPAIRS: Claim = {
    let changes = Permissions::WRITE.with(Permissions::RESIZE);
    Claim { takes: changes, shares: Permissions::ALL.without(changes) }
};

/// What changes of a node need of it, by the kinds of their jobs.
const CHANGES: [(&str, Claim); 3] =
    [(RESIZE, RESIZES), (REPAIR, REPAIRS), (OPENING, Claim::NOTHING)];

/// Returns the name of a change of a node among the jobs. No job of a user has such a name.
fn change_of(node: &str, kind: &str) -> String {
    format!("#{kind}-of-{node}")
}

/// A filter of a job: its name, and the job.
type Filter<'a> = (&'a str, &'a Job);

/// Filters of jobs, by the names of their sources. The users' first, the source's last: a new filter comes below older ones.
type Filters<'a> = BTreeMap<&'a str, Vec<Filter<'a>>>;

/// Returns the filter of that number above the node `name`, counted from the users, or the node itself.
fn nth_above<'a>(filters: &'a Filters<'_>, name: &'a str, nth: usize) -> &'a str {
    filters.get(name).and_then(|above| above.get(nth)).map_or(name, |&(filter, _)| filter)
}

impl Inventory {
    /// Returns the inventory with a node that is being resized, until [`resized`](Self::resized).
    ///
    /// # Errors
    ///
    /// In QSD's words: a job uses the node, an image lies above it, or a user does not share resizing.
    pub fn with_resize(&self, name: &str) -> Result<Inventory, OptionError> {
        if name.starts_with('#') {
            let message = format!("Node '{name}' is busy: it belongs to the node above it");
            return Err(OptionError::new(message).hint("Resize that one."));
        }
        self.free_of_jobs(name)?;
        self.is_active(name)?;
        self.is_no_backing(name)?;
        self.is_behind_no_image(name)?;
        self.with_change(name, RESIZE, RESIZES)
    }

    /// Returns the inventory with a change of a node that goes on beside other commands.
    fn with_change(
        &self,
        node: &str,
        kind: &'static str,
        claim: Claim,
    ) -> Result<Inventory, OptionError> {
        self.check_with(Some(UserUse::new(node, claim, u64::MAX)), &[])?;
        let mut inventory = self.clone();
        let (serial, source) = (inventory.serial(), node.to_owned());
        let chain = ChainUse::default();
        let (filter, source_use) = (None, SourceUse::default());
        let job = Job { serial, kind, source, target: None, chain, filter, source_use };
        inventory.jobs.insert(change_of(node, kind), job);
        Ok(inventory)
    }

    /// Returns the inventory with a node that is no longer being resized.
    #[must_use]
    pub fn resized(&self, name: &str) -> Inventory {
        self.without_job(&change_of(name, RESIZE))
    }

    /// Returns the inventory with a node whose image is being repaired, until [`repaired`](Self::repaired).
    ///
    /// A node that is not in the inventory yet is free.
    ///
    /// # Errors
    ///
    /// A job uses the node, or a user does not share writing and resizing.
    pub fn with_repair(&self, file: &str) -> Result<Inventory, OptionError> {
        if !self.nodes.contains_key(file) {
            return Ok(self.clone());
        }
        self.free_of_jobs(file)?;
        self.with_change(file, REPAIR, REPAIRS)
    }

    /// Returns the inventory with a node whose image is no longer being repaired.
    #[must_use]
    pub fn repaired(&self, file: &str) -> Inventory {
        self.without_job(&change_of(file, REPAIR))
    }

    /// Returns the inventory with a node that is being opened, until [`opened`](Self::opened). It keeps the nodes that its
    /// options refer to as they are.
    ///
    /// # Errors
    ///
    /// A job uses one of them, or another node that is being opened.
    pub fn with_opening(&self, name: &str) -> Result<Inventory, OptionError> {
        let involved = self.referred_by(name);
        involved.iter().try_for_each(|name| self.free_of_jobs(name))?;
        involved.iter().try_fold(self.clone(), |inventory, name| {
            inventory.with_change(name, OPENING, Claim::NOTHING)
        })
    }

    /// Returns the inventory with a node that is no longer being opened.
    #[must_use]
    pub fn opened(&self, name: &str) -> Inventory {
        let involved = self.referred_by(name);
        involved
            .iter()
            .fold(self.clone(), |inventory, name| inventory.without_job(&change_of(name, OPENING)))
    }

    /// A node, and those that its options refer to by name.
    fn referred_by(&self, name: &str) -> Vec<String> {
        let (mut names, mut unseen) = (vec![name.to_owned()], vec![name]);
        while let Some(node) = unseen.pop().and_then(|name| self.nodes.get(name)) {
            for child in &node.children {
                match child.owned {
                    true => unseen.push(&child.name),
                    false => names.push(child.name.clone()),
                }
            }
        }
        names.sort();
        names.dedup();
        names
    }

    /// Checks that a node is neither being opened nor repaired, nor one that is being opened refers to it.
    ///
    /// # Errors
    ///
    /// It is.
    pub(super) fn is_settled(&self, node: &str) -> Result<(), OptionError> {
        let changes = |job: &&Job| matches!(job.kind, OPENING | REPAIR) && job.source == node;
        match self.jobs.values().find(changes) {
            Some(job) => Err(job.conflict(node)),
            None => Ok(()),
        }
    }

    /// Checks that users of a node can bear that a larger overlay replaces it.
    ///
    /// # Errors
    ///
    /// In QSD's words for a resize: a user does not share resizing, or the node is behind an image. Exports over NBD and
    /// `vfio-user-ahci` do not count: their clients and guests keep the size that they know.
    pub fn check_new_size(&self, name: &str) -> Result<(), OptionError> {
        self.is_behind_no_image(name)?;
        let mut inventory = self.clone();
        let exports = inventory.exports.values_mut();
        for export in exports.filter(|export| export.size_use == SizeUse::Fixed) {
            export.size_use = SizeUse::Follows;
        }
        inventory.check_with(Some(UserUse::new(name, RESIZES, u64::MAX)), &[])
    }

    /// Checks that a node is neither the backing image of another one nor below that. What an image knows of its backing
    /// image's size is as old as its users.
    fn is_behind_no_image(&self, name: &str) -> Result<(), OptionError> {
        for (above, node) in &self.nodes {
            let mut backing = node.children.iter().filter(|child| child.role == "backing");
            if backing.any(|child| child.name == name || self.lies_on(&child.name, name)) {
                return Err(OptionError::new(format!(
                    "Node '{name}' is busy: node is used as backing hd of '{above}'"
                )));
            }
        }
        Ok(())
    }

    /// The nodes that are being resized.
    fn resizing(&self) -> impl Iterator<Item = &str> {
        self.jobs.values().filter(|job| job.kind == RESIZE).map(|job| job.source.as_str())
    }

    /// Checks that a node has a size that stays: neither it nor a node above is being resized.
    ///
    /// # Errors
    ///
    /// One is.
    pub fn has_fixed_size(&self, node: &str) -> Result<(), OptionError> {
        match self.resizing().find(|resized| *resized == node || self.lies_on(resized, node)) {
            Some(resized) => self.free_of_jobs(resized),
            None => Ok(()),
        }
    }

    /// Checks that an image may be made in a node, over the node's contents.
    ///
    /// # Errors
    ///
    /// In QSD's words: a user of the node does not share writing or resizing.
    pub fn check_create(&self, name: &str) -> Result<(), OptionError> {
        self.is_active(name)?;
        let takes = Permissions::WRITE.with(Permissions::RESIZE);
        let claim = Claim { takes, shares: Permissions::ALL };
        self.check_with(Some(UserUse::new(name, claim, u64::MAX)), &[])
    }

    /// Checks that a job on a chain may read `top` to its end.
    ///
    /// Later users are refused because the job uses the node.
    pub(super) fn check_chain(&self, top: &str) -> Result<(), OptionError> {
        let shares = Permissions::ALL.without(Permissions::RESIZE);
        let claim = Claim { shares, ..Claim::NOTHING };
        self.check_with(Some(UserUse::new(top, claim, u64::MAX)), &[])
    }

    /// Checks that other users of nodes of the chain `chain` can bear a job on them: of that type and name.
    ///
    /// Later users are refused because the job uses the nodes.
    ///
    /// # Errors
    ///
    /// In QSD's words: a user does what the job does not share.
    pub fn check_steady(
        &self,
        kind: &str,
        id: &str,
        chain: &[String],
        steady: &[Steady<'_>],
    ) -> Result<(), OptionError> {
        // No other user can name a node that was opened for the one above it.
        let mut steady = steady.iter().filter(|steady| !steady.node.starts_with('#'));
        steady.try_for_each(|&Steady { node, readable, role }| {
            let unshared = match readable {
                true => Permissions::WRITE,
                // A user that writes reads, too.
                false => Permissions::CONSISTENT_READ,
            };
            let shares = Permissions::ALL.without(Permissions::RESIZE).without(unshared);
            let claim = Claim { shares, ..Claim::NOTHING };
            let job = role.map(|role| JobUse { kind, id, role });
            // The chain's own images read it as the job has it.
            let cut = if readable { &[] } else { chain };
            self.check_with(Some(UserUse { node, claim, serial: u64::MAX, job }), cut)
        })
    }

    /// Checks that other users of a chain's base can bear that a job makes it longer.
    ///
    /// # Errors
    ///
    /// In QSD's words: a user does not share resizing.
    pub fn check_growth(&self, base: &str, chain: &[String]) -> Result<(), OptionError> {
        self.check_with(Some(UserUse::new(base, RESIZES, u64::MAX)), chain)
    }

    /// Checks that no two users of a node exclude each other.
    pub(super) fn check_permissions(&self) -> Result<(), OptionError> {
        self.check_with(None, &[])
    }

    /// Does the same with one more user.
    ///
    /// The images of `cut` do not use their backing images.
    fn check_with(&self, user: Option<UserUse<'_>>, cut: &[String]) -> Result<(), OptionError> {
        // The filters of jobs lie between the source and its users.
        let mut filters: Filters<'_> = BTreeMap::new();
        for job in self.jobs.values() {
            if let Some(filter) = &job.filter {
                filters.entry(&job.source).or_default().push((filter, job));
            }
        }
        filters.values_mut().for_each(|above| above.sort_by_key(|(_, job)| job.serial));
        let filters = &filters;
        let through_filters = |name| nth_above(filters, name, 0);
        let own = || self.nodes.iter().filter(|(_, node)| node.filter_of.is_none());
        let nodes = own().map(|(name, node)| NodeUse {
            name,
            writable: !node.read_only,
            active: !node.inactive,
            // A job may write to a node of a reader.
            force_share: node.force_share && node.read_only,
            serial: node.serial,
        });
        let filter_nodes = filters.values().flatten().map(|&(name, job)| NodeUse {
            name,
            writable: true,
            active: true,
            force_share: false,
            serial: job.serial,
        });
        // The target of a backup may be an overlay of its source, where it reads what is not overwritten yet: below
        // the filter.
        let passes_by = |parent: &str, (_, job): &Filter<'_>| {
            let target = job.target.as_deref();
            target.is_some_and(|target| target == parent || self.is_behind(parent, target))
        };
        let passed_by = |parent: &str, source: &str| {
            let above = filters.get(source).map_or(&[][..], Vec::as_slice);
            above.iter().rposition(|filter| passes_by(parent, filter)).map_or(0, |last| last + 1)
        };
        let edges = own().flat_map(|(parent, node)| {
            let is_cut = cut.contains(parent);
            let children = node.children.iter().filter(move |c| !is_cut || c.role != "backing");
            children.map(move |child| EdgeUse {
                parent,
                role: child.role,
                child: match child.role {
                    "backing" => nth_above(filters, &child.name, passed_by(parent, &child.name)),
                    _ => through_filters(&child.name),
                },
                used_as: child.used_as,
            })
        });
        let filter_edges = filters.iter().flat_map(|(source, above)| {
            above.iter().enumerate().map(move |(nth, &(filter, job))| EdgeUse {
                parent: filter,
                role: if job.source_use() == ChildUse::Window { "backing" } else { "file" },
                child: nth_above(filters, source, nth + 1),
                used_as: job.source_use(),
            })
        });
        let exports = self.exports.values().flat_map(|export| {
            let (claim, serial) = (export.claim(), export.serial);
            let user = move |node| UserUse::new(through_filters(node), claim, serial);
            export.nodes.iter().map(String::as_str).map(user)
        });
        let targets = self.jobs.values().filter_map(|job| {
            let (claim, serial) = (job.target_claim(), job.serial);
            job.target.as_deref().map(|node| UserUse::new(node, claim, serial))
        });
        let changes = self.jobs.values().filter_map(|job| {
            let (_, claim) = CHANGES.into_iter().find(|(kind, _)| *kind == job.kind)?;
            Some(UserUse::new(&job.source, claim, job.serial))
        });
        // A mirror copies a disk of one size; a backup does not mind, as in QSD.
        let jobs = filters.values().flatten();
        let mirrored = jobs.filter(|(_, job)| job.source_use() == ChildUse::Window);
        let sources = mirrored.map(|(_, job)| {
            let shares = Permissions::ALL.without(Permissions::RESIZE);
            UserUse::new(&job.source, Claim { shares, ..Claim::NOTHING }, job.serial)
        });
        let users = exports.chain(sources).chain(targets).chain(changes).chain(user);
        check(nodes.chain(filter_nodes), edges.chain(filter_edges), users)
            .map_err(|conflict| OptionError::new(conflict.to_string()))
    }
}

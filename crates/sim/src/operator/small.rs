//! Commands with an effect at once: limits, sizes, bitmaps, exports, objects, queries.

use serde_json::json;

use super::{Gone, Operator};
use crate::daemon::GROUP;
use crate::model::SECTOR;

impl Operator {
    /// Changes the limits of the throttle group, to values that still allow progress, or to none.
    pub(super) fn limits(&mut self) -> Result<(), Gone> {
        let average = self.random().pick(&[0, 50_000, 200_000, 1_000_000]);
        let limits = match self.random().one_in(2) {
            true => json!({"iops-total": average, "bps-total": 0}),
            false => json!({"iops-total": 0, "bps-total": average * 2048}),
        };
        let path = format!("/objects/{GROUP}");
        self.succeeds("qom-set", json!({"path": path, "property": "limits", "value": limits}))?;
        let now = self.succeeds("qom-get", json!({"path": path, "property": "limits"}))?;
        if limits.as_object().is_some_and(|set| set.iter().any(|(name, n)| now[name] != *n)) {
            self.world.fail(&format!("the limits are {now} after they were set to {limits}"));
        }
        if self.world.is_throttled() {
            self.world.coverage.limits.one();
        }
        Ok(())
    }

    /// Makes a disk larger, and tells its guest once that is done.
    pub(super) fn grow(&mut self, disk: usize) -> Result<(), Gone> {
        let sectors = self.world.sectors(disk) + 8;
        let size = u64::from(sectors) * SECTOR as u64;
        let arguments = json!({"node-name": self.memory.nodes[disk], "size": size});
        if self.world.has_fixed_size(disk) {
            return self.is_refused("block_resize", arguments);
        }
        if self.tries("block_resize", arguments)? {
            self.world.coverage.resizes.one();
            self.world.grow(disk, sectors);
        }
        Ok(())
    }

    /// Asks for the daemon's state.
    pub(super) fn query(&mut self) -> Result<(), Gone> {
        let nodes = self.succeeds("query-named-block-nodes", json!({"flat": true}))?;
        let has = |name: &String| {
            nodes.as_array().is_some_and(|all| all.iter().any(|node| node["node-name"] == **name))
        };
        if let Some(missing) = self.memory.nodes.iter().find(|name| !has(name)) {
            self.world.fail(&format!("node {missing} is not listed"));
        }
        let exports = self.succeeds("query-block-exports", json!({}))?;
        let wanted = self.world.disks() + usize::from(self.world.attacked.is_some());
        if exports.as_array().is_none_or(|all| all.len() != wanted) {
            self.world.fail(&format!("the exports are not the {wanted} there are: {exports}"));
        }
        self.succeeds("query-blockstats", json!({"query-nodes": true}))?;
        let jobs = self.succeeds("query-jobs", json!({}))?;
        if jobs.as_array().is_none_or(|all| !all.is_empty()) {
            self.world.fail(&format!("jobs that have ended are listed: {jobs}"));
        }
        Ok(())
    }

    /// Adds a dirty bitmap to a disk, changes it, and removes it.
    pub(super) fn bitmap(&mut self, disk: usize) -> Result<(), Gone> {
        let (node, name) = (self.memory.nodes[disk].clone(), self.name("bitmap"));
        let bitmap = json!({"node": node, "name": name});
        let granularity = self.random().pick(&[512, 4096, 65536]);
        let mut add = json!({"node": node, "name": name, "granularity": granularity});
        let persistent = self.world.may_keep_bitmaps(&node) && self.random().one_in(2);
        if persistent {
            add["persistent"] = true.into();
        }
        self.succeeds("block-dirty-bitmap-add", add.clone())?;
        self.is_refused("block-dirty-bitmap-add", add)?;
        self.pause(0, 300_000);
        for change in ["disable", "clear", "enable"] {
            if self.random().one_in(2) {
                self.succeeds(&format!("block-dirty-bitmap-{change}"), bitmap.clone())?;
            }
        }
        if self.random().one_in(2) {
            // The bitmap grows with its disk.
            self.grow(disk)?;
        }
        self.may_upgrade(8)?;
        self.succeeds("block-dirty-bitmap-remove", bitmap)?;
        self.world.coverage.bitmaps.one();
        self.world.coverage.bitmaps_kept.add(persistent.into());
        Ok(())
    }

    /// Adds nodes and exports, and deletes them: of a node of its own, or of a disk, for reading.
    pub(super) fn scratch(&mut self, disk: usize) -> Result<(), Gone> {
        let (own, export) = (self.name("null"), self.name("export"));
        let add =
            json!({"driver": "null-co", "node-name": own, "size": 1 << 20, "read-zeroes": true});
        self.succeeds("blockdev-add", add.clone())?;
        self.is_refused("blockdev-add", add)?;
        let of_disk = self.random().one_in(2);
        let node = if of_disk { self.memory.nodes[disk].clone() } else { own.clone() };
        let path = self.path(&export).display().to_string();
        let arguments = json!({
            "type": "vhost-user-blk", "id": export, "node-name": node, "writable": !of_disk,
            "addr": {"type": "unix", "path": path},
        });
        self.succeeds("block-export-add", arguments.clone())?;
        self.is_refused("block-export-add", arguments)?;
        self.is_refused("blockdev-del", json!({"node-name": node}))?;
        self.may_upgrade(8)?;
        self.succeeds("block-export-del", json!({"id": export}))?;
        self.qmp.event("the end of an export", |name, data| {
            (name == "BLOCK_EXPORT_DELETED" && data["id"] == *export).then_some(())
        })?;
        self.succeeds("blockdev-del", json!({"node-name": own}))?;
        self.is_refused("blockdev-del", json!({"node-name": own}))?;
        self.world.coverage.exports.one();
        Ok(())
    }

    /// Adds an I/O thread, and removes it.
    pub(super) fn thread(&mut self) -> Result<(), Gone> {
        let id = self.name("thread");
        self.succeeds("object-add", json!({"qom-type": "iothread", "id": id}))?;
        let path = format!("/objects/{id}");
        let set = json!({"path": path, "property": "poll-max-ns", "value": 8_000});
        self.succeeds("qom-set", set)?;
        self.may_upgrade(4)?;
        self.succeeds("object-del", json!({"id": id}))?;
        self.world.coverage.threads.one();
        Ok(())
    }
}

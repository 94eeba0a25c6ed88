//! Restarts of a daemon with a state file: it has to have what QMP had added.

use std::rc::Rc;

use serde_json::json;

use super::upgrades::difference;
use super::{Gone, Operator, Qmp};
use crate::daemon::disk_name;
use crate::world::World;

/// Asks which nodes serve the disks, and tells the world.
pub(super) fn learn(world: &Rc<World>, qmp: &mut Qmp) -> Result<Vec<String>, Gone> {
    let exports = match qmp.command("query-block-exports", json!({}))? {
        Ok(exports) => exports,
        Err(error) => world.fail(&format!("query-block-exports fails: {error}")),
    };
    let of = |disk| {
        let name = disk_name(disk);
        let all = exports.as_array();
        let export = all.and_then(|all| all.iter().find(|export| export["id"] == *name));
        let node = export.and_then(|export| export["node-name"].as_str());
        node.unwrap_or_else(|| world.fail(&format!("{name} is not exported"))).to_owned()
    };
    let nodes: Vec<_> = (0..world.disks()).map(of).collect();
    for (disk, node) in nodes.iter().enumerate() {
        world.set_image(disk, world.image_of(node));
    }
    Ok(nodes)
}

impl Operator {
    /// Does nothing for a while. A daemon that is killed meanwhile has to have the same configuration when it is
    /// started again.
    pub(super) fn rest(&mut self) -> Result<(), Gone> {
        let inventory = self.inventory()?;
        self.memory.known = Some(inventory);
        self.qmp.is_known();
        self.pause(100_000, 5_000_000);
        Ok(())
    }

    /// After a kill, checks the new daemon's configuration, and removes what the operator had begun.
    pub(super) fn after_restart(&mut self) -> Result<(), Gone> {
        let kills = self.world.kills();
        if self.memory.kills == kills {
            return Ok(());
        }
        self.world.moving.set(None);
        if !self.world.keeps_state() {
            self.look_at_bitmaps()?;
            self.memory.kills = kills;
            return Ok(());
        }
        self.memory.nodes = learn(&self.world, &mut self.qmp)?;
        let after = self.inventory()?;
        if let Some(known) = self.memory.known.take() {
            // Bitmaps in memory end with their daemon. A cut of the power may take a new size back.
            let lasts = |(key, _): &(String, _)| {
                !key.starts_with("bitmap ") && !key.starts_with("size of ")
            };
            let [before, after] =
                [known, after.clone()].map(|all| all.into_iter().filter(lasts).collect::<Vec<_>>());
            if let Some(wrong) = difference(&before, &after) {
                self.world.fail(&format!("after a restart with a state file, {wrong}"));
            }
            self.world.coverage.restarts.one();
        }
        for (key, _) in &after {
            if let Some(id) = key.strip_prefix("export \"").and_then(|id| id.strip_suffix('"'))
                && id.starts_with("export")
            {
                self.succeeds("block-export-del", json!({"id": id}))?;
                self.qmp.event("the end of an export", |name, data| {
                    (name == "BLOCK_EXPORT_DELETED" && data["id"] == *id).then_some(())
                })?;
            }
            if let Some(id) = key.strip_prefix("thread \"").and_then(|id| id.strip_suffix('"'))
                && id.starts_with("thread")
            {
                self.succeeds("object-del", json!({"id": id}))?;
            }
        }
        if let Some(disk) = self.memory.chained
            && self.memory.nodes[disk].starts_with("overlay")
        {
            self.stream_to(disk, None)?;
        }
        self.memory.chained = None;
        // A node may lie on others.
        for _ in 0..3 {
            for (key, _) in &after {
                let Some(node) = key.strip_prefix("node ") else { continue };
                // Refused for nodes in use.
                let _ = self.qmp.command("blockdev-del", json!({"node-name": node}))?;
            }
        }
        self.memory.nodes = learn(&self.world, &mut self.qmp)?;
        self.look_at_bitmaps()?;
        self.memory.kills = kills;
        Ok(())
    }

    /// Ends the daemon in order, if that is possible, and starts another one. The power may be cut in between.
    pub(super) fn may_stop(&mut self) -> Result<(), Gone> {
        let kills = self.world.kills();
        // The connection may be that to a daemon that was killed.
        let _ = self.qmp.command("query-version", json!({}))?;
        if !self.world.may_stop() {
            return Ok(());
        }
        self.world.is_stopping(true);
        let _ = self.qmp.command("quit", json!({}));
        while self.world.kills() == kills && !self.world.has_stopped() {
            self.world.machine.sleep(20_000);
        }
        self.world.is_stopping(false);
        if self.world.kills() == kills {
            self.world.start_again();
        }
        Err(Gone)
    }
}

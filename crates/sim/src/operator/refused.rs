//! Commands that the daemon must refuse.

use serde_json::json;

use super::{Gone, Operator};
use crate::daemon::GROUP;

impl Operator {
    /// Tries what a node in use does not allow.
    pub(super) fn try_refused(&mut self, disk: usize) -> Result<(), Gone> {
        let node = self.memory.nodes[disk].clone();
        match self.random().below(4) {
            0 => self.is_refused("blockdev-del", json!({"node-name": node})),
            1 => {
                let add = json!({"driver": "null-co", "node-name": node});
                self.is_refused("blockdev-add", add)
            }
            2 if self.world.is_throttled() && !self.world.may_move() => {
                self.is_refused("object-del", json!({"id": GROUP}))
            }
            2 => self.is_refused("object-del", json!({"id": "io0"})),
            _ => {
                let job = json!({
                    "job-id": "job", "device": node, "target": node, "sync": "full",
                });
                self.is_refused("blockdev-backup", job)
            }
        }
    }

    /// Tries what a job that copies a node to a target does not allow.
    pub(super) fn try_refused_by_job(
        &mut self,
        job: &str,
        source: &str,
        target: &str,
    ) -> Result<(), Gone> {
        let path = self.path("refused").display().to_string();
        match self.random().below(8) {
            0 => self.is_refused("blockdev-del", json!({"node-name": target})),
            1 => self.is_refused("blockdev-del", json!({"node-name": source})),
            2 => self.is_refused("block_resize", json!({"node-name": source, "size": 1 << 30})),
            3 => self.is_refused("block_resize", json!({"node-name": target, "size": 1 << 30})),
            4 if !job.starts_with("backup") => {
                // A second writer of what the job writes. A backup shares its target, as in QSD.
                let export = json!({
                    "type": "vhost-user-blk", "id": "refused", "node-name": target, "writable": true,
                    "addr": {"type": "unix", "path": path},
                });
                self.is_refused("block-export-add", export)
            }
            // A backup continues below an overlay.
            5 if !job.starts_with("backup") => {
                let snapshot = json!({
                    "node-name": source, "snapshot-file": path, "snapshot-node-name": "refused",
                });
                self.is_refused("blockdev-snapshot-sync", snapshot)
            }
            6 => {
                self.is_refused("x-upgrade", json!({}))?;
                self.world.coverage.upgrades_refused.one();
                Ok(())
            }
            _ => {
                let arguments = json!({
                    "job-id": format!("{job}-second"), "device": source, "target": target,
                    "sync": "full",
                });
                let command = self.random().pick(&["blockdev-backup", "blockdev-mirror"]);
                self.is_refused(command, arguments)
            }
        }
    }
}

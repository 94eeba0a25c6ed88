//! Snapshots of disks, which a commit or a stream ends again.

use serde_json::json;

use super::{Gone, Operator};
use crate::daemon::disk_name;
use crate::image::Format;

impl Operator {
    /// Puts an overlay over a disk. Later the overlay is committed, or gets all of the disk's data.
    pub(super) fn snapshot(&mut self, disk: usize) -> Result<(), Gone> {
        if self.world.is_throttled() && self.memory.nodes[disk] == disk_name(disk) {
            // A node of driver throttle names no file for the overlay's header.
            return Ok(());
        }
        let (node, overlay) = (self.memory.nodes[disk].clone(), self.name("overlay"));
        let path = self.path(&overlay);
        self.world.name_image(&overlay, &path, Format::Qcow2(65536), Some(&node));
        self.memory.chained = Some(disk);
        let snapshot = json!({
            "node-name": node, "snapshot-file": path.display().to_string(),
            "snapshot-node-name": overlay,
        });
        self.succeeds("blockdev-snapshot-sync", snapshot)?;
        self.memory.nodes[disk] = overlay.clone();
        self.world.coverage.snapshots.one();
        self.is_refused("blockdev-del", json!({"node-name": node}))?;
        self.pause(0, 2_000_000);
        self.may_upgrade(4)?;
        if self.random().one_in(2) {
            let job = self.name("commit");
            let commit = json!({"job-id": job, "device": overlay, "auto-dismiss": false});
            self.succeeds("block-commit", commit)?;
            if !self.is_ready(&job)? {
                self.world.fail(&format!("{job} ends, and no operation has failed"));
            }
            self.pause(0, 500_000);
            self.succeeds("job-complete", json!({"id": job}))?;
            self.conclude(&job)?;
            self.succeeds("blockdev-del", json!({"node-name": overlay}))?;
            self.memory.nodes[disk] = node;
            self.world.coverage.commits.one();
        } else {
            let job = self.name("stream");
            let stream = json!({"job-id": job, "device": overlay, "auto-dismiss": false});
            self.succeeds("block-stream", stream)?;
            self.conclude(&job)?;
            self.succeeds("blockdev-del", json!({"node-name": node}))?;
            self.world.set_image(disk, self.world.image_of(&overlay));
            self.world.coverage.streams.one();
        }
        self.memory.chained = None;
        self.world.coverage.moves_hard.add(self.world.is_hard().into());
        Ok(())
    }
}

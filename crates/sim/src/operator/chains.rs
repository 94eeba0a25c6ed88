//! Snapshots of disks, which commits or streams end again.

use serde_json::json;

use super::{Gone, Moving, Operator};
use crate::daemon::disk_name;
use crate::image::Format;

impl Operator {
    /// Puts one or two overlays over a disk. Later they are committed, or get all of the disk's data.
    pub(super) fn snapshot(&mut self, disk: usize) -> Result<(), Gone> {
        if self.world.is_throttled() && self.memory.nodes[disk] == disk_name(disk) {
            // A node of driver throttle names no file for the overlay's header.
            return Ok(());
        }
        let node = self.memory.nodes[disk].clone();
        self.memory.chained = Some(disk);
        self.put_overlay(disk)?;
        self.is_refused("blockdev-del", json!({"node-name": node}))?;
        self.pause(0, 2_000_000);
        self.may_upgrade(4)?;
        let mut between = None;
        if self.random().one_in(2) {
            let middle = self.memory.nodes[disk].clone();
            self.put_overlay(disk)?;
            self.pause(0, 2_000_000);
            between = match self.random().below(3) {
                0 => Some(middle),
                1 => {
                    self.commit_between(disk, &node, &middle)?;
                    None
                }
                _ => {
                    self.stream_to(disk, Some(&node))?;
                    self.succeeds("blockdev-del", json!({"node-name": middle}))?;
                    None
                }
            };
            self.pause(0, 1_000_000);
        }
        let overlay = self.memory.nodes[disk].clone();
        if self.random().one_in(2) {
            self.commit_active(disk, &node)?;
            self.succeeds("blockdev-del", json!({"node-name": overlay}))?;
            if let Some(middle) = between {
                self.succeeds("blockdev-del", json!({"node-name": middle}))?;
            }
        } else {
            self.stream_to(disk, None)?;
            if let Some(middle) = between {
                self.succeeds("blockdev-del", json!({"node-name": middle}))?;
            }
            self.succeeds("blockdev-del", json!({"node-name": node}))?;
            self.world.set_image(disk, self.world.image_of(&overlay));
        }
        self.memory.chained = None;
        self.has_moved();
        Ok(())
    }

    /// Puts an overlay over a disk.
    fn put_overlay(&mut self, disk: usize) -> Result<(), Gone> {
        let (node, overlay) = (self.memory.nodes[disk].clone(), self.name("overlay"));
        let path = self.path(&overlay);
        self.world.name_image(&overlay, &path, Format::Qcow2(65536));
        let snapshot = json!({
            "node-name": node, "snapshot-file": path.display().to_string(),
            "snapshot-node-name": overlay,
        });
        self.succeeds("blockdev-snapshot-sync", snapshot)?;
        self.memory.nodes[disk] = overlay;
        self.world.coverage.snapshots.one();
        Ok(())
    }

    /// Commits all overlays of a disk to the image below, which becomes the disk.
    pub(super) fn commit_active(&mut self, disk: usize, node: &str) -> Result<(), Gone> {
        self.world.moving.set(Some(Moving::Commit));
        let (overlay, job) = (self.memory.nodes[disk].clone(), self.name("commit"));
        let commit =
            json!({"job-id": job, "device": overlay, "auto-dismiss": false, "speed": self.speed()});
        self.succeeds("block-commit", commit)?;
        if !self.is_ready(&job)? {
            self.world.fail(&format!("{job} ends, and no operation has failed"));
        }
        self.pause(0, 500_000);
        self.succeeds("job-complete", json!({"id": job}))?;
        self.conclude(&job)?;
        self.memory.nodes[disk] = node.to_owned();
        self.world.moving.set(None);
        self.world.coverage.commits.one();
        Ok(())
    }

    /// Commits an image between a disk's topmost image and `node`, and removes it.
    fn commit_between(&mut self, disk: usize, node: &str, middle: &str) -> Result<(), Gone> {
        self.world.moving.set(Some(Moving::Commit));
        let (overlay, job) = (self.memory.nodes[disk].clone(), self.name("commit"));
        let commit = json!({
            "job-id": job, "device": overlay, "top-node": middle, "base-node": node,
            "auto-dismiss": false, "speed": self.speed(),
        });
        self.succeeds("block-commit", commit)?;
        self.conclude(&job)?;
        self.succeeds("blockdev-del", json!({"node-name": middle}))?;
        self.world.moving.set(None);
        self.world.coverage.commits_between.one();
        Ok(())
    }

    /// Copies the data of the images below into a disk's topmost image, down to the image `base`, or all.
    pub(super) fn stream_to(&mut self, disk: usize, base: Option<&str>) -> Result<(), Gone> {
        self.world.moving.set(Some(Moving::Stream));
        let (overlay, job) = (self.memory.nodes[disk].clone(), self.name("stream"));
        let mut stream = json!({
            "job-id": job, "device": overlay, "auto-dismiss": false, "speed": self.speed(),
        });
        if let Some(base) = base {
            stream["base-node"] = base.into();
        }
        self.succeeds("block-stream", stream)?;
        self.conclude(&job)?;
        self.world.moving.set(None);
        match base {
            Some(_) => self.world.coverage.streams_between.one(),
            None => self.world.coverage.streams.one(),
        }
        Ok(())
    }

    /// The speed of a job, bytes per second. A slow one takes several lives of a daemon.
    fn speed(&self) -> u64 {
        self.random().pick(&[0, 0, 50_000_000, 200_000_000])
    }

    /// Counts a disk that a job has moved to another image.
    pub(super) fn has_moved(&self) {
        self.world.coverage.moves_hard.add(self.world.is_hard().into());
        self.world.coverage.moves_cut.add(self.world.has_power_cuts().into());
    }
}

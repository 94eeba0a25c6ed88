//! Jobs that copy a disk. The copy must equal the disk at one moment.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use serde_json::{Value as Json, json};

use super::{Gone, Moving, Operator};
use crate::image::Format;
use crate::model::Seen;

/// A node to copy to, and its image.
pub(super) struct Target {
    pub(super) node: String,
    path: PathBuf,
    format: Format,
}

/// A backup that runs, and what the disk was when it began.
struct Begun {
    job: String,
    target: Target,
    seen: Seen,
}

/// How a job has ended.
#[derive(PartialEq, Eq)]
pub(super) enum End {
    Done,
    Failed,
}

impl Operator {
    /// Copies a disk with `blockdev-backup`. The copy has the disk's contents at the moment of the command. Often, several
    /// backups run side by side, which begin at different moments and end in any order.
    pub(super) fn backup(&mut self, disk: usize) -> Result<(), Gone> {
        self.may_upgrade(8)?;
        let most = self.random().pick(&[1, 1, 2, 3]);
        let mut running = Vec::new();
        for _ in 0..most {
            running.extend(self.begin_backup(disk)?);
            self.pause(0, 200_000);
        }
        self.world.coverage.backups_beside.add(u64::from(running.len() > 1));
        while !running.is_empty() {
            let next = self.random().below(running.len() as u64) as usize;
            self.end_backup(disk, running.swap_remove(next))?;
        }
        Ok(())
    }

    /// Begins a backup. `None`: that has failed.
    fn begin_backup(&mut self, disk: usize) -> Result<Option<Begun>, Gone> {
        let Some(target) = self.target(disk, None)? else { return Ok(None) };
        let (source, job) = (self.memory.nodes[disk].clone(), self.name("backup"));
        let look = self.world.begin_look(disk);
        let started = self.tries("blockdev-backup", self.copy(&job, &source, &target.node));
        let seen = self.world.end_look(disk, &look);
        if !started? {
            self.remove(&target)?;
            return Ok(None);
        }
        self.disturb(&job, &source, &target.node)?;
        Ok(Some(Begun { job, target, seen }))
    }

    /// Waits for the end of a backup, and compares the copy with the disk.
    fn end_backup(&mut self, disk: usize, backup: Begun) -> Result<(), Gone> {
        let Begun { job, target, seen } = backup;
        let end = self.conclude(&job)?;
        self.remove(&target)?;
        if end == End::Done {
            self.world.coverage.backups.one();
            let checked = self.contents(&target).and_then(|bytes| seen.check(&bytes));
            checked.unwrap_or_else(|wrong| {
                self.world.fail(&format!("{job} of disk {disk} is wrong: {wrong}"))
            });
        }
        Ok(())
    }

    /// Copies a disk, and later to the same copy what a dirty bitmap has recorded since.
    pub(super) fn incremental(&mut self, disk: usize) -> Result<(), Gone> {
        let Some(target) = self.target(disk, None)? else { return Ok(()) };
        let (source, bitmap) = (self.memory.nodes[disk].clone(), self.name("bitmap"));
        let job = self.name("backup");
        let granularity = self.random().pick(&[512, 4096, 65536]);
        let bitmap_of = json!({"node": source, "name": bitmap});
        let mut add = bitmap_of.clone();
        add["granularity"] = granularity.into();
        let first = self.copy(&job, &source, &target.node);
        let actions = json!({"actions": [
            {"type": "block-dirty-bitmap-add", "data": add},
            {"type": "blockdev-backup", "data": first},
        ]});
        if !self.tries("transaction", actions)? {
            return self.remove(&target);
        }
        let mut end = self.conclude(&job)?;
        self.may_upgrade(3)?;
        self.pause(0, 500_000);
        let (mut seen, job) = (None, self.name("backup"));
        if end == End::Done {
            let mut second = self.copy(&job, &source, &target.node);
            second["sync"] = "incremental".into();
            second["bitmap"] = bitmap.into();
            let look = self.world.begin_look(disk);
            let started = self.tries("blockdev-backup", second);
            seen = Some(self.world.end_look(disk, &look));
            end = match started? {
                true => self.conclude(&job)?,
                false => End::Failed,
            };
        }
        self.succeeds("block-dirty-bitmap-remove", bitmap_of)?;
        self.remove(&target)?;
        let bytes = self.contents(&target);
        let Some(seen) = seen.filter(|_| end == End::Done) else { return Ok(()) };
        self.world.coverage.incrementals.one();
        self.world.coverage.bitmaps_hard.add(self.world.is_hard().into());
        let checked = bytes.and_then(|bytes| seen.check(&bytes));
        checked.unwrap_or_else(|wrong| {
            self.world.fail(&format!("{job} of disk {disk}, by a bitmap, is wrong: {wrong}"))
        });
        Ok(())
    }

    /// Copies a disk with `blockdev-mirror`, whose copy has the contents of the moment of its end. In a mild world,
    /// the copy may take the place of the disk.
    pub(super) fn mirror(&mut self, disk: usize) -> Result<(), Gone> {
        let Some(target) = self.target(disk, None)? else { return Ok(()) };
        let (source, job) = (self.memory.nodes[disk].clone(), self.name("mirror"));
        if !self.tries("blockdev-mirror", self.copy(&job, &source, &target.node))? {
            return self.remove(&target);
        }
        self.world.moving.set(Some(Moving::Mirror));
        self.disturb(&job, &source, &target.node)?;
        if !self.is_ready(&job)? {
            self.conclude(&job)?;
            self.world.moving.set(None);
            return self.remove(&target);
        }
        self.pause(0, 500_000);
        if self.world.may_move() && self.random().one_in(2) {
            self.succeeds("job-complete", json!({"id": job}))?;
            if self.conclude(&job)? == End::Failed {
                self.world.fail(&format!("{job} fails, and no operation has"));
            }
            self.world.coverage.pivots.one();
            self.has_moved();
            self.world.moving.set(None);
            self.memory.nodes[disk] = target.node.clone();
            self.succeeds("blockdev-del", json!({"node-name": source}))?;
            self.world.set_image(disk, self.world.image_of(&target.node));
            return Ok(());
        }
        let look = self.world.begin_look(disk);
        // Without force, a job that is ready ends with a copy.
        let ended = match self.qmp.command("block-job-cancel", json!({"device": job})) {
            Ok(_) => self.conclude(&job),
            Err(Gone) => Err(Gone),
        };
        let seen = self.world.end_look(disk, &look);
        self.world.moving.set(None);
        if ended? == End::Failed {
            return self.remove(&target);
        }
        self.world.coverage.mirrors.one();
        self.remove(&target)?;
        let checked = self.contents(&target).and_then(|bytes| seen.check(&bytes));
        checked.unwrap_or_else(|wrong| {
            self.world.fail(&format!("{job} of disk {disk} is wrong: {wrong}"))
        });
        Ok(())
    }

    /// Makes a node to copy a disk to, with a new image, or with a raw one that has the contents `base`. `None`: that has
    /// failed.
    pub(super) fn target(
        &mut self,
        disk: usize,
        base: Option<&[u8]>,
    ) -> Result<Option<Target>, Gone> {
        let node = self.name("copy");
        let size = self.size(disk)?;
        let path = self.path(&node);
        let format = match base.is_none() && self.random().one_in(3) {
            true => Format::Qcow2(65536),
            false => Format::Raw,
        };
        if format == Format::Raw {
            let file = File::create(&path).expect("a file in memory");
            let made = file.write_all_at(base.unwrap_or_default(), 0);
            made.and_then(|()| file.set_len(size)).expect("a file in memory");
        }
        self.world.name_image(&node, &path, format);
        let filename = path.display().to_string();
        let file = format!("{node}-file");
        let protocol = json!({
            "driver": "file", "node-name": file, "filename": filename, "locking": "off",
        });
        let driver = match format {
            Format::Raw => {
                self.succeeds("blockdev-add", protocol)?;
                "raw"
            }
            Format::Qcow2(_) => {
                let job = self.name("create");
                let options = json!({"driver": "file", "filename": filename, "size": 0});
                self.create(&job, options)?;
                self.succeeds("blockdev-add", protocol)?;
                let job = self.name("create");
                let options = json!({"driver": "qcow2", "file": file, "size": size});
                self.create(&job, options)?;
                "qcow2"
            }
        };
        let add = json!({"driver": driver, "node-name": node, "file": file});
        if !self.tries("blockdev-add", add)? {
            return Ok(None);
        }
        Ok(Some(Target { node, path, format }))
    }

    /// The size of a disk in bytes. The disk may be larger than its user knows, if a daemon was killed before it
    /// answered the operator.
    fn size(&mut self, disk: usize) -> Result<u64, Gone> {
        let nodes = self.succeeds("query-named-block-nodes", json!({"flat": true}))?;
        let name = &self.memory.nodes[disk];
        let node =
            nodes.as_array().and_then(|all| all.iter().find(|one| one["node-name"] == **name));
        let size = node.and_then(|node| node["image"]["virtual-size"].as_u64());
        Ok(size.unwrap_or_else(|| self.world.fail(&format!("node {name} is not listed"))))
    }

    /// The contents of a copy, after its nodes were closed. Removes its image.
    pub(super) fn contents(&self, target: &Target) -> Result<Vec<u8>, String> {
        let bytes = fs::read(&target.path).expect("the image");
        self.world.remove_image(&target.path);
        target.format.contents(bytes)
    }

    fn create(&mut self, job: &str, options: Json) -> Result<(), Gone> {
        self.succeeds("blockdev-create", json!({"job-id": job, "options": options}))?;
        if self.conclude(job)? == End::Failed {
            self.world.fail(&format!("{job} fails"));
        }
        Ok(())
    }

    /// Closes the target's nodes.
    pub(super) fn remove(&mut self, target: &Target) -> Result<(), Gone> {
        self.succeeds("blockdev-del", json!({"node-name": target.node}))?;
        self.succeeds("blockdev-del", json!({"node-name": format!("{}-file", target.node)}))?;
        Ok(())
    }

    /// The arguments of a job that copies.
    pub(super) fn copy(&self, job: &str, source: &str, target: &str) -> Json {
        let speed = self.random().pick(&[0, 0, 20_000_000, 200_000_000]);
        json!({
            "job-id": job, "device": source, "target": target, "sync": "full", "speed": speed,
            "auto-finalize": false, "auto-dismiss": false,
        })
    }

    /// Disturbs a job, or tries what it does not allow, while it may run.
    fn disturb(&mut self, job: &str, source: &str, target: &str) -> Result<(), Gone> {
        for _ in 0..self.random().below(4) {
            self.pause(0, 200_000);
            match self.random().below(4) {
                0 => {
                    let paused = self.qmp.command("job-pause", json!({"id": job}))?.is_ok();
                    self.pause(0, 200_000);
                    if paused {
                        // An error may have ended the job meanwhile.
                        let _ = self.qmp.command("job-resume", json!({"id": job}))?;
                    }
                }
                1 => {
                    // Fails if the job has ended.
                    let speed = json!({"device": job, "speed": 0});
                    let _ = self.qmp.command("block-job-set-speed", speed)?;
                }
                // The job holds the nodes until it is finalized. An error would end it before.
                _ if self.world.never_fails() => {
                    self.try_refused_by_job(job, source, target)?;
                }
                _ => self.pause(0, 200_000),
            }
        }
        Ok(())
    }

    /// The status of a job, and its error.
    fn status(&mut self, job: &str) -> Result<(String, Option<String>), Gone> {
        let jobs = self.succeeds("query-jobs", json!({}))?;
        let found = jobs.as_array().and_then(|all| all.iter().find(|one| one["id"] == *job));
        let Some(found) = found else { self.world.fail(&format!("{job} is not listed")) };
        let error = found["error"].as_str().map(str::to_owned);
        Ok((found["status"].as_str().unwrap_or_default().to_owned(), error))
    }

    /// Waits until a job has this status or has ended.
    fn wait_for(&mut self, job: &str, wanted: &str) -> Result<(String, Option<String>), Gone> {
        let until = self.world.machine.now_ns() + PATIENCE_NS;
        let mut most = 100_000;
        loop {
            let (status, error) = self.status(job)?;
            match status.as_str() {
                "paused" | "standby" => drop(self.qmp.command("job-resume", json!({"id": job}))?),
                "pending" => drop(self.qmp.command("job-finalize", json!({"id": job}))?),
                "concluded" => return Ok((status, error)),
                status if status == wanted => return Ok((wanted.to_owned(), error)),
                _ if self.world.machine.now_ns() > until => {
                    self.world.fail(&format!("{job} does not get {wanted}: it is {status}"))
                }
                _ => {}
            }
            self.pause(20_000, most);
            most = (most * 2).min(10_000_000);
        }
    }

    /// Waits until a job is ready to be completed. Returns `false` if it has ended.
    pub(super) fn is_ready(&mut self, job: &str) -> Result<bool, Gone> {
        let (status, error) = self.wait_for(job, "ready")?;
        if status != "ready" && !self.world.has_failed() {
            self.world.fail(&format!("{job} ends, and no operation has failed: {error:?}"));
        }
        Ok(status == "ready")
    }

    /// Waits until a job has ended, and dismisses it.
    pub(super) fn conclude(&mut self, job: &str) -> Result<End, Gone> {
        let (_, error) = self.wait_for(job, "concluded")?;
        self.succeeds("job-dismiss", json!({"id": job}))?;
        self.world.coverage.jobs.one();
        match error {
            None => Ok(End::Done),
            Some(_) if self.world.has_failed() => Ok(End::Failed),
            Some(error) => {
                self.world.fail(&format!("{job} fails, and no operation has failed: {error}"))
            }
        }
    }
}

/// How long a job may take, nanoseconds.
const PATIENCE_NS: u64 = 20_000_000_000;

//! Persistent bitmaps that outlive daemons: each begins with a full backup, and incremental backups follow.

use serde_json::{Value as Json, json};

use super::copies::End;
use super::{Gone, Operator};
use crate::lasting::Lasting;

impl Operator {
    /// Makes an incremental backup by the persistent bitmap of a disk. Without one, adds a bitmap with a full backup.
    pub(super) fn keep_bitmap(&mut self, disk: usize) -> Result<(), Gone> {
        let node = self.memory.nodes[disk].clone();
        if !self.world.may_keep_bitmaps(&node) {
            return Ok(());
        }
        self.may_upgrade(8)?;
        let lasting = self.world.lasting.borrow_mut()[disk].take();
        match lasting {
            Some(lasting) if lasting.node == node => self.use_bitmap(disk, lasting),
            // That node is closed, and its bitmap with it.
            _ => self.begin_bitmap(disk, node),
        }
    }

    /// Often makes backups by bitmaps that have outlived a daemon.
    pub(super) fn use_restarted(&mut self) -> Result<(), Gone> {
        for disk in 0..self.world.disks() {
            let is_one = |lasting: &Lasting| lasting.restarted;
            let has_one = self.world.lasting.borrow()[disk].as_ref().is_some_and(is_one);
            if has_one && self.random().one_in(2) {
                self.keep_bitmap(disk)?;
            }
        }
        Ok(())
    }

    fn begin_bitmap(&mut self, disk: usize, node: String) -> Result<(), Gone> {
        let Some(target) = self.target(disk, None)? else { return Ok(()) };
        let (name, job) = (self.name("lasting"), self.name("backup"));
        let granularity = self.random().pick(&[512, 4096, 65536]);
        let full = self.copy(&job, &node, &target.node);
        let add = json!({
            "node": node, "name": name, "granularity": granularity, "persistent": true,
        });
        let actions = json!({"actions": [
            {"type": "block-dirty-bitmap-add", "data": add},
            {"type": "blockdev-backup", "data": full},
        ]});
        self.succeeds("transaction", actions)?;
        let ended = self.conclude(&job)?;
        self.remove(&target)?;
        let bytes = self.contents(&target);
        if ended == End::Failed {
            return self.forget_bitmap(&node, &name);
        }
        let base = bytes.unwrap_or_else(|wrong| self.world.fail(&format!("{job}: {wrong}")));
        let lasting = Lasting { node, name, base, stored: false, restarted: false, cut: false };
        self.world.lasting.borrow_mut()[disk] = Some(lasting);
        self.world.coverage.lasting.one();
        Ok(())
    }

    fn use_bitmap(&mut self, disk: usize, lasting: Lasting) -> Result<(), Gone> {
        let (node, name) = (lasting.node.clone(), lasting.name.clone());
        let (base, restarted, cut) = (lasting.base.clone(), lasting.restarted, lasting.cut);
        // A bitmap stays right if the daemon is killed meanwhile.
        self.world.lasting.borrow_mut()[disk] = Some(lasting);
        if self.random().one_in(8) {
            self.world.lasting.borrow_mut()[disk] = None;
            return self.forget_bitmap(&node, &name);
        }
        let Some(target) = self.target(disk, Some(&base))? else { return Ok(()) };
        let job = self.name("backup");
        let mut again = self.copy(&job, &node, &target.node);
        again["sync"] = "incremental".into();
        again["bitmap"] = name.clone().into();
        let look = self.world.begin_look(disk);
        let started = self.qmp.command("blockdev-backup", again.clone());
        let seen = self.world.end_look(disk, &look);
        if let Err(error) = started? {
            self.world.fail(&format!("blockdev-backup {again} fails: {error}"));
        }
        let ended = self.conclude(&job)?;
        self.remove(&target)?;
        let bytes = self.contents(&target);
        if ended == End::Failed {
            return Ok(());
        }
        let checked = bytes.and_then(|bytes| seen.check(&bytes).map(|()| bytes));
        let base = checked.unwrap_or_else(|wrong| {
            self.world.fail(&format!("{job} of disk {disk}, by {name}, is wrong: {wrong}"))
        });
        let coverage = &self.world.coverage;
        coverage.lasting_used.one();
        coverage.lasting_survived.add(restarted.into());
        coverage.lasting_survived_cut.add(cut.into());
        if let Some(lasting) = &mut self.world.lasting.borrow_mut()[disk] {
            (lasting.base, lasting.restarted, lasting.cut) = (base, false, false);
        }
        Ok(())
    }

    fn forget_bitmap(&mut self, node: &str, name: &str) -> Result<(), Gone> {
        self.succeeds("block-dirty-bitmap-remove", json!({"node": node, "name": name}))?;
        Ok(())
    }

    /// After the end of a daemon, looks at what the next one has of the persistent bitmaps. An inconsistent one must be
    /// refused. Those without a backup are removed.
    pub(super) fn look_at_bitmaps(&mut self) -> Result<(), Gone> {
        let nodes = self.succeeds("query-named-block-nodes", json!({"flat": true}))?;
        for disk in 0..self.world.disks() {
            let serving = self.memory.nodes[disk].clone();
            let of_node = nodes.as_array().and_then(|all| {
                let mut all = all.iter();
                all.find(|node| node["node-name"] == *serving)
            });
            let bitmaps = of_node.and_then(|node| node["dirty-bitmaps"].as_array());
            let found: Vec<_> = bitmaps.into_iter().flatten().collect();
            let known = self.world.lasting.borrow_mut()[disk].take();
            let known = known.filter(|known| known.node == serving);
            if let Some(mut known) = known {
                let bitmap = found.iter().find(|bitmap| bitmap["name"] == *known.name);
                let is_right = bitmap.is_some_and(|bitmap| bitmap["inconsistent"] != true);
                if bitmap.is_none() && known.stored {
                    self.world.fail(&format!("{} was stored, and is gone", known.name));
                }
                let cut = self.world.is_cut.get();
                self.world.coverage.lasting_cut.add(cut.into());
                known.cut |= cut;
                known.restarted = true;
                if is_right {
                    self.world.lasting.borrow_mut()[disk] = Some(known);
                }
            }
            for bitmap in found {
                let name = bitmap["name"].as_str().unwrap_or_default().to_owned();
                let is_known = self.world.lasting.borrow()[disk]
                    .as_ref()
                    .is_some_and(|known| known.name == name);
                if is_known {
                    continue;
                }
                if bitmap["inconsistent"] == true {
                    let size = of_node.map(|node| node["image"]["virtual-size"].clone());
                    self.is_refused_for_backups(&serving, &name, size.unwrap_or_default())?;
                }
                self.forget_bitmap(&serving, &name)?;
            }
        }
        Ok(())
    }

    fn is_refused_for_backups(&mut self, node: &str, name: &str, size: Json) -> Result<(), Gone> {
        let target = self.name("null");
        let add = json!({"driver": "null-co", "node-name": target, "size": size});
        self.succeeds("blockdev-add", add)?;
        let job = self.name("backup");
        let mut backup = self.copy(&job, node, &target);
        backup["sync"] = "incremental".into();
        backup["bitmap"] = name.into();
        self.is_refused("blockdev-backup", backup)?;
        self.world.coverage.lasting_inconsistent.one();
        self.succeeds("blockdev-del", json!({"node-name": target}))?;
        Ok(())
    }
}

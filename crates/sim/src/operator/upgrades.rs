//! Live upgrades: the daemon is replaced, and everything in it has to be in the new one.

use serde_json::{Value as Json, json};

use super::{Gone, Operator, Qmp};
use crate::daemon::GROUP;

/// The configuration of a daemon, by kind and name.
pub(super) type Inventory = Vec<(String, Json)>;

impl Operator {
    /// Replaces the daemon by a new one, once in `n` times.
    pub(super) fn may_upgrade(&mut self, n: u64) -> Result<(), Gone> {
        if self.world.keeps_state() && self.random().one_in(n) {
            self.rest()?;
        }
        if !self.random().one_in(n) {
            return Ok(());
        }
        let before = self.inventory()?;
        let (kills, disturbed) = (self.world.kills(), self.world.disturbed_upgrades());
        match self.qmp.command("x-upgrade", json!({})) {
            Ok(Err(_)) if self.world.has_failed() => return Ok(()),
            Ok(Err(_)) if self.world.disturbed_upgrades() != disturbed => {}
            Ok(Err(error)) => self.world.fail(&format!("x-upgrade fails: {error}")),
            // The old daemon leaves, or was killed. The other one may serve.
            Ok(Ok(_)) | Err(Gone) => {
                if self.world.kills() != kills {
                    return Err(Gone);
                }
                self.memory.known = None;
                self.qmp = Qmp::connect(&self.world)?;
            }
        }
        let after = self.inventory()?;
        if let Some(wrong) = difference(&before, &after) {
            self.world.fail(&format!("after an upgrade, {wrong}"));
        }
        Ok(())
    }

    /// What has to be the same before and after an upgrade, by kind and name.
    pub(super) fn inventory(&mut self) -> Result<Inventory, Gone> {
        let mut all = Vec::new();
        let nodes = self.succeeds("query-named-block-nodes", json!({"flat": true}))?;
        for node in nodes.as_array().into_iter().flatten() {
            let name = node["node-name"].as_str().unwrap_or_default();
            // Names that the daemon has chosen may be others.
            if name.starts_with('#') {
                continue;
            }
            let own = json!([node["drv"], node["ro"], node["active"], node["file"]]);
            all.push((format!("node {name}"), own));
            // A file below an image grows with it, and keeps the size that it was opened with.
            if !name.ends_with("-file") {
                all.push((format!("size of {name}"), node["image"]["virtual-size"].clone()));
            }
            for bitmap in node["dirty-bitmaps"].as_array().into_iter().flatten() {
                let key = format!("bitmap {} of {name}", bitmap["name"]);
                let own = ["granularity", "recording", "persistent", "count"];
                all.push((key, own.iter().map(|name| bitmap[*name].clone()).collect()));
            }
        }
        let exports = self.succeeds("query-block-exports", json!({}))?;
        for export in exports.as_array().into_iter().flatten() {
            all.push((format!("export {}", export["id"]), export.clone()));
        }
        let threads = self.succeeds("query-iothreads", json!({}))?;
        for thread in threads.as_array().into_iter().flatten() {
            all.push((format!("thread {}", thread["id"]), thread["poll-max-ns"].clone()));
        }
        let limits = json!({"path": format!("/objects/{GROUP}"), "property": "limits"});
        all.push(("limits".to_owned(), self.succeeds("qom-get", limits)?));
        Ok(all)
    }
}

/// The first difference of two inventories. Guests write to the disks meanwhile, so a bitmap may get more bits.
pub(super) fn difference(before: &[(String, Json)], after: &[(String, Json)]) -> Option<String> {
    let find = |all: &[(String, Json)], key: &str| {
        all.iter().find(|(other, _)| other == key).map(|(_, own)| own.clone())
    };
    for (key, was) in before {
        let Some(is) = find(after, key) else { return Some(format!("{key} is missing")) };
        let is_same = match (key.starts_with("bitmap "), was.as_array(), is.as_array()) {
            (true, Some(was), Some(is)) => {
                let is_recording = was[1] == true;
                let (some, more) = (was[3].as_u64(), is[3].as_u64());
                was[..3] == is[..3] && (some == more || is_recording && some < more)
            }
            _ => *was == is,
        };
        if !is_same {
            return Some(format!("{key} is {is}, and was {was}"));
        }
    }
    let more = after.iter().find(|(key, _)| find(before, key).is_none());
    more.map(|(key, _)| format!("there is {key}"))
}

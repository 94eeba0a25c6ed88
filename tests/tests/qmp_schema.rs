//! `query-qmp-schema`: what ringmill says of itself, beside what qemu-storage-daemon says.

use std::collections::BTreeSet;

use integration::schema::{Schema, list, text};
use integration::{Qmp, Scratch, ServerCommand, start_qsd};
use serde_json::{Value, json};

/// What of ours QSD does not have, by path: options and words of our own, and those that the oldest
/// QSD which this is compared with (10.0) does not have yet.
const OURS: &[&str] = &[
    "blockdev-add/copy-on-read/as-cache",
    "blockdev-add/copy-on-read/max-size",
    "blockdev-add/qcow2/snapshot",
    "blockdev-backup/on-cbw-error",
    "blockdev-mirror/target-is-zero",
    "object-add/iothread/poll-goal",
    "object-add/iothread/poll-policy",
    "object-add/iothread/poll-weight",
    "object-add/iothread/cpu-affinity",
    "block-export-add/iothread:array",
    "block-export-add/type=vhost-user-scsi",
    "block-export-add/type=vfio-user-ahci",
    "block-export-add/type=vfio-user-nvme",
    "block-export-add/type=ublk",
    "query-block-exports-> []/device",
    "block-export-add/stall-timeout-ms",
    "block-export-add/vhost-user-blk/max-memory",
    "query-named-block-nodes-> []/image/format-specific/qcow2/data/x-bitmaps-left-out",
    "query-named-block-nodes-> []/image/x-snapshots-left-out",
    "query-named-block-nodes-> []/x-dirty-bitmaps-left-out",
    "block-export-add/vhost-user-blk/pin-memory",
    "block-export-add/vhost-user-blk/rerror",
    "block-export-add/vhost-user-blk/werror",
    "block-export-add/nbd/rerror",
    "block-export-add/nbd/werror",
    "blockdev-add/blkdebug/inject-error[]/delay-ns",
    "blockdev-add/blkdebug/inject-error[]/sectors",
    "blockdev-add/blkdebug/inject-error[]/count",
    "blockdev-add/blkdebug/inject-error[]/probability-ppm",
    "blockdev-add/blkdebug/inject-error[]/effect",
    "blockdev-add/blkdebug/seed",
    "blockdev-add/qcow2/backing-changed",
    "blockdev-add/http/force-range",
    "blockdev-add/http/open-timeout",
    "blockdev-add/http/reconnect-delay",
    "blockdev-add/https/force-range",
    "blockdev-add/https/open-timeout",
    "blockdev-add/https/reconnect-delay",
    "blockdev-add/driver=s3",
    "blockdev-add/blkdebug/take-child-perms[]",
    "query-block-exports-> []/io-status",
    "query-block-exports-> []/drives",
    "query-block-exports-> []/luns",
    "query-block-exports-> []/type=vhost-user-scsi",
    "query-block-exports-> []/namespaces",
    "query-block-exports-> []/type=vfio-user-ahci",
    "query-block-exports-> []/type=vfio-user-nvme",
    "query-named-block-nodes-> []/children",
    "query-named-block-nodes-> []/image/limits",
];

fn schema(qmp: &mut Qmp) -> Schema {
    Schema::new(&qmp.execute("query-qmp-schema", json!({})))
}

/// Two schemas, and what the first has that does not fit the second.
struct Comparison<'a> {
    ours: &'a Schema,
    theirs: &'a Schema,
    compared: BTreeSet<(String, String)>,
    found: Vec<String>,
}

impl Comparison<'_> {
    /// That whatever is of our type is of theirs.
    fn fits(&mut self, ours: &str, theirs: &str, at: &str) {
        if theirs == "any" || !self.compared.insert((ours.to_owned(), theirs.to_owned())) {
            return;
        }
        let (our, their) = (self.ours.get(ours), self.theirs.get(theirs));
        let (our_kind, their_kind) = (text(our, "meta-type"), text(their, "meta-type"));
        match (our_kind, their_kind) {
            ("builtin", "builtin") if ours == theirs => {}
            // Ours does not say what it looks like: an image within an image.
            ("builtin", _) if ours == "any" => {}
            ("enum", "enum") => {
                let known: Vec<&Value> = list(their, "values").collect();
                for word in list(our, "values").filter(|word| !known.contains(word)) {
                    self.found.push(format!("{at}={}", word.as_str().unwrap_or_default()));
                }
            }
            // Ours says which words there are.
            ("enum", "builtin") if theirs == "str" => {}
            ("array", "array") => {
                let (our, their) = (text(our, "element-type"), text(their, "element-type"));
                self.fits(our, their, &format!("{at}[]"));
            }
            ("alternate", _) => {
                for branch in list(our, "members") {
                    self.branch(text(branch, "type"), theirs, at);
                }
            }
            (_, "alternate") => self.branch(ours, theirs, at),
            ("object", "object") => self.objects(our, their, at),
            _ => self.found.push(format!("{at}: {our_kind} {ours}, not {their_kind} {theirs}")),
        }
    }

    /// That one of theirs is what ours is in JSON.
    fn branch(&mut self, ours: &str, theirs: &str, at: &str) {
        let json_type = |schema: &Schema, name: &str| match text(schema.get(name), "meta-type") {
            "builtin" => name.to_owned(),
            "enum" => "str".to_owned(),
            other => other.to_owned(),
        };
        let kind = json_type(self.ours, ours);
        let their = self.theirs.get(theirs);
        let same = match text(their, "meta-type") {
            "alternate" => list(their, "members")
                .map(|branch| text(branch, "type"))
                .find(|name| json_type(self.theirs, name) == kind),
            _ => Some(theirs).filter(|name| json_type(self.theirs, name) == kind),
        };
        match same {
            Some(same) => self.fits(ours, same, at),
            None => self.found.push(format!("{at}:{kind}")),
        }
    }

    fn objects(&mut self, ours: &Value, theirs: &Value, at: &str) {
        let their_variant = |case: &Value| {
            let found = list(theirs, "variants").find(|variant| variant["case"] == *case);
            found.map(|variant| self.theirs.get(text(variant, "type")))
        };
        let mut all = vec![theirs];
        if ours.get("tag").is_none() {
            // What theirs has by a tag may be optional in ours.
            all.extend(list(theirs, "variants").map(|case| self.theirs.get(text(case, "type"))));
        }
        let mut pairs: Vec<(String, &Value, Vec<&Value>)> = vec![(at.to_owned(), ours, all)];
        for variant in list(ours, "variants") {
            let Some(theirs_too) = their_variant(&variant["case"]) else {
                // The word of the tag is found, too, unless it is one of theirs without members.
                continue;
            };
            let at = format!("{at}/{}", text(variant, "case"));
            pairs.push((at, self.ours.get(text(variant, "type")), vec![theirs, theirs_too]));
        }
        for (at, ours, theirs) in pairs {
            for member in list(ours, "members") {
                let name = text(member, "name");
                let at = format!("{at}/{name}");
                let is_in = |theirs: &Value| list(theirs, "members").any(|m| m["name"] == *name);
                if let [common, own] = theirs[..]
                    && is_in(common)
                    && !is_in(own)
                {
                    self.found.push(format!("{at}: not a member of this variant alone"));
                }
                let same = theirs
                    .iter()
                    .flat_map(|theirs| list(theirs, "members"))
                    .find(|theirs| theirs["name"] == *name);
                match same {
                    Some(same) => self.fits(text(member, "type"), text(same, "type"), &at),
                    None => self.found.push(at),
                }
            }
        }
    }
}

#[test]
fn the_schema_is_compatible_with_qemu_storage_daemon() {
    let (scratch, qsd) = (Scratch::new(), Scratch::new());
    let (mut child, mut qmp) = start_qsd(&qsd.path("qsd.sock"));
    let theirs = schema(&mut qmp);
    child.kill().and_then(|()| child.wait()).expect("our child");
    let server = ServerCommand::new(&scratch).monitor("qmp").start();
    let ours = schema(&mut Qmp::connect(&server.socket("qmp")));
    server.stop();

    let known: BTreeSet<&str> = theirs.commands().collect();
    let shared: Vec<&str> = ours.commands().filter(|name| known.contains(name)).collect();
    assert!(shared.len() >= 14, "{shared:?}");
    let mut comparison =
        Comparison { ours: &ours, theirs: &theirs, compared: BTreeSet::new(), found: Vec::new() };
    for name in shared {
        let (our, their) = (ours.get(name), theirs.get(name));
        comparison.fits(text(our, "arg-type"), text(their, "arg-type"), name);
        // `query-qmp-schema` describes itself by a union with as many types as there are meta-types.
        if name != "query-qmp-schema" {
            let at = format!("{name}-> ");
            comparison.fits(text(our, "ret-type"), text(their, "ret-type"), &at);
        }
    }
    // What follows a colon names types by numbers, which differ from version to version.
    comparison.found.retain(|at| !OURS.contains(&at.split(": ").next().unwrap_or(at)));
    assert!(comparison.found.is_empty(), "not in QSD's schema:\n{}", comparison.found.join("\n"));
}

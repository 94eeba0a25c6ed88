//! A valid call for each command, and for each value of a tag.

use serde_json::{Value, json};

/// A valid call, with the commands before and after it.
pub(super) struct Call {
    pub(super) command: &'static str,
    pub(super) arguments: Value,
    /// Only members whose path has this prefix are varied.
    pub(super) below: &'static str,
    pub(super) before: Vec<(&'static str, Value)>,
    pub(super) after: Vec<(&'static str, Value)>,
    /// Part of the expected error, for a device that this machine may lack.
    pub(super) refused: Option<String>,
}

/// Waits until all exports have ended.
pub(super) const GONE: &str = "(exports end)";
/// Waits until a job has a status: `{"id": …, "status": …}`.
pub(super) const STATUS: &str = "(a job's status)";
/// Ends all jobs. No job may fail.
pub(super) const END_JOBS: &str = "(jobs end)";

/// Returns a call without commands before or after it.
fn call(command: &'static str, arguments: Value) -> Call {
    Call { command, arguments, below: "", before: Vec::new(), after: Vec::new(), refused: None }
}

impl Call {
    fn before(mut self, command: &'static str, arguments: Value) -> Self {
        self.before.push((command, arguments));
        self
    }

    fn after(mut self, command: &'static str, arguments: Value) -> Self {
        self.after.push((command, arguments));
        self
    }

    fn below(self, below: &'static str) -> Self {
        Call { below, ..self }
    }
}

/// Drivers whose nodes this machine may not have.
pub(super) const NOT_REOPENED: [&str; 3] = ["host_device", "https", "rbd"];

/// Returns the call that reopens the node of another call, with the same options.
fn reopened(added: &Call) -> Call {
    let driver = added.arguments["driver"].as_str().unwrap_or_default();
    // As QSD has it.
    let never = ["copy-on-read", "copy-before-write", "snapshot-access"].contains(&driver);
    let mut before = added.before.clone();
    before.push((added.command, added.arguments.clone()));
    Call {
        before,
        after: added.after.clone(),
        refused: never.then(|| "does not support reopening files".to_owned()),
        ..call("blockdev-reopen", json!({"options": [added.arguments]}))
    }
}

/// Returns the calls. `World` makes what they name.
pub(super) fn calls(dir: &str, tcp_port: u16, web_port: u16) -> Vec<Call> {
    let path = |name: &str| format!("{dir}/{name}");
    let node = |driver: &str, rest: Value| {
        let mut arguments = json!({"driver": driver, "node-name": "n"});
        merge(&mut arguments, &rest);
        call("blockdev-add", arguments).after("blockdev-del", json!({"node-name": "n"}))
    };
    let file = |name: &str, file: &str| json!({"driver": "file", "node-name": name, "filename": path(file)});
    let qcow2 = json!({
        "file": {"driver": "file", "filename": path("disk.qcow2")},
        "data-file": {"driver": "file", "filename": path("disk.data")},
    });
    let encrypted = json!({
        "file": {"driver": "file", "filename": path("secret.qcow2")},
        "encrypt": {"format": "luks", "key-secret": "sec0"},
    });
    let unix = json!({"export": "disk", "server": {"type": "unix", "path": path("other.sock")}});
    let tcp = json!({"type": "inet", "host": "localhost", "port": tcp_port.to_string()});
    // Port 1 of this machine has no server, and a kernel without vsock has no ports.
    let vsock = json!({"type": "vsock", "cid": "1", "port": "1"});
    let mut vsock =
        node("nbd", json!({"export": "disk", "server": vsock})).below("blockdev-add/nbd/server");
    vsock.after.clear();
    vsock.refused = Some("Failed to connect".into());
    // The inherited socket listens.
    let fd = json!({"type": "fd", "str": "0"});
    let mut fd =
        node("nbd", json!({"export": "disk", "server": fd})).below("blockdev-add/nbd/server/fd");
    fd.after.clear();
    fd.refused = Some("is not a connected stream socket".into());
    let mut device = node("host_device", json!({"filename": path("disk.img")}));
    device.after.clear();
    // The options are accepted, and the file is refused: the machine need not have a device.
    device.refused = Some("requires".into());
    let monitor = json!({"host": "localhost", "port": "3300"});
    let location = json!({"pool": "rbd", "image": "disk", "server": [monitor]});
    let mut rbd = node("rbd", location.clone());
    rbd.after.clear();
    // As above: the daemon has not loaded the library.
    rbd.refused = Some("Ceph's library is not loaded".into());
    let url = |scheme: &str| format!("{scheme}://127.0.0.1:{web_port}/disk.img");
    let mut https = node("https", json!({"url": url("https"), "read-only": true}));
    https.after.clear();
    // The web server has no TLS.
    https.refused = Some("Could not open 'https://".into());
    let mut all = vec![
        device,
        rbd,
        https,
        node("http", json!({"url": url("http"), "read-only": true})),
        // The web server serves a folder as a bucket, and asks for no key.
        node(
            "s3",
            json!({"bucket": "bucket", "key": "disk.img", "read-only": true, "access-key": "anything",
                "secret-key-secret": "sec0", "endpoint": format!("http://127.0.0.1:{web_port}")}),
        ),
        node("file", json!({"filename": path("disk.img")})),
        node("raw", json!({"file": "d0"})),
        node("null-co", json!({})),
        node("null-aio", json!({})),
        node("throttle", json!({"throttle-group": "g0", "file": "d0"})),
        node("blkdebug", json!({"image": "d0"})),
        node(
            "compress",
            json!({"file": {"driver": "qcow2", "file": {"driver": "file", "filename": path("packed.qcow2")}}}),
        )
        .before(
            "blockdev-add",
            json!({"driver": "qcow2", "node-name": "plain",
                "file": {"driver": "file", "filename": path("plain.qcow2")}}),
        )
        .after("blockdev-del", json!({"node-name": "plain"})),
        node("preallocate", json!({"file": "d0"})),
        node("copy-on-read", json!({"file": "d0"})),
        node("copy-before-write", json!({"file": "d0", "target": "d1"}))
            .before("block-dirty-bitmap-add", json!({"node": "d0", "name": "anything"}))
            .after("block-dirty-bitmap-remove", json!({"node": "d0", "name": "anything"})),
        node(
            "snapshot-access",
            json!({"file": {"driver": "copy-before-write", "file": "d0", "target": "d1"}}),
        )
        .before(
            "blockdev-add",
            json!({"driver": "copy-before-write", "node-name": "kept", "file": "d0", "target": "d1"}),
        )
        .after("blockdev-del", json!({"node-name": "kept"})),
        node(
            "luks",
            json!({"file": {"driver": "file", "filename": path("disk.luks")}, "key-secret": "sec0"}),
        )
        .before("blockdev-add", file("encrypted", "file.luks"))
        .before("blockdev-add", file("header", "header.luks"))
        .after("blockdev-del", json!({"node-name": "encrypted"}))
        .after("blockdev-del", json!({"node-name": "header"})),
        vsock,
        fd,
        node("nbd", unix),
        node("nbd", json!({"export": "disk", "server": tcp})).below("blockdev-add/nbd/server"),
        node("qcow2", encrypted).below("blockdev-add/qcow2/encrypt"),
        node("qcow2", qcow2)
            .before("blockdev-add", file("data", "copy.data"))
            .before("blockdev-add", file("image", "copy.qcow2"))
            .after("blockdev-del", json!({"node-name": "image"}))
            .after("blockdev-del", json!({"node-name": "data"})),
    ];

    let reopened: Vec<Call> =
        all.iter().filter(|call| call.refused.is_none()).map(reopened).collect();
    all.extend(reopened);

    let export = |kind: &str, rest: Value| {
        let mut arguments = json!({"type": kind, "id": "e", "node-name": "d0"});
        merge(&mut arguments, &rest);
        call("block-export-add", arguments)
            .after("block-export-del", json!({"id": "e"}))
            .after(GONE, json!({}))
    };
    let addr = json!({"addr": {"type": "unix", "path": path("e.sock")}});
    let inherited = json!({"addr": {"type": "fd", "str": "0"}});
    let server = json!({"addr": {"type": "unix", "data": {"path": path("own.sock")}}});
    for (kind, below) in [
        ("vhost-user-blk", "block-export-add/vhost-user-blk/addr/fd"),
        ("vhost-user-scsi", "block-export-add/vhost-user-scsi/addr/fd"),
        ("vfio-user-ahci", "block-export-add/vfio-user-ahci/addr/fd"),
        ("vfio-user-nvme", "block-export-add/vfio-user-nvme/addr/fd"),
    ] {
        all.push(export(kind, addr.clone()));
        all.push(export(kind, inherited.clone()).below(below));
    }
    all.push(export("fuse", json!({"mountpoint": path("mount")})));
    all.push(export("ublk", json!({"dev-id": 900_000})));
    all.push(export("vduse-blk", json!({"name": "e"})));
    // A bitmap that clients of an export for reading can ask for.
    let shown = json!({"node": "d0", "name": "anything", "disabled": true});
    let hidden = json!({"node": "d0", "name": "anything"});
    all.push(
        export("nbd", json!({}))
            .before("nbd-server-start", server.clone())
            .before("block-dirty-bitmap-add", shown.clone())
            .after("nbd-server-stop", json!({}))
            .after("block-dirty-bitmap-remove", hidden.clone()),
    );
    let start = |addr: Value, below| {
        call("nbd-server-start", json!({"addr": addr}))
            .after("nbd-server-stop", json!({}))
            .below(below)
    };
    all.push(start(server["addr"].clone(), ""));
    let inet = json!({"type": "inet", "data": {"host": "localhost", "port": "0"}});
    all.push(start(inet, "nbd-server-start/addr"));
    let vsock = json!({"type": "vsock", "data": {"cid": "4294967295", "port": "10809"}});
    all.push(start(vsock, "nbd-server-start/addr/vsock"));
    let fd = json!({"type": "fd", "data": {"str": "0"}});
    all.push(start(fd, "nbd-server-start/addr/fd"));
    let add = || {
        call("nbd-server-add", json!({"device": "d0", "name": "anything"}))
            .before("nbd-server-start", server.clone())
    };
    all.push(
        add()
            .before("block-dirty-bitmap-add", shown)
            .after("nbd-server-stop", json!({}))
            .after(GONE, json!({}))
            .after("block-dirty-bitmap-remove", hidden),
    );
    let remove = add();
    all.push(
        call("nbd-server-remove", json!({"name": "anything"}))
            .before("nbd-server-start", server.clone())
            .before("nbd-server-add", remove.arguments)
            .after(GONE, json!({}))
            .after("nbd-server-stop", json!({})),
    );
    all.push(
        call("block-latency-histogram-set", json!({"id": "e", "boundaries": [10, 100]}))
            .before("block-export-add", export("vhost-user-blk", addr.clone()).arguments)
            .after("block-export-del", json!({"id": "e"}))
            .after(GONE, json!({})),
    );
    all.push(
        call("block-export-del", json!({"id": "e"}))
            .before("block-export-add", export("vhost-user-blk", addr.clone()).arguments)
            .after(GONE, json!({})),
    );
    all.push(
        call("x-block-export-resume", json!({"id": "e"}))
            .before("block-export-add", export("vhost-user-blk", addr).arguments)
            .after("block-export-del", json!({"id": "e"}))
            .after(GONE, json!({})),
    );

    let object = |kind: &str, rest: Value| {
        let mut arguments = json!({"qom-type": kind, "id": "o"});
        merge(&mut arguments, &rest);
        call("object-add", arguments).after("object-del", json!({"id": "o"}))
    };
    all.extend([
        object("iothread", json!({})),
        object("secret", json!({"data": "password"})),
        object("throttle-group", json!({})),
        object("authz-list", json!({})),
        object("authz-simple", json!({"identity": "CN=x"})),
        object("tls-creds-x509", json!({"dir": path("creds"), "endpoint": "server"})),
    ]);
    let added = object("throttle-group", json!({})).arguments;
    let property = json!({"path": "/objects/io0", "property": "poll-max-ns"});
    let mut changed = property.clone();
    merge(&mut changed, &json!({"value": 0}));
    all.extend([
        call("object-del", json!({"id": "o"})).before("object-add", added),
        call("qom-list", json!({"path": "/objects/io0"})),
        call("qom-list-types", json!({})),
        call("qom-get", property),
        call("qom-set", changed),
    ]);

    let job = |command, rest: Value| {
        let mut arguments = json!({"job-id": "j", "device": "d0", "target": "d1", "sync": "full"});
        merge(&mut arguments, &rest);
        call(command, arguments).after(END_JOBS, json!({}))
    };
    all.extend(job_verbs());
    all.push(
        job("blockdev-backup", json!({"auto-dismiss": false}))
            .before("block-dirty-bitmap-add", json!({"node": "d0", "name": "anything"}))
            .after("block-dirty-bitmap-remove", json!({"node": "d0", "name": "anything"})),
    );
    all.push(job("blockdev-mirror", json!({"auto-dismiss": false})));
    // The name that is tried for every argument that is a name.
    let bitmap = || json!({"node": "d0", "name": "anything"});
    let (add, remove) = ("block-dirty-bitmap-add", "block-dirty-bitmap-remove");
    let merge = json!({"node": "d0", "target": "anything", "bitmaps": ["anything"]});
    let named = |name: &'static str| (name, bitmap());
    let mut changes = vec![
        named("block-dirty-bitmap-clear"),
        named("block-dirty-bitmap-enable"),
        named("block-dirty-bitmap-disable"),
        ("block-dirty-bitmap-merge", merge),
    ];
    all.push(call(add, bitmap()).after(remove, bitmap()));
    all.push(call(remove, bitmap()).before(add, bitmap()));
    for (name, arguments) in changes.clone() {
        all.push(call(name, arguments).before(add, bitmap()).after(remove, bitmap()));
    }
    let transaction = |kind: &str, data: Value| {
        let call = call("transaction", json!({"actions": [{"type": kind, "data": data}]}));
        // As in QSD, a transaction whose jobs end together has no other actions.
        if kind == "blockdev-backup" { call } else { call.below("transaction/actions") }
    };
    all.push(transaction(add, bitmap()).after(remove, bitmap()));
    all.push(transaction(remove, bitmap()).before(add, bitmap()));
    let backed_up = json!({"job-id": "j", "device": "d0", "target": "d1", "sync": "full",
        "auto-dismiss": false});
    changes.push(("blockdev-backup", backed_up));
    for (name, arguments) in changes {
        let call = transaction(name, arguments).before(add, bitmap());
        all.push(call.after(END_JOBS, json!({})).after(remove, bitmap()));
    }
    let mut aborted = transaction("abort", json!({}));
    aborted.refused = Some("Transaction aborted".to_owned());
    all.push(aborted);
    let top = json!({"driver": "qcow2", "node-name": "top", "backing": null,
        "file": {"driver": "file", "filename": path("top.qcow2")}});
    all.push(
        transaction("blockdev-snapshot", json!({"node": "d0", "overlay": "top"}))
            .before("blockdev-add", top)
            .after("blockdev-del", json!({"node-name": "top"})),
    );
    let made = json!({"node-name": "n", "snapshot-node-name": "top",
        "snapshot-file": path("top.qcow2")});
    all.push(
        transaction("blockdev-snapshot-sync", made)
            .before(
                "blockdev-add",
                json!({"driver": "file", "node-name": "n", "filename": path("disk.img")}),
            )
            .after("blockdev-del", json!({"node-name": "top"}))
            .after("blockdev-del", json!({"node-name": "n"})),
    );

    let image = |name: &str| {
        json!({"driver": "qcow2", "node-name": name, "backing": null,
            "file": {"driver": "file", "filename": path(&format!("{name}.qcow2"))}})
    };
    // The name that is tried for every argument that is a name.
    let inside = || json!({"device": "mid", "name": "anything"});
    let (make, delete) =
        ("blockdev-snapshot-internal-sync", "blockdev-snapshot-delete-internal-sync");
    let in_image = |call: Call| {
        let call = call.before("blockdev-add", image("mid"));
        match call.command == delete {
            true => call.before(make, inside()),
            false => call.after(delete, inside()),
        }
    };
    let action = transaction(make, inside());
    for call in [call(make, inside()), call(delete, inside()), action] {
        all.push(in_image(call).after("blockdev-del", json!({"node-name": "mid"})));
    }
    let above = |node: &str, overlay: &str| json!({"node": node, "overlay": overlay});
    let chain = |command, arguments| {
        call(command, arguments)
            .before(
                "blockdev-add",
                json!({"driver": "file", "node-name": "low", "filename": path("disk.img")}),
            )
            .before("blockdev-add", image("mid"))
            .before("blockdev-snapshot", above("low", "mid"))
            .before("blockdev-add", image("top"))
            .before("blockdev-snapshot", above("mid", "top"))
            .after(END_JOBS, json!({}))
            .after("blockdev-del", json!({"node-name": "top"}))
            .after("blockdev-del", json!({"node-name": "mid"}))
            .after("blockdev-del", json!({"node-name": "low"}))
    };
    let stream = json!({"job-id": "j", "device": "top", "base-node": "low", "auto-dismiss": false});
    all.push(chain("block-stream", stream));
    let commit = json!({"job-id": "j", "device": "top", "top-node": "mid", "auto-dismiss": false});
    all.push(chain("block-commit", commit));
    let file = json!({"driver": "file", "filename": path("new.img"), "size": 1 << 20});
    all.push(
        call("blockdev-create", json!({"job-id": "j", "options": file})).after(END_JOBS, json!({})),
    );

    let luks = json!({"driver": "luks", "file": "made", "size": 1 << 20, "key-secret": "sec0", "iter-time": 10});
    let plain = json!({"driver": "qcow2", "file": "made", "size": 1 << 20});
    let mut qcow2 = plain.clone();
    qcow2["encrypt"] = json!({"format": "luks", "key-secret": "sec0", "iter-time": 10});
    let made = json!({"driver": "file", "node-name": "made", "filename": path("made.img")});
    let head = json!({"driver": "file", "node-name": "head", "filename": path("head.img")});
    let encrypt = "blockdev-create/options/qcow2/encrypt";
    for (options, below) in [(luks, ""), (plain, ""), (qcow2, encrypt)] {
        let create = call("blockdev-create", json!({"job-id": "j", "options": options}));
        all.push(
            create
                .below(below)
                .before("blockdev-add", made.clone())
                .before("blockdev-add", head.clone())
                // A file that is longer than the image has no room that can be allocated.
                .before("block_resize", json!({"node-name": "made", "size": 0}))
                .after(END_JOBS, json!({}))
                .after("blockdev-del", json!({"node-name": "made"}))
                .after("blockdev-del", json!({"node-name": "head"})),
        );
    }
    let change = json!({"state": "active", "new-secret": "sec0", "keyslot": 1, "iter-time": 10});
    let (mut luks, mut encrypt) = (change.clone(), change);
    luks["driver"] = "luks".into();
    encrypt["format"] = "luks".into();
    let qcow2 = json!({"driver": "qcow2", "encrypt": encrypt});
    let encrypted = json!({"format": "luks", "key-secret": "sec0"});
    for (options, name, more) in [
        (luks, "amended.luks", json!({"driver": "luks", "key-secret": "sec0"})),
        (qcow2, "secret.qcow2", json!({"driver": "qcow2", "encrypt": encrypted})),
    ] {
        let mut node = more;
        node["node-name"] = "n".into();
        node["file"] = json!({"driver": "file", "filename": path(name)});
        let arguments = json!({"job-id": "j", "node-name": "n", "options": options, "force": true});
        all.push(
            call("x-blockdev-amend", arguments)
                .before("blockdev-add", node)
                .after(END_JOBS, json!({}))
                .after("blockdev-del", json!({"node-name": "n"})),
        );
    }
    let rbd = json!({"driver": "rbd", "location": location, "size": 1 << 20});
    all.push(
        call("blockdev-create", json!({"job-id": "j", "options": rbd})).after(END_JOBS, json!({})),
    );
    let file = json!({"driver": "file", "node-name": "n", "filename": path("disk.img")});
    let deleted = json!({"node-name": "n"});
    let overlay = json!({"driver": "qcow2", "node-name": "top", "backing": null,
        "file": {"driver": "file", "filename": path("top.qcow2")}});
    let snapshot = json!({"node-name": "n", "snapshot-node-name": "top",
        "snapshot-file": path("top.qcow2")});
    all.extend([
        call("blockdev-del", deleted.clone()).before("blockdev-add", file.clone()),
        call("block_resize", json!({"node-name": "n", "size": 1 << 20}))
            .before("blockdev-add", file.clone())
            .after("blockdev-del", deleted.clone()),
        call("block-set-write-threshold", json!({"node-name": "n", "write-threshold": 0}))
            .before("blockdev-add", file.clone())
            .after("blockdev-del", deleted.clone()),
        call("blockdev-set-active", json!({"node-name": "n", "active": true}))
            .before("blockdev-add", file.clone())
            .after("blockdev-del", deleted.clone()),
        call(
            "change-backing-file",
            json!({"device": "top", "image-node-name": "top", "backing-file": "other.img"}),
        )
        .before("blockdev-add", overlay.clone())
        .before("blockdev-snapshot", json!({"node": "d0", "overlay": "top"}))
        .after("blockdev-del", json!({"node-name": "top"})),
        call("blockdev-snapshot", json!({"node": "d0", "overlay": "top"}))
            .before("blockdev-add", overlay)
            .after("blockdev-del", json!({"node-name": "top"})),
        call("blockdev-snapshot-sync", snapshot)
            .before("blockdev-add", file)
            .after("blockdev-del", json!({"node-name": "top"}))
            .after("blockdev-del", deleted),
        call("query-named-block-nodes", json!({})),
        call("query-blockstats", json!({})),
        call("qmp_capabilities", json!({})),
    ]);
    all
}

/// Returns a call for each command that a job obeys, at a moment when the job obeys it.
fn job_verbs() -> Vec<Call> {
    let arguments = json!({"job-id": "j", "device": "d0", "target": "d1", "sync": "full"});
    let job = |name: &'static str, command, status, rest: Value| {
        let mut started = arguments.clone();
        merge(&mut started, &rest);
        let named = match name.starts_with("job-") || status == "pending" || status == "concluded" {
            true => json!({"id": "j"}),
            false => json!({"device": "j"}),
        };
        call(name, named)
            .before(command, started)
            .before(STATUS, json!({"id": "j", "status": status}))
            .after(END_JOBS, json!({}))
    };
    let running =
        |name: &'static str| job(name, "blockdev-backup", "running", json!({"sync": "none"}));
    let mut all = Vec::new();
    for name in ["job-cancel", "block-job-cancel", "job-pause", "block-job-pause"] {
        all.push(running(name));
    }
    for name in ["job-resume", "block-job-resume"] {
        all.push(running(name).before("job-pause", json!({"id": "j"})));
    }
    let mut limited = running("block-job-set-speed");
    merge(&mut limited.arguments, &json!({"speed": 1 << 20}));
    all.push(limited);
    for name in ["job-complete", "block-job-complete"] {
        all.push(job(name, "blockdev-mirror", "ready", json!({})));
    }
    let mut changed = job("block-job-change", "blockdev-mirror", "ready", json!({}));
    changed.arguments = json!({"id": "j", "type": "mirror", "copy-mode": "background"});
    all.push(changed);
    for name in ["job-finalize", "block-job-finalize"] {
        all.push(job(name, "blockdev-backup", "pending", json!({"auto-finalize": false})));
    }
    for name in ["job-dismiss", "block-job-dismiss"] {
        all.push(job(name, "blockdev-backup", "concluded", json!({"auto-dismiss": false})));
    }
    all
}

fn merge(into: &mut Value, more: &Value) {
    for (name, value) in more.as_object().expect("members") {
        into[name] = value.clone();
    }
}

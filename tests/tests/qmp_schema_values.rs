//! Each member and value that `query-qmp-schema` offers is tried on a daemon. The daemon accepts all of them.
//!
//! Each command has valid calls, one for each value of a tag. Variations of a call change one member each: to
//! each word of an enumeration, to `true` and `false`, or to each of [`values`].

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::net::UnixListener;

use integration::nbd::{client_output, nbd_export};
use integration::schema::{Schema, list, text};
use integration::tls::{Authority, NOW};
use integration::{Port, Qmp, Scratch, Server, ServerCommand, eventually};
use serde_json::{Value, json};

/// A valid call, with the commands before and after it.
struct Call {
    command: &'static str,
    arguments: Value,
    /// Only members whose path has this prefix are varied.
    below: &'static str,
    before: Vec<(&'static str, Value)>,
    after: Vec<(&'static str, Value)>,
    /// Part of the expected error, for a device that this machine may lack.
    refused: Option<String>,
}

/// Makes the variations of calls, and collects members without known values.
struct Variations<'a> {
    schema: &'a Schema,
    /// The scratch folder.
    dir: &'a str,
    /// Types that are not entered: they are tried elsewhere, or are being walked.
    walked: Vec<String>,
    /// Values of tags in the schema, each of which needs a call; `said` has those that calls use.
    tags: BTreeSet<String>,
    said: BTreeSet<String>,
    unknown: BTreeSet<String>,
}

impl Variations<'_> {
    /// Returns values of a type, with their paths. `base` is one of them unless null.
    fn of(&mut self, name: &str, base: &Value, at: &str) -> Vec<(String, Value)> {
        let entry = self.schema.get(name);
        match text(entry, "meta-type") {
            "builtin" => self.given(text(entry, "json-type"), base, at),
            "enum" => {
                list(entry, "values").map(|word| (format!("{at}={word}"), word.clone())).collect()
            }
            "array" => {
                let item = base.get(0).unwrap_or(&Value::Null);
                let items = self.of(text(entry, "element-type"), item, &format!("{at}[]"));
                items.into_iter().map(|(what, item)| (what, json!([item]))).collect()
            }
            "alternate" => {
                let branches = list(entry, "members").map(|member| text(member, "type"));
                let tried = |name: &str| {
                    let fits = match text(self.schema.get(name), "meta-type") {
                        "array" => base.is_array(),
                        "object" => base.is_object(),
                        _ => base.is_string() || base.is_i64(),
                    };
                    let base = if fits { base } else { &Value::Null };
                    self.of(name, base, at)
                };
                branches.flat_map(tried).collect()
            }
            "object" if self.walked.iter().any(|walked| walked == name) => {
                self.given("object", base, at)
            }
            "object" => {
                self.walked.push(name.to_owned());
                let all = self.object(entry, base, at);
                self.walked.pop();
                all
            }
            other => panic!("{at}: {other}"),
        }
    }

    /// Returns the known values of this JSON type.
    fn given(&mut self, json_type: &str, base: &Value, at: &str) -> Vec<(String, Value)> {
        let fits = |value: &Value| match json_type {
            "string" => value.is_string(),
            "int" => value.is_i64(),
            "object" => value.is_object(),
            "boolean" => value.is_boolean(),
            _ => !value.is_null(),
        };
        let mut all = match json_type {
            "boolean" => vec![json!(false), json!(true)],
            _ => values(at, self.dir),
        };
        all.push(base.clone());
        all.retain(fits);
        if all.is_empty() {
            self.unknown.insert(format!("{at}: no {json_type} is known to try"));
        }
        all.into_iter().map(|value| (format!("{at}={value}"), value)).collect()
    }

    fn object(&mut self, entry: &Value, base: &Value, at: &str) -> Vec<(String, Value)> {
        let mut base = base.clone();
        if base.is_null() {
            base = values(at, self.dir).into_iter().find(Value::is_object).unwrap_or(json!({}));
        }
        let mut all = Vec::new();
        let mut members: Vec<(&Value, String)> =
            list(entry, "members").map(|member| (member, at.to_owned())).collect();
        let tag = entry["tag"].as_str();
        for case in list(entry, "variants") {
            self.tags.insert(format!("{at}/{}", text(case, "case")));
            if tag.is_some_and(|tag| base[tag] == case["case"]) {
                let at = format!("{at}/{}", text(case, "case"));
                let of_case = list(self.schema.get(text(case, "type")), "members");
                members.extend(of_case.map(|member| (member, at.clone())));
                self.said.insert(at);
            }
        }
        for (member, at) in members {
            let name = text(member, "name");
            let at = format!("{at}/{name}");
            if tag == Some(name) {
                continue;
            }
            let values = self.of(text(member, "type"), &base[name], &at);
            all.extend(values.into_iter().map(|(what, value)| {
                let mut whole = base.clone();
                whole[name] = value;
                // Only for this member, not for its own members.
                let is_own =
                    what.strip_prefix(&at).is_some_and(|rest| rest.starts_with(['=', '[']));
                let beside = if is_own { beside(&what) } else { json!({}) };
                for (name, value) in beside.as_object().expect("members") {
                    whole[name] = value.clone();
                }
                whole.as_object_mut().expect("an object").retain(|_, value| !value.is_null());
                (what, whole)
            }));
        }
        all.push((format!("{at} as it is"), base));
        all
    }
}

/// Returns values for the member at a path.
fn values(at: &str, dir: &str) -> Vec<Value> {
    let one = |value: Value| vec![value];
    let name = at.rsplit('/').next().unwrap_or_default();
    match (at, name) {
        (_, "iothread") => one(json!("io0")),
        (_, "iothread[]") => one(json!("io1")),
        (_, "luns[]") => one(json!("d1")),
        ("blockdev-add/qcow2/file", _) => one(json!("image")),
        (_, "file" | "backing" | "image") => vec![json!("d0"), json!({"driver": "null-co"})],
        (_, "config") => one(json!(format!("{dir}/rules"))),
        (_, "data-file") => one(json!("data")),
        (_, "inject-error[]") => one(json!({"event": "none"})),
        (_, "set-state[]") => one(json!({"event": "none", "new_state": 2})),
        (_, "rules[]") => one(json!({"match": "*", "policy": "allow"})),
        (_, "cpu-affinity") => vec![json!(0), json!("0")],
        (_, "cpu-affinity[]") => vec![json!(0), json!("0")],
        (_, "name" | "description" | "filter-node-name") => one(json!("anything")),
        (_, "format") => one(json!("qcow2")),
        (_, "replaces") => one(json!("d0")),
        (_, "tls-creds") => one(json!("tls0")),
        (_, "tls-authz") => one(json!("authz0")),
        (_, "sector") => one(json!(0)),
        (_, "num-queues" | "poll-grow" | "poll-shrink" | "poll-weight") => one(json!(2)),
        (_, "logical-block-size" | "l2-cache-entry-size" | "max-transfer") => one(json!(4096)),
        (_, "align" | "offset" | "opt-write-zero" | "opt-discard") => one(json!(512)),
        (_, "granularity" | "max-write-zero" | "max-discard") => one(json!(65536)),
        (_, "to") => one(json!(65535)),
        // Megabytes suit sizes, speeds, times in nanoseconds and numbers of requests.
        ("object-add/throttle-group/limits", _) => one(json!({})),
        (_, name) if name.ends_with("-length") => one(json!(2)),
        (_, name) if name.ends_with("-max") && at.contains("throttle-group") => one(json!(20)),
        (at, _) if at.contains("throttle-group") => one(json!(10)),
        (_, "size" | "speed" | "buf-size" | "cache-size" | "l2-cache-size") => one(json!(1 << 20)),
        (_, "refcount-cache-size") => one(json!(1 << 20)),
        (_, "thread-pool-min" | "thread-pool-max" | "aio-max-batch" | "poll-max-ns") => {
            one(json!(4))
        }
        (_, "stall-timeout-ms" | "latency-ns" | "delay-ns" | "cache-clean-interval") => {
            one(json!(5))
        }
        (_, "reconnect-delay" | "open-timeout" | "handshake-max-seconds") => one(json!(5)),
        (_, "max-connections" | "state" | "errno" | "sectors" | "count" | "seed") => one(json!(5)),
        (_, "probability-ppm") => one(json!(5)),
        (at, _) if at.starts_with("block-latency-histogram-set/") => one(json!(10)),
        _ => Vec::new(),
    }
}

/// Returns members that a varied member requires. Members that it excludes are null.
fn beside(what: &str) -> Value {
    if let Some(name) = what.split_once("throttle-group/").map(|(_, name)| name) {
        let name = name.rsplit('/').next().and_then(|name| name.split('=').next());
        let name = name.unwrap_or_default();
        if let Some(limit) = name.strip_suffix("-max-length") {
            return json!({limit: 10, format!("{limit}-max"): 20});
        }
        if let Some(limit) = name.strip_suffix("-max") {
            return json!({limit: 10});
        }
        return match name.ends_with("iops-size") {
            true => json!({name.replace("-size", "-total"): 10}),
            false => json!({}),
        };
    }
    let is = |path: &str| what.ends_with(path);
    if is("/aio=\"native\"") {
        json!({"cache": {"direct": true}})
    } else if is("/detect-zeroes=\"unmap\"") {
        json!({"discard": "unmap"})
    } else if what.contains("/tls-authz=") {
        json!({"tls-creds": "tls0"})
    } else if what.contains("/luns[]") {
        json!({"node-name": null})
    } else if is("/ipv4=false") || is("/ipv6=true") {
        json!({"host": "::1"})
    } else {
        json!({})
    }
}

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

/// Returns the calls. [`World`] makes what they name.
fn calls(dir: &str, tcp_port: u16) -> Vec<Call> {
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
    let unix = json!({"export": "disk", "server": {"type": "unix", "path": path("other.sock")}});
    let tcp = json!({"type": "inet", "host": "localhost", "port": tcp_port.to_string()});
    let mut device = node("host_device", json!({"filename": path("disk.img")}));
    device.after.clear();
    // The options are accepted, and the file is refused: the machine need not have a device.
    device.refused = Some("requires".into());
    let mut all = vec![
        device,
        node("file", json!({"filename": path("disk.img")})),
        node("raw", json!({"file": "d0"})),
        node("null-co", json!({})),
        node("null-aio", json!({})),
        node("throttle", json!({"throttle-group": "g0", "file": "d0"})),
        node("blkdebug", json!({"image": "d0"})),
        node("nbd", unix),
        node("nbd", json!({"export": "disk", "server": tcp})).below("blockdev-add/nbd/server"),
        node("qcow2", qcow2)
            .before("blockdev-add", file("data", "copy.data"))
            .before("blockdev-add", file("image", "copy.qcow2"))
            .after("blockdev-del", json!({"node-name": "image"}))
            .after("blockdev-del", json!({"node-name": "data"})),
    ];

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
    ] {
        all.push(export(kind, addr.clone()));
        all.push(export(kind, inherited.clone()).below(below));
    }
    all.push(
        export("nbd", json!({}))
            .before("nbd-server-start", server.clone())
            .after("nbd-server-stop", json!({})),
    );
    let start = |addr: Value, below| {
        call("nbd-server-start", json!({"addr": addr}))
            .after("nbd-server-stop", json!({}))
            .below(below)
    };
    all.push(start(server["addr"].clone(), ""));
    let inet = json!({"type": "inet", "data": {"host": "localhost", "port": "0"}});
    all.push(start(inet, "nbd-server-start/addr"));
    let fd = json!({"type": "fd", "data": {"str": "0"}});
    all.push(start(fd, "nbd-server-start/addr/fd"));
    let add = || {
        call("nbd-server-add", json!({"device": "d0", "name": "anything"}))
            .before("nbd-server-start", server.clone())
    };
    all.push(add().after("nbd-server-stop", json!({})).after(GONE, json!({})));
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

    let object = |kind: &str, rest: Value| {
        let mut arguments = json!({"qom-type": kind, "id": "o"});
        merge(&mut arguments, &rest);
        call("object-add", arguments).after("object-del", json!({"id": "o"}))
    };
    all.extend([
        object("iothread", json!({})),
        object("throttle-group", json!({})),
        object("authz-list", json!({})),
        object("authz-simple", json!({"identity": "CN=x"})),
        object("tls-creds-x509", json!({"dir": path("creds"), "endpoint": "server"})),
    ]);

    let job = |command, rest: Value| {
        let mut arguments = json!({"job-id": "j", "device": "d0", "target": "d1", "sync": "full"});
        merge(&mut arguments, &rest);
        call(command, arguments).after(END_JOBS, json!({}))
    };
    all.push(job("blockdev-backup", json!({"auto-dismiss": false})));
    all.push(job("blockdev-mirror", json!({"auto-dismiss": false})));
    let file = json!({"driver": "file", "filename": path("new.img"), "size": 1 << 20});
    all.push(
        call("blockdev-create", json!({"job-id": "j", "options": file})).after(END_JOBS, json!({})),
    );

    let raw = json!({"driver": "raw", "node-name": "n", "file": "d0"});
    let file = json!({"driver": "file", "node-name": "n", "filename": path("disk.img")});
    let deleted = json!({"node-name": "n"});
    all.extend([
        call("block_resize", json!({"node-name": "n", "size": 1 << 20}))
            .before("blockdev-add", file.clone())
            .after("blockdev-del", deleted.clone()),
        call("blockdev-reopen", json!({"options": [raw.clone()]}))
            .before("blockdev-add", raw.clone())
            .after("blockdev-del", deleted.clone()),
        call("blockdev-set-active", json!({"node-name": "n", "active": true}))
            .before("blockdev-add", file)
            .after("blockdev-del", deleted),
        call("query-named-block-nodes", json!({})),
        call("query-blockstats", json!({})),
        call("qom-list", json!({"path": "/objects/io0"})),
    ]);
    all
}

/// Waits until all exports have ended.
const GONE: &str = "(exports end)";
/// Ends all jobs. No job may fail.
const END_JOBS: &str = "(jobs end)";

fn merge(into: &mut Value, more: &Value) {
    for (name, value) in more.as_object().expect("members") {
        into[name] = value.clone();
    }
}

fn carry_out(qmp: &mut Qmp, (command, arguments): &(&'static str, Value)) -> Result<(), String> {
    match *command {
        GONE => eventually("the end of exports", || {
            let exports = qmp.execute("query-block-exports", json!({}));
            (exports == json!([])).then_some(Ok(()))
        }),
        END_JOBS => eventually("the end of jobs", || end_jobs(qmp)),
        _ => match qmp.ask(command, arguments.clone()) {
            answer if answer.get("return").is_some() => Ok(()),
            answer => Err(answer["error"]["desc"].as_str().unwrap_or_default().to_owned()),
        },
    }
}

/// Takes each job one step towards its end. Returns `Some` if there is no job left, or if one has failed.
fn end_jobs(qmp: &mut Qmp) -> Option<Result<(), String>> {
    let jobs = qmp.execute("query-jobs", json!({}));
    for job in jobs.as_array().expect("a list") {
        let id = json!({"id": job["id"]});
        match job["status"].as_str() {
            Some("pending") => drop(qmp.ask("job-finalize", id)),
            Some("concluded") => {
                let failed = job.get("error").cloned();
                qmp.execute("job-dismiss", id);
                if let Some(why) = failed {
                    return Some(Err(format!("the job: {why}")));
                }
            }
            Some("ready") => drop(qmp.ask("job-complete", id)),
            // A job without a background copy runs until it is cancelled.
            Some("running") => drop(qmp.ask("job-cancel", id)),
            _ => {}
        }
    }
    (jobs == json!([])).then_some(Ok(()))
}

/// Whether the daemon refuses a valid call for a reason in its environment. This is the only list of
/// exceptions.
fn is_for_another_reason(call: &Call, what: &str, why: &str) -> bool {
    let driver = call.arguments["driver"].as_str().unwrap_or_default();
    match what {
        // Only nodes with an image, or above one, can be inactive.
        "blockdev-add/active=false" => {
            why == "A node of this driver cannot be inactive"
                && !["file", "qcow2"].contains(&driver)
        }
        // The other NBD server listens on IPv4 only.
        "blockdev-add/nbd/server/inet/ipv4=false" | "blockdev-add/nbd/server/inet/ipv6=true" => {
            why.starts_with("Failed to connect to '::1:")
        }
        _ => false,
    }
}

/// The files and servers that calls name.
struct World {
    // Dropped first: daemons have their logs in the folder.
    _others: [Server; 2],
    port: Port,
    scratch: Scratch,
}

impl World {
    fn new() -> Self {
        let scratch = Scratch::new();
        let path = |name: &str| scratch.path(name).display().to_string();
        fs::write(path("disk.img"), vec![0; 1 << 20]).expect("an image");
        fs::write(path("rules"), "").expect("no rules");
        let options = format!("data_file={}", path("disk.data"));
        let create = ["create", "-q", "-f", "qcow2", "-o", &options, &path("disk.qcow2"), "1M"];
        client_output(&scratch, "qemu-img", &create);
        for (file, copy) in [("disk.data", "copy.data"), ("disk.qcow2", "copy.qcow2")] {
            fs::copy(path(file), path(copy)).expect("a copy");
        }
        let creds = Authority::new(&scratch, "ca").server("server", NOW);
        fs::rename(creds, path("creds")).expect("credentials");
        let port = Port::new();
        let tcp = format!("addr.type=inet,addr.host=localhost,addr.port={}", port.number());
        let unix = format!("addr.type=unix,addr.path={}", path("other.sock"));
        let others = [("tcp", tcp), ("unix", unix)].map(|(name, address)| {
            let other = ServerCommand::new(&scratch).named(name);
            let other = other.args(["--blockdev", "null-co,node-name=d", "--nbd-server"]);
            nbd_export(other.arg(address), "d", ",name=disk,writable=on").start()
        });
        World { _others: others, port, scratch }
    }

    /// Starts a daemon for one call, with the objects that calls name. It inherits a socket, which a call may
    /// take.
    fn daemon(&self) -> Server {
        let socket = self.scratch.path("inherited.sock");
        // The previous daemon's socket.
        let _ = fs::remove_file(&socket);
        let listener = UnixListener::bind(socket).expect("a socket");
        let creds = self.scratch.path("creds");
        let creds = format!("tls-creds-x509,id=tls0,endpoint=server,dir={}", creds.display());
        let daemon = ServerCommand::new(&self.scratch).monitor("qmp").stdin(listener);
        let daemon = daemon.iothread("io0").iothread("io1").arg("--object").arg(creds);
        let daemon = daemon.args(["--object", "authz-simple,id=authz0,identity=CN=x"]);
        let daemon = daemon.args(["--object", "throttle-group,id=g0"]);
        let daemon =
            daemon.args(["--blockdev", "null-co,node-name=d0,size=1048576,read-zeroes=on"]);
        daemon.args(["--blockdev", "null-co,node-name=d1,size=1048576"]).start()
    }

    /// Makes the calls by the schema after `change`. Returns what is wrong, and the number of calls.
    fn try_all(
        &self,
        is_wanted: impl Fn(&Call) -> bool,
        change: impl Fn(&mut Value),
    ) -> (BTreeSet<String>, usize) {
        let dir = self.scratch.dir().display().to_string();
        let (mut wrong, mut tags, mut said) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        let mut made = 0;
        for call in calls(&dir, self.port.number()).into_iter().filter(is_wanted) {
            let mut daemon = self.daemon();
            let mut qmp = Qmp::connect(&daemon.socket("qmp"));
            let mut entries = qmp.execute("query-qmp-schema", json!({}));
            change(&mut entries);
            let schema = Schema::new(&entries);
            // A nested node has the members of blockdev-add, which are tried there.
            let node = text(schema.get("blockdev-add"), "arg-type").to_owned();
            let walked = if call.command == "blockdev-add" { Vec::new() } else { vec![node] };
            let mut variations = Variations {
                schema: &schema,
                dir: &dir,
                walked,
                tags: BTreeSet::new(),
                said: BTreeSet::new(),
                unknown: BTreeSet::new(),
            };
            let arguments = text(schema.get(call.command), "arg-type").to_owned();
            let attempts = variations.of(&arguments, &call.arguments, call.command);
            tags.extend(variations.tags);
            said.extend(variations.said);
            wrong.extend(variations.unknown);
            for (what, arguments) in attempts {
                if what.starts_with(call.below) {
                    made += 1;
                    let tried = self.attempt(&mut qmp, &call, arguments);
                    if tried.as_ref().is_err_and(|why| is_for_another_reason(&call, &what, why)) {
                        continue;
                    }
                    wrong.extend(tried.err().map(|why| format!("{what}: {why}")));
                }
            }
            qmp.execute("quit", json!({}));
            assert!(daemon.wait().success(), "{}", daemon.log());
        }
        wrong.extend(tags.difference(&said).map(|tag| format!("no call for {tag}")));
        (wrong, made)
    }

    /// Makes one call, between the commands before and after it.
    fn attempt(&self, qmp: &mut Qmp, call: &Call, arguments: Value) -> Result<(), String> {
        for before in &call.before {
            carry_out(qmp, before).map_err(|why| format!("{}: {why}", before.0))?;
        }
        match (carry_out(qmp, &(call.command, arguments)), &call.refused) {
            (Err(why), Some(expected)) if why.contains(expected.as_str()) => {}
            (Ok(()), None) => {}
            (result, _) => {
                // Cleans up as far as possible, for the next call.
                call.after.iter().for_each(|after| drop(carry_out(qmp, after)));
                return Err(result.err().unwrap_or_else(|| "accepted".into()));
            }
        }
        for after in &call.after {
            carry_out(qmp, after).map_err(|why| format!("then {}: {why}", after.0))?;
        }
        Ok(())
    }
}

#[test]
fn all_that_is_offered_is_taken() {
    let (wrong, made) = World::new().try_all(|_| true, |_| {});
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(made > 300, "only {made} calls");
}

/// The test finds values and members that a schema offers and the daemon lacks.
#[test]
fn what_is_offered_and_not_taken_is_found() {
    let change = |entries: &mut Value| {
        let found = |entries: &Value, wanted: &dyn Fn(&Value) -> bool| {
            entries.as_array().expect("a list").iter().position(wanted).expect("it is there")
        };
        let mode = found(entries, &|entry| entry["values"] == json!(["background"]));
        entries[mode]["values"] = json!(["background", "write-blocking"]);
        let mirror = found(entries, &|entry| entry["name"] == "blockdev-mirror");
        let arguments = entries[mirror]["arg-type"].clone();
        let arguments = found(entries, &|entry| entry["name"] == arguments);
        let members = entries[arguments]["members"].as_array_mut().expect("members");
        members.push(json!({"name": "unmap", "type": "bool", "default": null}));
    };
    let (wrong, _) = World::new().try_all(|call| call.command == "blockdev-mirror", change);
    let found: Vec<&str> = wrong.iter().filter_map(|wrong| wrong.split(": ").next()).collect();
    let expected = [
        "blockdev-mirror/copy-mode=\"write-blocking\"",
        "blockdev-mirror/unmap=false",
        "blockdev-mirror/unmap=true",
    ];
    assert_eq!(found, expected, "{wrong:#?}");
}

//! Each member and value that `query-qmp-schema` offers is tried on a daemon. The daemon accepts all of them.
//!
//! Each command has valid calls, one for each value of a tag. Variations of a call change one member each: to
//! each word of an enumeration, to `true` and `false`, or to a known value.

mod calls;
mod variations;

use std::collections::BTreeSet;
use std::fs;
use std::net::TcpStream;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Child;

use integration::nbd::{client_output, nbd_export};
use integration::schema::{Schema, list, text};
use integration::tls::{Authority, NOW};
use integration::{Port, Qmp, Scratch, Server, ServerCommand, eventually, tied_command, tool};
use serde_json::{Value, json};

use calls::{Call, END_JOBS, GONE, NOT_REOPENED, STATUS, calls};
use variations::Variations;

fn carry_out(qmp: &mut Qmp, (command, arguments): &(&'static str, Value)) -> Result<(), String> {
    match *command {
        GONE => eventually("the end of exports", || {
            let exports = qmp.execute("query-block-exports", json!({}));
            (exports == json!([])).then_some(Ok(()))
        }),
        END_JOBS => eventually("the end of jobs", || end_jobs(qmp)),
        STATUS => eventually("a job's status", || {
            let jobs = qmp.execute("query-jobs", json!({}));
            let is_wanted =
                |job: &Value| job["id"] == arguments["id"] && job["status"] == arguments["status"];
            jobs.as_array()?.iter().any(is_wanted).then_some(Ok(()))
        }),
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
                // What this has cancelled has not failed.
                let failed = job.get("error").filter(|why| *why != "Operation canceled").cloned();
                qmp.execute("job-dismiss", id);
                if let Some(why) = failed {
                    return Some(Err(format!("the job: {why}")));
                }
            }
            Some("ready") => drop(qmp.ask("job-complete", id)),
            // A job without a background copy runs until it is cancelled.
            Some("running" | "paused") => drop(qmp.ask("job-cancel", id)),
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
        // The node that is tried is for writing, and no cache.
        what if what.starts_with("blockdev-add/copy-on-read/") => {
            why == "as-cache=on needs read-only=on" || why == "max-size is for a cache"
        }
        // The image that is tried is for writing, and has none.
        what if what.starts_with("blockdev-add/qcow2/snapshot=") => {
            why == "A disk at a snapshot is for reading" || why.contains("Can't find snapshot")
        }
        // The call with an encrypted image tries them.
        what if what.starts_with("blockdev-add/qcow2/encrypt") => {
            call.arguments.get("data-file").is_some()
                && why == "No encryption in image header, but options specified format 'luks'"
        }
        // The same: this call's node has no room for the header.
        what if what.starts_with("blockdev-create/options/qcow2/encrypt") => {
            call.arguments["options"]["file"] == "d0" && why.contains("does not support resize")
        }
        // The calls before have put a password into the slot.
        "x-blockdev-amend/force=false" => why.contains("Refusing to overwrite active keyslot 1"),
        // The other NBD server has a path.
        "blockdev-add/nbd/server/unix/abstract=true" => why.ends_with("Connection refused"),
        // Only images have room for bitmaps: tests/bitmaps.rs.
        what if what.ends_with("/persistent=true") => {
            why == "Can't store persistent bitmaps to d0: Operation not supported"
        }
        // The only credentials are for servers.
        "blockdev-add/nbd/tls-creds=\"tls0\"" => {
            why == "Expected TLS credentials for a client endpoint"
        }
        // The other NBD server listens on IPv4 only.
        "blockdev-add/nbd/server/inet/ipv4=false" | "blockdev-add/nbd/server/inet/ipv6=true" => {
            why.starts_with("Failed to connect to '::1:")
        }
        // As QSD's.
        what if what.ends_with("/read-only=false") => {
            why == format!(
                "{} driver does not support writes",
                if driver == "s3" { "s3" } else { "curl" }
            )
        }
        // The endpoint is an address, of which there are no subdomains.
        "blockdev-add/s3/addressing-style=\"virtual-hosted\"" => {
            why.contains("a bucket cannot be in front of")
        }
        // The machine's kernel has no ublk. The tests of `guest_ublk.rs` have one.
        _ if call.arguments["type"] == "ublk" => why.contains("/dev/ublk-control"),
        // As QSD's: the queue is too small.
        "block-export-add/vduse-blk/queue-size=2" => why == "queue-size is invalid",
        // Nor has it VDUSE: `guest_vduse.rs`.
        _ if call.arguments["type"] == "vduse-blk" => why.contains("/dev/vduse/control"),
        // An ordinary user needs an entry in /etc/fuse.conf.
        "block-export-add/fuse/allow-other=\"on\"" => why.contains("'user_allow_other'"),
        // A kernel without vsock.
        what if what.starts_with("nbd-server-start/addr/vsock") => {
            why == "Failed to bind socket: Address family not supported by protocol"
        }
        // The options are accepted. The daemon has no such node, and has not loaded the library.
        _ if call.arguments["options"]["driver"] == "rbd" => {
            why.contains("Ceph's library is not loaded") || why == "Can't create snapshots"
        }
        _ => false,
    }
}

/// busybox as a web server.
struct Web {
    port: Port,
    child: Child,
}

impl Web {
    fn serve(folder: &Path) -> Web {
        let port = Port::new();
        let address = format!("127.0.0.1:{}", port.number());
        let child = tied_command(&tool("busybox"))
            .args(["httpd", "-f", "-p", &address, "-h"])
            .arg(folder)
            .spawn()
            .expect("busybox runs");
        eventually("the web server", || TcpStream::connect(&address).ok());
        Web { port, child }
    }
}

impl Drop for Web {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The files and servers that calls name.
struct World {
    // Dropped first: daemons have their logs in the folder.
    _others: [Server; 2],
    port: Port,
    web: Web,
    scratch: Scratch,
}

impl World {
    fn new() -> Self {
        let scratch = Scratch::new();
        let path = |name: &str| scratch.path(name).display().to_string();
        fs::write(path("disk.img"), vec![0; 1 << 20]).expect("an image");
        fs::write(path("rules"), "").expect("no rules");
        fs::write(path("mount"), "").expect("a mount point");
        let options = format!("data_file={}", path("disk.data"));
        let create = ["create", "-q", "-f", "qcow2", "-o", &options, &path("disk.qcow2"), "1M"];
        client_output(&scratch, "qemu-img", &create);
        for (file, copy) in [("disk.data", "copy.data"), ("disk.qcow2", "copy.qcow2")] {
            fs::copy(path(file), path(copy)).expect("a copy");
        }
        fs::create_dir(path("bucket")).expect("a folder");
        fs::copy(path("disk.img"), path("bucket/disk.img")).expect("a copy");
        for name in ["top.qcow2", "mid.qcow2", "plain.qcow2", "packed.qcow2"] {
            let create = ["create", "-q", "-f", "qcow2", &path(name), "1M"];
            client_output(&scratch, "qemu-img", &create);
        }
        for name in ["head.img", "made.img", "inside-head.img", "inside-made.img"] {
            fs::write(path(name), "").expect("a file for new images");
        }
        fs::write(path("password"), "letmein").expect("a password");
        let secret = format!("secret,id=s,file={}", path("password"));
        let create =
            ["create", "-q", "-f", "luks", "--object", &secret, "-o", "key-secret=s,iter-time=10"];
        let image = path("disk.luks");
        let arguments: Vec<&str> = create.iter().copied().chain([&*image, "1M"]).collect();
        client_output(&scratch, "qemu-img", &arguments);
        for name in ["copy.luks", "file.luks", "header.luks", "amended.luks"] {
            fs::copy(&image, path(name)).expect("a copy");
        }
        let encrypt = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
        let secret_image = path("secret.qcow2");
        let create = ["create", "-q", "-f", "qcow2", "--object", &secret, "-o", encrypt];
        let arguments: Vec<&str> = create.iter().copied().chain([&*secret_image, "1M"]).collect();
        client_output(&scratch, "qemu-img", &arguments);
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
        let web = Web::serve(scratch.dir());
        World { _others: others, port, web, scratch }
    }

    /// Starts a daemon with the objects that calls name. It inherits a socket, which a call may take.
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
        let password = self.scratch.path("password").display().to_string();
        let daemon = daemon.arg("--object").arg(format!("secret,id=sec0,file={password}"));
        let key = "secret,id=key,format=base64,data=AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
        let daemon = daemon.args(["--object", key]);
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
        let calls: Vec<Call> = calls(&dir, self.port.number(), self.web.port.number())
            .into_iter()
            .filter(is_wanted)
            .collect();
        // After a snapshot, a node stays read-only: other commands have another daemon.
        for calls in calls.chunk_by(|one, next| one.command == next.command) {
            let mut daemon = self.daemon();
            let mut qmp = Qmp::connect(&daemon.socket("qmp"));
            let mut entries = qmp.execute("query-qmp-schema", json!({}));
            change(&mut entries);
            let schema = Schema::new(&entries);
            for call in calls {
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
                    if !what.starts_with(call.below) {
                        continue;
                    }
                    made += 1;
                    // Only a client that has just connected negotiates.
                    let mut new = (call.command == "qmp_capabilities")
                        .then(|| Qmp::greeted(&daemon.socket("qmp")));
                    let qmp = new.as_mut().unwrap_or(&mut qmp);
                    if let Err(why) = self.attempt(qmp, call, arguments)
                        && !is_for_another_reason(call, &what, &why)
                    {
                        wrong.insert(format!("{what}: {why}"));
                    }
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
        let mut ended = Ok(());
        // All of them, for the next call.
        for after in &call.after {
            let done = carry_out(qmp, after).map_err(|why| format!("then {}: {why}", after.0));
            ended = ended.and(done);
        }
        ended
    }
}

/// Among the calls that are tried, each driver has nodes that are reopened, or that QSD does not reopen either.
#[test]
fn every_driver_that_the_schema_offers_is_reopened() {
    let scratch = Scratch::new();
    let daemon = ServerCommand::new(&scratch).monitor("qmp").start();
    let mut qmp = Qmp::connect(&daemon.socket("qmp"));
    let entries = qmp.execute("query-qmp-schema", json!({}));
    let schema = Schema::new(&entries);
    let node = schema.get(text(schema.get("blockdev-add"), "arg-type"));
    let offered: BTreeSet<&str> =
        list(node, "variants").map(|variant| text(variant, "case")).collect();
    let all = calls("", 1, 2);
    let reopened = all.iter().filter(|call| call.command == "blockdev-reopen");
    let reopened = reopened.filter_map(|call| call.arguments["options"][0]["driver"].as_str());
    let tried: BTreeSet<&str> = reopened.chain(NOT_REOPENED).collect();
    assert_eq!(offered, tried);
    daemon.stop();
}

/// Returns the commands that have arguments in the schema and no call.
fn without_a_call<'a>(schema: &'a Schema, calls: &[Call]) -> Vec<&'a str> {
    let has_members = |command: &&str| {
        let arguments = schema.get(text(schema.get(command), "arg-type"));
        list(arguments, "members").chain(list(arguments, "variants")).next().is_some()
    };
    let is_called = |command: &&str| calls.iter().any(|call| call.command == *command);
    schema.commands().filter(has_members).filter(|command| !is_called(command)).collect()
}

#[test]
fn every_command_with_arguments_has_a_call() {
    let scratch = Scratch::new();
    let daemon = ServerCommand::new(&scratch).monitor("qmp").start();
    let mut qmp = Qmp::connect(&daemon.socket("qmp"));
    let schema = Schema::new(&qmp.execute("query-qmp-schema", json!({})));
    let mut all = calls("", 1, 2);
    assert_eq!(without_a_call(&schema, &all), [""; 0]);
    // A missing call is detected.
    all.retain(|call| call.command != "job-pause");
    assert_eq!(without_a_call(&schema, &all), ["job-pause"]);
    daemon.stop();
}

#[test]
fn all_offered_values_are_accepted() {
    let (wrong, made) = World::new().try_all(|_| true, |_| {});
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(made > 300, "only {made} calls");
}

/// The test finds values and members that a schema offers and the daemon lacks.
#[test]
fn refused_offers_are_found() {
    let change = |entries: &mut Value| {
        let found = |entries: &Value, wanted: &dyn Fn(&Value) -> bool| {
            entries.as_array().expect("a list").iter().position(wanted).expect("it is there")
        };
        let modes = json!(["background", "write-blocking"]);
        let mode = found(entries, &|entry| entry["values"] == modes);
        entries[mode]["values"] = json!(["background", "write-blocking", "write-never"]);
        let mirror = found(entries, &|entry| entry["name"] == "blockdev-mirror");
        let arguments = entries[mirror]["arg-type"].clone();
        let arguments = found(entries, &|entry| entry["name"] == arguments);
        let members = entries[arguments]["members"].as_array_mut().expect("members");
        members.push(json!({"name": "unmap", "type": "bool", "default": null}));
    };
    let (wrong, _) = World::new().try_all(|call| call.command == "blockdev-mirror", change);
    let found: Vec<&str> = wrong.iter().filter_map(|wrong| wrong.split(": ").next()).collect();
    let expected = [
        "blockdev-mirror/copy-mode=\"write-never\"",
        "blockdev-mirror/unmap=false",
        "blockdev-mirror/unmap=true",
    ];
    assert_eq!(found, expected, "{wrong:#?}");
}

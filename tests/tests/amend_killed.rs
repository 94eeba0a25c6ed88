//! The daemon is killed with SIGKILL while `x-blockdev-amend` changes passwords. Afterwards QEMU opens each image with
//! the old password or the new one, with its data, and the next daemon serves it.
//!
//! `RINGMILL_KILLS` sets the number of kills, 20 by default: each of three images counts. `RINGMILL_SEED` determines their
//! instants; a failing test prints its seed.

use crate::common;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use common::replaced::{Random, times};
use integration::nbd::client;
use integration::{PATIENCE, Qmp, Scratch, Server, ServerCommand, eventually, tool};
use serde_json::{Value, json};

/// The passwords, which are also the names of their objects.
const PASSWORDS: [&str; 2] = ["first", "second"];

/// An image by the `node-name` of its node, which is also its job's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Image {
    Luks,
    Detached,
    Qcow2,
}

const IMAGES: [Image; 3] = [Image::Luks, Image::Detached, Image::Qcow2];

/// A change of passwords.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Add(&'static str),
    Erase(&'static str),
    /// The password of the only slot in use becomes this one.
    Replace(u64, &'static str),
}

impl Image {
    fn name(self) -> &'static str {
        match self {
            Image::Luks => "luks",
            Image::Detached => "detached",
            Image::Qcow2 => "qcow2",
        }
    }

    /// The image's files, with the node of the LUKS header first.
    fn files(self) -> &'static [&'static str] {
        match self {
            Image::Luks => &["luks.img"],
            Image::Detached => &["header.img", "data.img"],
            Image::Qcow2 => &["qcow2.img"],
        }
    }

    /// Options of a new image.
    fn create(self) -> Value {
        let (size, secret) = (1 << 20, PASSWORDS[0]);
        match self {
            Image::Luks => {
                json!({"driver": "luks", "file": "luks.img", "size": size, "key-secret": secret, "iter-time": 1})
            }
            Image::Detached => {
                json!({"driver": "luks", "file": "data.img", "header": "header.img", "size": size, "key-secret": secret,
                    "iter-time": 1})
            }
            Image::Qcow2 => {
                let encrypt = json!({"format": "luks", "key-secret": secret, "iter-time": 1});
                json!({"driver": "qcow2", "file": "qcow2.img", "size": size, "encrypt": encrypt})
            }
        }
    }

    /// Options of a node, above nodes with the names of the files.
    fn node(self, password: &str) -> Value {
        let name = self.name();
        match self {
            Image::Luks => {
                json!({"driver": "luks", "node-name": name, "file": "luks.img", "key-secret": password})
            }
            Image::Detached => {
                json!({"driver": "luks", "node-name": name, "file": "data.img", "header": "header.img",
                    "key-secret": password})
            }
            Image::Qcow2 => {
                let encrypt = json!({"format": "luks", "key-secret": password});
                json!({"driver": "qcow2", "node-name": name, "file": "qcow2.img", "encrypt": encrypt})
            }
        }
    }

    /// The command that makes a change.
    fn amend(self, change: Change) -> Value {
        let mut options = match change {
            Change::Add(new) => json!({"state": "active", "new-secret": new, "iter-time": 1}),
            Change::Erase(old) => json!({"state": "inactive", "old-secret": old}),
            Change::Replace(slot, new) => {
                json!({"state": "active", "new-secret": new, "keyslot": slot, "iter-time": 1})
            }
        };
        let options = match self {
            Image::Luks | Image::Detached => {
                options["driver"] = "luks".into();
                options
            }
            Image::Qcow2 => {
                options["format"] = "luks".into();
                json!({"driver": "qcow2", "encrypt": options})
            }
        };
        let force = matches!(change, Change::Replace(..));
        json!({"execute": "x-blockdev-amend", "arguments": {"job-id": self.name(), "node-name": self.name(),
            "options": options, "force": force}})
    }

    /// Runs commands of qemu-io. Returns `false` if the password is wrong.
    fn io(self, scratch: &Scratch, password: &str, command: &str) -> bool {
        let path = |name: &str| scratch.path(name).display().to_string();
        let image = match self {
            Image::Luks => format!("driver=luks,key-secret=s,file.filename={}", path("luks.img")),
            Image::Detached => format!(
                "driver=luks,key-secret=s,file.filename={},header.filename={}",
                path("data.img"),
                path("header.img")
            ),
            Image::Qcow2 => {
                format!("driver=qcow2,encrypt.key-secret=s,file.filename={}", path("qcow2.img"))
            }
        };
        let object = format!("secret,id=s,data={password}");
        let arguments = ["--object", &object, "--image-opts", "-c", command, &image];
        // A killed daemon's locks go when the kernel has ended its ring, which may be after the process.
        let said = eventually("the image's lock", || {
            let output = client(scratch, "qemu-io", &arguments);
            let (out, err) =
                (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            (!err.contains("Failed to get")).then(|| format!("{out}{err}"))
        });
        assert!(!said.contains("verification failed"), "{self:?}, {password}: {said}");
        let done = said.contains("524288/524288");
        assert!(done || said.contains("Invalid password"), "{self:?}, {password}: {said}");
        done
    }

    /// The passwords with which QEMU reads the data.
    fn valid(self, scratch: &Scratch) -> Vec<&'static str> {
        let opens = |password: &&&str| self.io(scratch, password, "read -P 7 128k 512k");
        PASSWORDS.iter().filter(opens).copied().collect()
    }

    /// The next change of an image with these passwords.
    fn next(self, qmp: &mut Qmp, valid: &[&'static str], random: &Random) -> Change {
        let [one] = valid else {
            return Change::Erase(valid[random.below(valid.len() as u64) as usize]);
        };
        let other = if *one == PASSWORDS[0] { PASSWORDS[1] } else { PASSWORDS[0] };
        match self.slots(qmp)[..] {
            [slot] if random.below(2) == 0 => Change::Replace(slot, other),
            _ => Change::Add(other),
        }
    }

    /// The slots in use.
    fn slots(self, qmp: &mut Qmp) -> Vec<u64> {
        let nodes = qmp.execute("query-named-block-nodes", json!({}));
        let node =
            nodes.as_array().into_iter().flatten().find(|node| node["node-name"] == self.name());
        let data = &node.expect("the node")["image"]["format-specific"]["data"];
        let data = if self == Image::Qcow2 { &data["encrypt"] } else { data };
        let slots = data["slots"].as_array().expect("slots");
        (0..).zip(slots).filter(|(_, slot)| slot["active"] == true).map(|(n, _)| n).collect()
    }
}

impl Change {
    /// Checks which passwords an image has. `before`: those before the change. `is_done`: a client has seen the job's end.
    fn check(self, image: Image, before: &[&str], after: &[&str], is_done: bool) {
        let what = format!("{image:?}, {self:?}, done: {is_done}: {before:?}, then {after:?}");
        let (stays, comes, goes) = match self {
            Change::Add(new) => (before.to_vec(), vec![new], vec![]),
            Change::Erase(old) => {
                (before.iter().copied().filter(|other| *other != old).collect(), vec![], vec![old])
            }
            Change::Replace(_, new) => (vec![], vec![new], before.to_vec()),
        };
        assert!(!after.is_empty(), "{what}");
        assert!(stays.iter().all(|password| after.contains(password)), "{what}");
        if is_done {
            assert!(comes.iter().all(|password| after.contains(password)), "{what}");
            assert!(!goes.iter().any(|password| after.contains(password)), "{what}");
        }
    }
}

fn start(scratch: &Scratch) -> (Server, Qmp) {
    let mut command = ServerCommand::new(scratch).monitor("qmp");
    for password in PASSWORDS {
        let secret = format!("secret,id={password},data={password}");
        command = command.args(["--object", &secret]);
    }
    let server = command.start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    for file in IMAGES.iter().flat_map(|image| image.files()) {
        let node = json!({"driver": "file", "node-name": file, "filename": scratch.path(file)});
        // A killed daemon's locks go when the kernel has ended its ring, which may be after the process.
        eventually("the image's lock", || {
            qmp.ask("blockdev-add", node.clone()).get("return").is_some().then_some(())
        });
    }
    (server, qmp)
}

fn make(scratch: &Scratch) {
    for file in IMAGES.iter().flat_map(|image| image.files()) {
        std::fs::write(scratch.path(file), []).expect("writable");
    }
    let (server, mut qmp) = start(scratch);
    for image in IMAGES {
        qmp.execute("blockdev-create", json!({"job-id": "make", "options": image.create()}));
        eventually("the job's end", || {
            let jobs = qmp.execute("query-jobs", json!({}));
            assert!(jobs[0].get("error").is_none(), "{jobs}");
            (jobs[0]["status"] == "concluded").then_some(())
        });
        qmp.execute("job-dismiss", json!({"id": "make"}));
    }
    server.stop();
    for image in IMAGES {
        assert!(image.io(scratch, PASSWORDS[0], "write -P 7 128k 512k"));
    }
}

/// A client of the monitor that may lose its connection at any time.
struct Client(UnixStream);

impl Client {
    fn connect(server: &Server) -> Client {
        let mut stream = UnixStream::connect(server.socket("qmp")).expect("the monitor");
        stream.set_read_timeout(Some(PATIENCE)).expect("a time limit");
        stream.write_all(b"{\"execute\": \"qmp_capabilities\"}\n").expect("it reads");
        Client(stream)
    }

    /// What it has received, up to the daemon's end.
    fn told(mut self) -> Vec<Value> {
        let mut told = Vec::new();
        // A reset ends it, too.
        let _ = self.0.read_to_end(&mut told);
        let lines = String::from_utf8(told).expect("text");
        lines.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }
}

#[test]
fn a_killed_daemon_leaves_a_password_that_opens() {
    let _ = tool("qemu-io");
    let scratch = Scratch::new();
    make(&scratch);
    let random = Random::new();
    let mut valid = IMAGES.map(|_| vec![PASSWORDS[0]]);
    // How long the changes take without a kill.
    let mut longest = Duration::ZERO;
    for round in 0..=times("RINGMILL_KILLS").div_ceil(IMAGES.len()) {
        let (server, mut qmp) = start(&scratch);
        let mut changes = Vec::new();
        for (image, valid) in IMAGES.into_iter().zip(&valid) {
            qmp.execute("blockdev-add", image.node(valid[0]));
            changes.push(image.next(&mut qmp, valid, &random));
        }
        let mut client = Client::connect(&server);
        let begun = Instant::now();
        for (image, change) in IMAGES.into_iter().zip(&changes) {
            client.0.write_all(format!("{}\n", image.amend(*change)).as_bytes()).expect("it reads");
        }
        if round == 0 {
            eventually("the end of the jobs", || {
                let jobs = qmp.execute("query-jobs", json!({}));
                let jobs = jobs.as_array().expect("jobs");
                let ended = jobs.iter().filter(|job| job["status"] == "concluded").count();
                (ended == IMAGES.len()).then_some(())
            });
            longest = begun.elapsed();
        } else {
            let thousandth = u32::try_from(random.below(1000)).expect("32 bits");
            std::thread::sleep(longest * thousandth / 1000);
        }
        server.kill();
        let told = client.told();
        for ((image, change), before) in IMAGES.into_iter().zip(changes).zip(&mut valid) {
            let is_done = told
                .iter()
                .any(|event| event["data"] == json!({"status": "concluded", "id": image.name()}));
            let after = image.valid(&scratch);
            println!("{round}: {image:?}, {change:?}, done: {is_done}: {after:?}");
            change.check(image, before, &after, is_done);
            *before = after;
        }
    }
}

//! Conflicts between users of a node: ringmill refuses what qemu-storage-daemon refuses.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use fastrand::Rng;
use integration::{Qmp, Scratch, ServerCommand, eventually, start_qsd, tool};
use serde_json::{Value, json};

/// Size of each image, bytes.
const SIZE: u64 = 1 << 20;
/// Number of commands in a sequence.
const STEPS: usize = 60;

fn qemu_img(arguments: &[&str]) {
    let made = Command::new(tool("qemu-img")).args(arguments).output().expect("qemu-img runs");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
}

/// Makes the images. Each is for one node: image locks play no part.
fn make_images(folder: &Path) {
    std::fs::create_dir(folder).expect("a new folder");
    for n in 0..STEPS {
        let path = |kind: &str| folder.join(format!("{n}.{kind}")).display().to_string();
        qemu_img(&["create", "-q", "-f", "qcow2", &path("qcow2"), &SIZE.to_string()]);
        qemu_img(&["create", "-q", "-f", "raw", &path("raw"), &SIZE.to_string()]);
    }
}

/// How to undo a command, if possible.
enum Undo {
    Nothing,
    Command(&'static str, Value),
    /// Deletes the export.
    Export(String),
    /// Cancels the job that the command started.
    Cancel(String),
    Impossible,
}

struct Step {
    command: &'static str,
    arguments: Value,
    undo: Undo,
    /// Change of the model if the command succeeds.
    effect: Effect,
}

#[derive(Clone)]
enum Effect {
    None,
    Node {
        name: String,
        below: Vec<String>,
        overlay: bool,
    },
    NoNode(String),
    Export(String),
    NoExport(String),
    Overlay {
        node: String,
        overlay: String,
    },
    /// A job that ends by itself.
    Stream(String),
    /// A job that goes on until it is cancelled.
    Job {
        id: String,
        ends: [String; 2],
    },
    NoJob(String),
}

/// The model: what both daemons have.
#[derive(Default)]
struct World {
    /// Nodes, and the nodes below each.
    nodes: BTreeMap<String, Vec<String>>,
    /// qcow2 nodes that have no backing image.
    overlays: Vec<String>,
    exports: Vec<String>,
    jobs: Vec<(String, [String; 2])>,
}

impl World {
    /// Returns nodes that no job uses. There a name may mean the job's filter, unlike in QSD.
    fn free(&self) -> Vec<String> {
        let is_free = |name: &&String| !self.jobs.iter().any(|(_, ends)| ends.contains(name));
        self.nodes.keys().filter(is_free).cloned().collect()
    }

    fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::None | Effect::Stream(_) => {}
            Effect::Node { name, below, overlay } => {
                if overlay {
                    self.overlays.push(name.clone());
                }
                self.nodes.insert(name, below);
            }
            Effect::NoNode(name) => {
                self.nodes.remove(&name);
                self.overlays.retain(|other| *other != name);
            }
            Effect::Export(id) => self.exports.push(id),
            Effect::NoExport(id) => self.exports.retain(|other| *other != id),
            Effect::Overlay { node, overlay } => {
                for below in self.nodes.values_mut().flatten().filter(|below| **below == node) {
                    below.clone_from(&overlay);
                }
                self.nodes.entry(overlay.clone()).or_default().push(node);
                self.overlays.retain(|other| *other != overlay);
            }
            Effect::Job { id, ends } => self.jobs.push((id, ends)),
            Effect::NoJob(id) => self.jobs.retain(|(other, _)| *other != id),
        }
    }

    /// Returns the next command.
    fn step(&self, n: usize, random: &mut Rng, folder: &Path) -> Step {
        let plain =
            |command, arguments, effect| Step { command, arguments, undo: Undo::Nothing, effect };
        let free = self.free();
        let what = random.usize(..100);
        match what {
            0..40 => self.add_node(n, &free, random, folder),
            40..65 => {
                let Some(node) = random.choice(&free) else {
                    return self.add_node(n, &free, random, folder);
                };
                let kind = ['n', 'n', 'n', 'v', 'v', 'f'][random.usize(..6)];
                let id = format!("{kind}{n}");
                let mut arguments =
                    json!({"id": id, "node-name": node, "writable": (random.u8(..100) < 60)});
                let mut set = |name: &str, value: Value| arguments[name] = value;
                match kind {
                    'n' => {
                        set("type", "nbd".into());
                        set("name", id.as_str().into());
                    }
                    'v' => {
                        let path = folder.join(format!("{id}.sock"));
                        set("type", "vhost-user-blk".into());
                        set("addr", json!({"type": "unix", "path": path}));
                    }
                    _ => {
                        // One that grows takes the permission to resize.
                        set("growable", (random.u8(..100) < 50).into());
                        set("type", "fuse".into());
                        set("mountpoint", folder.join(format!("mount{n}")).to_str().into());
                    }
                }
                let undo = Undo::Export(id.clone());
                Step { command: "block-export-add", arguments, undo, effect: Effect::Export(id) }
            }
            65..72 if !self.exports.is_empty() => {
                let id = random.choice(&self.exports).cloned().unwrap_or_default();
                let arguments = json!({"id": id, "mode": "hard"});
                plain("block-export-del", arguments, Effect::NoExport(id))
            }
            // QSD 10.0 and 11.1 crash if a vhost-user disk without a front end is resized.
            72..82 if !free.is_empty() && !self.exports.iter().any(|id| id.starts_with('v')) => {
                // The size stays the same.
                let node = random.choice(&free);
                plain("block_resize", json!({"node-name": node, "size": SIZE}), Effect::None)
            }
            82..86 if !free.is_empty() => {
                let name = random.choice(&free).cloned().unwrap_or_default();
                let step = plain("blockdev-del", json!({"node-name": name}), Effect::NoNode(name));
                Step { undo: Undo::Impossible, ..step }
            }
            86..91 if !self.overlays.is_empty() && !free.is_empty() => {
                let overlay = random.choice(&self.overlays).cloned().unwrap_or_default();
                let node = random.choice(&free).cloned().unwrap_or_default();
                let arguments = json!({"node": node, "overlay": overlay});
                let effect = Effect::Overlay { node, overlay };
                Step { command: "blockdev-snapshot", arguments, undo: Undo::Impossible, effect }
            }
            91..93 if !free.is_empty() => {
                let node = random.choice(&free).cloned().unwrap_or_default();
                let id = format!("j{n}");
                Step {
                    command: "block-stream",
                    arguments: json!({"job-id": id, "device": node, "auto-dismiss": true}),
                    undo: Undo::Cancel(id.clone()),
                    effect: Effect::Stream(id),
                }
            }
            93..97 if free.len() > 1 => {
                let source = random.choice(&free).cloned().unwrap_or_default();
                let target = random.choice(&free).cloned().unwrap_or_default();
                let id = format!("j{n}");
                let (command, sync) = match random.u8(..100) < 50 {
                    true => ("blockdev-mirror", "full"),
                    false => ("blockdev-backup", "none"),
                };
                let arguments =
                    json!({"job-id": id, "device": source, "target": target, "sync": sync});
                let undo = Undo::Cancel(id.clone());
                Step {
                    command,
                    arguments,
                    undo,
                    effect: Effect::Job { id, ends: [source, target] },
                }
            }
            _ if !self.jobs.is_empty() => {
                let (id, _) = self.jobs[random.usize(..self.jobs.len())].clone();
                plain("job-cancel", json!({"id": id}), Effect::NoJob(id))
            }
            _ => self.add_node(n, &free, random, folder),
        }
    }

    fn add_node(&self, n: usize, free: &[String], random: &mut Rng, folder: &Path) -> Step {
        let name = format!("n{n}");
        let at = |kind: &str| folder.join(format!("{n}.{kind}"));
        let read_only = random.u8(..100) < 20;
        let mut options = json!({"node-name": name, "read-only": read_only});
        let mut set = |name: &str, value: Value| options[name] = value;
        let mut below = Vec::new();
        let mut overlay = false;
        let kind = if free.is_empty() { 0 } else { random.usize(..6) };
        match kind {
            0 => {
                set("driver", "file".into());
                set("filename", json!(at(if random.u8(..100) < 60 { "qcow2" } else { "raw" })));
            }
            1 | 2 => {
                // If the node has no image, both daemons refuse, before or after the check of permissions.
                let file = random.choice(free).cloned().unwrap_or_default();
                set("driver", "qcow2".into());
                set("file", file.as_str().into());
                below.push(file);
                overlay = true;
                set("backing", Value::Null);
            }
            3 => {
                let backing = random.choice(free).cloned().unwrap_or_default();
                set("driver", "qcow2".into());
                set("file", json!({"driver": "file", "filename": at("qcow2")}));
                overlay = random.u8(..100) < 40;
                if overlay {
                    set("backing", Value::Null);
                } else {
                    set("backing", backing.as_str().into());
                    below.push(backing);
                }
            }
            4 => {
                let file = random.choice(free).cloned().unwrap_or_default();
                set("driver", "raw".into());
                set("file", file.as_str().into());
                below.push(file);
                if random.u8(..100) < 30 {
                    set("size", SIZE.into());
                }
            }
            _ => {
                let file = random.choice(free).cloned().unwrap_or_default();
                set("driver", "throttle".into());
                set("throttle-group", "group".into());
                set("file", file.as_str().into());
                below.push(file);
            }
        }
        let undo = Undo::Command("blockdev-del", json!({"node-name": name}));
        let effect = Effect::Node { name, below, overlay };
        Step { command: "blockdev-add", arguments: options, undo, effect }
    }
}

fn error(answer: &Value) -> Option<&str> {
    answer.pointer("/error/desc").and_then(Value::as_str)
}

/// Whether the reason is a conflict with other users of a node.
fn is_conflict(why: &str) -> bool {
    why.starts_with("Permission conflict")
        || why.contains("node is used as")
        || why.contains("in use")
        || why.contains("read-only node as writable")
}

fn end_job(qmp: &mut Qmp, id: &str) {
    let _ = qmp.ask("block-job-cancel", json!({"device": id, "force": true}));
    await_end(qmp, "query-jobs", id);
}

/// Waits until `query` no longer lists `id`.
fn await_end(qmp: &mut Qmp, query: &str, id: &str) {
    eventually("the end of a job or an export", || {
        let all = qmp.execute(query, json!({}));
        let is_there = all.as_array().is_some_and(|all| all.iter().any(|one| one["id"] == id));
        (!is_there).then_some(())
    });
}

/// Counts of commands by outcome; `ours_alone`: refused by ringmill only, by reason.
#[derive(Debug, Default)]
struct Counts {
    granted: usize,
    conflicts: usize,
    refused: usize,
    ours_alone: BTreeMap<String, usize>,
}

fn compare(seed: u64, images: &Path, counts: &mut Counts) {
    let (scratch, their_scratch) = (Scratch::new(), Scratch::new());
    let (mut qsd, mut theirs) = start_qsd(&their_scratch.path("qsd.sock"));
    let server = ServerCommand::new(&scratch).monitor("qmp").start();
    let mut ours = Qmp::connect(&server.socket("qmp"));
    // Each daemon has separate images.
    let folders = [their_scratch.path("images"), scratch.path("images")];
    for (qmp, folder) in [&mut theirs, &mut ours].into_iter().zip(&folders) {
        std::fs::create_dir(folder).expect("a new folder");
        for image in std::fs::read_dir(images).expect("images") {
            let image = image.expect("an image").path();
            std::fs::copy(&image, folder.join(image.file_name().expect("a name"))).expect("a copy");
        }
        for n in 0..STEPS {
            std::fs::write(folder.join(format!("mount{n}")), "").expect("a mount point");
        }
        let socket = folder.join("nbd.sock");
        let addr = json!({"type": "unix", "data": {"path": socket}});
        qmp.execute("nbd-server-start", json!({"addr": addr}));
        qmp.execute("object-add", json!({"qom-type": "throttle-group", "id": "group"}));
    }
    let (mut world, mut random) = (World::default(), Rng::with_seed(seed));
    let mut log = Vec::new();
    for n in 0..STEPS {
        let Step { command, arguments, undo, effect } = world.step(n, &mut random, &folders[0]);
        if let Effect::NoJob(id) = &effect {
            end_job(&mut theirs, id);
            end_job(&mut ours, id);
            world.carry_out(effect);
            continue;
        }
        let own = arguments
            .to_string()
            .replace(&folders[0].display().to_string(), &folders[1].display().to_string());
        let own = serde_json::from_str(&own).expect("JSON still");
        let (their_answer, our_answer) =
            (theirs.ask(command, arguments.clone()), ours.ask(command, own));
        let (their_error, our_error) = (error(&their_answer), error(&our_answer));
        log.push(format!("{command} {arguments}\n    QSD {their_error:?}\n    ours {our_error:?}"));
        let so_far = || format!("seed {seed}\n{}", log.join("\n"));
        match (their_error, our_error) {
            (None, None) => {
                counts.granted += 1;
                if let Effect::Stream(id) = &effect {
                    // A stream that still runs in one daemon only would be a conflict there only.
                    await_end(&mut theirs, "query-jobs", id);
                    await_end(&mut ours, "query-jobs", id);
                }
                if let Effect::NoExport(id) = &effect {
                    // The command only begins the end.
                    await_end(&mut theirs, "query-block-exports", id);
                    await_end(&mut ours, "query-block-exports", id);
                }
                world.carry_out(effect);
            }
            (Some(theirs), Some(_)) => {
                counts.refused += 1;
                // If there are several conflicts, the two programs may name different ones.
                counts.conflicts += usize::from(theirs.starts_with("Permission conflict"));
                if command == "block-stream" {
                    // QSD goes on using the node.
                    break;
                }
            }
            (Some(theirs), None) => {
                assert!(!is_conflict(theirs), "granted, where QSD finds a conflict: {}", so_far());
                // QSD refused for another reason: the nodes of the two daemons differ from now on.
                break;
            }
            (None, Some(ours)) => {
                assert!(
                    !ours.starts_with("Permission conflict"),
                    "QSD finds no conflict: {}",
                    so_far()
                );
                let start: String = ours.chars().filter(|c| !c.is_ascii_digit()).collect();
                *counts.ours_alone.entry(start).or_default() += 1;
                match undo {
                    Undo::Nothing => {}
                    Undo::Command(command, arguments) => drop(theirs.execute(command, arguments)),
                    Undo::Export(id) => {
                        theirs.execute("block-export-del", json!({"id": id, "mode": "hard"}));
                        await_end(&mut theirs, "query-block-exports", &id);
                    }
                    Undo::Cancel(id) => end_job(&mut theirs, &id),
                    Undo::Impossible => break,
                }
            }
        }
    }
    qsd.kill().and_then(|()| qsd.wait()).expect("our child");
    server.stop();
}

#[test]
fn conflicts_are_refused_as_by_qemu_storage_daemon() {
    let seeds = match std::env::var("RINGMILL_PERMISSION_SEEDS") {
        Ok(seeds) => seeds.parse().expect("a number of seeds"),
        Err(_) => 8,
    };
    let scratch = Scratch::new();
    let images = scratch.path("images");
    make_images(&images);
    let mut counts = Counts::default();
    (1..=seeds).for_each(|seed| compare(seed, &images, &mut counts));
    println!("{counts:#?}");
    // With fewer, the sequences would test nothing.
    let seeds = usize::try_from(seeds).expect("few seeds");
    assert!(counts.granted > 10 * seeds && counts.conflicts > seeds, "{counts:?}");
}

/// Each command here has at most one conflict: both programs name the same one.
#[test]
fn a_conflict_has_the_words_of_qemu_storage_daemon() {
    let (scratch, their_scratch) = (Scratch::new(), Scratch::new());
    let (mut qsd, mut theirs) = start_qsd(&their_scratch.path("qsd.sock"));
    let server = ServerCommand::new(&scratch).monitor("qmp").start();
    let mut ours = Qmp::connect(&server.socket("qmp"));
    for folder in [their_scratch.dir(), scratch.dir()] {
        for name in ["a", "b", "c"] {
            let path = folder.join(name).display().to_string();
            qemu_img(&["create", "-q", "-f", "qcow2", &path, &SIZE.to_string()]);
        }
        std::fs::write(folder.join("raw"), vec![0; SIZE as usize]).expect("an image");
        std::fs::write(folder.join("copy"), vec![0; SIZE as usize]).expect("an image");
    }
    let file = |name: &str, at: &str| json!({"driver": "file", "node-name": name, "filename": format!("DIR/{at}")});
    let qcow2 = |name: &str, file: &str, backing: Value| json!({"driver": "qcow2", "node-name": name, "file": file, "backing": backing});
    let nbd = |node: &str, id: &str, writable: bool| json!({"type": "nbd", "id": id, "name": id, "node-name": node, "writable": writable});
    let vhost = |node: &str, id: &str, writable: bool| {
        let path = format!("DIR/{id}.sock");
        let addr = json!({"type": "unix", "path": path});
        json!({"type": "vhost-user-blk", "id": id, "node-name": node, "writable": writable, "addr": addr})
    };
    let resize = |node: &str| json!({"node-name": node, "size": SIZE});
    let reopen = |node: &str, file: &str, read_only: bool| json!({"options": [{"driver": "raw", "node-name": node, "file": file, "read-only": read_only}]});
    let server_addr = json!({"addr": {"type": "unix", "data": {"path": "DIR/nbd.sock"}}});
    let read_only = |mut options: Value| {
        options["read-only"] = true.into();
        options
    };
    let steps = [
        ("nbd-server-start", server_addr),
        ("blockdev-add", file("f", "a")),
        ("blockdev-add", qcow2("a", "f", Value::Null)),
        // A second image on the same file.
        ("blockdev-add", qcow2("b", "f", Value::Null)),
        ("blockdev-add", read_only(qcow2("b", "f", Value::Null))),
        // Writes and resizes below an image.
        ("nbd-server-add", json!({"device": "f", "writable": true})),
        ("block-export-add", vhost("f", "v", true)),
        ("block-export-add", nbd("f", "e", false)),
        ("block_resize", resize("f")),
        ("blockdev-add", json!({"driver": "raw", "node-name": "r", "file": "f"})),
        ("block-export-add", nbd("r", "e", true)),
        ("block-export-add", nbd("r", "e", false)),
        ("block_resize", resize("r")),
        ("blockdev-add", json!({"driver": "raw", "node-name": "w", "file": "f", "offset": 512})),
        ("block-export-add", vhost("f", "v", false)),
        // A backing image.
        ("blockdev-add", file("g", "b")),
        ("blockdev-add", qcow2("overlay", "g", "a".into())),
        ("block_resize", resize("a")),
        ("block-export-add", nbd("overlay", "o", true)),
        ("block_resize", resize("overlay")),
        ("block-export-del", json!({"id": "o"})),
        ("block_resize", resize("overlay")),
        // Jobs.
        ("blockdev-add", file("raw", "raw")),
        ("blockdev-add", file("copy", "copy")),
        ("block-export-add", vhost("copy", "c", true)),
        (
            "blockdev-mirror",
            json!({"job-id": "j", "device": "raw", "target": "copy", "sync": "full"}),
        ),
        ("block-export-del", json!({"id": "c"})),
        (
            "blockdev-mirror",
            json!({"job-id": "j", "device": "raw", "target": "copy", "sync": "full"}),
        ),
        ("block-export-add", nbd("copy", "c", false)),
        ("block-export-add", vhost("copy", "c", true)),
        ("block_resize", resize("copy")),
        ("block_resize", resize("raw")),
        // Reopening with options that other users exclude, or that make a cycle.
        ("blockdev-add", json!({"driver": "null-co", "node-name": "null", "size": SIZE})),
        ("blockdev-add", json!({"driver": "raw", "node-name": "low", "file": "null"})),
        ("blockdev-add", json!({"driver": "raw", "node-name": "high", "file": "low"})),
        ("block-export-add", nbd("high", "h", true)),
        ("blockdev-reopen", reopen("low", "high", false)),
        ("blockdev-reopen", reopen("low", "f", false)),
        ("blockdev-reopen", reopen("low", "null", true)),
        ("blockdev-reopen", reopen("high", "low", true)),
        // A snapshot: afterwards the backing node takes no writes.
        ("blockdev-add", file("h", "c")),
        ("blockdev-add", qcow2("top", "h", Value::Null)),
        ("blockdev-snapshot", json!({"node": "overlay", "overlay": "top"})),
        ("block-export-add", nbd("overlay", "x", true)),
        ("blockdev-snapshot", json!({"node": "overlay", "overlay": "top"})),
    ];
    let in_folder = |arguments: &Value, folder: &Path| {
        let text = arguments.to_string().replace("DIR", &folder.display().to_string());
        serde_json::from_str::<Value>(&text).expect("JSON still")
    };
    let mut refused = 0;
    for (command, arguments) in steps {
        let their_answer = theirs.ask(command, in_folder(&arguments, their_scratch.dir()));
        let our_answer = ours.ask(command, in_folder(&arguments, scratch.dir()));
        assert_eq!(error(&our_answer), error(&their_answer), "{command} {arguments}");
        refused += usize::from(error(&our_answer).is_some());
    }
    assert_eq!(refused, 23);
    qsd.kill().and_then(|()| qsd.wait()).expect("our child");
    server.stop();
}

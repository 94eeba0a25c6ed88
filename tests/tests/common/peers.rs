//! ringmill and qemu-storage-daemon side by side: the same commands to both, on images of their own.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use integration::{Qmp, Scratch, Server, ServerCommand, start_qsd, tool};
use serde_json::{Value, json};

/// The two daemons, each with a folder and a monitor.
pub struct Peers {
    pub ours: Side,
    pub theirs: Side,
    server: Option<Server>,
    child: Child,
}

/// One of the two.
pub struct Side {
    pub folder: PathBuf,
    pub qmp: Qmp,
}

/// Replaces text in all strings of a value.
fn replaced(value: &Value, from: &str, to: &str) -> Value {
    match value {
        Value::String(text) => text.replace(from, to).into(),
        Value::Array(list) => list.iter().map(|value| replaced(value, from, to)).collect(),
        Value::Object(members) => {
            members.iter().map(|(name, value)| (name.clone(), replaced(value, from, to))).collect()
        }
        other => other.clone(),
    }
}

impl Side {
    /// Sends a command, in which `DIR` is the folder. The answer has `DIR` for it, too.
    pub fn ask(&mut self, command: &str, arguments: &Value) -> Value {
        let folder = self.folder.display().to_string();
        let answer = self.qmp.ask(command, replaced(arguments, "DIR", &folder));
        replaced(&answer, &folder, "DIR")
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

impl Peers {
    pub fn new(scratch: &Scratch) -> Peers {
        let side = |name: &str| {
            let folder = scratch.path(name);
            std::fs::create_dir(&folder).expect("a new folder");
            folder
        };
        let (ours, theirs) = (side("ours"), side("theirs"));
        let server = ServerCommand::new(scratch).monitor("qmp").start();
        let (child, their_qmp) = start_qsd(&theirs.join("qsd.sock"));
        let qmp = Qmp::connect(&server.socket("qmp"));
        Peers {
            ours: Side { folder: ours, qmp },
            theirs: Side { qmp: their_qmp, folder: theirs },
            server: Some(server),
            child,
        }
    }

    /// Both sides.
    pub fn sides(&mut self) -> [&mut Side; 2] {
        [&mut self.ours, &mut self.theirs]
    }

    /// Runs a program for each side. `DIR` in the arguments is the side's folder.
    pub fn run(&mut self, program: &str, arguments: &[&str]) {
        for side in self.sides() {
            run(program, &side.folder, arguments);
        }
    }

    /// Sends a command to both, which answer the same.
    pub fn both(&mut self, command: &str, arguments: Value) -> Value {
        let ours = self.ours.ask(command, &arguments);
        let theirs = self.theirs.ask(command, &arguments);
        assert_eq!(ours, theirs, "{command} {arguments}");
        ours
    }

    /// The same; both succeed.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Value {
        let mut answer = self.both(command, arguments);
        match answer.get_mut("return") {
            Some(returned) => returned.take(),
            None => panic!("{command}: {answer}"),
        }
    }

    /// Waits for an event from both, with the same data but for how far a job is.
    pub fn wait_for(&mut self, event: &str) -> Value {
        let [ours, theirs] = self.sides().map(|side| {
            let mut data = side.qmp.wait_for(event);
            if let Some(members) = data.as_object_mut() {
                members.retain(|name, _| name != "len" && name != "offset");
            }
            data
        });
        assert_eq!(ours, theirs, "{event}");
        ours
    }

    /// Serves a node for writing over NBD, on the socket `nbd.sock` of each folder.
    pub fn serve(&mut self, node: &str) {
        let addr = json!({"type": "unix", "data": {"path": "DIR/nbd.sock"}});
        self.execute("nbd-server-start", json!({"addr": addr}));
        let export =
            json!({"type": "nbd", "id": "e", "node-name": node, "name": "e", "writable": true});
        self.execute("block-export-add", export);
    }

    /// Has a client of the NBD export of both carry out commands of qemu-io.
    pub fn io(&mut self, commands: &[&str]) {
        let mut arguments = vec!["-f", "raw", "nbd+unix:///e?socket=DIR/nbd.sock"];
        arguments.extend(commands.iter().flat_map(|command| ["-c", command]));
        self.run("qemu-io", &arguments);
    }

    /// Ends both. Images may be looked at then.
    pub fn stop(&mut self) {
        self.ours.qmp.execute("quit", json!({}));
        self.theirs.qmp.execute("quit", json!({}));
        self.child.wait().expect("our child");
        if let Some(mut server) = self.server.take() {
            assert!(server.wait().success());
        }
    }
}

/// Runs a program, which is to succeed. `DIR` in the arguments is the folder.
pub fn run(program: &str, folder: &Path, arguments: &[&str]) -> String {
    let folder = folder.display().to_string();
    let replaced = arguments.iter().map(|argument| argument.replace("DIR", &folder));
    let output = Command::new(tool(program)).args(replaced).output().expect("it can be run");
    assert!(output.status.success(), "{program} {arguments:?} in {folder}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

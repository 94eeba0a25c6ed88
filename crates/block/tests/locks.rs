//! Image locks, against QEMU's own tools. `scripts/setup-tests.sh` installs them; without them these
//! tests fail.

use crate::common;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use block::options::*;
use block::{NodeRegistry, OpenError};
use common::*;

fn options(path: &Path, read_only: bool) -> BlockdevOptions {
    BlockdevOptions { read_only, ..blockdev("disk", file(path, None)) }
}

fn open(path: &Path, read_only: bool) -> Result<NodeRegistry, OpenError> {
    let mut nodes = NodeRegistry::new();
    nodes.open(&options(path, read_only)).map(|_| nodes)
}

/// Runs a tool to its end: whether it succeeded, and what it said.
fn tool(program: &str, args: &[&str], path: &Path) -> (bool, String) {
    let output = Command::new(program)
        .args(args)
        .arg(path)
        .output()
        .unwrap_or_else(|e| panic!("{program}: {e}; scripts/setup-tests.sh installs it"));
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// A `qemu-io` that has the image open until dropped.
struct QemuIo(Child);

impl QemuIo {
    fn open(args: &[&str], path: &Path) -> QemuIo {
        let mut child = Command::new("qemu-io")
            .args(args)
            .arg(path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("qemu-io: {e}; scripts/setup-tests.sh installs it"));
        // It answers once it has the image.
        child.stdin.as_mut().unwrap().write_all(b"length\n").unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "qemu-io opened {}", path.display());
        QemuIo(child)
    }
}

impl Drop for QemuIo {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const READ: [&str; 5] = ["-r", "-f", "raw", "-c", "read 0 4k"];
const WRITE: [&str; 4] = ["-f", "raw", "-c", "write 0 4k"];

#[test]
fn qemu_tools_cannot_take_unshared_permissions() {
    let image = TempFile::new(&disk(), "lock-ours", 65536);
    let nodes = open(&image.0, false).unwrap();
    let (ok, said) = tool("qemu-io", &WRITE, &image.0);
    assert!(!ok && said.contains("Failed to get \"write\" lock"), "{said}");
    let resize =
        Command::new("qemu-img").args(["resize", "-f", "raw"]).arg(&image.0).arg("1M").output();
    let said = String::from_utf8_lossy(&resize.unwrap().stderr).into_owned();
    assert!(said.contains("Failed to get \"write\" lock"), "{said}");
    let copy = TempFile(image.0.with_extension("copy"));
    let convert = Command::new("qemu-img")
        .args(["convert", "-f", "raw", "-O", "raw"])
        .args([&image.0, &copy.0])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&convert.stderr);
    assert!(said.contains("Failed to get shared \"write\" lock"), "{said}");
    let (ok, said) = tool("qemu-io", &READ, &image.0);
    assert!(ok, "readers that bear a writer are let in: {said}");
    drop(nodes);
    let (ok, said) = tool("qemu-io", &WRITE, &image.0);
    assert!(ok, "closing the node unlocks: {said}");
}

#[test]
fn readers_share() {
    let image = TempFile::new(&disk(), "lock-read", 65536);
    let _first = open(&image.0, true).unwrap();
    let _second = open(&image.0, true).unwrap();
    let (ok, said) = tool("qemu-io", &READ, &image.0);
    assert!(ok, "{said}");
    let (ok, said) = tool("qemu-io", &WRITE, &image.0);
    assert!(!ok && said.contains("Failed to get \"write\" lock"), "{said}");
}

#[test]
fn a_writer_elsewhere_is_named() {
    let image = TempFile::new(&disk(), "lock-theirs", 65536);
    let qemu = QemuIo::open(&["-f", "raw"], &image.0);
    for read_only in [false, true] {
        let error = open(&image.0, read_only).map(drop).unwrap_err();
        assert_eq!(error.to_string(), "Failed to get shared \"write\" lock");
        let hint = error.hint().unwrap();
        let question = format!("Is another process using the image [{}]?", image.0.display());
        assert!(hint.starts_with(&question), "{hint}");
        assert!(hint.contains(&format!("qemu-io (pid {})", qemu.0.id())), "{hint}");
    }
    let mut unlocked = options(&image.0, false);
    let file = unlocked.driver.as_file_mut().unwrap();
    file.locking = Locking::Off;
    assert!(NodeRegistry::new().open(&unlocked).is_ok(), "locking=off does not ask");
    drop(qemu);
    open(&image.0, false).unwrap();
}

#[test]
fn a_user_that_shares_no_writes_is_named() {
    let image = TempFile(disk().join(format!("ringmill-{}-lock.qcow2", std::process::id())));
    let created =
        Command::new("qemu-img").args(["create", "-f", "qcow2"]).arg(&image.0).arg("1M").output();
    assert!(created.expect("scripts/setup-tests.sh installs qemu-img").status.success());
    // A format driver permits no other writer.
    let qemu = QemuIo::open(&["-f", "qcow2"], &image.0);
    let error = open(&image.0, false).map(drop).unwrap_err();
    assert_eq!(error.to_string(), "Failed to get \"write\" lock");
    let hint = error.hint().unwrap();
    assert!(hint.contains(&format!("qemu-io (pid {})", qemu.0.id())), "{hint}");
    assert!(hint.contains("does not share \"write\""), "{hint}");
}

#[test]
fn a_second_node_of_ours_is_refused() {
    let image = TempFile::new(&disk(), "lock-second", 65536);
    let first = open(&image.0, false).unwrap();
    let error = open(&image.0, false).map(drop).unwrap_err();
    assert_eq!(error.to_string(), "Failed to get \"write\" lock");
    assert!(error.hint().unwrap().contains("Another node of this process"), "{error:?}");
    drop(first);
    open(&image.0, false).unwrap();
}

#[test]
fn only_idle_nodes_without_pending_metadata_release_their_locks() {
    let [busy, idle, under] = ["busy", "idle", "under"]
        .map(|name| TempFile::new(&disk(), &format!("lock-{name}"), 65536));
    let create = ["create", "-q", "-f", "qcow2", "-o", "size=1M"];
    let (made, said) = tool("qemu-img", &create, &under.0);
    assert!(made, "{said}");
    let mut nodes = NodeRegistry::new();
    for (name, image) in [("busy", &busy), ("idle", &idle), ("under", &under)] {
        nodes.open(&blockdev(name, file(&image.0, None))).unwrap();
    }
    let on = |name: &str| BlockdevRef::Name(name.into());
    let raw = |file: &str| {
        Driver::from(RawOptions { file: on(file), offset: 0, size: None, keep_raw: false })
    };
    nodes.open(&blockdev("top", raw("busy"))).unwrap();
    let qcow2 =
        Qcow2Options { file: on("under"), backing: Backing::None, ..Qcow2Options::default() };
    nodes.open(&blockdev("qcow2", Driver::from(qcow2))).unwrap();
    let is_free = |image: &TempFile| tool("qemu-io", &WRITE, &image.0).0;
    nodes.give_up_locks(&["top".into()]);
    assert_eq!([&busy, &idle, &under].map(is_free), [false, true, false]);
    nodes.give_up_locks(&[]);
    assert_eq!([&busy, &idle, &under].map(is_free), [true, true, false]);
    drop(nodes);
    assert!(is_free(&under));
}

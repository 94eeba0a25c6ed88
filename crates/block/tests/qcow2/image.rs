//! Images made and judged by QEMU's tools.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use block::NodeRegistry;
use block::node::BlockNode;
use block::options::*;

use crate::common::{Rig, blockdev, disk, file};

/// A folder that is gone with its value.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Folder {
        let path = disk().join(format!("ringmill-qcow2-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs one of QEMU's tools in a folder, which is `DIR` in the arguments; returns whether it was content, and what it said.
pub(crate) fn run(folder: &Folder, program: &str, args: &[&str]) -> (bool, String) {
    let dir = folder.0.display().to_string();
    let args = args.iter().map(|arg| arg.replace("DIR", &dir));
    let output = Command::new(program).args(args).current_dir(&folder.0).output();
    let output =
        output.unwrap_or_else(|error| panic!("{program}: {error} (scripts/setup-tests.sh)"));
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}

pub(crate) fn qemu_img(folder: &Folder, args: &[&str]) -> String {
    let (content, said) = run(folder, "qemu-img", args);
    assert!(content, "qemu-img {args:?}: {said}");
    said
}

/// One command of qemu-io's on an image.
pub(crate) fn qemu_io(folder: &Folder, image: &str, command: &str) {
    let (content, said) = run(folder, "qemu-io", &["-f", "qcow2", "-c", command, image]);
    assert!(content && !said.contains("failed"), "qemu-io {command}: {said}");
}

/// Not even leaks.
pub(crate) fn check(folder: &Folder, image: &str) {
    qemu_img(folder, &["check", "-q", "-f", "qcow2", image]);
}

/// The options of an image in a file.
pub(crate) fn options(path: &Path) -> BlockdevOptions {
    BlockdevOptions { discard: Discard::Unmap, ..blockdev("disk", driver(path, Backing::Implicit)) }
}

pub(crate) fn driver(path: &Path, backing: Backing) -> Driver {
    Driver::from(qcow2(path, backing))
}

pub(crate) fn qcow2(path: &Path, backing: Backing) -> Qcow2Options {
    let below = BlockdevOptions {
        node_name: None,
        discard: Discard::Unmap,
        ..blockdev("", file(path, None))
    };
    Qcow2Options { file: BlockdevRef::Inline(Box::new(below)), backing, ..Qcow2Options::default() }
}

/// Opens an image that no other process has open.
pub(crate) fn open(options: &BlockdevOptions) -> Arc<dyn BlockNode> {
    let journals = crate::common::tmpfs().join("ringmill-test-journals");
    NodeRegistry::new().with_journals(&journals).unwrap().open(options).unwrap()
}

/// All that a node has.
pub(crate) fn contents(node: &Arc<dyn BlockNode>) -> Vec<u8> {
    let mut rig = Rig::new(node.clone());
    let size = node.geometry().size as usize;
    let mut all = Vec::with_capacity(size);
    while all.len() < size {
        let len = (size - all.len()).min(1 << 20);
        all.extend(rig.read(all.len() as u64, len, 0).unwrap());
    }
    all
}

/// That QEMU finds the image whole, and in it what we have read of it.
pub(crate) fn judge(folder: &Folder, image: &str, contents: &[u8]) {
    check(folder, image);
    std::fs::write(folder.path("contents.raw"), contents).unwrap();
    qemu_img(folder, &["compare", "-f", "qcow2", "-F", "raw", image, "contents.raw"]);
}

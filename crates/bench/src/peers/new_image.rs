//! New qcow2 images, made for each measurement: what is measured is the first write to each cluster.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::rows::Place;
use super::tree::Tree;

/// Bytes of the disk.
const SIZE: u64 = 4 << 30;
/// A file system in memory.
const MEMORY: &str = "/dev/shm";

/// An image, removed when dropped.
#[derive(Debug)]
pub(crate) struct NewImage(PathBuf);

/// The path of an image, which need not exist. `directory`: that of the measurement.
pub(crate) fn path(place: Place, directory: &Path) -> PathBuf {
    match place {
        Place::Disk => directory.join("first-writes.qcow2"),
        Place::Memory => {
            Path::new(MEMORY).join(format!("bench-first-writes-{}.qcow2", std::process::id()))
        }
    }
}

impl NewImage {
    /// Makes an image. `base`: the raw file behind it, which has its size then.
    pub(crate) fn create(tree: &Tree, path: PathBuf, base: Option<&Path>) -> Result<NewImage> {
        let mut create = match tree.has("usr/bin/qemu-img") {
            true => tree.program("usr/bin/qemu-img")?,
            false => vec!["qemu-img".into()],
        };
        create.extend(["create", "-q", "-f", "qcow2"].map(OsString::from));
        create.push(path.clone().into());
        let size = match base {
            Some(base) => fs::metadata(base).context("the base's size")?.len(),
            None => SIZE,
        };
        create.push(size.to_string().into());
        let image = NewImage(path);
        let status = Command::new(&create[0]).args(&create[1..]).status().context("qemu-img")?;
        ensure!(status.success(), "qemu-img could not create {}: {status}", image.0.display());
        Ok(image)
    }
}

impl Drop for NewImage {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

//! The images of rows. Each measurement has its own, so that none finds what the one before has written.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use fastrand::Rng;

use super::contender::{Node, SECRET, qemu_img};
use super::rows::{Contents, Place};
use super::tree::Tree;
use crate::host::ram_disk::MEMORY;

/// Bytes of a disk with nothing in it, and of one that is compressed: clusters for seconds of first writes.
const SIZE: u64 = 4 << 30;
/// Bytes of a cluster, qemu-img's default.
const CLUSTER: usize = 64 << 10;

/// Makes images.
#[derive(Debug)]
pub(crate) struct Maker {
    /// Where qemu-img is.
    pub(crate) tree: Tree,
    /// Where images on disk are, and what each image is copied from.
    pub(crate) directory: PathBuf,
    /// A raw file full of random data.
    pub(crate) data: PathBuf,
}

/// A disk in files, which are removed when this is dropped.
#[derive(Debug)]
pub(crate) struct Image {
    /// How it is opened.
    pub(crate) node: Node,
    /// Its files.
    _files: Vec<Removed>,
}

impl Maker {
    /// Makes an image.
    pub(crate) fn make(&self, contents: Contents, place: Place) -> Result<Image> {
        let file = self.file(place, "image");
        let path = file.0.clone();
        let image = |node| Image { node, _files: vec![file] };
        match contents {
            Contents::New => {
                self.create(&path, &[], SIZE)?;
                Ok(image(Node::Qcow2(path, None)))
            }
            Contents::Overlay | Contents::Named => {
                let base = match place {
                    Place::Disk => None,
                    Place::Memory => Some(self.file(place, "base")),
                };
                if let Some(base) = &base {
                    copy(&self.data, &base.0)?;
                }
                let below = base.as_ref().map_or(&self.data, |base| &base.0).clone();
                let size = fs::metadata(&below).context("the base's size")?.len();
                let is_named = contents == Contents::Named;
                let names = ["-F", "raw", "-b", below.to_str().context("the base's name")?];
                self.create(&path, if is_named { &names } else { &[] }, size)?;
                let mut image = image(Node::Qcow2(path, (!is_named).then_some(below)));
                image._files.extend(base);
                Ok(image)
            }
            Contents::Raw => {
                copy(&self.data, &path)?;
                Ok(image(Node::File(path)))
            }
            Contents::Mapped => {
                copy(&self.template("mapped", &self.data, &["-O", "qcow2"])?, &path)?;
                Ok(image(Node::Qcow2(path, None)))
            }
            Contents::Compressed => {
                copy(&self.compressed()?, &path)?;
                Ok(image(Node::Qcow2(path, None)))
            }
            Contents::Luks => {
                let options = ["-O", "luks", "--object", SECRET, "-o", "key-secret=s,iter-time=10"];
                copy(&self.template("luks", &self.data, &options)?, &path)?;
                Ok(image(Node::Luks(path)))
            }
        }
    }

    fn file(&self, place: Place, name: &str) -> Removed {
        Removed(match place {
            Place::Disk => self.directory.join(name),
            Place::Memory => Path::new(MEMORY).join(format!("bench-{name}-{}", std::process::id())),
        })
    }

    fn create(&self, path: &Path, backing: &[&str], size: u64) -> Result<()> {
        let options = [&["create", "-f", "qcow2"], backing].concat();
        qemu_img(&self.tree, &options, &[path.as_ref(), size.to_string().as_ref()])
    }

    fn template_path(&self, name: &str, size: u64) -> PathBuf {
        self.directory.join(format!("{name}-{}m", size >> 20))
    }

    /// The image that others are copied from; it stays for later runs.
    fn template(&self, name: &str, data: &Path, options: &[&str]) -> Result<PathBuf> {
        let size = fs::metadata(data).with_context(|| data.display().to_string())?.len();
        let path = self.template_path(name, size);
        if !path.exists() {
            // Under another name until it is complete.
            let unfinished = path.with_extension("unfinished");
            let convert: Vec<&str> =
                ["convert", "-f", "raw"].iter().chain(options).copied().collect();
            qemu_img(&self.tree, &convert, &[data.as_ref(), unfinished.as_ref()])?;
            fs::rename(&unfinished, &path).with_context(|| path.display().to_string())?;
        }
        Ok(path)
    }

    fn compressed(&self) -> Result<PathBuf> {
        // Random data would be stored as it is, and so would be what repeats less often than every 4 KiB (QEMU's window).
        let data = self.file(Place::Memory, "compressible");
        let write = || -> std::io::Result<()> {
            let mut random = Rng::with_seed(SIZE);
            let mut file = File::create(&data.0)?;
            for _ in 0..SIZE / CLUSTER as u64 {
                let mut part = [0; CLUSTER / 64];
                random.fill(&mut part);
                file.write_all(&part.repeat(64))?;
            }
            Ok(())
        };
        let path = self.template_path("compressed", SIZE);
        if path.exists() {
            return Ok(path);
        }
        write().with_context(|| data.0.display().to_string())?;
        self.template("compressed", &data.0, &["-O", "qcow2", "-c", "-W", "-m", "8"])
    }
}

/// Writes are on the disk afterwards, so that none of them disturbs the measurement.
fn copy(from: &Path, to: &Path) -> Result<()> {
    let copy = || fs::copy(from, to).and_then(|_| File::open(to)?.sync_all());
    copy().with_context(|| format!("copying {} to {}", from.display(), to.display()))
}

/// A file, removed when dropped.
#[derive(Debug)]
struct Removed(PathBuf);

impl Drop for Removed {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

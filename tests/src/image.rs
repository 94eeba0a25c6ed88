//! Disk images: making them, and looking at them from outside.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::{Scratch, pattern, tool};

/// A raw image in a test's folder.
#[derive(Clone, Debug)]
pub struct Image {
    path: PathBuf,
}

impl Image {
    /// An image of `mib` MiB of holes.
    pub fn empty(scratch: &Scratch, name: &str, mib: u64) -> Self {
        let path = scratch.path(name);
        let file = File::create_new(&path).expect("a new image");
        file.set_len(mib << 20).expect("space for the image");
        Self { path }
    }

    /// An image of `mib` MiB of [`pattern`] blocks of generation 0, on disk when this returns.
    pub fn filled(scratch: &Scratch, name: &str, mib: u64) -> Self {
        let path = scratch.path(name);
        let mut file = BufWriter::new(File::create_new(&path).expect("a new image"));
        for index in 0..(mib << 20) / pattern::BLOCK as u64 {
            file.write_all(&pattern::block(index, 0)).expect("space for the image");
        }
        let file = file.into_inner().expect("space for the image");
        file.sync_all().expect("the image on disk");
        Self { path }
    }

    /// The image at `path`.
    pub fn existing(path: &Path) -> Self {
        assert!(path.is_file(), "{} is not an image", path.display());
        Self { path: path.to_owned() }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How many bytes of storage it takes up.
    pub fn allocated(&self) -> u64 {
        fs::metadata(&self.path).expect("the image exists").blocks() * 512
    }

    /// The `len` bytes at `offset`.
    pub fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        let file = File::open(&self.path).expect("the image exists");
        file.read_exact_at(&mut data, offset).expect("the image is large enough");
        data
    }

    /// Runs `qemu-img` with `arguments`, and then with the path of the image.
    pub fn qemu_img(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(tool("qemu-img"));
        command.args(arguments).arg(&self.path).output().expect("qemu-img runs")
    }

    /// The MD5 sum of what `qemu-img` reads from it, in hexadecimal.
    ///
    /// # Panics
    ///
    /// When another process uses it.
    pub fn md5(&self) -> String {
        let copy = self.path.with_extension("copy");
        let target = copy.to_str().expect("a path in UTF-8");
        let source = self.path.to_str().expect("a path in UTF-8");
        let (input, output) = (format!("if={source}"), format!("of={target}"));
        let dd = ["dd", "-f", "raw", "-O", "raw", "bs=1M", &input, &output];
        let dd = Command::new(tool("qemu-img")).args(dd).output().expect("qemu-img runs");
        assert!(dd.status.success(), "{dd:?}");
        let sum = Command::new(tool("busybox")).arg("md5sum").arg(&copy).output();
        let sum = String::from_utf8(sum.expect("busybox runs").stdout).expect("a sum");
        fs::remove_file(&copy).expect("the copy exists");
        sum.split(' ').next().expect("a sum").to_owned()
    }
}

//! A guest's second initramfs: a test's own programs and files, in addition to the common ones.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::tool;

/// An archive that the kernel unpacks after the first one (`cpio -H newc`).
#[derive(Debug, Default)]
pub struct Initramfs {
    archive: Vec<u8>,
    known: BTreeSet<PathBuf>,
    top: PathBuf,
}

const FOLDER: u32 = 0o04_0755;
const FILE: u32 = 0o10_0644;
const PROGRAM: u32 = 0o10_0755;

impl Initramfs {
    /// An empty archive whose paths are below the guest's folder `top`.
    pub fn new(top: &str) -> Self {
        Self { top: top.into(), ..Self::default() }
    }

    /// Adds a file.
    pub fn file(&mut self, at: &str, contents: &[u8]) {
        self.add(Path::new(at), FILE, contents);
    }

    /// Adds a program without its debug information, and its libraries.
    ///
    /// # Panics
    ///
    /// If it cannot be read.
    pub fn program(&mut self, at: &str, program: &Path) {
        let stripped = tempfile::NamedTempFile::new_in("/var/tmp").expect("a file");
        let mut strip = Command::new(tool("strip"));
        strip.arg("--strip-debug").arg("-o").arg(stripped.path()).arg(program);
        assert!(strip.status().expect("strip can be run").success());
        self.add(Path::new(at), PROGRAM, &fs::read(stripped.path()).expect("what strip wrote"));

        let output = Command::new(tool("ldd")).arg(program).output().expect("ldd can be run");
        let output = String::from_utf8(output.stdout).expect("paths in UTF-8");
        for library in output.split_whitespace().filter(|word| word.starts_with('/')) {
            let library = Path::new(library);
            self.add(library, PROGRAM, &fs::read(library).expect("a library"));
        }
    }

    fn add(&mut self, at: &Path, mode: u32, contents: &[u8]) {
        let at = self.top.join(at.strip_prefix("/").unwrap_or(at));
        let folders: Vec<&Path> = at.ancestors().skip(1).collect();
        for folder in folders.into_iter().rev().filter(|folder| folder.parent().is_some()) {
            self.entry(folder, FOLDER, &[]);
        }
        self.entry(&at, mode, contents);
    }

    /// Adds an entry, unless the path has one.
    fn entry(&mut self, path: &Path, mode: u32, contents: &[u8]) {
        if !self.known.insert(path.to_owned()) {
            return;
        }
        let name = path.strip_prefix("/").unwrap_or(path).to_str().expect("a path in UTF-8");
        let inode = self.known.len() as u32;
        self.raw_entry(name, inode, mode, contents);
    }

    fn raw_entry(&mut self, name: &str, inode: u32, mode: u32, contents: &[u8]) {
        let size = u32::try_from(contents.len()).expect("below 4 GiB");
        let name_size = name.len() as u32 + 1;
        let fields = [inode, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0];
        self.put(b"070701");
        fields.iter().for_each(|field| self.put(format!("{field:08x}").as_bytes()));
        self.put(name.as_bytes());
        self.put(b"\0");
        self.pad();
        self.put(contents);
        self.pad();
    }

    fn put(&mut self, bytes: &[u8]) {
        self.archive.extend_from_slice(bytes);
    }

    fn pad(&mut self) {
        self.archive.resize(self.archive.len().next_multiple_of(4), 0);
    }

    /// Writes the contents of the file `before`, followed by this archive.
    pub(crate) fn write_behind(mut self, before: &Path, to: &Path) {
        self.raw_entry("TRAILER!!!", 0, 0, &[]);
        fs::copy(before, to).expect("space for the initramfs");
        let mut file = fs::File::options().append(true).open(to).expect("it is there");
        file.write_all(&self.archive).expect("space for the initramfs");
    }
}

//! The tested kinds of images.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::OnceLock;

use block::options::*;
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::common::{TempFile, blockdev, file_options, tmpfs};
use crate::course::Random;
use crate::guest::{SECTOR, sector};
use crate::path_of;

/// The name of the node below an image.
pub(crate) const FILE: &str = "file";

/// A kind of image.
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    /// Options for qemu-img; empty for a raw image.
    pub(crate) options: &'static str,
    /// Bytes of the disk.
    pub(crate) size: usize,
    /// Bytes of a cluster.
    pub(crate) cluster: usize,
    /// With `O_DIRECT`.
    pub(crate) direct: bool,
    /// It has a backing image that is shorter than the disk.
    pub(crate) backed: bool,
    /// Relative frequency in courses.
    weight: usize,
    start: OnceLock<Start>,
}

/// A new image.
pub(crate) struct Start {
    pub(crate) image: Vec<u8>,
    /// Contents of the backing image.
    pub(crate) behind: Vec<u8>,
    pub(crate) behind_file: Option<File>,
}

const fn kind(
    name: &'static str,
    options: &'static str,
    size: usize,
    cluster: usize,
    weight: usize,
) -> Kind {
    let start = OnceLock::new();
    Kind { name, options, size, cluster, direct: false, backed: false, weight, start }
}

/// Most sizes are not multiples of a cluster. Clusters under 4 KiB have no room for the mark of a journal.
static KINDS: [Kind; 12] = [
    kind("raw", "", 100 * 1024 + 512, 4096, 2),
    kind("raw, O_DIRECT", "", 100 * 1024, 4096, 2).direct(),
    kind("qcow2", "cluster_size=512", 150 * 1024 + 512, 512, 6),
    kind("qcow2, O_DIRECT", "cluster_size=512", 150 * 1024, 512, 2).direct(),
    kind("qcow2 with a backing file", "cluster_size=512", 150 * 1024, 512, 3).backed(),
    kind("qcow2 version 2", "compat=0.10,cluster_size=512", 150 * 1024, 512, 2),
    kind("qcow2, 1-bit counts", "cluster_size=512,refcount_bits=1", 150 * 1024 + 512, 512, 2),
    kind("qcow2, 64-bit counts", "cluster_size=512,refcount_bits=64", 150 * 1024, 512, 3),
    kind("qcow2, 4k", "cluster_size=4k", 300 * 1024 + 512, 4096, 8),
    kind("qcow2, 4k, O_DIRECT", "cluster_size=4k", 300 * 1024, 4096, 3).direct(),
    kind("qcow2, 4k, with a backing file", "cluster_size=4k", 300 * 1024, 4096, 3).backed(),
    kind("qcow2, 64k", "cluster_size=64k", 1024 * 1024 + 512, 65536, 4),
];

impl Kind {
    const fn direct(mut self) -> Kind {
        self.direct = true;
        self
    }

    const fn backed(mut self) -> Kind {
        self.backed = true;
        self
    }

    pub(crate) fn pick(number: usize) -> &'static Kind {
        let all: usize = KINDS.iter().map(|kind| kind.weight).sum();
        let mut left = number % all;
        for kind in &KINDS {
            if left < kind.weight {
                return kind;
            }
            left -= kind.weight;
        }
        &KINDS[0]
    }

    pub(crate) fn is_qcow2(&self) -> bool {
        !self.options.is_empty()
    }

    pub(crate) fn start(&self) -> &Start {
        self.start.get_or_init(|| {
            let name = format!("power-{}", self.name.replace(' ', "-"));
            if !self.is_qcow2() {
                let (behind, behind_file) = (Vec::new(), None);
                return Start { image: vec![0; self.size], behind, behind_file };
            }
            let image = TempFile::new(&tmpfs(), &name, 0);
            let path = image.0.to_str().unwrap();
            let args = ["create", "-q", "-f", "qcow2", "-o", self.options, path];
            let made = Command::new("qemu-img").args(args).arg(self.size.to_string()).status();
            assert!(made.expect("qemu-img (scripts/setup-tests.sh)").success(), "{args:?}");
            let behind: Vec<u8> = match self.backed {
                true => {
                    (0..(self.size / SECTOR * 2 / 3) as u64).flat_map(|n| sector(7, n)).collect()
                }
                false => Vec::new(),
            };
            let file = self.backed.then(|| {
                let file = File::from(memfd_create("behind", MFdFlags::MFD_CLOEXEC).unwrap());
                file.write_all_at(&behind, 0).unwrap();
                file
            });
            Start { image: image.contents(), behind, behind_file: file }
        })
    }

    /// How an image of this kind is opened: the file, and the disk in it.
    pub(crate) fn options(
        &self,
        start: &Start,
        fd: &OwnedFd,
        random: &mut Random,
    ) -> [BlockdevOptions; 2] {
        let (discard, detect_zeroes) = freeing(random);
        let locking = Locking::Off;
        let file = Driver::file(FileOptions { locking, ..file_options(&path_of(fd), None) });
        let mut file = BlockdevOptions { discard, detect_zeroes, ..blockdev(FILE, file) };
        file.cache.direct = self.direct;
        let below = BlockdevRef::Name(FILE.into());
        let driver = match self.is_qcow2() {
            false => {
                Driver::from(RawOptions { file: below, offset: 0, size: None, keep_raw: false })
            }
            true => Driver::from(Qcow2Options {
                file: below,
                data_file: None,
                backing: match &start.behind_file {
                    None => Backing::None,
                    Some(file) => {
                        let file = FileOptions { locking, ..file_options(&path_of(file), None) };
                        Backing::Node(BlockdevRef::Inline(Box::new(BlockdevOptions {
                            read_only: true,
                            ..blockdev("behind", Driver::file(file))
                        })))
                    }
                },
                pass_discard_request: [None, Some(true), Some(false)][random.below(3)],
                discard_no_unref: random.one_in(4),
                unheeded: Default::default(),
                encrypt: None,
                caches: Default::default(),
            }),
        };
        let (discard, detect_zeroes) = freeing(random);
        [file, BlockdevOptions { discard, detect_zeroes, ..blockdev("disk", driver) }]
    }
}

/// `discard` and `detect-zeroes`.
fn freeing(random: &mut Random) -> (Discard, DetectZeroes) {
    match random.below(8) {
        0 => (Discard::Ignore, DetectZeroes::On),
        1 => (Discard::Unmap, DetectZeroes::On),
        2 | 3 => (Discard::Unmap, DetectZeroes::Unmap),
        _ => (Discard::Unmap, DetectZeroes::Off),
    }
}

//! The tested kinds of images.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::OnceLock;

use block::NodeRegistry;
use block::options::*;
use crypto::Secret;
use fastrand::Rng;
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::common::{TempFile, blockdev, file_options, tmpfs};
use crate::power::guest::{SECTOR, sector};
use crate::power::oracle::{Image, Luks};
use crate::power::path_of;

/// The name of the node below an image.
pub(crate) const FILE: &str = "file";

/// The secret object with the password of encrypted images, and the password.
const SECRET: &str = "s";
const PASSWORD: &str = "letmein";

/// What an image has besides, chosen independently of its kind.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Extras {
    /// It is encrypted.
    pub(crate) luks: bool,
    /// It gets persistent dirty bitmaps.
    pub(crate) bitmaps: bool,
    /// Some of its data is written compressed.
    pub(crate) compressed: bool,
    /// Internal snapshots of it are made and deleted.
    pub(crate) snapshots: bool,
}

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
    /// Plain, and encrypted.
    starts: [OnceLock<Start>; 2],
}

/// A new image.
pub(crate) struct Start {
    pub(crate) image: Vec<u8>,
    /// Contents of the backing image.
    pub(crate) behind: Vec<u8>,
    pub(crate) behind_file: Option<File>,
    /// `None`: the image is not encrypted.
    pub(crate) luks: Option<Luks>,
}

const fn kind(
    name: &'static str,
    options: &'static str,
    size: usize,
    cluster: usize,
    weight: usize,
) -> Kind {
    let starts = [OnceLock::new(), OnceLock::new()];
    Kind { name, options, size, cluster, direct: false, backed: false, weight, starts }
}

/// As small as such clusters can be: a subcluster is a sector.
const EXTENDED: &str = "cluster_size=16k,extended_l2=on";

/// Most sizes are not multiples of a cluster. Clusters under 4 KiB have no room for the mark of a journal.
static KINDS: [Kind; 15] = [
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
    kind("qcow2, subclusters", EXTENDED, 300 * 1024 + 512, 16384, 6),
    kind("qcow2, subclusters, O_DIRECT", EXTENDED, 300 * 1024, 16384, 2).direct(),
    kind("qcow2, subclusters, with a backing file", EXTENDED, 300 * 1024, 16384, 4).backed(),
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

    /// The kind of that name.
    pub(crate) fn named(name: &str) -> &'static Kind {
        KINDS.iter().find(|kind| kind.name == name).expect("a name in the list")
    }

    pub(crate) fn is_qcow2(&self) -> bool {
        !self.options.is_empty()
    }

    /// Picks what an image of this kind has besides.
    pub(crate) fn extras(&self, random: &mut Rng) -> Extras {
        let is_possible = self.is_qcow2() && !self.options.contains("compat");
        let (luks, bitmaps) = (random.usize(..4) == 0, random.usize(..3) == 0);
        let luks = is_possible && luks;
        let compressed = self.is_qcow2() && !luks && random.usize(..2) == 0;
        let snapshots = self.is_qcow2() && random.usize(..5) == 0;
        Extras { luks, bitmaps: is_possible && bitmaps, compressed, snapshots }
    }

    pub(crate) fn start(&self, extras: Extras) -> &Start {
        let is_encrypted = extras.luks;
        self.starts[usize::from(is_encrypted)].get_or_init(|| {
            let name = format!("power-{is_encrypted}-{}", self.name.replace(' ', "-"));
            if !self.is_qcow2() {
                let (behind, behind_file) = (Vec::new(), None);
                return Start { image: vec![0; self.size], behind, behind_file, luks: None };
            }
            let image = TempFile::new(&tmpfs(), &name, 0);
            let path = image.0.to_str().unwrap();
            // The cipher with the smallest header.
            let cipher = "encrypt.cipher-alg=aes-128,encrypt.cipher-mode=cbc,encrypt.iter-time=1";
            let options = match is_encrypted {
                true => format!(
                    "{},encrypt.format=luks,encrypt.key-secret={SECRET},{cipher}",
                    self.options
                ),
                false => self.options.to_owned(),
            };
            let object = secret_object();
            let args = ["create", "-q", "-f", "qcow2", "--object", &object, "-o", &options, path];
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
            let image = image.contents();
            let luks = is_encrypted.then(|| luks(&image));
            Start { image, behind, behind_file: file, luks }
        })
    }

    /// How an image of this kind is opened: the file, and the disk in it.
    pub(crate) fn options(
        &self,
        start: &Start,
        fd: &OwnedFd,
        random: &mut Rng,
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
                pass_discard_request: [None, Some(true), Some(false)][random.usize(..3)],
                discard_no_unref: random.usize(..4) == 0,
                encrypt: start.luks.as_ref().map(|_| Encrypt { key_secret: Some(SECRET.into()) }),
                ..Qcow2Options::default()
            }),
        };
        let (discard, detect_zeroes) = freeing(random);
        [file, BlockdevOptions { discard, detect_zeroes, ..blockdev("disk", driver) }]
    }
}

/// The LUKS header of a new image, and its cipher.
fn luks(image: &[u8]) -> Luks {
    use crypto::luks::{Header, VolumeKey};
    let (at, len) = Image::luks_place(image).expect("an encrypted image");
    let bytes = image[at..at + len].to_vec();
    let header = Header::read(&bytes).unwrap();
    let slot = header.slots.iter().find(|slot| slot.active).unwrap();
    let (place, len) = header.stripes(slot);
    let stripes = Secret::new(bytes[place as usize..][..len].to_vec());
    let key = VolumeKey::unlock(&header, slot, stripes, PASSWORD.as_bytes()).expect("its password");
    let Ok(cipher) = key.cipher(header.cipher) else { panic!("a key of another length") };
    Luks { at, bytes, decrypt: Box::new(move |sector, data| cipher.decrypt(sector, data)) }
}

/// The secret of encrypted images, as QEMU takes it.
pub(crate) fn secret_object() -> String {
    format!("secret,id={SECRET},data={PASSWORD}")
}

/// Adds the secret of encrypted images.
pub(crate) fn add_secret(registry: &mut NodeRegistry) {
    registry.credentials().add_secret(SECRET, Secret::new(PASSWORD.into()));
}

/// `discard` and `detect-zeroes`.
fn freeing(random: &mut Rng) -> (Discard, DetectZeroes) {
    match random.usize(..8) {
        0 => (Discard::Ignore, DetectZeroes::On),
        1 => (Discard::Unmap, DetectZeroes::On),
        2 | 3 => (Discard::Unmap, DetectZeroes::Unmap),
        _ => (Discard::Unmap, DetectZeroes::Off),
    }
}

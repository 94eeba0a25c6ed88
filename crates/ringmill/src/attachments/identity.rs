//! Which image is attached, whatever its path: a path leads to another image after the file there was replaced.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use daemon::{DaemonError, utc};
use nix::sys::stat::{major, minor};
use serde_json::{Value as Json, json};

use super::{Attached, Mode};

/// What identifies an image while this host runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Identity {
    /// A file.
    File {
        /// The number of the file system's device.
        device: u64,
        inode: u64,
        /// The time of birth, nanoseconds since 1970: inode numbers are used again. `None`: the file system has none.
        born_ns: Option<u64>,
    },
    /// A block device.
    Device {
        number: u64,
        /// The kernel's number of the disk: another disk with the same device number has another one. `None`: Linux
        /// before 5.15.
        disk: Option<u64>,
    },
    /// An image on a server, by its URL.
    Url(String),
}

impl Identity {
    /// Returns the identity of a file or a block device.
    ///
    /// # Errors
    ///
    /// As of stat(2).
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        let metadata = fs::metadata(path)?;
        if metadata.file_type().is_block_device() {
            let number = metadata.rdev();
            return Ok(Identity::Device { number, disk: disk_number(number) });
        }
        let born = metadata.created().ok().and_then(|born| born.duration_since(UNIX_EPOCH).ok());
        Ok(Identity::File {
            device: metadata.dev(),
            inode: metadata.ino(),
            born_ns: born.and_then(|born| born.as_nanos().try_into().ok()),
        })
    }

    pub(super) fn to_json(&self) -> Json {
        match self {
            Identity::File { device, inode, born_ns } => {
                json!({"device": device, "inode": inode, "born-ns": born_ns})
            }
            Identity::Device { number, disk } => json!({"number": number, "disk": disk}),
            Identity::Url(url) => json!({"url": url}),
        }
    }

    pub(super) fn from_json(json: &Json) -> Option<Self> {
        let number = |name: &str| json[name].as_u64();
        match (number("inode"), number("number")) {
            (Some(inode), _) => Some(Identity::File {
                device: number("device")?,
                inode,
                born_ns: number("born-ns"),
            }),
            (None, Some(number)) => Some(Identity::Device { number, disk: json["disk"].as_u64() }),
            (None, None) => json["url"].as_str().map(|url| Identity::Url(url.to_owned())),
        }
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Identity::File { device, inode, born_ns } => {
                write!(f, "inode {inode} on device {}:{}", major(*device), minor(*device))?;
                let Some(born_ns) = born_ns else { return Ok(()) };
                let born = Duration::from_nanos(*born_ns);
                let (date, time) = utc(born);
                write!(f, ", made {date} {time}.{:09} UTC", born.subsec_nanos())
            }
            Identity::Device { number, disk } => {
                write!(f, "block device {}:{}", major(*number), minor(*number))?;
                disk.map_or(Ok(()), |disk| write!(f, ", disk number {disk}"))
            }
            // The URL may have a password.
            Identity::Url(_) => f.write_str("a URL of a certain user and query"),
        }
    }
}

/// Returns the kernel's number of the disk that a block device is, or is a partition of.
fn disk_number(device: u64) -> Option<u64> {
    let folder = format!("/sys/dev/block/{}:{}", major(device), minor(device));
    let read = |name: &str| fs::read_to_string(Path::new(&folder).join(name)).ok();
    // The folder is a link: `..` is that of a partition's disk.
    read("diskseq").or_else(|| read("../diskseq"))?.trim().parse().ok()
}

/// An image as `attach` is given it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Image {
    /// The absolute path without links, or the URL, for people. Of an image with an overlay: the overlay's.
    pub(crate) name: String,
    /// `None`: there is no such file.
    pub(crate) identity: Option<Identity>,
    /// Of an overlay: the URL of the image below it.
    pub(crate) base: Option<String>,
}

impl Image {
    fn is(&self, other: &Image) -> bool {
        self.identity.is_some() && self.identity == other.identity
    }

    /// Returns whether the two may be one image, or have one name.
    pub(crate) fn concerns(&self, other: &Image) -> bool {
        self.name == other.name || self.is(other)
    }
}

/// Returns the absolute path of an image without links, also of one that does not exist.
///
/// # Errors
///
/// The path is empty, or there is no working directory.
pub(crate) fn absolute(path: &Path) -> io::Result<PathBuf> {
    if let Ok(found) = fs::canonicalize(path) {
        return Ok(found);
    }
    let path = std::path::absolute(path)?;
    match (path.parent().map(fs::canonicalize), path.file_name()) {
        (Some(Ok(folder)), Some(name)) => Ok(folder.join(name)),
        _ => Ok(path),
    }
}

/// Decides whether an image may be attached beside what is attached. Returns the attachment whose device waits for this
/// image; `None`: the image gets a new device. `daemon` returns the process that serves an attachment.
///
/// # Errors
///
/// The image has a device already, and one of the two attachments writes. Or a device has the image's name, and the file of
/// that name is another one by now.
pub(crate) fn choose<'a>(
    all: &'a [Attached],
    image: &Image,
    mode: Mode,
    daemon: impl Fn(&Attached) -> Option<i32>,
) -> Result<Option<&'a Attached>, DaemonError> {
    for known in all.iter().filter(|known| known.images().any(|own| own.concerns(image))) {
        // After a move, the first image may be gone.
        let is_gone =
            known.moved().is_some() && image.identity.is_none() && known.image.name == image.name;
        let is_same = is_gone || known.images().any(|own| own.is(image));
        let is_named = known.images().any(|own| own.name == image.name);
        let writes = mode == Mode::Write || known.mode == Mode::Write;
        let has_snapshot = mode == Mode::Snapshot || known.mode == Mode::Snapshot;
        // A device of a snapshot does not wait. Beside it, another file and readers of the same one do no harm.
        if has_snapshot && !(is_same && writes) {
            continue;
        }
        if !is_same {
            let own = known.images().find(|own| own.name == image.name);
            return Err(replaced(known, own.unwrap_or(&known.image), image));
        }
        let (name, device) = (&image.name, known.device.display());
        let of = match is_named {
            true => String::new(),
            false => format!(", as {}", known.image.name),
        };
        if let Some(pid) = daemon(known) {
            return Err(DaemonError::new(format!(
                "{name} is attached already: {device}, by process {pid}{of}"
            )));
        }
        if known.mode != mode || !is_named || known.image.base != image.base {
            return Err(waits(known, name, &of));
        }
        return Ok(Some(known));
    }
    Ok(None)
}

/// The error for an image whose device waits for another command. `of`: the name that it has there, in words.
pub(crate) fn waits(known: &Attached, name: &str, of: &str) -> DaemonError {
    let (device, manner) = (known.device.display(), known.mode.word());
    let error = DaemonError::new(format!(
        "{name} is attached already: {device} ({manner}{of}) waits, as its daemon was killed"
    ));
    error.with_hint(&format!(
        "Go on with that device: {}\nOr give up what {device} has not written: ringmill detach --force {device}",
        known.command.join(" ")
    ))
}

/// The error for an image that is not the one that a device was made of.
pub(crate) fn replaced(known: &Attached, own: &Image, image: &Image) -> DaemonError {
    let (name, device) = (&image.name, known.device.display());
    let shown = |identity: &Option<Identity>| {
        identity.as_ref().map_or_else(|| "no file".to_owned(), ToString::to_string)
    };
    DaemonError::new(format!(
        "{name} was replaced: {device} belongs to {}, and {name} is {} now",
        shown(&own.identity),
        shown(&image.identity)
    ))
    .with_hint(&format!(
        "Put the image of {device} back. Or detach the device, and attach the new image: ringmill detach {device}; with \
         --force, if its daemon was killed: what {device} has not written is lost."
    ))
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::os::unix::fs::symlink;

    use super::*;

    /// A folder with an image.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = env::temp_dir().join(format!("identity-{}-{name}", std::process::id()));
            fs::create_dir(&path).expect("a folder");
            fs::write(path.join("disk"), "image").expect("an image");
            Folder(fs::canonicalize(path).expect("a folder"))
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.join(name)
        }

        fn image(&self, name: &str) -> Image {
            let path = absolute(&self.path(name)).expect("a path");
            let identity = Identity::of(&path).ok();
            Image { name: path.display().to_string(), identity, base: None }
        }

        fn attached(&self, name: &str, mode: Mode) -> Attached {
            Attached {
                id: "id".into(),
                image: self.image(name),
                mode,
                device: "/dev/ublkb7".into(),
                command: vec!["ringmill".into(), "attach".into(), name.into()],
                kept: None,
            }
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// What becomes of an image whose device waits.
    fn while_waiting(known: &Attached, image: &Image, mode: Mode) -> Result<bool, String> {
        let found = choose(std::slice::from_ref(known), image, mode, |_| None);
        found.map(|found| found.is_some()).map_err(|error| error.to_string())
    }

    #[test]
    fn the_same_image_continues_with_its_device() {
        let folder = Folder::new("same");
        let known = folder.attached("disk", Mode::Write);
        assert_eq!(while_waiting(&known, &folder.image("disk"), Mode::Write), Ok(true));
        fs::write(folder.path("disk"), "written").expect("it can be written");
        assert_eq!(while_waiting(&known, &folder.image("disk"), Mode::Write), Ok(true));
        symlink("disk", folder.path("link")).expect("a link");
        assert_eq!(while_waiting(&known, &folder.image("link"), Mode::Write), Ok(true));
        fs::write(folder.path("other"), "other").expect("an image");
        assert_eq!(while_waiting(&known, &folder.image("other"), Mode::Write), Ok(false));
    }

    #[test]
    fn a_replaced_image_is_refused() {
        let folder = Folder::new("replaced");
        for mode in [Mode::Write, Mode::ReadOnly] {
            let known = folder.attached("disk", mode);
            let refused = |image: &Image| {
                let why = while_waiting(&known, image, mode).expect_err("refused");
                let old = known.image.identity.as_ref().expect("an identity").to_string();
                let words = ["was replaced: /dev/ublkb7 belongs to", &old, "detach /dev/ublkb7"];
                for word in words {
                    assert!(why.contains(word), "{why}");
                }
                why
            };
            fs::write(folder.path("new"), "image").expect("an image");
            fs::rename(folder.path("disk"), folder.path("old")).expect("it moves");
            assert!(refused(&folder.image("disk")).contains("is no file now"));
            fs::rename(folder.path("new"), folder.path("disk")).expect("it moves");
            let new = folder.image("disk").identity.expect("an identity").to_string();
            assert!(refused(&folder.image("disk")).contains(&new));
            // A snapshot of the new file has nothing to do with the device.
            assert_eq!(while_waiting(&known, &folder.image("disk"), Mode::Snapshot), Ok(false));
            // Put back.
            fs::rename(folder.path("old"), folder.path("disk")).expect("it moves");
            assert_eq!(while_waiting(&known, &folder.image("disk"), mode), Ok(true));
        }
    }

    #[test]
    fn an_inode_that_is_used_again_is_another_image() {
        let folder = Folder::new("again");
        let mut known = folder.attached("disk", Mode::Write);
        let Some(Identity::File { born_ns: Some(born_ns), .. }) = &mut known.image.identity else {
            // The folder for temporary files is on a file system without times of birth.
            return;
        };
        *born_ns -= 1;
        assert!(while_waiting(&known, &folder.image("disk"), Mode::Write).is_err());
    }

    #[test]
    fn another_disk_of_the_same_number_is_another_image() {
        let of = |disk| Image {
            name: "/dev/loop0".into(),
            identity: Some(Identity::Device { number: 0x700, disk: Some(disk) }),
            base: None,
        };
        let folder = Folder::new("disks");
        let known = Attached { image: of(1), ..folder.attached("disk", Mode::Write) };
        assert_eq!(while_waiting(&known, &of(1), Mode::Write), Ok(true));
        let why = while_waiting(&known, &of(2), Mode::Write).expect_err("refused");
        assert!(why.contains("block device 7:0, disk number 1"), "{why}");
    }

    #[test]
    fn an_image_has_one_device_if_one_of_its_users_writes() {
        let folder = Folder::new("modes");
        fs::hard_link(folder.path("disk"), folder.path("hard")).expect("a link");
        let modes = [Mode::Write, Mode::ReadOnly, Mode::Snapshot];
        for (known, mode, name) in modes.iter().flat_map(|known| {
            modes.iter().flat_map(move |mode| ["disk", "hard"].map(|name| (*known, *mode, name)))
        }) {
            let all = [folder.attached("disk", known)];
            let image = folder.image(name);
            let may_be_two = known != Mode::Write
                && mode != Mode::Write
                && (known == Mode::Snapshot || mode == Mode::Snapshot);
            let served = choose(&all, &image, mode, |_| Some(12));
            let waiting = choose(&all, &image, mode, |_| None);
            if may_be_two {
                assert_eq!(
                    (served.ok(), waiting.ok()),
                    (Some(None), Some(None)),
                    "{known:?} {mode:?}"
                );
                continue;
            }
            let why = served.expect_err("refused").to_string();
            assert!(why.contains("is attached already: /dev/ublkb7, by process 12"), "{why}");
            match waiting {
                Ok(found) => {
                    assert_eq!(found, Some(&all[0]));
                    assert_eq!((known, name), (mode, "disk"));
                }
                Err(why) => {
                    assert!((known, name) != (mode, "disk"), "{why}");
                    assert!(why.to_string().contains("ringmill attach disk"), "{why}");
                }
            }
        }
    }

    #[test]
    fn an_overlay_goes_on_above_the_same_image() {
        let folder = Folder::new("overlay");
        let of = |url: &str| Image { base: Some(url.into()), ..folder.image("disk") };
        let known = Attached { image: of("https://a/"), ..folder.attached("disk", Mode::Write) };
        assert_eq!(while_waiting(&known, &of("https://a/"), Mode::Write), Ok(true));
        assert!(while_waiting(&known, &of("https://b/"), Mode::Write).is_err());
    }

    #[test]
    fn a_missing_image_is_found_by_its_path() {
        let folder = Folder::new("missing");
        symlink(&folder.0, folder.path("self")).expect("a link");
        let path = folder.path("self").join("gone");
        assert_eq!(absolute(&path).expect("a path"), folder.path("gone"));
    }

    #[test]
    fn identities_are_read_as_they_were_written() {
        let born_ns = [Some(u64::MAX), None];
        let files = born_ns.map(|born_ns| Identity::File { device: 1, inode: u64::MAX, born_ns });
        let devices = [Some(3), None].map(|disk| Identity::Device { number: 1, disk });
        let url = [Identity::Url("https://host/image".into())];
        for identity in files.into_iter().chain(devices).chain(url) {
            assert_eq!(Identity::from_json(&identity.to_json()), Some(identity));
        }
        assert_eq!(Identity::from_json(&Json::Null), None);
    }
}

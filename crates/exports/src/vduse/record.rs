//! The record of a device's requests in flight, in a file that outlives the process.
//!
//! The file is in memory, where POSIX shared memory lies, shm_overview(7): it lives as long as the device, which ends with
//! the kernel. Its first page describes the device. The records of the queues follow.

#![forbid(unsafe_code)]

use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::libc;
use nix::unistd::Uid;

use crate::vhost_user::inflight::InflightArea;
use crate::vhost_user::wire::InflightDescription;
use queue::Inflight;

/// The first bytes of a file. The last one is the version of the layout.
const MAGIC: [u8; 8] = *b"ringvdu1";
/// Bytes before the records of the queues.
const HEAD: u64 = 4096;

/// What a device was made with, and cannot change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Made {
    pub(super) features: u64,
    pub(super) queues: u16,
    pub(super) queue_size: u16,
    /// `logical-block-size`, bytes.
    pub(super) block: u32,
}

impl Made {
    fn encode(&self) -> [u8; 24] {
        let mut bytes = [0; 24];
        let fields: [&[u8]; 5] = [
            &MAGIC,
            &self.features.to_le_bytes(),
            &self.block.to_le_bytes(),
            &self.queues.to_le_bytes(),
            &self.queue_size.to_le_bytes(),
        ];
        bytes.iter_mut().zip(fields.into_iter().flatten()).for_each(|(to, from)| *to = *from);
        bytes
    }

    fn decode(bytes: &[u8; 24]) -> Option<Made> {
        let [m @ .., f0, f1, f2, f3, f4, f5, f6, f7, b0, b1, b2, b3, q0, q1, s0, s1] = bytes;
        (*m == MAGIC).then(|| Made {
            features: u64::from_le_bytes([*f0, *f1, *f2, *f3, *f4, *f5, *f6, *f7]),
            block: u32::from_le_bytes([*b0, *b1, *b2, *b3]),
            queues: u16::from_le_bytes([*q0, *q1]),
            queue_size: u16::from_le_bytes([*s0, *s1]),
        })
    }

    /// Bytes of the records.
    fn len(&self) -> u64 {
        u64::from(self.queues) * Inflight::region_len(self.queue_size) as u64
    }
}

/// The file of a device.
#[derive(Debug)]
pub(super) struct Record {
    path: PathBuf,
    file: File,
    made: Made,
}

/// Returns the folder of the files of this process' user.
pub fn record_folder() -> PathBuf {
    let user = Uid::effective();
    block::private_folder(Path::new("/dev/shm"), &format!("ringmill-vduse-{user}"), user.as_raw())
}

impl Record {
    /// Makes an empty record for a new device.
    ///
    /// # Errors
    ///
    /// As of mkdir(2), open(2) and write(2). `EEXIST`: the folder belongs to another user.
    pub(super) fn new(folder: &Path, name: &str, made: Made) -> io::Result<Record> {
        match DirBuilder::new().mode(0o700).create(folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        check_owner(folder)?;
        let path = folder.join(name);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let file = options().create_new(true).mode(0o600).open(&path)?;
        let record = Record { path, file, made };
        // Writing takes the memory now: a page that is missing later would be a fault.
        record.clear()?;
        record.file.write_all_at(&record.made.encode(), 0)?;
        Ok(record)
    }

    /// Opens the record of a device that exists. `None`: there is none.
    ///
    /// # Errors
    ///
    /// As of open(2) and read(2). `EEXIST`: the folder belongs to another user.
    pub(super) fn of_device(folder: &Path, name: &str) -> io::Result<Option<Record>> {
        let path = folder.join(name);
        let file = match options().open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        check_owner(folder)?;
        let mut head = [0; 24];
        if file.read_exact_at(&mut head, 0).is_err() {
            return Ok(None);
        }
        let Some(made) = Made::decode(&head) else { return Ok(None) };
        let is_whole = file.metadata()?.len() >= HEAD + made.len();
        let is_possible = made.queue_size.is_power_of_two();
        Ok((is_whole && is_possible).then_some(Record { path, file, made }))
    }

    /// Returns what the device was made with.
    pub(super) fn made(&self) -> &Made {
        &self.made
    }

    /// Forgets all requests, as the driver has reset the device. No queue runs.
    pub(super) fn clear(&self) -> io::Result<()> {
        let zeroes = vec![0; self.made.len() as usize];
        self.file.write_all_at(&zeroes, HEAD)
    }

    /// Maps the records of the queues.
    pub(super) fn map(&self) -> Result<InflightArea, String> {
        let Made { queues: num_queues, queue_size, .. } = self.made;
        let mmap_size = self.made.len();
        let description =
            InflightDescription { mmap_size, mmap_offset: HEAD, num_queues, queue_size };
        let file = self.file.try_clone().map_err(|error| error.to_string())?;
        InflightArea::of_own_file(description, file.into()).map_err(|error| error.to_string())
    }

    /// Removes the file, as the device is gone.
    pub(super) fn remove(self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            log::debug!("removing {} failed: {error}", self.path.display());
        }
    }
}

fn options() -> std::fs::OpenOptions {
    let mut options = File::options();
    options.read(true).write(true).custom_flags(libc::O_NOFOLLOW);
    options
}

fn check_owner(folder: &Path) -> io::Result<()> {
    let found = std::fs::symlink_metadata(folder)?;
    let is_own = found.is_dir() && found.uid() == Uid::effective().as_raw();
    if is_own && found.mode() & 0o077 == 0 { Ok(()) } else { Err(Errno::EEXIST.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made() -> Made {
        Made { features: 1 << 32, queues: 2, queue_size: 128, block: 512 }
    }

    #[test]
    fn a_record_is_found_again_and_can_be_cleared() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = scratch.path().join("records");
        assert!(Record::of_device(&folder, "a").unwrap().is_none());
        let record = Record::new(&folder, "a", made()).unwrap();
        record.file.write_all_at(&[1], HEAD + 20).unwrap();
        let found = Record::of_device(&folder, "a").unwrap().expect("the record");
        assert_eq!(*found.made(), made());
        assert!(found.map().is_ok());
        let mut byte = [0];
        record.clear().unwrap();
        found.file.read_exact_at(&mut byte, HEAD + 20).unwrap();
        assert_eq!(byte, [0]);
        found.remove();
        assert!(Record::of_device(&folder, "a").unwrap().is_none());
    }

    #[test]
    fn foreign_and_short_files_are_no_records() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = scratch.path().join("records");
        let record = Record::new(&folder, "a", made()).unwrap();
        record.file.set_len(HEAD + 1).unwrap();
        assert!(Record::of_device(&folder, "a").unwrap().is_none());
        record.file.set_len(10).unwrap();
        assert!(Record::of_device(&folder, "a").unwrap().is_none());
        let record = Record::new(&folder, "a", made()).unwrap();
        record.file.write_all_at(b"x", 7).unwrap();
        assert!(Record::of_device(&folder, "a").unwrap().is_none());
        std::os::unix::fs::symlink("/etc/passwd", folder.join("b")).unwrap();
        assert!(Record::of_device(&folder, "b").is_err());
    }

    #[test]
    fn a_folder_that_others_reach_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let scratch = tempfile::tempdir().unwrap();
        let folder = scratch.path().join("records");
        std::fs::create_dir(&folder).unwrap();
        std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(Record::new(&folder, "a", made()).is_err());
    }
}

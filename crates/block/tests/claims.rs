//! A block device that is open for writing is claimed against mounts and the like (`O_EXCL`,
//! open(2)).

use crate::common;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use block::options::*;
use block::{NodeRegistry, OpenError};
use common::*;
use event_loop::{EventLoop, LoopConfig};
use nix::errno::Errno;
use nix::libc;

const SIZE: u64 = 1 << 20;

fn options(path: &Path) -> BlockdevOptions {
    blockdev("disk", Driver::host_device(file_options(path, None)))
}

/// Claims the device, as a mount does.
fn claim(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(path)
}

fn open(options: &BlockdevOptions) -> Result<NodeRegistry, OpenError> {
    let mut nodes = NodeRegistry::new();
    nodes.open(options).map(|_| nodes)
}

#[test]
fn a_device_that_something_has_claimed_is_not_written_to() {
    let Some(zram) = zram::Zram::new(SIZE) else { return };
    let options = options(zram.path());
    let mounted = claim(zram.path()).unwrap();
    let error = open(&options).map(drop).unwrap_err();
    assert_eq!(error.to_string(), "Could not open '/dev/zram0': Device or resource busy");
    assert!(error.hint().unwrap().contains("read-only=on"), "{error:?}");
    // Reading needs no claim, and `locking=off` allows sharing.
    open(&BlockdevOptions { read_only: true, ..options.clone() }).unwrap();
    let shared = FileOptions { locking: Locking::Off, ..file_options(zram.path(), None) };
    open(&blockdev("disk", Driver::host_device(shared))).unwrap();
    drop(mounted);
    open(&options).unwrap();
}

#[test]
fn a_device_that_is_written_to_is_claimed_by_nothing_else() {
    let Some(zram) = zram::Zram::new(SIZE) else { return };
    let options = options(zram.path());
    let nodes = open(&options).unwrap();
    let busy = claim(zram.path()).unwrap_err();
    assert_eq!(busy.raw_os_error(), Some(Errno::EBUSY as i32));
    // The image lock's error comes first: it names the holder.
    let error = open(&options).map(drop).unwrap_err();
    assert_eq!(error.to_string(), "Failed to get \"write\" lock");
    drop(nodes);
    claim(zram.path()).unwrap();
    let reader = open(&BlockdevOptions { read_only: true, ..options }).unwrap();
    claim(zram.path()).unwrap();
    drop(reader);
}

#[test]
fn a_device_that_is_opened_anew_stays_claimed() {
    let Some(zram) = zram::Zram::new(SIZE) else { return };
    let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
    let device = options(zram.path());
    let with = move |read_only, direct| {
        let cache = Cache { direct, no_flush: false };
        BlockdevOptions { read_only, cache, ..device.clone() }
    };
    let path = zram.path().to_owned();
    let test = async move {
        let mut nodes = open(&with(true, false)).unwrap();
        claim(&path).unwrap();
        for direct in [true, false, true] {
            drop(nodes.reopen("disk", &with(false, direct)).await.unwrap());
            claim(&path).unwrap_err();
        }
        nodes.remove("disk").unwrap();
        claim(&path).unwrap();
        let mut nodes = open(&with(true, false)).unwrap();
        let _mounted = claim(&path).unwrap();
        let error = nodes.reopen("disk", &with(false, false)).await.unwrap_err();
        assert_eq!(error.to_string(), "Could not open '/dev/zram0': Device or resource busy");
    };
    event_loop.block_on(test).unwrap();
}

//! Block devices of the test's own, on files.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use nix::fcntl::{Flock, FlockArg};
use nix::unistd::geteuid;
use test_requirements::{Needs, untested};

use crate::tool;

/// The loop devices of this machine, which has few, for one test at a time.
#[derive(Debug)]
pub struct LoopDevices {
    _lock: Flock<File>,
}

/// A loop device, detached when dropped.
#[derive(Debug)]
pub struct LoopDevice {
    device: PathBuf,
    file: PathBuf,
}

fn run(program: &str, arguments: &[&Path]) -> Output {
    Command::new(tool(program)).args(arguments).output().expect("it runs")
}

fn succeed(program: &str, arguments: &[&Path]) {
    let output = run(program, arguments);
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
}

impl LoopDevices {
    /// Waits for its turn. `None`: there are none to use here; reports the calling test as untested.
    ///
    /// # Panics
    ///
    /// If the lock file cannot be used.
    pub fn new() -> Option<LoopDevices> {
        if let Err(why) = OpenOptions::new().read(true).write(true).open("/dev/loop-control") {
            untested(Needs::Loop, format_args!("loop devices take root: {why}"));
            return None;
        }
        // One lock file per user: another user's file could not be opened.
        let name = format!("ringmill-test-loop-{}.lock", geteuid());
        let file =
            OpenOptions::new().create(true).append(true).open(std::env::temp_dir().join(name));
        let file = file.expect("our lock file");
        let lock = Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| errno);
        Some(LoopDevices { _lock: lock.expect("a lock") })
    }

    /// Attaches a device to a new file at that path.
    ///
    /// # Panics
    ///
    /// If no device can be had.
    pub fn attach(&self, file: &Path, size: u64) -> LoopDevice {
        let made = File::create_new(file).and_then(|file| file.set_len(size));
        made.expect("a new file");
        self.attach_again(file)
    }

    /// Attaches a device to a file that exists.
    ///
    /// # Panics
    ///
    /// If no device can be had.
    pub fn attach_again(&self, file: &Path) -> LoopDevice {
        let found = run("losetup", &["--find".as_ref(), "--show".as_ref(), file]);
        assert!(found.status.success(), "{found:?}");
        let device = String::from_utf8(found.stdout).expect("a path");
        LoopDevice { device: device.trim().into(), file: file.to_owned() }
    }
}

impl LoopDevice {
    /// Returns its path.
    ///
    /// # Panics
    ///
    /// If the path is no text.
    pub fn path(&self) -> &str {
        self.device.to_str().expect("a path of ASCII")
    }

    /// Gives it another size, in bytes.
    ///
    /// # Panics
    ///
    /// If that fails.
    pub fn resize(&self, size: u64) {
        let file = OpenOptions::new().write(true).open(&self.file).expect("our file");
        file.set_len(size).expect("room");
        succeed("losetup", &["--set-capacity".as_ref(), &self.device]);
    }

    /// Has the kernel refuse writes to it.
    ///
    /// # Panics
    ///
    /// If that fails.
    pub fn set_read_only(&self) {
        succeed("blockdev", &["--setro".as_ref(), &self.device]);
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        run("blockdev", &["--setrw".as_ref(), &self.device]);
        run("losetup", &["--detach".as_ref(), &self.device]);
    }
}

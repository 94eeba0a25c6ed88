//! A test's own folder, and its time limit.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{self, Command};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use nix::mount::{MntFlags, umount2};
use tempfile::TempDir;

/// After this time a test counts as hung. It includes waiting for other tests' guests.
const TIME_LIMIT: Duration = Duration::from_secs(900);

/// A folder for a test's images and sockets, removed when it is dropped. What is mounted below it, such as by a daemon
/// that was killed, is unmounted before.
///
/// It also is the test's watchdog: a test that holds one for longer than 900 s is aborted, and with it the
/// processes that it started.
#[derive(Debug)]
pub struct Scratch {
    dir: TempDir,
    _alive: Sender<()>,
}

impl Scratch {
    /// Makes the folder and starts the clock.
    #[expect(clippy::new_without_default, reason = "it is not a value but a folder")]
    pub fn new() -> Self {
        let test = thread::current().name().unwrap_or("a test").to_owned();
        // Not under /tmp, which may be a tmpfs, where O_DIRECT does not work on older kernels; and not under
        // target/, since the path of a unix socket has at most 107 bytes.
        let dir = TempDir::with_prefix_in("ringmill-", "/var/tmp").expect("a folder in /var/tmp");
        let (alive, dropped) = mpsc::channel::<()>();
        let path = dir.path().to_owned();
        thread::spawn(move || {
            if dropped.recv_timeout(TIME_LIMIT) == Err(RecvTimeoutError::Timeout) {
                eprintln!("{test} hangs: it has been running for {TIME_LIMIT:?}");
                unmount_below(&path);
                process::abort();
            }
        });
        Self { dir, _alive: alive }
    }

    /// The path of `name` in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        unmount_below(self.dir.path());
    }
}

/// Unmounts everything below a folder, also what is in use or whose server is gone.
fn unmount_below(dir: &Path) {
    // proc_pid_mountinfo(5): the fifth field is the mount point, with octal escapes, which paths of tests do not need.
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let below = mounts.lines().filter_map(|line| line.split(' ').nth(4));
    let below: Vec<&Path> = below.map(Path::new).filter(|path| path.starts_with(dir)).collect();
    // What was mounted last may lie on the others.
    for path in below.into_iter().rev() {
        if umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW).is_err() {
            // For users without the right to unmount.
            let _ = Command::new("fusermount3").args(["-u", "-z", "-q"]).arg(path).status();
        }
    }
}

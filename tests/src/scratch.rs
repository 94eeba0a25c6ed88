//! A test's own folder, and its time limit.

use std::path::{Path, PathBuf};
use std::process;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use tempfile::TempDir;

/// After this time a test counts as hung. It includes waiting for other tests' guests.
const TIME_LIMIT: Duration = Duration::from_secs(900);

/// A folder for a test's images and sockets, removed when it is dropped.
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
        let (alive, dropped) = mpsc::channel::<()>();
        thread::spawn(move || {
            if dropped.recv_timeout(TIME_LIMIT) == Err(RecvTimeoutError::Timeout) {
                eprintln!("{test} hangs: it has been running for {TIME_LIMIT:?}");
                process::abort();
            }
        });
        // Not under /tmp, which may be a tmpfs, where O_DIRECT does not work on older kernels; and not under
        // target/, since the path of a unix socket has at most 107 bytes.
        let dir = TempDir::with_prefix_in("ringmill-", "/var/tmp").expect("a folder in /var/tmp");
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

//! A file whose pages and close(2) depend on another process: a FUSE export of qemu-storage-daemon.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The mounted file, until dropped.
#[derive(Debug)]
pub struct Fuse {
    folder: PathBuf,
    server: Option<Pid>,
}

impl Fuse {
    /// Mounts a file of `size` bytes, which takes /dev/fuse.
    ///
    /// # Errors
    ///
    /// It cannot be mounted, or there is no qemu-storage-daemon (`scripts/setup-tests.sh`).
    pub fn mount(size: u64) -> io::Result<Fuse> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let nth = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = format!("ringmill-fuse-{}-{nth}", std::process::id());
        let mut fuse = Fuse { folder: std::env::temp_dir().join(folder), server: None };
        let path = |name: &str| fuse.folder.join(name).display().to_string();
        fs::create_dir_all(&fuse.folder)?;
        File::create(path("image"))?.set_len(size)?;
        File::create(path("file"))?;
        let node = format!("file,node-name=n,filename={}", path("image"));
        let export = format!("fuse,id=e,node-name=n,writable=on,mountpoint={}", path("file"));
        let mut command = Command::new("qemu-storage-daemon");
        command.args(["--daemonize", "--pidfile", &path("pid")]);
        command.args(["--blockdev", &node, "--export", &export]);
        if !command.status()?.success() {
            return Err(io::Error::other("qemu-storage-daemon does not mount it"));
        }
        let pid = fs::read_to_string(path("pid"))?.trim().parse().map_err(io::Error::other)?;
        fuse.server = Some(Pid::from_raw(pid));
        Ok(fuse)
    }

    /// Opens the file for reading and writing.
    ///
    /// # Errors
    ///
    /// Those of open(2).
    pub fn open(&self) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).open(self.folder.join("file"))
    }

    /// Stops the server: all accesses to the file block until the result is dropped.
    pub fn hang(&self) -> Hanging<'_> {
        self.signal(Signal::SIGSTOP);
        Hanging(self)
    }

    fn signal(&self, signal: Signal) {
        if let Some(server) = self.server {
            let _ = kill(server, signal);
        }
    }
}

/// A file whose accesses block.
#[derive(Debug)]
pub struct Hanging<'a>(&'a Fuse);

impl Drop for Hanging<'_> {
    fn drop(&mut self) {
        self.0.signal(Signal::SIGCONT);
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        if let Some(server) = self.server {
            let _ = kill(server, Signal::SIGTERM);
            // It unmounts and ends.
            while kill(server, None).is_ok() {
                std::thread::yield_now();
            }
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

//! Memory in a file whose pages another process brings, when it likes.

use std::fs::{File, OpenOptions};
use std::path::PathBuf;
use std::process::Command;

use guest_memory::{Error, Region};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const SIZE: u64 = 1 << 20;

/// A file on FUSE, until this is dropped.
struct Fuse(PathBuf);

impl Fuse {
    fn mount() -> Fuse {
        let fuse = Fuse(std::env::temp_dir().join(format!("ringmill-fuse-{}", std::process::id())));
        let path = |name: &str| fuse.0.join(name).display().to_string();
        std::fs::create_dir_all(&fuse.0).unwrap();
        File::create(path("image")).unwrap().set_len(SIZE).unwrap();
        File::create(path("file")).unwrap();
        let node = format!("file,node-name=n,filename={}", path("image"));
        let export = format!("fuse,id=e,node-name=n,writable=on,mountpoint={}", path("file"));
        let mut command = Command::new("qemu-storage-daemon");
        command.args(["--daemonize", "--pidfile", &path("pid")]);
        command.args(["--blockdev", &node, "--export", &export]);
        let mounted = command.status().expect("qemu-storage-daemon (scripts/setup-tests.sh)");
        assert!(mounted.success());
        fuse
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        let pid = std::fs::read_to_string(self.0.join("pid")).unwrap_or_default();
        if let Ok(pid) = pid.trim().parse() {
            let pid = Pid::from_raw(pid);
            let _ = kill(pid, Signal::SIGTERM);
            // It unmounts, and goes.
            while kill(pid, None).is_ok() {
                std::thread::yield_now();
            }
        }
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn memory_on_fuse_is_refused() {
    if let Err(why) = OpenOptions::new().read(true).write(true).open("/dev/fuse") {
        eprintln!("\n*** NOT TESTED: memory on FUSE, which takes /dev/fuse: {why}. ***\n");
        return;
    }
    let fuse = Fuse::mount();
    let file = OpenOptions::new().read(true).write(true).open(fuse.0.join("file")).unwrap();
    let region =
        Region { guest_addr: 0, size: SIZE, user_addr: 0, mmap_offset: 0, fd: file.into() };
    let refused = region.map().map(drop);
    assert!(matches!(refused, Err(Error::Elsewhere { guest_addr: 0 })), "{refused:?}");
}

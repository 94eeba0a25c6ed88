//! Locks of records, each a byte of one file: nothing is left to be removed, and a command that is killed has none.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use daemon::DaemonError;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

use super::{FOLDER, failed, hash};

/// Interval of attempts to get a lock within a time.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// How long a lock is waited for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Wait {
    /// Until it is free.
    Ever,
    /// So long.
    Within(Duration),
    /// Not at all.
    No,
}

/// A lock, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Lock {
    file: File,
    byte: i64,
}

impl Lock {
    /// Locks the choice of devices' numbers, and waits for other commands that choose.
    pub(crate) fn of_all() -> Result<Self, DaemonError> {
        let (folder, path) = (Path::new(FOLDER), Path::new(FOLDER).join("lock"));
        let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
        made.map_err(|error| failed(folder, &error))?;
        take(&path, 0, Wait::Ever)
            .and_then(|lock| lock.ok_or_else(|| io::ErrorKind::WouldBlock.into()))
            .map_err(|error| failed(&path, &error))
    }

    /// Locks the record of this name; `None`: another command has the lock.
    pub(crate) fn of_record(id: &str, wait: Wait) -> Result<Option<Self>, DaemonError> {
        let path = Path::new(FOLDER).join("lock");
        // Not the byte of `of_all`, and no negative number.
        let byte = i64::try_from(hash(id) >> 1).unwrap_or(i64::MAX).max(1);
        take(&path, byte, wait).map_err(|error| failed(&path, &error))
    }
}

fn take(path: &Path, byte: i64, wait: Wait) -> io::Result<Option<Lock>> {
    let mut options = OpenOptions::new();
    let file = options.create(true).truncate(false).write(true).mode(0o600).open(path)?;
    let range = range(byte, libc::F_WRLCK);
    let deadline = match wait {
        Wait::Within(limit) => Some(Instant::now() + limit),
        Wait::Ever | Wait::No => None,
    };
    loop {
        let how = match wait {
            Wait::Ever => FcntlArg::F_OFD_SETLKW(&range),
            Wait::Within(_) | Wait::No => FcntlArg::F_OFD_SETLK(&range),
        };
        match fcntl(&file, how) {
            Ok(_) => return Ok(Some(Lock { file, byte })),
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN | Errno::EACCES) => match deadline {
                Some(deadline) if Instant::now() < deadline => thread::sleep(LOOK_AGAIN),
                _ => return Ok(None),
            },
            Err(errno) => return Err(errno.into()),
        }
    }
}

impl Drop for Lock {
    /// Unlocks: a copy of the descriptor may live on in a process that was forked.
    fn drop(&mut self) {
        // Closing the file does the same, if there is no copy.
        let _ = fcntl(&self.file, FcntlArg::F_OFD_SETLK(&range(self.byte, libc::F_UNLCK)));
    }
}

fn range(byte: i64, kind: libc::c_int) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: byte,
        l_len: 1,
        l_pid: 0,
    }
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::fs;

    use super::*;

    #[test]
    fn each_byte_has_one_owner() {
        let path = env::temp_dir().join(format!("attach-lock-{}", std::process::id()));
        let held = take(&path, 7, Wait::No).expect("a file").expect("it is free");
        assert!(take(&path, 7, Wait::No).expect("a file").is_none());
        assert!(take(&path, 7, Wait::Within(LOOK_AGAIN)).expect("a file").is_none());
        assert!(take(&path, 8, Wait::No).expect("a file").is_some());
        let waits = {
            let path = path.clone();
            thread::spawn(move || take(&path, 7, Wait::Ever).expect("a file").is_some())
        };
        drop(held);
        assert!(waits.join().expect("it has waited"));
        fs::remove_file(&path).expect("it goes");
    }
}

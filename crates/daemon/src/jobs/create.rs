//! `blockdev-create`: images are made on a thread of their own, since writing one takes its time.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::thread;

use block::{CreationLock, DriverServices, create_rbd};
use event_loop::{EventLoop, oneshot};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};

use super::options::{CreateOptions, Preallocation};
use crate::errno::words;

/// Bytes written at once.
const CHUNK: usize = 1 << 20;

/// Begins to make an image. What is returned gives why it could not be made, if so.
pub(super) fn begin(
    event_loop: &EventLoop,
    services: &Arc<DriverServices>,
    options: CreateOptions,
) -> oneshot::Receiver<Result<(), String>> {
    let (done, is_done) = oneshot::channel();
    match options {
        CreateOptions::File { filename, size, preallocation } => {
            on_thread(done, move || file(&filename, size, preallocation));
        }
        CreateOptions::Rbd { location, size, object_size } => {
            let (on_loop, services) = (event_loop.clone(), services.clone());
            event_loop.spawn(async move {
                let made = create_rbd(&services, &on_loop, &location, size, object_size).await;
                done.send(made.map_err(|error| error.to_string()));
            });
        }
    }
    is_done
}

fn on_thread(
    done: oneshot::Sender<Result<(), String>>,
    make: impl FnOnce() -> Result<(), String> + Send + 'static,
) {
    let make = move || done.send(make());
    // Without a thread the receiver learns that nobody will answer.
    if let Err(error) = thread::Builder::new().name("create".into()).spawn(make) {
        log::error!("blockdev-create: no thread can be started: {error}");
    }
}

fn file(path: &Path, size: u64, preallocation: Preallocation) -> Result<(), String> {
    let shown = path.display();
    let mut options = OpenOptions::new();
    // What is in it goes only once it is known that nobody uses it.
    let file = options.read(true).write(true).create(true).truncate(false).mode(0o644).open(path);
    let file = file.map_err(|error| format!("Could not create '{shown}': {}", words(&error)))?;
    let _lock = CreationLock::take(&file, path).map_err(|error| error.to_string())?;
    let resize = |size| {
        file.set_len(size).map_err(|error| format!("Could not resize '{shown}': {}", words(&error)))
    };
    resize(0)?;
    let failed = |what: &str, errno: Errno| format!("Could not {what} '{shown}': {}", errno.desc());
    match preallocation {
        Preallocation::Off => resize(size),
        Preallocation::Falloc => {
            let len =
                i64::try_from(size).map_err(|_| failed("preallocate data for", Errno::EFBIG))?;
            match len {
                0 => Ok(()),
                len => fallocate(file.as_fd(), FallocateFlags::empty(), 0, len)
                    .map_err(|errno| failed("preallocate data for", errno)),
            }
        }
        Preallocation::Full => {
            resize(size)?;
            let zeroes = vec![0; CHUNK];
            let mut at = 0;
            while at < size {
                let len = (size - at).min(CHUNK as u64) as usize;
                let part = zeroes.get(..len).unwrap_or(&zeroes);
                file.write_all_at(part, at).map_err(|error| {
                    format!("Could not write zeros for preallocation: {}", words(&error))
                })?;
                at += len as u64;
            }
            (&file)
                .flush()
                .and_then(|()| file.sync_data())
                .map_err(|error| format!("Could not flush file to disk: {}", words(&error)))
        }
    }
}

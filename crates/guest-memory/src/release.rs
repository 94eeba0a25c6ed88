//! A thread that drops what takes long to drop.
//!
//! To unmap a guest's memory, or to close the last descriptor of its file, takes the kernel up to 0.4 s per GiB. The
//! control thread and I/O threads must not wait for that.

#![forbid(unsafe_code)]

use std::any::Any;
use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;

use event_loop::start_thread;
use event_loop::sync::lock;
use nix::sys::stat::{SFlag, fstat};

/// Bytes that any thread may unmap or free, which takes about 0.4 ms.
pub(crate) const SMALL: usize = 1 << 20;

/// Unit of `st_blocks`, bytes: see stat(3type).
const BLOCK: u64 = 512;

static QUEUE: Mutex<Queue> = Mutex::new(Queue { things: VecDeque::new(), has_thread: false });

struct Queue {
    things: VecDeque<Box<dyn Any + Send>>,
    /// A thread drops `things`. It ends when there are none.
    has_thread: bool,
}

/// Drops `thing` on a thread that does nothing else, after the things before it.
///
/// Drops it at once if no thread can be started. The end of the process does not wait for the thread.
pub fn release(thing: impl Send + 'static) {
    let mut queue = lock(&QUEUE);
    queue.things.push_back(Box::new(thing));
    let has_thread = std::mem::replace(&mut queue.has_thread, true);
    drop(queue);
    if !has_thread && start_thread("release", drop_all).is_err() {
        drop_all();
    }
}

fn drop_all() {
    loop {
        let mut queue = lock(&QUEUE);
        let Some(thing) = queue.things.pop_front() else {
            *queue = Queue { things: VecDeque::new(), has_thread: false };
            return;
        };
        drop(queue);
        drop(thing);
    }
}

/// Returns whether closing the last descriptor of a file may take long, as its memory or blocks are freed.
///
/// The file is on a local file system, such as a memfd.
pub fn is_large(file: &OwnedFd) -> bool {
    fstat(file.as_fd()).is_ok_and(|stat| {
        let is_file = stat.st_mode & SFlag::S_IFMT.bits() == SFlag::S_IFREG.bits();
        is_file && stat.st_blocks.cast_unsigned().saturating_mul(BLOCK) > SMALL as u64
    })
}

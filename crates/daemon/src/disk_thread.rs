//! Work that waits for the disk, on a thread beside the loops.

use std::io;
use std::thread;

use event_loop::oneshot;

/// Does `work` on a new thread called `name`, and returns its result.
///
/// # Errors
///
/// The thread cannot be started, or has ended without a result.
pub(super) async fn on_a_thread<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let (done, is_done) = oneshot::channel();
    thread::Builder::new().name(name.to_owned()).spawn(move || done.send(work()))?;
    is_done.await.map_err(|_| io::Error::other("its thread has ended"))
}

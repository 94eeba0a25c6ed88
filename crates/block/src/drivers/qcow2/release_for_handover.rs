//! Closing an image on a separate thread, so that no caller has to wait for the disk.
//!
//! If the disk does not answer, the callers get an error, and the process continues to use the image. The close
//! then goes on beside it. It holds the same locks as other tasks that write metadata or mark the image, and
//! leaves an image that was changed meanwhile as it is.

use std::io;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use event_loop::oneshot::{self, Receiver};
use event_loop::start_thread;
use event_loop::sync::lock;

use super::image::Image;
use super::open::{Below, on_a_loop};

/// The thread that closes an image, if there is one.
#[derive(Default)]
pub(super) struct Releasing(Mutex<Option<JoinHandle<()>>>);

impl Releasing {
    /// Begins. Once the result was reported, [`end`](Self::end) does not wait.
    ///
    /// # Errors
    ///
    /// There is no thread, or the thread of an earlier call is still at work.
    pub(super) fn begin(
        &self,
        below: &Below,
        image: &Arc<Image>,
    ) -> io::Result<Receiver<io::Result<()>>> {
        let (below, image) = (below.clone(), image.clone());
        self.begin_with(move || {
            on_a_loop(
                &below,
                |channels| async move { Ok(image.release_for_handover(&channels).await?) },
            )
        })
    }

    /// Begins other work on the thread.
    ///
    /// # Errors
    ///
    /// As of [`begin`](Self::begin).
    pub(super) fn begin_with(
        &self,
        work: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> io::Result<Receiver<io::Result<()>>> {
        let mut thread = lock(&self.0);
        if thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            let why = "its disk has not answered since it was to be let go before";
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, why));
        }
        let (done, told) = oneshot::channel();
        *thread = Some(start_thread("qcow2", move || done.send(work()))?);
        Ok(told)
    }

    /// Waits for the end of the thread.
    pub(super) fn end(&self) {
        let thread = lock(&self.0).take();
        // A thread that panicked has dropped its sender, which reports the failure.
        let _ = thread.map(JoinHandle::join);
    }
}

#[cfg(test)]
mod tests;

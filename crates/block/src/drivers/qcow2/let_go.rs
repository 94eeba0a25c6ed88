//! Letting an image go: on a thread of its own, for which nobody has to wait.
//!
//! Where the disk does not answer, those who wanted the image are told so, and the process goes on with it. What is
//! under way then goes on beside: it holds the locks that anybody has who writes metadata or marks the image, and
//! leaves an image that has been changed in between as it is.

use std::io;
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};

use event_loop::oneshot::{self, Receiver};
use event_loop::sync::lock;

use super::image::Image;
use super::open::{Below, on_a_loop};

/// The thread that lets an image go, if there is one.
#[derive(Default)]
pub(super) struct LettingGo(Mutex<Option<JoinHandle<()>>>);

impl LettingGo {
    /// Begins. What comes of it is told, and then [`end`](Self::end) does not wait.
    ///
    /// # Errors
    ///
    /// There is no thread; or one is at it since an earlier call.
    pub(super) fn begin(
        &self,
        below: &Below,
        image: &Arc<Image>,
    ) -> io::Result<Receiver<io::Result<()>>> {
        let mut thread = lock(&self.0);
        if thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            let why = "its disk has not answered since it was to be let go before";
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, why));
        }
        let (done, told) = oneshot::channel();
        let (below, image) = (below.clone(), image.clone());
        let let_go = move || {
            let let_go =
                on_a_loop(&below, |channels| async move { Ok(image.let_go(&channels).await?) });
            done.send(let_go);
        };
        *thread = Some(Builder::new().name("qcow2".into()).spawn(let_go)?);
        Ok(told)
    }

    /// Waits until nothing is under way.
    pub(super) fn end(&self) {
        let thread = lock(&self.0).take();
        // One that has panicked has told nobody anything.
        let _ = thread.map(JoinHandle::join);
    }
}

#[cfg(test)]
mod tests;

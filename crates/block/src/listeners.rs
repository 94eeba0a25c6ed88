//! Objects on loops that any thread can notify.

use std::rc::{Rc, Weak};
use std::sync::{Arc, Mutex, Weak as Outlived};

use event_loop::sync::lock;
use event_loop::{EventLoop, mailbox};

/// Those that listen.
#[derive(Default)]
pub(crate) struct Listeners(Mutex<Vec<Outlived<mailbox::Sender<()>>>>);

/// Ends listening when it is dropped.
pub(crate) struct Listening(
    #[expect(dead_code, reason = "held for its drop")] Arc<mailbox::Sender<()>>,
);

impl Listeners {
    /// Calls `told` on the loop after each notice, while both `listener` and the returned value exist.
    pub(crate) fn listen<T: 'static>(
        &self,
        event_loop: &EventLoop,
        listener: Weak<T>,
        told: impl Fn(&Rc<T>) + 'static,
    ) -> Listening {
        let (sender, mut notices) = mailbox::channel();
        let sender = Arc::new(sender);
        let mut listeners = lock(&self.0);
        listeners.retain(|listener| listener.strong_count() > 0);
        listeners.push(Arc::downgrade(&sender));
        drop(listeners);
        event_loop.spawn(async move {
            while let Some(()) = notices.receive().await {
                if let Some(listener) = listener.upgrade() {
                    told(&listener);
                }
            }
        });
        Listening(sender)
    }

    /// Notifies all that listen.
    pub(crate) fn tell(&self) {
        for listener in lock(&self.0).iter().filter_map(Outlived::upgrade) {
            // Fails only if its loop has ended.
            let _ = listener.send(());
        }
    }
}

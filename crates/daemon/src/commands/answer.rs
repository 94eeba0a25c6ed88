//! The execution of a command, and the time of its answer.

use std::pin::Pin;

use block::DirtyImage;
use control::Object;
use control::qmp::QmpError;
use event_loop::oneshot;
use nix::errno::Errno;
use sandbox::Sandbox;
use serde_json::{Value as Json, json};

use super::{Accepted, Call, Running, read};
use crate::monitor::{Outcome, Request};
use crate::serving::Message;
use crate::state::not_recorded;
use crate::{Daemon, DaemonError};

/// The answer to a successful command, and the time when the answer is sent.
pub(crate) enum Answer {
    /// This answer, at once.
    Now(Json),
    /// An empty object, when the future completes. Other commands are executed meanwhile.
    Later(Pin<Box<dyn Future<Output = ()>>>),
    /// That of the command's rest, which is executed when the future completes. Other commands are executed
    /// meanwhile.
    Continued(Pin<Box<dyn Future<Output = Rest>>>),
    /// The serving task performs the [`Leave`], then sends the answer.
    AfterServing(Leave),
}

/// The rest of a command, carried out after a wait.
pub(crate) type Rest = Box<dyn for<'a> FnOnce(&'a mut Daemon) -> Running<'a>>;

/// The way in which a command ends serving.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leave {
    /// The daemon ends. The answer is an empty object, sent after the shutdown of all exports and
    /// nodes.
    Quit,
    /// Another process takes over. The answer describes the other process, and is sent once that
    /// process serves.
    Upgrade,
}

impl Answer {
    /// Returns the answer of a command's `rest`, which takes what `wait` gives. Other commands are executed during the wait.
    pub(crate) fn after<T: 'static>(
        wait: impl Future<Output = T> + 'static,
        rest: impl for<'a> FnOnce(&'a mut Daemon, T) -> Running<'a> + 'static,
    ) -> Answer {
        Answer::Continued(Box::pin(async move {
            let waited = wait.await;
            let rest: Rest = Box::new(move |daemon| rest(daemon, waited));
            rest
        }))
    }
}

impl From<()> for Answer {
    fn from((): ()) -> Self {
        Answer::Now(json!({}))
    }
}

impl From<Json> for Answer {
    fn from(value: Json) -> Self {
        Answer::Now(value)
    }
}

impl Daemon {
    /// Executes a command and answers it. Returns the open answer of a command that ends serving.
    pub(crate) async fn carry_out(
        &mut self,
        request: Request,
    ) -> Option<(Leave, oneshot::Sender<Outcome>)> {
        let Request { call: Call { records, mut again, run }, answer } = request;
        // A command that has changed nothing is executed again after a repair, which may take hours.
        self.nodes.set_repairs_apart(again.is_some());
        let mut outcome = run(self).await;
        self.nodes.set_repairs_apart(false);
        if let Some(image) = self.nodes.take_dirty_image()
            && outcome.is_err()
            && let Some(again) = again.take()
        {
            outcome = self.repair(image, *again);
        }
        if records && !matches!(outcome, Ok(Answer::Continued(_))) {
            // A failed command may have changed part of the configuration, so record the state as
            // well.
            let recorded = self.record().await.map_err(not_recorded);
            outcome = outcome.and_then(|value| Ok(recorded.map(|()| value)?));
        }
        match outcome {
            Ok(Answer::Now(value)) => answer.send(Ok(value)),
            Ok(Answer::Later(end)) => {
                self.control.spawn(async move {
                    end.await;
                    answer.send(Ok(json!({})));
                });
            }
            Ok(Answer::AfterServing(leave)) => return Some((leave, answer)),
            Ok(Answer::Continued(wait)) => {
                let (mailbox, waiting) = (self.agenda.mailbox.clone(), self.agenda.wait());
                self.control.spawn(async move {
                    let rest = wait.await;
                    let run: Rest = Box::new(move |daemon| {
                        drop(waiting);
                        rest(daemon)
                    });
                    mailbox.push(Message::Request(Request {
                        call: Call { records, again, run },
                        answer,
                    }));
                });
            }
            Err(error) => answer.send(Err(self.explain(error))),
        }
        None
    }

    /// Repairs an image, then executes the command that opens it. Other commands are executed meanwhile.
    fn repair(
        &mut self,
        image: DirtyImage,
        (command, arguments): (String, Object),
    ) -> Result<Answer, QmpError> {
        let file = image.file().to_owned();
        self.inventory = self.inventory.with_repair(&file).map_err(DaemonError::from)?;
        Ok(Answer::after(image.repair(), move |daemon, repaired| {
            Box::pin(async move {
                daemon.inventory = daemon.inventory.repaired(&file);
                repaired.map_err(DaemonError::from)?;
                match read(&command, arguments)? {
                    Accepted::Call(call) => (call.run)(daemon).await,
                    Accepted::Answer(answer) => Ok(answer.into()),
                }
            })
        }))
    }

    /// Adds a hint to an error that the sandbox may have caused: access to a file is denied.
    fn explain(&self, error: QmpError) -> QmpError {
        let hint = self.process.sandbox.as_ref().and_then(Sandbox::hint);
        match hint.filter(|_| error.desc.contains(Errno::EACCES.desc())) {
            Some(hint) => QmpError { desc: format!("{} ({hint})", error.desc), ..error },
            None => error,
        }
    }
}

//! How the daemon carries out a command, and when the command is answered.

use std::pin::Pin;

use control::qmp::QmpError;
use event_loop::oneshot;
use nix::errno::Errno;
use sandbox::Sandbox;
use serde_json::{Value as Json, json};

use super::Call;
use crate::Daemon;
use crate::monitor::{Outcome, Request};
use crate::state::not_recorded;

/// What a command that has succeeded is answered by, and when.
pub(crate) enum Answer {
    /// By this, at once.
    Now(Json),
    /// By an empty object, when the future completes. Other commands are carried out meanwhile.
    Later(Pin<Box<dyn Future<Output = ()>>>),
    /// By the task that serves, which has to do this first.
    AfterServing(Leave),
}

/// What ends serving, by a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leave {
    /// The daemon ends. The answer is an empty object, when everything has been taken down.
    Quit,
    /// Another process takes over. The answer is that process, when that process serves.
    Upgrade,
}

impl From<Json> for Answer {
    fn from(value: Json) -> Self {
        Answer::Now(value)
    }
}

impl Daemon {
    /// Carries out a command and answers it, unless it ends serving.
    pub(crate) async fn carry_out(
        &mut self,
        request: Request,
    ) -> Option<(Leave, oneshot::Sender<Outcome>)> {
        let Request { call: Call { records, run }, answer } = request;
        let mut outcome = run(self).await;
        if records {
            // A failed command is recorded, too: part of it may have been carried out.
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
            Err(error) => answer.send(Err(self.explain(error))),
        }
        None
    }

    /// Adds a hint to an error that the sandbox may have caused: access to a file is denied.
    fn explain(&self, error: QmpError) -> QmpError {
        let hint = self.sandbox.as_ref().and_then(Sandbox::hint);
        match hint.filter(|_| error.desc.contains(Errno::EACCES.desc())) {
            Some(hint) => QmpError { desc: format!("{} ({hint})", error.desc), ..error },
            None => error,
        }
    }
}

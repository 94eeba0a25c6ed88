//! The main loop of the daemon: handles one message after the other.

use block::job::Report;
use event_loop::{oneshot, until};
use exports::fuse::Resize;

use super::commands::Leave;
use super::monitor::{Outcome, Request};
use super::signals::StopSignals;
use super::state::unless_stopped;
use super::statistics::Statistics;
use super::upgrade::HandedOver;
use super::{Daemon, DaemonError};

/// A message to the main loop.
pub(super) enum Message {
    /// A command of a monitor's client.
    Request(Request),
    /// An I/O thread has failed.
    Failed(DaemonError),
    /// SIGUSR2.
    Upgrade,
    /// A request for the current statistics.
    Statistics(oneshot::Sender<Statistics>),
    /// The interval of the search for stalled requests is over.
    LookForStalls,
    /// An export that was stopped has ended.
    ExportEnded(String),
    /// A report of a job's worker.
    Job(u64, Report),
    /// A request to resize the node of an export.
    Resize(String, Resize),
    /// Another attempt of the copy of `serve --localize` is due.
    Localize,
    /// The result of a job that creates an image.
    ImageDone(u64, Result<(), String>),
}

/// The reason for the end of serving.
pub(super) enum End {
    /// `quit`. Answered once everything has been taken down.
    Quit(oneshot::Sender<Outcome>),
    Signal(&'static str),
    Failed(DaemonError),
    /// Another process serves now. The command, if there was one, is answered once the pid file is right.
    HandedOver(HandedOver, Option<oneshot::Sender<Outcome>>),
}

impl Daemon {
    /// Handles messages until a message or a signal ends serving.
    pub(super) async fn serve(&mut self, stop: &mut StopSignals) -> End {
        let (mailbox, moving) = (self.agenda.mailbox.clone(), self.agenda.is_moving());
        self.localize().await;
        loop {
            // A message may have ended the last user of an image.
            self.nodes.release_unused_locks();
            self.nodes.remove_left_journals();
            match until(mailbox.next(), stop.next()).await {
                Err(signal) => return End::Signal(signal),
                Ok(Message::Failed(error)) => return End::Failed(error),
                Ok(Message::ExportEnded(id)) => {
                    self.export_ended(&id);
                    self.tell_summary();
                }
                Ok(Message::Localize) => {
                    if let Err(signal) = unless_stopped(self.localize(), &moving, stop).await {
                        return End::Signal(signal);
                    }
                }
                Ok(Message::LookForStalls) => self.exports.look_for_stalls(),
                Ok(Message::Resize(export, resize)) => self.resize_for(&export, resize),
                Ok(Message::Statistics(answer)) => answer.send(self.statistics()),
                Ok(Message::ImageDone(job, result)) => self.image_done(job, result).await,
                Ok(Message::Job(job, report)) => {
                    let reported =
                        unless_stopped(self.job_reports(job, report), &moving, stop).await;
                    if let Err(signal) = reported {
                        return End::Signal(signal);
                    }
                    self.look_after_localizing();
                }
                Ok(Message::Upgrade) => match self.upgrade_until(stop).await {
                    Err(end) => return end,
                    Ok(Ok(to)) => return End::HandedOver(to, None),
                    Ok(Err(error)) => log::error!("{error}"),
                },
                Ok(Message::Request(request)) => {
                    let exports = self.exports.count();
                    let carried_out = unless_stopped(self.carry_out(request), &moving, stop);
                    let leave = match carried_out.await {
                        Ok(leave) => leave,
                        Err(signal) => return End::Signal(signal),
                    };
                    if self.exports.count() != exports {
                        self.tell_summary();
                    }
                    if let Some((leave, answer)) = leave
                        && let Some(end) = self.leave_for(leave, answer, stop).await
                    {
                        return end;
                    }
                }
            }
        }
    }

    /// Carries out a command that ends serving. Returns `None` if an upgrade has failed: this process still serves.
    async fn leave_for(
        &mut self,
        leave: Leave,
        answer: oneshot::Sender<Outcome>,
        stop: &mut StopSignals,
    ) -> Option<End> {
        match leave {
            Leave::Quit => Some(End::Quit(answer)),
            Leave::Upgrade => match self.upgrade_until(stop).await {
                Err(end) => Some(end),
                Ok(Ok(to)) => Some(End::HandedOver(to, Some(answer))),
                Ok(Err(error)) => {
                    log::error!("{error}");
                    answer.send(Err(error.into()));
                    None
                }
            },
        }
    }

    /// Hands over to another process. `Err`: a signal has cancelled the upgrade.
    async fn upgrade_until(
        &mut self,
        stop: &mut StopSignals,
    ) -> Result<Result<HandedOver, DaemonError>, End> {
        if let Some(manager) = &self.process.manager {
            manager.reloading();
        }
        let upgraded = until(self.upgrade(), stop.next()).await;
        match (&self.process.manager, &upgraded) {
            (Some(manager), Ok(Ok(to))) => manager.hand_over(to.pid),
            (Some(manager), Ok(Err(_))) => manager.ready(&self.summary()),
            _ => {}
        }
        if let Err(signal) = upgraded {
            self.resume().await;
            return Err(End::Signal(signal));
        }
        if let Ok(Err(_)) = &upgraded {
            self.localize().await;
        }
        upgraded.map_err(End::Signal)
    }
}

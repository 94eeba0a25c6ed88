//! `serve --localize`: a job copies an image on a server to its overlay, until the overlay needs the image no more.
//!
//! The overlay's allocated clusters are what is done. So nothing else is kept: a copy that begins again, in this process
//! or in the next one, finds what is left.

use std::cell::RefCell;
use std::rc::Rc;

use block::job::{Backup, OnError};

use super::Daemon;
use super::jobs::{ChainOptions, CopyOptions, Health, JobOptions};
use super::serving::Message;

/// The job's name.
const JOB: &str = "localize";
/// Time to the next attempt after an error, nanoseconds.
const PAUSE_NS: u64 = 10_000_000_000;

/// `--localize`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Localize {
    /// The node whose backing images are copied, or a filter above it.
    pub node: String,
    /// `--localize-speed`: most bytes per second. 0: no limit.
    pub speed: u64,
}

/// How far the copy is.
#[derive(Default)]
pub(crate) struct Progress(RefCell<Option<(Backup, u64)>>);

impl Progress {
    /// Returns the part that is copied, in percent. `None`: nothing is being copied.
    pub(crate) fn percent(&self) -> Option<u64> {
        let copy = self.0.borrow();
        let (copied, total) = copy.as_ref()?;
        let percent = u128::from(copied.done(*total)) * 100 / u128::from((*total).max(1));
        u64::try_from(percent).ok()
    }
}

/// The state of the copy.
#[derive(Default)]
pub(super) struct Localizing {
    /// `None`: nothing is to be copied, or all is.
    what: Option<Localize>,
    progress: Rc<Progress>,
    /// The job's serial number, while there is one.
    job: Option<u64>,
    /// Another attempt comes.
    waits: bool,
    /// The log has the last error.
    told: bool,
}

impl Localizing {
    pub(super) fn begin_with(&mut self, what: Option<Localize>) {
        self.what = what;
    }

    pub(super) fn progress(&self) -> Rc<Progress> {
        self.progress.clone()
    }

    fn set_job(&mut self, job: Option<(u64, (Backup, u64))>) {
        let (serial, parts) = job.unzip();
        self.job = serial;
        self.progress.0.replace(parts);
    }
}

impl Daemon {
    /// Starts the copy, or has it go on after an error.
    pub(super) async fn localize(&mut self) {
        self.localizing.waits = false;
        let Some(Localize { node, speed }) = self.localizing.what.clone() else { return };
        let begun = match self.jobs.health(JOB) {
            Some(Health::Runs { .. }) => return,
            Some(Health::Paused { .. }) => self.tell_job(JOB, super::jobs::JobVerb::Resume).await,
            None => {
                let copy = CopyOptions {
                    job: JobOptions { id: JOB.to_owned(), ..JobOptions::default() },
                    device: node,
                    speed: i64::try_from(speed).unwrap_or(i64::MAX),
                    on_source_error: OnError::Stop,
                    on_target_error: OnError::Stop,
                    ..CopyOptions::default()
                };
                self.start_stream(ChainOptions { copy, ..ChainOptions::default() }).await
            }
        };
        if let Err(error) = begun {
            self.localize_later(&error.desc);
        }
        let serial = match self.jobs.health(JOB) {
            Some(Health::Runs { serial } | Health::Paused { serial }) => Some(serial),
            None => None,
        };
        self.localizing.set_job(serial.zip(self.jobs.parts(JOB)));
    }

    /// Looks at the job after a report of a job's worker.
    pub(super) fn look_after_localizing(&mut self) {
        let Some(Localize { node, .. }) = self.localizing.what.clone() else { return };
        if self.localizing.job.is_none() {
            return;
        }
        match self.jobs.health(JOB) {
            Some(Health::Runs { .. }) => {}
            Some(Health::Paused { .. }) => {
                self.localize_later("reading the image or writing the overlay has failed");
            }
            None => {
                self.localizing.set_job(None);
                match self.is_whole(&node) {
                    true => {
                        self.localizing.what = None;
                        log::info!(
                            "localized: the overlay has the whole image, and needs the server no more"
                        );
                    }
                    false => self.localize_later("the job has ended"),
                }
            }
        }
    }

    /// Returns whether a node needs no image below it.
    fn is_whole(&self, node: &str) -> bool {
        let filtered = self.nodes.filtered(node);
        self.nodes.chain(filtered.last().map_or(node, String::as_str)).is_empty()
    }

    /// Has the next attempt come after a pause.
    fn localize_later(&mut self, why: &str) {
        if !std::mem::replace(&mut self.localizing.told, true) {
            let seconds = PAUSE_NS / 1_000_000_000;
            log::warn!("localizing stops: {why}; tried again every {seconds} seconds");
        }
        if std::mem::replace(&mut self.localizing.waits, true) {
            return;
        }
        let (control, mailbox) = (self.control.clone(), self.agenda.mailbox.clone());
        self.control.spawn(async move {
            control.sleep_until(control.now_ns() + PAUSE_NS).await;
            mailbox.push(Message::Localize);
        });
    }

    /// Ends the job before a hand-over. The next process begins it again.
    pub(super) async fn stop_localizing(&mut self) {
        let Some(serial) = self.localizing.job else { return };
        self.localizing.set_job(None);
        self.cancel_job(serial).await;
    }
}

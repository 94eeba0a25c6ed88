//! The sockets by which clients come in.

use std::collections::BTreeMap;
use std::rc::Rc;

use ::exports::nbd::NbdServer;

use super::DaemonError;
use super::chardev::Chardev;
use super::socket_activation::ActivationSockets;
use super::turn::Turn;
use super::upgrade::TakenListener;

/// The sockets of monitors, metrics and the NBD server.
///
/// Clients come in only while this process serves, through all of them or none. A socket of a monitor or of metrics
/// is recorded from its creation on, so that a hand-over leaves none out.
pub(super) struct Entrances {
    /// The sockets of the service manager. Each listener takes its own.
    pub(super) given: ActivationSockets,
    /// Character devices without a monitor.
    chardevs: BTreeMap<String, Chardev>,
    /// By purpose.
    listeners: BTreeMap<String, TakenListener>,
    pub(super) nbd_server: Option<NbdServer>,
    turn: Rc<Turn>,
}

impl Entrances {
    pub(super) fn new(given: ActivationSockets) -> Self {
        Entrances {
            given,
            chardevs: BTreeMap::new(),
            listeners: BTreeMap::new(),
            nbd_server: None,
            turn: Rc::default(),
        }
    }

    /// Adds a character device, and records its socket as `name`.
    pub(super) fn add_chardev(
        &mut self,
        id: &str,
        name: String,
        chardev: Chardev,
    ) -> Result<(), DaemonError> {
        if let Some(listener) = chardev.hand_over().map_err(DaemonError::new)? {
            self.record(name, listener);
        }
        self.chardevs.insert(id.to_owned(), chardev);
        Ok(())
    }

    /// Removes a character device for a monitor. Its socket stays recorded.
    pub(super) fn take_chardev(&mut self, id: &str) -> Option<Chardev> {
        self.chardevs.remove(id)
    }

    /// Returns the purpose of the next socket for metrics. There may be several, always in the same order.
    pub(super) fn next_metrics(&self) -> String {
        let number = self.listeners.keys().filter(|name| name.starts_with("metrics ")).count();
        format!("metrics {number}")
    }

    pub(super) fn record(&mut self, name: String, listener: TakenListener) {
        self.listeners.insert(name, listener);
    }

    pub(super) fn listeners(&self) -> &BTreeMap<String, TakenListener> {
        &self.listeners
    }

    /// The period in which clients come in.
    pub(super) fn turn(&self) -> Rc<Turn> {
        self.turn.clone()
    }

    pub(super) fn were_opened(&self) -> bool {
        !self.turn.is_not_yet()
    }

    /// Lets clients in, first those that wait already.
    pub(super) fn open(&self) {
        if let Some(server) = &self.nbd_server {
            server.resume();
        }
        self.turn.begin();
    }

    /// Another process lets them in.
    pub(super) fn leave(&self) {
        self.turn.end();
    }
}

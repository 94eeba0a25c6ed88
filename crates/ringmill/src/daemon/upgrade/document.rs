//! What is said between the two processes, and in which form.
//!
//! A packet begins with a letter. `Graph` and `Queues` are documents in JSON, in a memfd; descriptors
//! that a document speaks of, by numbers from 0, follow in packets of their own. What a document has to
//! say of nodes and exports are options of the command line, and of front ends messages of vhost-user:
//! both stay what they are from version to version.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use exports::vhost_user::handover::{Saved, SavedRings};
use serde_json::{Value as Json, json};

/// The version of the documents. A process that knows another one does not take over.
pub(super) const VERSION: u64 = 1;

/// Old to new: what there is.
pub(super) const GRAPH: u8 = b'G';
/// New to old: all of it is there.
pub(super) const READY: u8 = b'R';
/// New to old: it cannot be taken over; the text says why.
pub(super) const REFUSED: u8 = b'E';
/// Old to new: where the queues are, which stand still from now on.
pub(super) const QUEUES: u8 = b'Q';
/// New to old: nothing is left that could fail.
pub(super) const HAVE: u8 = b'H';
/// Old to new: serve.
pub(super) const GO: u8 = b'X';
/// More descriptors of the document before.
pub(super) const DESCRIPTORS: u8 = b'F';

/// The descriptors of a document that is made.
#[derive(Debug, Default)]
pub(super) struct Collected(pub(super) Vec<OwnedFd>);

impl Collected {
    /// Adds one; its number.
    pub(super) fn add(&mut self, fd: OwnedFd) -> Json {
        self.0.push(fd);
        (self.0.len() - 1).into()
    }

    pub(super) fn messages(&mut self, messages: Vec<Saved>) -> Json {
        let message = |Saved { code, payload, fds }: Saved| {
            let fds: Vec<Json> = fds.into_iter().map(|fd| self.add(fd)).collect();
            json!({"code": code, "payload": payload, "fds": fds})
        };
        messages.into_iter().map(message).collect()
    }

    pub(super) fn rings(&mut self, rings: SavedRings) -> Json {
        json!({"messages": self.messages(rings.messages), "device": rings.device})
    }
}

/// A document that was received.
#[derive(Debug)]
pub(super) struct Document {
    pub(super) json: Json,
    fds: BTreeMap<u64, OwnedFd>,
}

impl Document {
    pub(super) fn new(json: Json, fds: Vec<OwnedFd>) -> Self {
        Document { json, fds: (0..).zip(fds).collect() }
    }

    /// Takes the descriptor of that number.
    pub(super) fn fd(&mut self, number: &Json) -> Result<OwnedFd, String> {
        let fd = number.as_u64().and_then(|number| self.fds.remove(&number));
        fd.ok_or_else(|| format!("descriptor {number} is missing"))
    }

    pub(super) fn messages(&mut self, messages: &Json) -> Result<Vec<Saved>, String> {
        let mut saved = Vec::new();
        for message in list(messages)? {
            let code = number(&message["code"])?;
            let fds = list(&message["fds"])?.iter().map(|fd| self.fd(fd));
            let fds = fds.collect::<Result<_, _>>()?;
            saved.push(Saved { code, payload: bytes(&message["payload"])?, fds });
        }
        Ok(saved)
    }

    pub(super) fn rings(&mut self, rings: &Json) -> Result<SavedRings, String> {
        let messages = self.messages(&rings["messages"])?;
        Ok(SavedRings { messages, device: bytes(&rings["device"])? })
    }
}

pub(super) fn list(json: &Json) -> Result<&Vec<Json>, String> {
    json.as_array().ok_or_else(|| format!("{json} is no list"))
}

pub(super) fn text(json: &Json) -> Result<&str, String> {
    json.as_str().ok_or_else(|| format!("{json} is no text"))
}

pub(super) fn number<T: TryFrom<u64>>(json: &Json) -> Result<T, String> {
    let number = json.as_u64().and_then(|number| T::try_from(number).ok());
    number.ok_or_else(|| format!("{json} is no such number"))
}

fn bytes(json: &Json) -> Result<Vec<u8>, String> {
    list(json)?.iter().map(number).collect()
}

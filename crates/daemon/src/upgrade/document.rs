//! The messages between the two processes of an upgrade, and their format.
//!
//! A packet begins with a letter. `Inventory` and `Queues` are documents in JSON, in a memfd; descriptors
//! that a document speaks of, by numbers from 0, follow in packets of their own. What a document has to
//! say of nodes and exports are options of the command line, and of front ends messages of vhost-user or vfio-user:
//! both stay what they are from version to version.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use exports::nbd::SavedClient;
use exports::nbd::session::transmission::{Agreed, Context, Contexts};
use exports::nbd::wire::reply::ReplyMode;
use exports::vfio_user;
use exports::vhost_user::handover::{Saved, SavedRings, SavedServer, SavedSession};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{SockType, getsockopt, sockopt};
use serde_json::{Value as Json, json};

/// The version of the documents. A process that knows another one does not take over.
pub(super) const VERSION: u64 = 1;

/// Old to new: the current configuration.
pub const INVENTORY: u8 = b'G';
/// New to old: the configuration is reconstructed.
pub(super) const READY: u8 = b'R';
/// New to old: the take-over failed; the text gives the reason.
pub(super) const REFUSED: u8 = b'E';
/// Old to new: the positions of the queues, which are stopped from now on.
pub(super) const QUEUES: u8 = b'Q';
/// New to old: nothing is left that could fail.
pub(super) const HAVE: u8 = b'H';
/// Old to new: serve.
pub(super) const GO: u8 = b'X';
/// More descriptors of the document before.
pub const DESCRIPTORS: u8 = b'F';

/// Makes a part of a document: adds the descriptors, and returns the text.
pub(crate) type Part = Box<dyn FnOnce(&mut Collected) -> Result<Json, String>>;

pub(crate) fn part(make: impl FnOnce(&mut Collected) -> Result<Json, String> + 'static) -> Part {
    Box::new(make)
}

/// A part of a document that was received.
pub(crate) struct TakenPart<'a> {
    /// The text.
    pub(crate) json: Json,
    /// Has the descriptors.
    pub(crate) document: &'a mut Document,
}

/// The descriptors of a document that is made.
#[derive(Debug, Default)]
pub struct Collected(pub Vec<OwnedFd>);

impl Collected {
    /// Adds one; its number.
    pub fn add(&mut self, fd: OwnedFd) -> Json {
        self.0.push(fd);
        (self.0.len() - 1).into()
    }

    /// Adds vhost-user messages.
    pub fn messages(&mut self, messages: Vec<Saved>) -> Json {
        let message = |Saved { code, payload, fds }: Saved| {
            let fds: Vec<Json> = fds.into_iter().map(|fd| self.add(fd)).collect();
            json!({"code": code, "payload": payload, "fds": fds})
        };
        messages.into_iter().map(message).collect()
    }

    /// Adds the clients of an NBD export.
    ///
    /// What they have sent, and are sent, is in memory of its own where there is something.
    ///
    /// # Errors
    ///
    /// There is no memory.
    pub fn clients(&mut self, clients: Vec<SavedClient>) -> Result<Json, String> {
        let mut all = Vec::new();
        for SavedClient { socket, agreed, input, output } in clients {
            let Agreed { read_only, mode, contexts, size: _ } = agreed;
            let ids: Vec<u32> = contexts.iter().map(Context::id).collect();
            all.push(json!({
                "socket": self.add(socket),
                "replies": mode_name(mode),
                "read-only": read_only,
                // For version 0.2, which refuses requests below this size.
                "minimum-block": 1,
                // For older versions, which know no other contexts.
                "allocation": contexts.allocation,
                "contexts": ids,
                "input": self.memory(&input)?,
                "output": self.memory(&output)?,
            }));
        }
        Ok(json!({"clients": all}))
    }

    /// Adds the client of an export over vfio-user, in a list of none or one.
    ///
    /// # Errors
    ///
    /// There is no memory.
    pub fn vfio_user(&mut self, client: Option<vfio_user::SavedClient>) -> Result<Json, String> {
        let Some(vfio_user::SavedClient { socket, messages, device }) = client else {
            return Ok(json!({"vfio-user": []}));
        };
        Ok(json!({"vfio-user": [{
            "socket": self.add(socket),
            "messages": self.messages(messages),
            "device": self.memory(&device)?,
        }]}))
    }

    /// Adds memory that holds the bytes, if there are any.
    ///
    /// # Errors
    ///
    /// There is no memory.
    pub(super) fn memory(&mut self, bytes: &[u8]) -> Result<Json, String> {
        match bytes {
            [] => Ok(Json::Null),
            bytes => {
                let memory = memory(bytes).map_err(|error| format!("memfd failed: {error}"))?;
                Ok(self.add(memory))
            }
        }
    }

    /// Adds an export's listening socket, and its session with a front end.
    pub fn server(&mut self, server: SavedServer) -> Json {
        let SavedServer { listener, file, session } = server;
        let session = session.map(|SavedSession { socket, messages }| {
            json!({"socket": self.add(socket), "messages": self.messages(messages)})
        });
        json!({"listener": self.add(listener), "file": file, "session": session})
    }

    /// Adds the descriptors of a FUSE mount.
    pub(crate) fn mount(&mut self, devices: Vec<OwnedFd>, allow_other: bool) -> Json {
        let devices: Vec<Json> = devices.into_iter().map(|device| self.add(device)).collect();
        json!({"devices": devices, "allow-other": allow_other})
    }

    /// Adds the state of the file of a FUSE mount: mode, owner and group, and how many descriptors are open.
    pub(crate) fn file(owner: [u32; 3], opens: u64) -> Json {
        json!({"owner": owner, "opens": opens})
    }

    /// Adds the number of a ublk device.
    pub(crate) fn ublk(dev_id: u32) -> Json {
        json!({"dev-id": dev_id})
    }

    /// Adds the file of a VDUSE device.
    pub(crate) fn vduse(&mut self, file: OwnedFd) -> Json {
        json!({"file": self.add(file)})
    }

    /// Adds the state of an export's rings.
    pub fn rings(&mut self, rings: SavedRings) -> Json {
        json!({"messages": self.messages(rings.messages), "device": rings.device})
    }
}

/// A document that was received.
#[derive(Debug)]
pub struct Document {
    /// The text.
    pub json: Json,
    fds: BTreeMap<u64, OwnedFd>,
}

impl Document {
    /// Joins a text and the descriptors that it numbers.
    pub fn new(json: Json, fds: Vec<OwnedFd>) -> Self {
        Document { json, fds: (0..).zip(fds).collect() }
    }

    /// Takes the descriptor of that number.
    ///
    /// # Errors
    ///
    /// It is missing, or was taken before.
    pub fn fd(&mut self, number: &Json) -> Result<OwnedFd, String> {
        let fd = number.as_u64().and_then(|number| self.fds.remove(&number));
        fd.ok_or_else(|| format!("descriptor {number} is missing"))
    }

    /// Takes the socket of that number: a client's, connected now or a moment ago.
    ///
    /// Other sockets are refused, because shutdown(2) ends the connection later, and would end a listening socket.
    ///
    /// # Errors
    ///
    /// It is missing, or no connection.
    pub fn connection(&mut self, number: &Json) -> Result<OwnedFd, String> {
        let fd = self.fd(number)?;
        let is_stream = getsockopt(&fd, sockopt::SockType) == Ok(SockType::Stream);
        match is_stream && getsockopt(&fd, sockopt::AcceptConn) == Ok(false) {
            true => Ok(fd),
            false => Err(format!("descriptor {number} is no connection")),
        }
    }

    /// Takes what [`Collected::server`] added.
    ///
    /// # Errors
    ///
    /// The document is malformed.
    pub fn server(&mut self, server: &Json) -> Result<SavedServer, String> {
        let listener = self.fd(&server["listener"])?;
        let session = match &server["session"] {
            Json::Null => None,
            session => Some(SavedSession {
                socket: self.connection(&session["socket"])?,
                messages: self.messages(&session["messages"])?,
            }),
        };
        Ok(SavedServer { listener, file: path(&server["file"]), session })
    }

    /// Takes what [`Collected::mount`] added.
    ///
    /// # Errors
    ///
    /// The document is malformed.
    pub(crate) fn mount(&mut self, mount: &Json) -> Result<(Vec<OwnedFd>, bool), String> {
        let devices = list(&mount["devices"])?.iter().map(|device| self.fd(device));
        Ok((devices.collect::<Result<_, _>>()?, mount["allow-other"] == Json::Bool(true)))
    }

    /// Takes what [`Collected::file`] added.
    ///
    /// # Errors
    ///
    /// The document is malformed.
    pub(crate) fn file(state: &Json) -> Result<([u32; 3], u64), String> {
        let owner = list(&state["owner"])?.iter().map(number).collect::<Result<Vec<_>, _>>()?;
        let owner = owner.try_into().map_err(|_| "no mode, owner and group")?;
        Ok((owner, number(&state["opens"])?))
    }

    /// Takes what [`Collected::ublk`] added.
    ///
    /// # Errors
    ///
    /// The document is malformed.
    pub(crate) fn ublk(state: &Json) -> Result<u32, String> {
        number(&state["dev-id"])
    }

    /// Takes what [`Collected::vduse`] added.
    ///
    /// # Errors
    ///
    /// The document is malformed.
    pub(crate) fn vduse(&mut self, state: &Json) -> Result<OwnedFd, String> {
        self.fd(&state["file"])
    }

    /// Takes what [`Collected::messages`] added.
    ///
    /// # Errors
    ///
    /// The document is malformed.
    pub fn messages(&mut self, messages: &Json) -> Result<Vec<Saved>, String> {
        let mut saved = Vec::new();
        for message in list(messages)? {
            let code = number(&message["code"])?;
            let fds = list(&message["fds"])?.iter().map(|fd| self.fd(fd));
            let fds = fds.collect::<Result<_, _>>()?;
            saved.push(Saved { code, payload: bytes(&message["payload"])?, fds });
        }
        Ok(saved)
    }

    /// Takes what [`Collected::clients`] added.
    ///
    /// # Errors
    ///
    /// The document is malformed.
    pub fn clients(&mut self, state: &Json) -> Result<Vec<SavedClient>, String> {
        let mut saved = Vec::new();
        for client in list(&state["clients"])? {
            let agreed = Agreed {
                // That of the export.
                size: 0,
                read_only: boolean(&client["read-only"])?,
                mode: mode(text(&client["replies"])?)?,
                contexts: contexts(client)?,
            };
            let socket = self.connection(&client["socket"])?;
            let input = self.content(&client["input"])?;
            let output = Arc::new(self.content(&client["output"])?);
            saved.push(SavedClient { socket, agreed, input, output });
        }
        Ok(saved)
    }

    /// Takes what [`Collected::vfio_user`] added.
    ///
    /// # Errors
    ///
    /// The document is malformed.
    pub fn vfio_user(&mut self, state: &Json) -> Result<Option<vfio_user::SavedClient>, String> {
        let client = match &list(&state["vfio-user"])?[..] {
            [] => return Ok(None),
            [client] => client,
            _ => return Err("an export over vfio-user has one client at most".to_owned()),
        };
        Ok(Some(vfio_user::SavedClient {
            socket: self.connection(&client["socket"])?,
            messages: self.messages(&client["messages"])?,
            device: self.content(&client["device"])?,
        }))
    }

    /// Takes what [`Collected::memory`] added.
    ///
    /// # Errors
    ///
    /// The descriptor is missing, or is no memory.
    pub(super) fn content(&mut self, memory: &Json) -> Result<Vec<u8>, String> {
        match memory {
            Json::Null => Ok(Vec::new()),
            fd => content(self.fd(fd)?).map_err(|error| format!("descriptor {fd}: {error}")),
        }
    }

    /// Takes what [`Collected::rings`] added.
    ///
    /// # Errors
    ///
    /// The document is malformed.
    pub fn rings(&mut self, rings: &Json) -> Result<SavedRings, String> {
        let messages = self.messages(&rings["messages"])?;
        Ok(SavedRings { messages, device: bytes(&rings["device"])? })
    }
}

/// Longest memory that is received, bytes.
const MAX_MEMORY: u64 = 256 << 20;

/// Returns memory that holds the bytes, to be handed over.
///
/// # Errors
///
/// Those of memfd_create(2) and write(2).
pub fn memory(bytes: &[u8]) -> io::Result<OwnedFd> {
    let mut file = File::from(memfd_create("ringmill-upgrade", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(bytes)?;
    Ok(file.into())
}

/// Reads memory that was handed over.
pub(super) fn content(memory: OwnedFd) -> io::Result<Vec<u8>> {
    let mut file = File::from(memory);
    let metadata = file.metadata()?;
    // A read of another kind of descriptor, such as an eventfd, may block forever.
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no memory"));
    }
    let len = metadata.len().min(MAX_MEMORY);
    let mut bytes = Vec::with_capacity(usize::try_from(len).unwrap_or(0));
    file.rewind()?;
    file.take(MAX_MEMORY).read_to_end(&mut bytes)?;
    Ok(bytes)
}

const MODES: [(ReplyMode, &str); 3] = [
    (ReplyMode::Simple, "simple"),
    (ReplyMode::Structured, "structured"),
    (ReplyMode::Extended, "extended"),
];

fn mode_name(mode: ReplyMode) -> &'static str {
    MODES.iter().find(|(known, _)| *known == mode).map_or("simple", |(_, name)| name)
}

fn mode(name: &str) -> Result<ReplyMode, String> {
    let found = MODES.iter().find(|(_, known)| *known == name).map(|(mode, _)| *mode);
    found.ok_or_else(|| format!("'{name}' are no replies"))
}

/// The metadata contexts of a client. Older versions have one at most.
fn contexts(client: &Json) -> Result<Contexts, String> {
    match &client["contexts"] {
        Json::Null => {
            let allocation = boolean(&client["allocation"])?;
            Ok(Contexts { allocation, ..Contexts::default() })
        }
        ids => {
            let ids = list(ids)?.iter().map(number).collect::<Result<Vec<u32>, _>>()?;
            Ok(Contexts::of_ids(ids))
        }
    }
}

pub(super) fn boolean(json: &Json) -> Result<bool, String> {
    json.as_bool().ok_or_else(|| format!("{json} is neither true nor false"))
}

/// Returns the elements of an array.
///
/// # Errors
///
/// `json` is no array.
pub fn list(json: &Json) -> Result<&Vec<Json>, String> {
    json.as_array().ok_or_else(|| format!("{json} is no list"))
}

pub(super) fn path(json: &Json) -> Option<PathBuf> {
    json.as_str().map(|path| Path::new(path).to_owned())
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

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

    use super::*;

    fn server(test: &str) -> (Json, Vec<OwnedFd>) {
        let name = format!("ringmill-document-{test}-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        let (socket, _) = UnixStream::pair().unwrap();
        let message = Saved { code: 3, payload: vec![1, 2], fds: Vec::new() };
        let mut fds = Collected::default();
        let json = fds.server(SavedServer {
            listener: listener.into(),
            file: Some("/run/s".into()),
            session: Some(SavedSession { socket: socket.into(), messages: vec![message] }),
        });
        (json, fds.0)
    }

    #[test]
    fn a_server_is_read_as_it_was_written() {
        let (json, fds) = server("read");
        let mut document = Document::new(Json::Null, fds);
        let read = document.server(&json).unwrap();
        assert_eq!(read.file, Some("/run/s".into()));
        assert_eq!(getsockopt(&read.listener, sockopt::AcceptConn), Ok(true));
        let [message] = &read.session.unwrap().messages[..] else { panic!("one message") };
        assert_eq!((message.code, &message.payload[..]), (3, &[1, 2][..]));
        assert_eq!(document.server(&json).unwrap_err(), "descriptor 1 is missing");
    }

    #[test]
    fn a_listening_socket_is_no_client() {
        let (mut json, fds) = server("refused");
        let (listener, socket) = (json["listener"].clone(), json["session"]["socket"].clone());
        json["listener"] = socket;
        json["session"]["socket"] = listener;
        let refused = Document::new(Json::Null, fds).server(&json).unwrap_err();
        assert!(refused.ends_with("is no connection"), "{refused}");
    }
}

//! The new process' side.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::env;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use block::OpenImage;
use block::driver::HandOver;
use block::options::{BlockdevOptions, BlockdevRef};
use control::{Action, Step, TAKE_OVER};
use event_loop::until;
use nix::sys::prctl;
use nix::unistd::dup2_stdin;
use serde_json::{Map, Value as Json};

use super::super::{Daemon, DaemonError};
use super::bitmaps::{self, TakenBitmap, TakenBits};
use super::contents;
use super::document::{
    Document, GO, HAVE, INVENTORY, QUEUES, READY, REFUSED, TakenPart, VERSION, list, number, path,
    text,
};
use super::packets::{receive_blocking, receive_document, send};
use crate::host::{Host, OperatingSystem};
use crate::pidfile::Pidfile;

/// How long the first thing that all exports do may take, nanoseconds.
const BEGIN_NS: u64 = 5_000_000_000;

/// A listening socket, and its file if that is to be removed in the end.
pub(crate) type TakenListener = (OwnedFd, Option<PathBuf>);

/// What another process hands over once its queues have stopped.
struct Handed {
    /// The state of exports, by their names.
    exports: Map<String, Json>,
    /// Has the descriptors of `exports`.
    document: Document,
    bits: Vec<TakenBits>,
}

/// What another process has handed over and this one has not yet made its own.
pub struct TakenOver {
    socket: OwnedFd,
    /// What this process is called when it serves, if it has another name until then.
    name: Option<CString>,
    /// The process that hands over.
    pub(crate) pid: u32,
    /// The command line of the current configuration, without the program's name.
    pub arguments: Vec<String>,
    directory: Option<PathBuf>,
    /// Whether the other process' standard error goes nowhere. This process' goes to the other one until it serves.
    pub detached: bool,
    /// Whether the other process had to give signs of life.
    pub watchdog: bool,
    /// The pid file's path, and the locked file.
    pub pidfile: Option<(PathBuf, OwnedFd)>,
    /// The state file's path, and the locked file.
    pub state: Option<(PathBuf, OwnedFd)>,
    pub(crate) images: Vec<OpenImage<OwnedFd>>,
    listeners: HashMap<String, TakenListener>,
    /// What exports are made of, by their names.
    exports: Map<String, Json>,
    /// Has the descriptors of `exports`.
    document: Document,
    /// Of nodes that there are not yet.
    pub(super) bitmaps: Vec<TakenBitmap>,
    /// Of images on servers, by nodes.
    contents: BTreeMap<String, String>,
    /// Nodes behind overlays that store bitmaps when they are closed.
    pub(crate) storing: BTreeSet<String>,
}

/// Receives what is handed over on standard input.
///
/// Puts the real standard input in its place. Call this before there are threads.
///
/// # Errors
///
/// This process was not started by one that hands over, or does not know the version of its
/// documents. It has been told.
pub fn receive() -> Result<TakenOver, DaemonError> {
    let name = prctl::get_name();
    // Shows in lists of processes that this process does not serve yet.
    let _ = prctl::set_name(&CString::new(TAKE_OVER).map_err(DaemonError::new)?);
    let socket = io::stdin().as_fd().try_clone_to_owned().map_err(DaemonError::new)?;
    Ok(TakenOver { name: name.ok(), ..receive_from(&OperatingSystem, socket)? })
}

/// Receives what is handed over on a socket, as [`receive`] does on standard input.
///
/// # Errors
///
/// As of [`receive`].
pub fn receive_from(host: &dyn Host, socket: OwnedFd) -> Result<TakenOver, DaemonError> {
    let document = receive_document(host, &socket, INVENTORY).map_err(|error| {
        refuse(&socket, &format!("what is handed over cannot be received: {error}"));
        DaemonError::new(format!("standard input is not what is handed over: {error}"))
    })?;
    let refused = |why: String| {
        refuse(&socket, &why);
        DaemonError::new(why)
    };
    let version = document.json["version"].as_u64().unwrap_or(0);
    if version != VERSION {
        return Err(refused(format!(
            "what is handed over is of version {version}; this program takes version {VERSION}"
        )));
    }
    let copy = socket.try_clone().map_err(DaemonError::new)?;
    TakenOver::new(copy, document).map_err(refused)
}

/// Refuses the hand-over: the other process continues to serve and gets the reason.
fn refuse(socket: &OwnedFd, why: &str) {
    let _ = send(socket, REFUSED, why.as_bytes().get(..2048).unwrap_or(why.as_bytes()));
}

impl TakenOver {
    fn new(socket: OwnedFd, mut document: Document) -> Result<Self, String> {
        let json = document.json.take();
        let stdin = document.fd(&json["stdin"])?;
        dup2_stdin(&stdin).map_err(|errno| format!("dup2 failed: {}", errno.desc()))?;
        let arguments = list(&json["arguments"])?.iter().map(|word| Ok(text(word)?.to_owned()));
        let arguments = arguments.collect::<Result<_, String>>()?;
        let mut file = |file: &Json| match file {
            Json::Null => Ok::<_, String>(None),
            file => Ok(Some((text(&file["path"])?.into(), document.fd(&file["fd"])?))),
        };
        let (pidfile, state) = (file(&json["pidfile"])?, file(&json["state"])?);
        let mut images = Vec::new();
        for image in list(&json["images"])? {
            let (path, fd) = (text(&image["path"])?.into(), document.fd(&image["fd"])?);
            let lock = Some(&image["lock"]).filter(|lock| !lock.is_null());
            let lock = lock.map(|lock| document.fd(lock)).transpose()?;
            images.push(OpenImage { path, fd, lock });
        }
        let mut listeners = HashMap::new();
        for (name, listener) in object(&json["listeners"])? {
            let fd = document.fd(&listener["fd"])?;
            listeners.insert(name.clone(), (fd, path(&listener["file"])));
        }
        Ok(TakenOver {
            socket,
            name: None,
            pid: number(&json["pid"])?,
            arguments,
            directory: path(&json["directory"]),
            detached: json["detached"] == Json::Bool(true),
            watchdog: json["watchdog"] == Json::Bool(true),
            pidfile,
            state,
            images,
            listeners,
            exports: object(&json["exports"])?.clone(),
            document,
            bitmaps: bitmaps::read(&json["bitmaps"])?,
            contents: contents::read(&json["contents"])?,
            storing: match &json["storing"] {
                // An older program.
                Json::Null => BTreeSet::new(),
                names => list(names)?
                    .iter()
                    .map(|name| Ok(text(name)?.to_owned()))
                    .collect::<Result<_, String>>()?,
            },
        })
    }

    /// Takes the export of that name.
    pub(crate) fn export(&mut self, id: &str) -> Option<TakenPart<'_>> {
        let json = self.exports.remove(id)?;
        Some(TakenPart { json, document: &mut self.document })
    }

    /// Takes the listener of that name.
    pub(crate) fn listener(&mut self, name: &str) -> Option<TakenListener> {
        self.listeners.remove(name)
    }

    /// Takes the listening sockets of the NBD server; none: it had none.
    pub(crate) fn nbd_listeners(&mut self) -> Vec<TakenListener> {
        (0..).map_while(|number| self.listener(&nbd_listener(number))).collect()
    }

    /// Tells the other process why nothing comes of it.
    pub fn refuse(&self, error: &DaemonError) {
        refuse(&self.socket, &error.to_string());
    }

    /// All is there that can be there now: has the other process stop. Gives where its queues are then.
    /// The thread waits for it.
    ///
    /// # Errors
    ///
    /// The other process continues to serve, or has died.
    fn stop_other(&self, host: &dyn Host) -> Result<Handed, DaemonError> {
        let failed = |error| self.failed(&error);
        send(&self.socket, READY, &[]).map_err(failed)?;
        let mut document = receive_document(host, &self.socket, QUEUES).map_err(failed)?;
        let json = document.json.take();
        let exports = object(&json["exports"]).map_err(DaemonError::new)?.clone();
        let bits = bitmaps::read_bits(&mut document, &json["bitmaps"]);
        Ok(Handed { exports, document, bits: bits.map_err(DaemonError::new)? })
    }

    /// Nothing is left that could fail. From the return on this process serves.
    ///
    /// # Errors
    ///
    /// As of [`stop_other`](Self::stop_other).
    fn commit(&self, host: &dyn Host) -> Result<(), DaemonError> {
        let failed = |error| self.failed(&error);
        send(&self.socket, HAVE, &[]).map_err(failed)?;
        match receive_blocking(host, &self.socket).map_err(failed)? {
            (GO, ..) => Ok(()),
            _ => Err(failed(io::ErrorKind::InvalidData.into())),
        }
    }

    fn failed(&self, error: &io::Error) -> DaemonError {
        DaemonError::new(format!("process {} does not hand over: {error}", self.pid))
    }

    /// Goes where the other process was, which only now has nothing to be found any more by names that
    /// begin elsewhere.
    fn change_directory(&self) {
        if let Some(directory) = &self.directory
            && let Err(error) = env::set_current_dir(directory)
        {
            log::warn!("chdir to {} failed: {error}", directory.display());
        }
    }
}

impl Daemon {
    /// Makes what `steps` say of what was handed over, and serves it from then on. Ends the process if
    /// that cannot be, without taking anything down, which the other process has as well.
    pub(crate) async fn take_over(&mut self, steps: Vec<Step>) {
        if let Err(error) = self.try_take_over(steps).await {
            if let Some(taken) = &self.origin.taken {
                taken.refuse(&error);
            }
            log::error!("upgrade: not taking over: {error}");
            self.process.host.exit(1);
        }
    }

    async fn try_take_over(&mut self, steps: Vec<Step>) -> Result<(), DaemonError> {
        let mut late_nodes = BTreeSet::new();
        let (late, early): (Vec<_>, Vec<_>) =
            steps.into_iter().partition(|step| is_late(&step.action, &mut late_nodes));
        self.make(&early).await?;
        for step in &late {
            if let Action::Export(export) = &step.action {
                // A thread takes a while to start, and hangs on no node.
                self.threads.handles(&export.iothreads)?;
            }
        }
        // Afterwards it could only serve without.
        self.process.rehearse_confining(self.are_rings_restricted())?;
        let Some(taken) = &self.origin.taken else { return Ok(()) };
        contents::check(&self.nodes, &taken.contents)?;
        let Handed { exports, mut document, bits } = taken.stop_other(&*self.process.host)?;
        let contents = taken.contents.clone();
        self.make(&late).await?;
        contents::check(&self.nodes, &contents)?;
        self.exports.prepare(exports, &mut document).map_err(DaemonError::new)?;
        self.take_bits(&bits);
        let Some(mut taken) = self.origin.taken.take() else { return Ok(()) };
        if let Err(error) = taken.commit(&*self.process.host) {
            self.origin.taken = Some(taken);
            return Err(error);
        }
        self.nodes.own_images();
        let begun = self.let_in();
        // What follows, here and in the callers, writes to files. Guests must not wait for the disk of those files.
        let _ = until(begun, self.control.sleep_until(self.control.now_ns() + BEGIN_NS)).await;
        let nodes = self.nodes.names().filter_map(|name| Some((name, self.nodes.tracking(name)?)));
        nodes.for_each(|(name, tracking)| {
            self.control.spawn(tracking.secure(name, &self.control));
        });
        if let Some(name) = &taken.name {
            let _ = prctl::set_name(name);
        }
        if let Some((path, file)) = taken.pidfile.take() {
            let _ = self.process.pidfile.set(Pidfile::take_over(path, file));
        }
        taken.change_directory();
        log::info!("upgrade: took over from pid {}", taken.pid);
        Ok(())
    }
}

/// The name of a socket of the NBD server, which may have several.
pub(super) fn nbd_listener(number: usize) -> String {
    format!("nbd-server {number}")
}

/// Whether something can be made only when the other process has stopped: qcow2 images, whose metadata
/// it keeps in its memory and its journal has as they are then, and all that lies on them, or on a node inside.
fn is_late(action: &Action, late: &mut BTreeSet<String>) -> bool {
    match action {
        Action::Blockdev(node) => {
            let is_late = has_late_part(node, late);
            if is_late {
                add_names(node, late);
            }
            is_late
        }
        Action::Export(export) => export.nodes().any(|node| late.contains(node)),
        _ => false,
    }
}

fn has_late_part(node: &BlockdevOptions, late: &BTreeSet<String>) -> bool {
    let is_late = match node.driver.hand_over() {
        HandOver::Journal => true,
        HandOver::AtOnce | HandOver::HoldsBack | HandOver::Flush | HandOver::Never => false,
    };
    is_late
        || node.driver.children().into_iter().any(|child| match child.node {
            BlockdevRef::Name(name) => late.contains(name),
            BlockdevRef::Inline(options) => has_late_part(options, late),
        })
}

/// Adds the names of a node and of the nodes defined inside it.
fn add_names(node: &BlockdevOptions, names: &mut BTreeSet<String>) {
    names.extend(node.node_name.clone());
    for child in node.driver.children() {
        if let BlockdevRef::Inline(options) = child.node {
            add_names(options, names);
        }
    }
}

fn object(json: &Json) -> Result<&serde_json::Map<String, Json>, String> {
    json.as_object().ok_or_else(|| format!("{json} is no object"))
}

#[cfg(test)]
mod tests {
    use event_loop::{EventLoop, LoopConfig};
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
    use serde_json::json;

    use super::super::packets::Packets;
    use super::*;

    fn refusal_of(inventory: Json) -> String {
        let flags = SockFlag::SOCK_CLOEXEC;
        let (old, new) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).unwrap();
        let control = EventLoop::new(LoopConfig::default()).unwrap();
        let packets = Packets::new(&control, old);
        let answered = control.block_on(async move {
            packets.send_document(INVENTORY, &inventory, &[]).await.unwrap();
            assert!(receive_from(&OperatingSystem, new).is_err());
            packets.receive().await.unwrap()
        });
        let (kind, why, _) = answered.unwrap();
        assert_eq!(kind, REFUSED);
        String::from_utf8(why).unwrap()
    }

    #[test]
    fn another_version_of_the_document_is_refused() {
        let why = refusal_of(json!({"version": VERSION + 1}));
        assert!(why.contains("of version 2; this program takes version 1"), "{why}");
    }

    #[test]
    fn a_document_that_cannot_be_received_is_refused() {
        let flags = SockFlag::SOCK_CLOEXEC;
        let (old, new) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).unwrap();
        // Its descriptors are missing.
        send(&old, INVENTORY, &[0; 4]).unwrap();
        assert!(receive_from(&OperatingSystem, new).is_err());
        let (kind, why, _) = receive_blocking(&OperatingSystem, &old).unwrap();
        let why = String::from_utf8(why).unwrap();
        assert!(kind == REFUSED && why.contains("cannot be received"), "{why}");
    }

    #[test]
    fn a_document_without_what_it_needs_is_refused() {
        assert!(refusal_of(json!({"version": VERSION})).contains("descriptor null is missing"));
    }
}

//! The data of an upgrade as received by the new daemon: packets, JSON documents with
//! descriptors, the messages that restore an export.
//!
//! The data of a real export is changed, sent in pieces, or replaced. The new export
//! serves it or refuses it; in both cases nothing of it may be left over. [`clients`] does the same for
//! NBD servers.

mod clients;

use std::fs::File;
use std::io::{IoSlice, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use daemon::OperatingSystem;
use daemon::fuzzing::document::{Collected, DESCRIPTORS, INVENTORY};
use daemon::fuzzing::packets;
use event_loop::EventLoop;
use exports::vhost_user::handover::SavedSession;
use exports::vhost_user::{Listen, TakenOver, VhostUserExport, fd_passing};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, socketpair};
use serde_json::{Value as Json, json};

use crate::front_end::{self, FrontEnd};
use crate::input::Input;
use crate::world;

use clients::Clients;

/// Changes to a document, at most.
const CHANGES: usize = 40;
/// Of the first byte: it is an NBD server that is handed over.
const OF_CLIENTS: u8 = 0x80;

struct World {
    event_loop: EventLoop,
    listener: UnixListener,
    /// What a real export says: `session`, a list of messages, and `rings`.
    document: Json,
    fds: Vec<OwnedFd>,
    clients: Clients,
    files: usize,
}

impl World {
    fn new() -> Self {
        let world = front_end::World::new();
        let mut front_end = FrontEnd::connect(&world);
        front_end.set_up();
        let describe = world.export.hand_over().describe();
        let server =
            world.event_loop.block_on(describe).expect("it turns").expect("it can be handed over");
        let stop = world.export.hand_over().stop(false);
        let rings =
            world.event_loop.block_on(stop).expect("it turns").expect("it can be handed over");
        let mut fds = Collected::default();
        let session = server.session.expect("a front end is connected");
        let session = fds.messages(session.messages);
        let document = json!({"session": session, "rings": fds.rings(rings)});
        drop(front_end);
        let path = world::own_path("taken-over");
        let listener = UnixListener::bind(path).expect("a socket");
        let event_loop = world.event_loop.clone();
        event_loop.block_on(world.export.stop()).expect("it turns").expect("it stops");
        let (fds, clients) = (fds.0, Clients::new());
        let mut world = World { event_loop, listener, document, fds, clients, files: 0 };
        // What is handed over unchanged is served.
        assert!(world.play(&mut Input::new(&[1])), "what a daemon hands over is refused");
        world.files = world::open_files();
        world
    }

    /// Whether it was taken over.
    fn play(&self, input: &mut Input<'_>) -> bool {
        let how = input.u8();
        if how & OF_CLIENTS != 0 {
            return self.clients.play(how, input);
        }
        let mut document = self.document.clone();
        let text = match how & 3 {
            0 => {
                let mut text = Vec::new();
                while !input.is_empty() {
                    text.push(input.u8());
                }
                text
            }
            _ => {
                for _ in 0..CHANGES {
                    if input.is_empty() {
                        break;
                    }
                    change(&mut document, input);
                }
                document.to_string().into_bytes()
            }
        };
        let (ours, theirs) = socket_pair();
        send(&theirs, &text, &self.fds, how);
        drop(theirs);
        let Ok(mut received) = packets::receive_document(&OperatingSystem, &ours, INVENTORY) else {
            return false;
        };
        let json = received.json.take();
        let messages = received.messages(&json["session"]);
        let rings = received.rings(&json["rings"]);
        let (Ok(messages), Ok(rings)) = (messages, rings) else { return false };
        drop(received);
        let (front_end, socket) = UnixStream::pair().expect("a pair");
        let socket: OwnedFd = match how & 4 {
            0 => socket.into(),
            _ => std::io::pipe().expect("a pipe").0.into(),
        };
        let session = SavedSession { socket, messages };
        let listener = self.listener.try_clone().expect("a descriptor").into();
        let listen = Listen::TakenOver(Arc::new(listener), None);
        let config = front_end::config(&self.event_loop, listen);
        let config = exports::vhost_user::VhostUserConfig {
            taken_over: Some(TakenOver { session: Some(session) }),
            ..config
        };
        let (control, node) = (self.event_loop.clone(), world::null_node(1 << 20));
        let export = async { VhostUserExport::blk(control, config, node, "fuzz".into()).await };
        let Ok(export) = self.event_loop.block_on(export).expect("it turns") else { return false };
        drop(export.begin(rings));
        world::turn(&self.event_loop, 8);
        let is_served = export.is_connected();
        if how & 8 == 0 {
            drop(front_end);
            world::until(&self.event_loop, "the connection ends", || !export.is_connected());
        }
        self.event_loop.block_on(export.stop()).expect("it turns").expect("it stops");
        is_served
    }
}

fn socket_pair() -> (OwnedFd, OwnedFd) {
    let flags = SockFlag::SOCK_CLOEXEC;
    socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).expect("a pair")
}

/// Sends a document as a daemon does, or not quite.
fn send(socket: &OwnedFd, text: &[u8], fds: &[OwnedFd], how: u8) {
    let mut file = File::from(memfd_create(c"document", MFdFlags::empty()).expect("a memfd"));
    file.write_all(text).expect("it fits");
    let count = match how & 0x70 {
        0x10 => u32::MAX,
        0x20 => 0,
        _ => fds.len() as u32,
    };
    let kind = if how & 0x70 == 0x30 { DESCRIPTORS } else { INVENTORY };
    let packet = |kind: u8, bytes: &[u8], fds: &[RawFd]| {
        let bytes = [IoSlice::new(std::slice::from_ref(&kind)), IoSlice::new(bytes)];
        let _ = fd_passing::send(socket.as_fd(), &bytes, fds, MsgFlags::MSG_DONTWAIT);
    };
    let fds: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    let first = if how & 0x70 == 0x40 { fds[0] } else { file.as_raw_fd() };
    let bytes = count.to_ne_bytes();
    packet(kind, if how & 0x70 == 0x50 { &bytes[1..] } else { &bytes }, &[first]);
    let at_once = if how & 0x70 == 0x60 { 3 } else { fds.len() };
    for part in fds.chunks(at_once) {
        packet(DESCRIPTORS, &[], part);
    }
}

/// Changes something: a number of a message, a byte of a payload, a descriptor, what follows what.
fn change(document: &mut Json, input: &mut Input<'_>) {
    let (what, which) = (input.u8(), usize::from(input.u8()));
    let messages = match what & 1 {
        0 => &mut document["session"],
        _ => &mut document["rings"]["messages"],
    };
    let Some(messages) = messages.as_array_mut().filter(|messages| !messages.is_empty()) else {
        return;
    };
    let at = which % messages.len();
    let payload = messages[at]["payload"].as_array().map_or(0, Vec::len);
    match what >> 1 & 15 {
        0 => drop(messages.remove(at)),
        1 => {
            let again = messages[at].clone();
            messages.insert(usize::from(input.u8()) % messages.len(), again);
        }
        2 => {
            let other = usize::from(input.u8()) % messages.len();
            messages.swap(at, other);
        }
        3 => messages[at]["code"] = input.u8().into(),
        4 => messages[at]["fds"] = json!([input.u8() % 16]),
        5 => messages[at]["fds"] = json!([]),
        6 => messages[at]["payload"] = json!(vec![input.u8(); input.u8().into()]),
        7 => {
            let device: Vec<u8> = (0..input.u8() & 15).map(|_| input.u8()).collect();
            document["rings"]["device"] = json!(device);
        }
        8 => messages[at]["payload"] = input.u8().into(),
        _ if payload > 0 => {
            let byte = usize::from(input.u8()) % payload;
            messages[at]["payload"][byte] = match input.u8() {
                0 => u32::from(input.u16()).into(),
                byte => byte.into(),
            };
        }
        _ => {}
    }
}

thread_local! {
    static WORLD: World = World::new();
}

/// Takes over with the changed data, and ends.
pub fn run(data: &[u8]) {
    WORLD.with(|world| {
        world.play(&mut Input::new(data));
        let event_loop = &world.event_loop;
        if world.files > 0 {
            let files = || world::open_files() <= world.files;
            world::until(event_loop, "all descriptors are closed", files);
        }
        world::until(event_loop, "all memory is unmapped", front_end::is_unmapped);
    });
}

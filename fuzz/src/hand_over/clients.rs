//! An upgrade of an NBD server: its listening sockets, and a client with half-sent requests and unsent
//! replies.

use std::fs::File;
use std::net::UdpSocket;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;

use exports::nbd::{NbdListen, SavedClient};
use nix::sys::eventfd::EventFd;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, socket};
use serde_json::{Value as Json, json};

use super::{CHANGES, send, socket_pair};
use crate::input::Input;
use crate::nbd_server::{self, Client, serve};
use crate::world;
use daemon::OperatingSystem;
use daemon::fuzzing::document::{Collected, Document, INVENTORY, list, memory};
use daemon::fuzzing::packets;

/// Of the first byte: the document is handed over as it was made;
pub(super) const UNCHANGED: u8 = 4;
/// the client stays to the end.
const STAYS: u8 = 8;

/// Things that a client does before, at most.
const STEPS: usize = 24;
/// How many descriptors a document has at most that a change chooses.
const FDS: u8 = 16;

pub(super) struct Clients {
    before: nbd_server::World,
    /// A file that the new server may remove.
    file: PathBuf,
}

impl Clients {
    pub(super) fn new() -> Self {
        let clients = Clients { before: nbd_server::World::new(), file: world::own_path("gone") };
        // A read, and half of a write, in each mode.
        for mode in [0, 1, 3] {
            let input = [mode, 1, 0, 2, 0, 0, 0, 0, 0, 2, 2, 0, 0, 2, 40];
            let is_served = clients.play(UNCHANGED, &mut Input::new(&input));
            assert!(is_served, "what a daemon hands over is refused");
        }
        clients
    }

    /// Returns whether a server continues.
    pub(super) fn play(&self, how: u8, input: &mut Input<'_>) -> bool {
        let before = &self.before;
        let mut client = Client::connect(before);
        client.go(input.u8());
        let (steps, what) = (input.u8(), input.u8());
        for _ in 0..usize::from(steps).min(STEPS) {
            client.step(input);
        }
        let rest = client.begin_request(input);
        let pause = before.export.pause(what & 1 != 0);
        let saved = before.event_loop.block_on(pause).expect("it turns").expect("it stands still");
        let sockets = before.server.hand_over().expect("it has descriptors");
        client.hear();
        let go_on = || {
            before.export.resume();
            before.server.resume();
        };
        let is_served = match what & 6 {
            // The other one has refused, or has died.
            6 => {
                drop((saved, sockets));
                go_on();
                client.go_on(&rest);
                true
            }
            _ => {
                let is_served = self.take_over(how, input, saved, sockets, (&mut client, rest));
                go_on();
                is_served
            }
        };
        before.leave(client);
        before.serve_another();
        is_served
    }

    /// Another server continues with the document. Returns whether it does.
    fn take_over(
        &self,
        how: u8,
        input: &mut Input<'_>,
        saved: Vec<SavedClient>,
        sockets: Vec<(OwnedFd, Option<PathBuf>)>,
        (client, rest): (&mut Client<'_>, Vec<u8>),
    ) -> bool {
        let mut fds = Collected::default();
        let listeners = sockets.into_iter().map(|(fd, _)| json!({"fd": fds.add(fd), "file": null}));
        let listeners: Json = listeners.collect();
        let saved = saved.into_iter().map(|saved| moved(client, saved)).collect();
        let clients = fds.clients(saved).expect("it has descriptors");
        let mut json = json!({"listeners": listeners, "clients": clients["clients"]});
        let mut fds = fds.0;
        let is_unchanged = how & UNCHANGED != 0;
        if !is_unchanged {
            strange(&mut fds);
            for _ in 0..CHANGES {
                if input.is_empty() {
                    break;
                }
                change(&mut json, &mut fds, input);
            }
            client.well = false;
        }
        let (ours, theirs) = socket_pair();
        let how_sent = if is_unchanged { 0 } else { how };
        send(&theirs, json.to_string().as_bytes(), &fds, how_sent);
        drop((theirs, fds));
        let Ok(mut received) = packets::receive_document(&OperatingSystem, &ours, INVENTORY) else {
            return false;
        };
        let json = received.json.take();
        let listeners = self.listeners(&json["listeners"], &mut received);
        let clients = received.clients(&json);
        drop(received);
        let (Ok(listeners), Ok(clients)) = (listeners, clients) else { return false };
        let event_loop = &self.before.event_loop;
        let shared = |(socket, file)| (Arc::new(socket), file);
        let listeners = listeners.into_iter().map(shared).collect();
        let Ok((server, export)) = serve(event_loop, NbdListen::TakenOver(listeners)) else {
            return false;
        };
        export.begin(clients);
        server.resume();
        world::turn(event_loop, 8);
        client.go_on(&rest);
        if is_unchanged {
            // By the socket that both servers have.
            drop(Client::connect(&self.before).served());
        }
        if how & STAYS == 0 {
            client.hang_up();
        }
        event_loop.block_on(server.stop()).expect("it turns");
        event_loop.block_on(export.stop()).expect("it turns").expect("it stops");
        true
    }

    fn listeners(
        &self,
        json: &Json,
        received: &mut Document,
    ) -> Result<Vec<(OwnedFd, Option<PathBuf>)>, String> {
        let mut listeners = Vec::new();
        for listener in list(json)? {
            let file = listener["file"].as_str().map(|_| self.file.clone());
            listeners.push((received.fd(&listener["fd"])?, file));
        }
        Ok(listeners)
    }
}

/// Replaces the client's connection. The old server would close it, as both servers are in one process. Data in
/// flight is moved along.
fn moved(client: &mut Client<'_>, saved: SavedClient) -> SavedClient {
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    ours.set_nonblocking(true).expect("a socket");
    client.socket = ours;
    let mut bytes = [0; 16 << 10];
    while let Ok(n @ 1..) = recv(saved.socket.as_raw_fd(), &mut bytes, MsgFlags::MSG_DONTWAIT) {
        client.send(&bytes[..n]);
    }
    SavedClient { socket: theirs.into(), ..saved }
}

/// Adds descriptors that are none of a document's.
fn strange(fds: &mut Vec<OwnedFd>) {
    let again: Vec<_> = fds.iter().map(|fd| fd.try_clone().expect("a descriptor")).collect();
    fds.extend(again);
    let (family, kind, flags) = (AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC);
    fds.push(socket(family, kind, flags, None).expect("a socket"));
    fds.push(UdpSocket::bind("127.0.0.1:0").expect("a socket").into());
    fds.push(std::io::pipe().expect("a pipe").0.into());
    fds.push(File::open("/").expect("it is there").into());
    fds.push(EventFd::new().expect("an eventfd").into());
}

/// Changes something: a descriptor, what was agreed on, bytes that came or are to be sent.
fn change(json: &mut Json, fds: &mut Vec<OwnedFd>, input: &mut Input<'_>) {
    let (what, which) = (input.u8(), usize::from(input.u8()));
    if what & 0xf0 == 0 {
        let Some(listeners) = json["listeners"].as_array_mut() else { return };
        let count = listeners.len();
        return match what {
            0 if count > 0 => drop(listeners.remove(which % count)),
            1 => listeners.push(json!({"fd": input.u8() % FDS, "file": null})),
            2 if count > 0 => listeners[which % count]["file"] = "a file".into(),
            3 => json["listeners"] = Json::Null,
            _ => {}
        };
    }
    let Some(clients) = json["clients"].as_array_mut().filter(|clients| !clients.is_empty()) else {
        return;
    };
    let at = which % clients.len();
    if what & 15 == 0 {
        let again = clients[at].clone();
        return clients.push(again);
    }
    let client = &mut clients[at];
    let keys = ["socket", "input", "output"];
    let key = keys[which / 16 % keys.len()];
    match what & 15 {
        1..=3 => client[key] = (input.u8() % FDS).into(),
        4 => client[key] = Json::Null,
        5 => client["replies"] = ["simple", "structured", "extended", "none"][which % 4].into(),
        6 => client["read-only"] = (which & 1 != 0).into(),
        7 => client["allocation"] = (which & 1 != 0).into(),
        8 => client["minimum-block"] = 1u64.wrapping_shl(which as u32).into(),
        9 => client["minimum-block"] = which.into(),
        10 => client[["socket", "replies", "read-only", "input"][which % 4]] = json!([which]),
        11 => {
            // The bytes of a memory, if that is one.
            if let Some(fd) = client[key].as_u64().and_then(|fd| fds.get(fd as usize))
                && let Ok(fd) = fd.try_clone()
            {
                let _ = File::from(fd).write_all_at(&input.array::<4>(), input.u8().into());
            }
        }
        _ => {
            let bytes: Vec<u8> = (0..input.u8()).map(|_| input.u8()).collect();
            client[key] = fds.len().into();
            fds.push(memory(&bytes).expect("a memfd"));
        }
    }
}

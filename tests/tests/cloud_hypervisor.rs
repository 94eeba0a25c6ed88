//! The messages of Cloud Hypervisor's client (the crate vfio_user, as of 2026), in its order and with its way of receiving:
//! it reads replies of fixed sizes, whatever they say. A reply that is shorter blocks it for ever, with its machine.
//!
//! Cloud Hypervisor itself needs a KVM that runs operating systems.

use std::io::{IoSlice, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use exports::vhost_user::fd_passing::receive;
use integration::{Image, PATIENCE, Scratch, Server, ServerCommand};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

const HEADER: usize = 16;
const REGION_INFO: usize = 32;
const CONFIG: u32 = 7;
const MSI: u32 = 1;
const MSIX: u32 = 2;
/// What a guest with 1 GiB has below the hole for devices.
const MEMORY: u64 = 1 << 20;
/// Descriptors in a message, at most.
const BATCH: u32 = 16;

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let bytes = bytes.get(4 * at..4 * at + 4).expect("a word");
    u32::from_ne_bytes(bytes.try_into().expect("four bytes"))
}

struct Client {
    stream: UnixStream,
    id: u16,
}

impl Client {
    fn send(&mut self, command: u16, payload: &[u8], fds: &[RawFd]) {
        let header =
            [u32::from(self.id) | u32::from(command) << 16, (HEADER + payload.len()) as u32];
        self.id += 1;
        let message = [&words(&header), &[0; 8][..], payload].concat();
        let rights = [ControlMessage::ScmRights(fds)];
        let rights = if fds.is_empty() { &[][..] } else { &rights[..] };
        let iov = [IoSlice::new(&message)];
        let sent = sendmsg::<()>(self.stream.as_raw_fd(), &iov, rights, MsgFlags::empty(), None);
        assert_eq!(sent, Ok(message.len()));
    }

    /// Reads this many bytes of a reply, header included, which succeeds and is as long as that.
    fn reply(&mut self, size: usize) -> Vec<u8> {
        let mut reply = vec![0; size];
        self.stream.read_exact(&mut reply).expect("a reply of that size");
        assert_eq!((word(&reply, 1), word(&reply, 2)), (size as u32, 1), "{reply:?}");
        reply
    }

    fn ask(&mut self, command: u16, payload: &[u8], reply: usize) -> Vec<u8> {
        self.send(command, payload, &[]);
        self.reply(reply)
    }

    fn negotiate(&mut self) {
        let mut offer = words(&[1 << 16]);
        offer.extend(
            br#"{"capabilities":{"max_msg_fds":1,"max_data_xfer_size":1048576,"migration":{"pgsize":4096}}}"#,
        );
        offer.push(0);
        self.send(1, &offer, &[]);
        let mut head = [0; HEADER + 4];
        self.stream.read_exact(&mut head).expect("a version");
        let mut text = vec![0; word(&head, 1) as usize - head.len()];
        self.stream.read_exact(&mut text).expect("capabilities");
        assert_eq!(text.pop(), Some(0));
        let offer: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
        let capabilities = &offer["capabilities"];
        assert!(capabilities["max_msg_fds"].as_u64().is_some_and(|most| most >= u64::from(BATCH)));
        assert!(capabilities["max_data_xfer_size"].is_u64());
    }

    /// The description of a region, and the part of it to be mapped, with a descriptor. The client asks twice where the reply
    /// has more than it has room for.
    fn region(&mut self, index: u32) -> (Vec<u8>, Option<(u64, u64, OwnedFd)>) {
        let mut ask = |room: u32| {
            self.send(5, &words(&[room, 0, index, 0, 0, 0, 0, 0]), &[]);
            let mut reply = vec![0; HEADER + REGION_INFO];
            let received = loop {
                match receive(self.stream.as_fd(), &mut reply) {
                    Err(Errno::EAGAIN) => {
                        let mut fds = [PollFd::new(self.stream.as_fd(), PollFlags::POLLIN)];
                        assert_eq!(poll(&mut fds, PollTimeout::from(60_000u16)), Ok(1), "a reply");
                    }
                    received => break received.expect("a reply"),
                }
            };
            let rest = reply.get_mut(received.len..).expect("not more than there is room for");
            self.stream.read_exact(rest).expect("a reply of that size");
            let mut fds = received.fds;
            (reply, fds.pop())
        };
        let (reply, fd) = ask(REGION_INFO as u32);
        let room = word(&reply, 4);
        if room == REGION_INFO as u32 {
            assert!(word(&reply, 1) as usize == reply.len() && fd.is_none());
            return (reply, None);
        }
        assert_eq!(word(&reply, 1) as usize, reply.len(), "nothing beyond the room");
        let (reply, fd) = ask(room);
        let more = room as usize - REGION_INFO;
        assert_eq!(word(&reply, 1) as usize - reply.len(), more, "as the client asserts");
        let mut sparse = vec![0; more];
        self.stream.read_exact(&mut sparse).expect("a capability");
        let at = word(&reply, 7) as usize - REGION_INFO;
        assert_eq!((at, word(&sparse, 0), word(&sparse, 1)), (0, 0x1_0001, 0), "the only one");
        assert_eq!(word(&sparse, 2), 1, "one area");
        let long = |at| u64::from(word(&sparse, at)) | u64::from(word(&sparse, at + 1)) << 32;
        let fd = fd.expect("the client unwraps it");
        (reply, Some((long(4), long(6), fd)))
    }

    fn read(&mut self, region: u32, offset: u64, count: u32) -> Vec<u8> {
        let place = [&offset.to_ne_bytes()[..], &words(&[region, count])].concat();
        self.ask(9, &place, HEADER + 16 + count as usize).split_off(HEADER + 16)
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) {
        let place =
            [&offset.to_ne_bytes()[..], &words(&[region, data.len() as u32]), data].concat();
        self.ask(10, &place, HEADER + 16);
    }

    fn irqs(&mut self, index: u32) -> u32 {
        word(&self.ask(7, &words(&[16, 0, index, 0]), HEADER + 16), 7)
    }

    /// Gives all vectors their eventfds, 16 at a time.
    fn enable(&mut self, index: u32, fds: &[EventFd]) {
        for (first, fds) in (0..).step_by(BATCH as usize).zip(fds.chunks(BATCH as usize)) {
            let set = words(&[20, 4 | 32, index, first, fds.len() as u32]);
            let fds: Vec<RawFd> = fds.iter().map(|fd| fd.as_fd().as_raw_fd()).collect();
            self.send(8, &set, &fds);
            self.reply(HEADER);
        }
    }
}

fn server(scratch: &Scratch, export: &str) -> Server {
    let image = Image::empty(scratch, "disk.img", 1);
    let socket = scratch.path("pci.sock");
    let export = format!(
        "{export},id=pci,node-name=disk,addr.type=unix,addr.path={},writable=on",
        socket.display()
    );
    ServerCommand::new(scratch)
        .args(["--sandbox", "on"])
        .file("disk", &image, "discard=unmap")
        .args(["--export", &export])
        .start()
}

/// From the connection to a controller that its guest uses, and to the end of the machine. `register`: one of the BAR that
/// can be read.
fn is_served(export: &str, (bar, register): (u32, u64), irqs: (u32, u32), is_mapped: bool) {
    let scratch = Scratch::new();
    let server = server(&scratch, export);
    let stream = UnixStream::connect(scratch.path("pci.sock")).expect("the export listens");
    stream.set_read_timeout(Some(PATIENCE.min(Duration::from_secs(60)))).expect("a time limit");
    let mut client = Client { stream, id: 0 };
    client.negotiate();
    // It says the size of its whole message as room.
    let info = client.ask(4, &words(&[32, 0, 0, 0]), HEADER + 16);
    assert_eq!(word(&info, 5) & 3, 3, "a PCI device, which can be reset");
    let regions = word(&info, 6);
    assert!(regions > CONFIG);
    for index in 0..regions {
        let (_, area) = client.region(index);
        assert_eq!(area.is_some(), is_mapped && index == bar, "region {index}");
        if let Some((offset, size, fd)) = area {
            assert_eq!((offset, size), (0x1000, 0x1000));
            let len = nix::sys::stat::fstat(&fd).expect("a file").st_size;
            assert!(len >= 0x2000, "mapped at its offset in the region");
        }
    }
    // Capabilities, by bytes and words; then what the vectors are.
    assert_eq!(client.read(CONFIG, 6, 2)[0] & 0x10, 0x10, "it has capabilities");
    let mut at = client.read(CONFIG, 0x34, 1)[0];
    let mut found = Vec::new();
    while at != 0 {
        let head = client.read(CONFIG, at.into(), 2);
        found.push(head[0]);
        at = head[1];
    }
    assert!(!found.contains(&0x10), "it has no space of PCI Express");
    let (kind, vectors) = irqs;
    assert!(found.contains(if kind == MSI { &0x05 } else { &0x11 }));
    assert_eq!(client.irqs(kind), vectors, "few: it makes an eventfd for each");
    for other in 0..5 {
        client.irqs(other);
    }
    // A guest may read what is beyond.
    assert_eq!(client.read(CONFIG, 0x100, 4), [0xff; 4]);
    client.write(CONFIG, 0x104, &[0; 4]);

    // BARs are sized and set, memory and bus mastering switched on.
    let at = u64::from(0x10 + 4 * bar);
    client.write(CONFIG, at, &words(&[u32::MAX]));
    assert_ne!(client.read(CONFIG, at, 4), [0; 4]);
    client.write(CONFIG, at, &words(&[0xe000_0000]));
    client.write(CONFIG, 4, &[6, 0]);
    let memory = memfd_create("guest", MFdFlags::MFD_CLOEXEC).expect("memory");
    nix::unistd::ftruncate(&memory, MEMORY as i64).expect("memory of that size");
    let map = [words(&[32, 3, 0, 0]), [0, MEMORY].map(u64::to_ne_bytes).concat()].concat();
    client.send(2, &map, &[memory.as_raw_fd()]);
    client.reply(HEADER);
    let eventfd = |_| EventFd::from_flags(EfdFlags::EFD_NONBLOCK).expect("an eventfd");
    let fds: Vec<EventFd> = (0..vectors).map(eventfd).collect();
    client.enable(kind, &fds);
    assert_ne!(client.read(bar, register, 4), [0xff; 4]);
    assert_eq!(client.read(bar, register, 8).len(), 8);
    client.write(bar, register, &[0; 4]);

    // The guest reboots: interrupts off, on again, and off; memory goes.
    for _ in 0..2 {
        client.send(8, &words(&[20, 1 | 32, kind, 0, 0]), &[]);
        client.reply(HEADER);
        client.enable(kind, &fds);
    }
    client.ask(13, &[], HEADER);
    let unmap = [words(&[24, 0]), [0, MEMORY].map(u64::to_ne_bytes).concat()].concat();
    client.ask(3, &unmap, HEADER + 24);
    drop(client);
    server.stop();
}

#[test]
fn an_nvme_controller_is_served() {
    is_served("vfio-user-nvme", (0, 0x08), (MSIX, 5), false);
}

#[test]
fn an_nvme_controller_with_many_queues_is_served() {
    is_served("vfio-user-nvme,num-queues=64", (0, 0x08), (MSIX, 65), false);
}

#[test]
fn an_nvme_controller_with_mapped_doorbells_is_served() {
    is_served("vfio-user-nvme,doorbells=mapped", (0, 0x08), (MSIX, 5), true);
}

#[test]
fn an_ahci_controller_is_served() {
    is_served("vfio-user-ahci", (5, 0x00), (MSI, 1), false);
}

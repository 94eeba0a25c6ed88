//! Hostile vhost-user front ends.

use std::fs::File;
use std::io::{self, IoSlice, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use fastrand::Rng;
use nix::fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

use crate::{GoOn, PATIENCE, Target};

/// Requests of the protocol.
const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_BASE: u32 = 10;
const GET_VRING_BASE: u32 = 11;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const SET_VRING_ERR: u32 = 14;
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_VRING_ENABLE: u32 = 18;
const SET_INFLIGHT_FD: u32 = 32;
const RESET_DEVICE: u32 = 34;
const ADD_MEM_REG: u32 = 37;

/// Its memory: two queues' rings, then requests.
const MEMORY: u64 = 0x20000;
const USER: u64 = 0x7000_0000;
const AVAIL: u64 = 0x800;
const USED: u64 = 0x1000;
const QUEUE: u64 = 0x2000;
const DATA: u64 = 0x8000;
/// An indirect table.
const TABLE: u64 = 0x1c000;
const ENTRIES: u16 = 64;
/// Parts of a large read, and the bytes of each.
const PARTS: u64 = 16;
const PART: u32 = 64 << 10;
/// Blows after which it begins anew.
const ROUND: u32 = 1000;

struct FrontEnd {
    socket: UnixStream,
    memory: File,
    kicks: [EventFd; 2],
    call: EventFd,
    offered: u16,
}

fn memfd(size: u64, seals: SealFlag) -> io::Result<File> {
    let file = File::from(memfd_create(c"stranger", MFdFlags::MFD_ALLOW_SEALING)?);
    file.set_len(size)?;
    fcntl(file.as_fd(), FcntlArg::F_ADD_SEALS(seals))?;
    Ok(file)
}

impl FrontEnd {
    fn connect(target: &Target) -> io::Result<Self> {
        let socket = UnixStream::connect(&target.vhost_user)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.set_write_timeout(Some(PATIENCE))?;
        let event = || EventFd::from_flags(EfdFlags::EFD_NONBLOCK);
        let (kicks, call) = ([event()?, event()?], event()?);
        let memory = memfd(MEMORY, SealFlag::empty())?;
        Ok(FrontEnd { socket, memory, kicks, call, offered: 0 })
    }

    /// One that has set its queues up as it should.
    fn ready(target: &Target) -> io::Result<Self> {
        let mut front_end = Self::connect(target)?;
        front_end.set_up()?;
        Ok(front_end)
    }

    fn send(&self, bytes: &[u8], fds: &[RawFd]) -> io::Result<()> {
        let rights = [ControlMessage::ScmRights(fds)];
        let control = if fds.is_empty() { &[][..] } else { &rights[..] };
        let flags = MsgFlags::MSG_NOSIGNAL;
        sendmsg::<()>(self.socket.as_raw_fd(), &[IoSlice::new(bytes)], control, flags, None)?;
        Ok(())
    }

    fn message(&self, code: u32, payload: &[u64], fds: &[RawFd]) -> io::Result<()> {
        self.send(&encode(code, payload), fds)
    }

    /// Waits for an answer of that many bytes behind the header.
    fn answer<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut payload = [0; N];
        self.socket.read_exact(&mut [0; 12])?;
        self.socket.read_exact(&mut payload)?;
        Ok(payload)
    }

    fn set_up(&mut self) -> io::Result<()> {
        // VERSION_1, PROTOCOL_FEATURES, INDIRECT_DESC, the device's own; INFLIGHT_SHMFD, RESET_DEVICE.
        self.message(SET_FEATURES, &[1 << 32 | 1 << 30 | 1 << 28 | 0x7240], &[])?;
        self.message(SET_PROTOCOL_FEATURES, &[1 << 12 | 1 << 13], &[])?;
        self.share()?;
        (0..2).try_for_each(|queue| self.start(queue))
    }

    fn share(&self) -> io::Result<()> {
        let size = self.memory.metadata()?.len();
        self.message(SET_MEM_TABLE, &[1, 0, size, USER, 0], &[self.memory.as_raw_fd()])
    }

    fn start(&self, queue: u64) -> io::Result<()> {
        let base = USER + queue * QUEUE;
        let kick = self.kicks[queue as usize].as_fd().as_raw_fd();
        self.message(SET_VRING_NUM, &[queue | u64::from(ENTRIES) << 32], &[])?;
        self.message(SET_VRING_BASE, &[queue], &[])?;
        self.message(SET_VRING_ADDR, &[queue, base, base + USED, base + AVAIL, 0], &[])?;
        self.message(SET_VRING_CALL, &[queue], &[self.call.as_fd().as_raw_fd()])?;
        self.message(SET_VRING_KICK, &[queue], &[kick])?;
        self.message(SET_VRING_ENABLE, &[queue | 1 << 32], &[])
    }

    /// Whether all that was sent has been carried out.
    fn settle(&mut self) -> io::Result<()> {
        self.message(GET_FEATURES, &[], &[])?;
        self.answer::<8>().map(drop)
    }

    /// Offers a read of a sector on queue 0.
    fn read_sector(&mut self) -> io::Result<()> {
        let slot = u64::from(self.offered % (ENTRIES / 4)) * 3;
        let at = DATA + slot * 0x400;
        let chain = [
            descriptor(at, 16, 1, slot + 1),
            descriptor(at + 0x20, 512, 3, slot + 2),
            descriptor(at + 0x10, 1, 2, 0),
        ];
        self.memory.write_all_at(&[0; 16], at)?;
        self.memory.write_all_at(&chain.concat(), slot * 16)?;
        let entry = AVAIL + 4 + u64::from(self.offered % ENTRIES) * 2;
        self.memory.write_all_at(&(slot as u16).to_le_bytes(), entry)?;
        self.offered = self.offered.wrapping_add(1);
        self.memory.write_all_at(&self.offered.to_le_bytes(), AVAIL + 2)
    }
}

fn descriptor(addr: u64, len: u32, flags: u16, next: u64) -> Vec<u8> {
    let (addr, len) = (addr.to_le_bytes(), len.to_le_bytes());
    [&addr[..], &len, &flags.to_le_bytes(), &(next as u16).to_le_bytes()].concat()
}

fn encode(code: u32, payload: &[u64]) -> Vec<u8> {
    let header = [code, 1, payload.len() as u32 * 8];
    let header = header.into_iter().flat_map(u32::to_ne_bytes);
    header.chain(payload.iter().flat_map(|word| word.to_ne_bytes())).collect()
}

/// Writes the indirect table of a read of 1 MiB, in parts that `place` puts. Returns the descriptor that leads to it.
fn write_table(memory: &File, place: impl Fn(u64) -> u64) -> io::Result<Vec<u8>> {
    let parts = (0..PARTS).map(|part| descriptor(place(part), PART, 3, part + 2));
    let table: Vec<_> = [descriptor(DATA, 16, 1, 1)].into_iter().chain(parts).collect();
    let table = [table.concat(), descriptor(TABLE - 1, 1, 2, 0)].concat();
    memory.write_all_at(&table, TABLE)?;
    Ok(descriptor(TABLE, table.len() as u32, 4, 0))
}

pub(crate) fn kicks(target: &Target, go_on: &GoOn) -> io::Result<()> {
    let mut front_end = FrontEnd::ready(target)?;
    front_end.settle()?;
    while go_on.blow() {
        // A counter that is full has kicked.
        let _ = front_end.kicks[0].write(1);
    }
    Ok(())
}

pub(crate) fn large_reads(target: &Target, go_on: &GoOn) -> io::Result<()> {
    let mut front_end = FrontEnd::ready(target)?;
    front_end.settle()?;
    let memory = &front_end.memory;
    memory.write_all_at(&[0; 16], DATA)?;
    // All requests have one table, and one place to read to.
    let table = write_table(memory, |_| DATA + 16)?;
    for slot in 0..u64::from(ENTRIES) {
        memory.write_all_at(&table, slot * 16)?;
        memory.write_all_at(&(slot as u16).to_le_bytes(), AVAIL + 4 + slot * 2)?;
    }
    while go_on.blow() {
        // They are answered in order: as many as there is room for, always.
        let mut used = [0; 2];
        memory.read_exact_at(&mut used, USED + 2)?;
        let offered = u16::from_le_bytes(used).wrapping_add(ENTRIES);
        memory.write_all_at(&offered.to_le_bytes(), AVAIL + 2)?;
        let _ = front_end.kicks[0].write(1);
        std::thread::sleep(Duration::from_micros(50));
    }
    Ok(())
}

pub(crate) fn rubbish(target: &Target, go_on: &GoOn) -> io::Result<()> {
    let mut front_end = FrontEnd::ready(target)?;
    front_end.settle()?;
    let mut random = Rng::with_seed(1);
    for _ in 0..ROUND {
        if !go_on.blow() {
            break;
        }
        for _ in 0..16 {
            let at = random.u64(..2 * QUEUE - 8);
            front_end.memory.write_all_at(&random.u64(..).to_le_bytes(), at)?;
        }
        // A near index makes the device read the entries.
        front_end.offered = front_end.offered.wrapping_add(random.u16(..ENTRIES));
        for queue in [0, QUEUE] {
            let index = front_end.offered.to_le_bytes();
            front_end.memory.write_all_at(&index, queue + AVAIL + 2)?;
        }
        let _ = front_end.kicks[0].write(1);
        let _ = front_end.kicks[1].write(1);
        if front_end.offered % 8 == 0 {
            // A broken queue takes nothing: another.
            front_end = FrontEnd::ready(target)?;
        }
    }
    Ok(())
}

pub(crate) fn resets(target: &Target, go_on: &GoOn) -> io::Result<()> {
    let mut front_end = FrontEnd::ready(target)?;
    while go_on.blow() {
        front_end.read_sector()?;
        let _ = front_end.kicks[0].write(1);
        front_end.message(GET_VRING_BASE, &[0], &[])?;
        front_end.answer::<8>()?;
        front_end.message(RESET_DEVICE, &[], &[])?;
        front_end.memory.write_all_at(&[0; QUEUE as usize], 0)?;
        front_end.offered = 0;
        front_end.set_up()?;
    }
    Ok(())
}

pub(crate) fn connections(target: &Target, go_on: &GoOn) -> io::Result<()> {
    loop {
        let front_end = FrontEnd::connect(target)?;
        front_end.message(GET_FEATURES, &[], &[])?;
        if !go_on.blow() {
            return Ok(());
        }
    }
}

pub(crate) fn half_messages(target: &Target, go_on: &GoOn) -> io::Result<()> {
    let message = encode(SET_MEM_TABLE, &[1, 0, MEMORY, USER, 0]);
    let mut waiting = Vec::new();
    for len in 1..message.len() {
        let front_end = FrontEnd::connect(target)?;
        front_end.send(&message[..len], &[front_end.memory.as_raw_fd()])?;
        if !go_on.blow() {
            break;
        }
        // Of those, one is served, and the others are in line.
        waiting.push(front_end);
        if waiting.len() == 8 {
            std::thread::sleep(Duration::from_millis(5));
            waiting.clear();
        }
    }
    Ok(())
}

pub(crate) fn bad_memory(target: &Target, go_on: &GoOn) -> io::Result<()> {
    let sealed = memfd(4096, SealFlag::F_SEAL_WRITE)?;
    let empty = memfd(0, SealFlag::empty())?;
    let null = File::open("/dev/null")?;
    for (fd, table) in [
        (None, [1, 0, u64::MAX, USER, 0]),
        (None, [1, u64::MAX - 0xfff, 0x2000, USER, 0]),
        (None, [1, 0, 1 << 46, USER, 0]),
        (None, [1, 0, MEMORY, USER, u64::MAX - 0xfff]),
        (None, [1, 0, MEMORY, USER, MEMORY]),
        (Some(&sealed), [1, 0, 4096, USER, 0]),
        (Some(&empty), [1, 0, 4096, USER, 0]),
        (Some(&null), [1, 0, 4096, USER, 0]),
    ] {
        let mut front_end = FrontEnd::connect(target)?;
        let fd = fd.unwrap_or(&front_end.memory).as_raw_fd();
        front_end.message(SET_MEM_TABLE, &table, &[fd])?;
        // It is sent away, or not.
        let _ = front_end.settle();
        if !go_on.blow() {
            break;
        }
    }
    Ok(())
}

pub(crate) fn wrong_descriptors(target: &Target, go_on: &GoOn) -> io::Result<()> {
    let folder = File::open("/")?;
    let (read, write) = nix::unistd::pipe()?;
    let (one, _other) = UnixStream::pair()?;
    let memory = memfd(MEMORY, SealFlag::empty())?;
    let fds: [&OwnedFd; 5] = [&folder.into(), &read, &write, &one.into(), &memory.into()];
    for fd in fds {
        for code in [SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR, SET_MEM_TABLE, SET_INFLIGHT_FD]
        {
            let mut front_end = FrontEnd::ready(target)?;
            let payload = match code {
                SET_MEM_TABLE => &[1, 0, MEMORY, USER, 0][..],
                SET_INFLIGHT_FD => &[0x1000, 0, 1 | u64::from(ENTRIES) << 16],
                _ => &[0],
            };
            front_end.message(code, payload, &[fd.as_raw_fd()])?;
            let _ = front_end.settle();
            // More than any message may have.
            let many = [fd.as_raw_fd(); 64];
            let _ = front_end.message(code, payload, &many);
            if !go_on.blow() {
                return Ok(());
            }
        }
    }
    Ok(())
}

pub(crate) fn shrunk_memory(target: &Target, go_on: &GoOn) -> io::Result<()> {
    for _ in 0..ROUND {
        let mut front_end = FrontEnd::ready(target)?;
        front_end.settle()?;
        front_end.memory.set_len(0)?;
        let _ = front_end.kicks[0].write(1);
        let _ = front_end.kicks[1].write(1);
        let _ = front_end.settle();
        if !go_on.blow() {
            break;
        }
    }
    Ok(())
}

pub(crate) fn sparse_memory(target: &Target, go_on: &GoOn) -> io::Result<()> {
    let mut front_end = FrontEnd::connect(target)?;
    front_end.message(SET_FEATURES, &[1 << 32 | 1 << 30], &[])?;
    // REPLY_ACK, CONFIGURE_MEM_SLOTS.
    front_end.message(SET_PROTOCOL_FEATURES, &[1 << 3 | 1 << 15], &[])?;
    let (mut size, mut at) = (64 << 40, 0);
    while go_on.blow() && size > 1 << 20 {
        let memory = memfd(size, SealFlag::empty())?;
        let message = encode(ADD_MEM_REG, &[0, at, size, at, 0]);
        // With need_reply.
        let message = [&message[..4], &9u32.to_ne_bytes(), &message[8..]].concat();
        front_end.send(&message, &[memory.as_raw_fd()])?;
        match front_end.answer::<8>() {
            Ok(answer) if answer == [0; 8] => at += size,
            // Sent away: another begins where this one has ended.
            Err(_) => return Ok(()),
            Ok(_) => size /= 2,
        }
    }
    Ok(())
}

/// Bytes of a large guest.
pub(crate) const LARGE: u64 = 1 << 30;

pub(crate) fn large_memory(target: &Target, go_on: &GoOn) -> io::Result<()> {
    let mut front_end = FrontEnd::connect(target)?;
    front_end.memory.set_len(LARGE)?;
    front_end.set_up()?;
    front_end.settle()?;
    let memory = &front_end.memory;
    memory.write_all_at(&[0; 16], DATA)?;
    let read = PARTS * u64::from(PART);
    for at in (read..LARGE).step_by(read as usize) {
        let table = write_table(memory, |part| at + part * u64::from(PART))?;
        memory.write_all_at(&table, 0)?;
        let next = front_end.offered.wrapping_add(1).to_le_bytes();
        let entry = AVAIL + 4 + u64::from(front_end.offered % ENTRIES) * 2;
        memory.write_all_at(&[0; 2], entry)?;
        memory.write_all_at(&next, AVAIL + 2)?;
        front_end.offered = u16::from_le_bytes(next);
        let _ = front_end.kicks[0].write(1);
        let mut used = [0; 2];
        while used != next {
            if !go_on.is_wanted() {
                return Ok(());
            }
            std::thread::sleep(Duration::from_micros(100));
            memory.read_exact_at(&mut used, USED + 2)?;
        }
        go_on.blow();
    }
    Ok(())
}

pub(crate) fn holes(target: &Target, go_on: &GoOn) -> io::Result<()> {
    let mut front_end = FrontEnd::connect(target)?;
    // On a disk if the folder for temporary files is on one.
    front_end.memory = tempfile::tempfile()?;
    front_end.memory.set_len(MEMORY)?;
    front_end.set_up()?;
    front_end.settle()?;
    while go_on.blow() {
        let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        fallocate(&front_end.memory, hole, DATA as i64, (TABLE - DATA) as i64)?;
        front_end.memory.sync_data()?;
        for _ in 0..ENTRIES / 4 {
            front_end.read_sector()?;
        }
        let _ = front_end.kicks[0].write(1);
    }
    Ok(())
}

pub(crate) fn full_call(target: &Target, go_on: &GoOn) -> io::Result<()> {
    let mut front_end = FrontEnd::connect(target)?;
    front_end.call = EventFd::new()?;
    front_end.call.write(u64::MAX - 1)?;
    front_end.set_up()?;
    front_end.settle()?;
    while go_on.blow() {
        front_end.read_sector()?;
        let _ = front_end.kicks[0].write(1);
        // Its ring has room for the reads of some time.
        std::thread::sleep(Duration::from_micros(50));
    }
    Ok(())
}

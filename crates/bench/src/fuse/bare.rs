//! The floors: loops that answer a kernel's messages and do nothing else.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use exports::fuse::FileAttributes;
use exports::fuse::mount::{AllowOther, Allowed, MountOptions, mount};
use exports::fuse::session::{Todo, judge};
use exports::fuse::wire::{
    Answer, Encoded, IN_HEADER, MAX_DATA, MAX_REQUEST, Message, OUT_HEADER, Request,
    WRITE_ARGUMENTS,
};
use io_uring::{IoUring, opcode, squeue, types};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::SIZE;

/// How messages and answers are exchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// read(2) and write(2) of /dev/fuse, which wait.
    Device,
    /// FUSE over io_uring (Linux 6.14): the answer is committed and the next message awaited by one operation.
    IoUring,
}

/// Where data begin in a message's memory.
const DATA: usize = 4096;
/// Where a message begins: the data of a write are at a page's beginning then.
const MESSAGE: usize = DATA - IN_HEADER - WRITE_ARGUMENTS;
/// Where an answer begins.
const ANSWER: usize = DATA - OUT_HEADER;

/// Serves a file that answers at once, until it is unmounted.
pub(crate) fn serve(way: Way, mountpoint: &Path) -> Result<()> {
    let options = MountOptions {
        mountpoint: mountpoint.to_owned(),
        writable: true,
        allow_other: AllowOther::Auto,
        devices: 1,
    };
    let mounted = mount(&options, &Allowed::Anywhere).map_err(anyhow::Error::msg)?;
    let device = mounted.devices.into_iter().next().context("no descriptor")?;
    let file = FileAttributes::new(SIZE, 4096, true, false, mounted.allow_other);
    match way {
        Way::Device => by_device(&device, &file),
        Way::IoUring => by_io_uring(&device, &file),
    }
}

/// The answer to a message; `None`: there is none.
fn answer(bytes: &[u8], received: usize, file: &FileAttributes) -> Option<(Encoded, u32)> {
    let Ok(Message { unique, request }) = Message::parse(bytes, received) else { return None };
    let answer = match judge(request, file, false, false) {
        Todo::Answer(answer) | Todo::Node { then: answer, .. } => answer,
        Todo::Nothing => return None,
        Todo::Describe => Answer::Attributes(file.get(None)),
        Todo::Seek { .. } | Todo::Grow(_) | Todo::Truncate(..) => {
            Answer::Error(nix::errno::Errno::ENOTSUP)
        }
    };
    let data = match answer {
        Answer::Data(len) => len,
        _ => 0,
    };
    Some((answer.encode(unique), data))
}

fn by_device(device: &OwnedFd, file: &FileAttributes) -> Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(device, FcntlArg::F_GETFL)?);
    fcntl(device, FcntlArg::F_SETFL(flags - OFlag::O_NONBLOCK))?;
    let mut memory = vec![0; DATA + MAX_DATA as usize];
    loop {
        let Some(len) = read(device, &mut memory[MESSAGE..])? else { return Ok(()) };
        let end = MESSAGE + len.min(MAX_REQUEST);
        let Some((encoded, data)) = answer(&memory[MESSAGE..end], len, file) else { continue };
        write(device, &mut memory, &encoded, data);
    }
}

/// Reads a message. `None`: the file is unmounted.
fn read(device: &OwnedFd, memory: &mut [u8]) -> Result<Option<usize>> {
    loop {
        match nix::unistd::read(device, memory) {
            Ok(len) => return Ok(Some(len)),
            Err(nix::errno::Errno::ENODEV) => return Ok(None),
            Err(nix::errno::Errno::EINTR | nix::errno::Errno::ENOENT) => {}
            Err(error) => bail!("reading /dev/fuse: {error}"),
        }
    }
}

/// An answer that the kernel does not want any more is no error.
fn write(device: &OwnedFd, memory: &mut [u8], encoded: &Encoded, data: u32) {
    let bytes = encoded.bytes();
    memory[ANSWER..ANSWER + bytes.len()].copy_from_slice(bytes);
    let end = ANSWER + bytes.len() + data as usize;
    let _ = nix::unistd::write(device, &memory[ANSWER..end]);
}

/// `FUSE_IO_URING_CMD_*`.
const REGISTER: u32 = 1;
const COMMIT_AND_FETCH: u32 = 2;
/// Entries per queue, of which there is one per CPU.
const ENTRIES: usize = 64;
/// The upper half of `FUSE_OVER_IO_URING`, and where an answer to INIT has that half.
const OVER_IO_URING: u32 = 1 << 9;
const UPPER_FLAGS: usize = OUT_HEADER + 32;
/// `fuse_uring_req_header`: the header, the operation's arguments, and what concerns the ring.
const HEADER: usize = 288;
const ARGUMENTS: usize = 128;
const COMMIT_ID: usize = 264;
const PAYLOAD_LEN: usize = 272;

/// Memory of an entry, which the kernel knows by its addresses.
struct Entry {
    queue: u16,
    header: Box<[u8; HEADER]>,
    payload: Vec<u8>,
    segments: Box<[libc::iovec; 2]>,
}

fn by_io_uring(device: &OwnedFd, file: &FileAttributes) -> Result<()> {
    // The first message comes by the device.
    let mut memory = vec![0; DATA + MAX_DATA as usize];
    let mut ready = [PollFd::new(std::os::fd::AsFd::as_fd(device), PollFlags::POLLIN)];
    poll(&mut ready, PollTimeout::NONE)?;
    let len = read(device, &mut memory[MESSAGE..])?.context("the file is unmounted")?;
    let message = &memory[MESSAGE..MESSAGE + len.min(MAX_REQUEST)];
    let offered = matches!(
        Message::parse(message, len),
        Ok(Message { request: Request::Init(init), .. }) if init.flags >> 32 & u64::from(OVER_IO_URING) != 0
    );
    ensure!(offered, "the kernel does not offer FUSE over io_uring (fuse.enable_uring)");
    let (encoded, _) = answer(message, len, file).context("no answer to INIT")?;
    let mut bytes = encoded.bytes().to_vec();
    let upper = bytes.get_mut(UPPER_FLAGS..UPPER_FLAGS + 4).context("a short answer")?;
    upper[1] |= (OVER_IO_URING >> 8) as u8;
    nix::unistd::write(device, &bytes)?;

    let mut ring: IoUring<squeue::Entry128> = IoUring::<squeue::Entry128>::builder()
        .setup_single_issuer()
        .setup_coop_taskrun()
        .setup_taskrun_flag()
        .build(256)
        .context("creating a ring")?;
    ring.submitter().register_files(&[device.as_raw_fd()])?;
    // SAFETY: the call takes no pointers.
    let queues = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) };
    let mut entries: Vec<Entry> = Vec::new();
    for queue in 0..u16::try_from(queues)? {
        entries.extend((0..ENTRIES).map(|_| Entry::new(queue)));
    }
    for (number, entry) in entries.iter().enumerate() {
        push(&mut ring, entry.command(REGISTER, 0, number as u64))?;
    }
    loop {
        match ring.submit_and_wait(1) {
            Err(error) if error.raw_os_error() != Some(libc::EINTR) => return Err(error.into()),
            _ => {}
        }
        let done: Vec<_> = ring.completion().map(|cqe| (cqe.user_data(), cqe.result())).collect();
        for (number, result) in done {
            match -result {
                0 => {}
                libc::ENOTCONN | libc::ECONNABORTED => return Ok(()),
                errno => bail!("FUSE over io_uring: {}", io::Error::from_raw_os_error(errno)),
            }
            let entry = entries.get_mut(number as usize).context("no such entry")?;
            let commit_id = entry.carry_out(file);
            push(&mut ring, entry.command(COMMIT_AND_FETCH, commit_id, number))?;
        }
    }
}

impl Entry {
    fn new(queue: u16) -> Entry {
        let mut header = Box::new([0; HEADER]);
        let mut payload = vec![0u8; MAX_DATA as usize];
        let segment = |base: *mut u8, len| libc::iovec { iov_base: base.cast(), iov_len: len };
        let segments = Box::new([
            segment(header.as_mut_ptr(), HEADER),
            segment(payload.as_mut_ptr(), payload.len()),
        ]);
        Entry { queue, header, payload, segments }
    }

    /// Puts the answer to the entry's message in its place. Returns the number to commit it by.
    fn carry_out(&mut self, file: &FileAttributes) -> u64 {
        let number = |at: usize, header: &[u8; HEADER]| {
            u64::from_ne_bytes(std::array::from_fn(|byte| header[at + byte]))
        };
        let (commit_id, unique) = (number(COMMIT_ID, &self.header), number(8, &self.header));
        let mut message = [0; MAX_REQUEST];
        message[..IN_HEADER].copy_from_slice(&self.header[..IN_HEADER]);
        message[IN_HEADER..]
            .copy_from_slice(&self.header[ARGUMENTS..ARGUMENTS + MAX_REQUEST - IN_HEADER]);
        let received = number(0, &self.header) as u32 as usize;
        let answered = answer(&message[..received.min(MAX_REQUEST)], received, file);
        let (encoded, data) = answered.unwrap_or_else(|| (Answer::Done.encode(unique), 0));
        let (head, arguments) = encoded.bytes().split_at(OUT_HEADER);
        self.header[..OUT_HEADER].copy_from_slice(head);
        self.payload[..arguments.len()].copy_from_slice(arguments);
        let len = arguments.len() as u32 + data;
        self.header[PAYLOAD_LEN..PAYLOAD_LEN + 4].copy_from_slice(&len.to_ne_bytes());
        commit_id
    }

    fn command(&self, command: u32, commit_id: u64, number: u64) -> squeue::Entry128 {
        let mut arguments = [0; 80];
        arguments[8..16].copy_from_slice(&commit_id.to_ne_bytes());
        arguments[16..18].copy_from_slice(&self.queue.to_ne_bytes());
        let mut entry = opcode::UringCmd80::new(types::Fixed(0), command)
            .cmd(arguments)
            .build()
            .user_data(number);
        let place = (&raw mut entry).cast::<u8>();
        // SAFETY: the members `addr` and `len` of `io_uring_sqe`, within the entry, which has 128 bytes.
        unsafe {
            place.add(16).cast::<u64>().write_unaligned(self.segments.as_ptr() as u64);
            place.add(24).cast::<u32>().write_unaligned(self.segments.len() as u32);
        }
        entry
    }
}

fn push(ring: &mut IoUring<squeue::Entry128>, entry: squeue::Entry128) -> Result<()> {
    // SAFETY: the memory that the entry names is that of an entry of the caller's list, which lives as long as the
    // ring's operations: until the process ends. No reference to it exists while the kernel has the entry.
    while unsafe { ring.submission().push(&entry) }.is_err() {
        ring.submit()?;
    }
    Ok(())
}

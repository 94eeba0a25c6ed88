//! The floor: a loop that answers a kernel's messages by read(2) and write(2) of /dev/fuse, and does nothing else.

use std::os::fd::OwnedFd;
use std::path::Path;

use anyhow::{Context, Result, bail};
use exports::fuse::FileAttributes;
use exports::fuse::mount::{AllowOther, Allowed, MountOptions, mount};
use exports::fuse::session::{Todo, judge};
use exports::fuse::wire::{
    Answer, Encoded, IN_HEADER, MAX_DATA, MAX_REQUEST, Message, OUT_HEADER, WRITE_ARGUMENTS,
};
use nix::fcntl::{FcntlArg, OFlag, fcntl};

use super::SIZE;

/// Where data begin in a message's memory.
const DATA: usize = 4096;
/// Where a message begins: the data of a write are at a page's beginning then.
const MESSAGE: usize = DATA - IN_HEADER - WRITE_ARGUMENTS;
/// Where an answer begins.
const ANSWER: usize = DATA - OUT_HEADER;

/// Serves a file that answers at once, until it is unmounted.
pub(crate) fn serve(mountpoint: &Path) -> Result<()> {
    let options = MountOptions {
        mountpoint: mountpoint.to_owned(),
        writable: true,
        allow_other: AllowOther::Auto,
        devices: 1,
    };
    let mounted = mount(&options, &Allowed::Anywhere).map_err(anyhow::Error::msg)?;
    let device = mounted.devices.into_iter().next().context("no descriptor")?;
    let file = FileAttributes::new(SIZE, 4096, true, false, mounted.allow_other);
    let flags = OFlag::from_bits_retain(fcntl(&device, FcntlArg::F_GETFL)?);
    fcntl(&device, FcntlArg::F_SETFL(flags - OFlag::O_NONBLOCK))?;
    let mut memory = vec![0; DATA + MAX_DATA as usize];
    loop {
        let Some(len) = read(&device, &mut memory[MESSAGE..])? else { return Ok(()) };
        let end = MESSAGE + len.min(MAX_REQUEST);
        let Some((encoded, data)) = answer(&memory[MESSAGE..end], len, &file) else { continue };
        write(&device, &mut memory, &encoded, data);
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

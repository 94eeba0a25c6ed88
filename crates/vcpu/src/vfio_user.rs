//! A vfio-user client, as a VMM has it: guest memory by descriptor, interrupts by eventfd, registers by message.

pub mod wire;

use std::io::{IoSlice, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use exports::vhost_user::fd_passing::receive;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

pub use wire::{BAR0, CONFIG};
use wire::{
    DEVICE_RESET, DMA_MAP, DMA_UNMAP, GET_REGION_INFO, HEADER, REGION_READ, REGION_WRITE, SET_IRQS,
    VERSION,
};

/// Bytes of a region's description with a list of one area that may be mapped.
const REGION_INFO: u32 = 64;
/// The flag of a region that may be mapped.
const REGION_MMAP: u32 = 4;
/// A reply without an error.
const REPLY: u32 = 1;
/// The longest reply that is accepted, bytes.
const MAX_REPLY: usize = 1 << 16;

/// A part of a region that may be mapped.
pub struct MappedArea {
    /// Offset in the region, and in the file.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
    /// The file.
    pub file: OwnedFd,
}

/// A connection to a device. Each message waits for its reply.
pub struct Client {
    socket: UnixStream,
}

impl Client {
    /// Connects and agrees on a version.
    ///
    /// # Errors
    ///
    /// The socket cannot be connected to, or the server refuses the version.
    pub fn connect(path: &Path) -> Result<Client> {
        let socket = UnixStream::connect(path)
            .with_context(|| format!("connecting to {}", path.display()))?;
        let mut client = Client { socket };
        client.ask(VERSION, &wire::words(&[0]), None).context("agreeing on a version")?;
        Ok(client)
    }

    /// Shares memory of `size` bytes at guest address `addr`: the first bytes of a file.
    ///
    /// # Errors
    ///
    /// The server refuses.
    pub fn map(&mut self, addr: u64, size: u64, file: BorrowedFd<'_>) -> Result<()> {
        self.ask(DMA_MAP, &wire::map(0, addr, size), Some(file.as_raw_fd())).map(drop)
    }

    /// Takes back the memory of `size` bytes at guest address `addr`. Nothing uses it after the reply.
    ///
    /// # Errors
    ///
    /// The server refuses.
    pub fn unmap(&mut self, addr: u64, size: u64) -> Result<()> {
        self.ask(DMA_UNMAP, &wire::unmap(addr, size), None).map(drop)
    }

    /// Resets the device.
    ///
    /// # Errors
    ///
    /// The server refuses.
    pub fn reset(&mut self) -> Result<()> {
        self.ask(DEVICE_RESET, &[], None).map(drop)
    }

    /// Waits for the server to end the connection.
    ///
    /// # Errors
    ///
    /// The server sends a message instead, or the connection fails.
    pub fn wait_for_end(&mut self) -> Result<()> {
        let received = self.socket.read(&mut [0; 1]).context("waiting for the end")?;
        ensure!(received == 0, "a message instead of the end of the connection");
        Ok(())
    }

    /// Returns the one part of a region that may be mapped; `None`: there is none.
    ///
    /// # Errors
    ///
    /// The server refuses, or describes more than one part.
    pub fn mapped_area(&mut self, region: u32) -> Result<Option<MappedArea>> {
        let info = wire::region_info(region, REGION_INFO);
        let (reply, fd) = self.ask_for_fd(GET_REGION_INFO, &info, None)?;
        let word = |at: usize| reply.as_chunks().0.get(at).map(|w| u32::from_ne_bytes(*w));
        let long = |at: usize| reply.as_chunks().0.get(at).map(|w| u64::from_ne_bytes(*w));
        if word(1).context("a reply without flags")? & REGION_MMAP == 0 {
            ensure!(fd.is_none(), "a descriptor of a region that may not be mapped");
            return Ok(None);
        }
        // Size, where the capability begins, its number and version, and the number of areas.
        ensure!(word(0) == Some(REGION_INFO) && word(3) == Some(32), "{reply:?}");
        ensure!(word(8) == Some(0x1_0001) && word(10) == Some(1), "{reply:?}");
        let (offset, size) = (long(6).context("no offset")?, long(7).context("no size")?);
        let file = fd.context("a region that may be mapped has no descriptor")?;
        Ok(Some(MappedArea { offset, size, file }))
    }

    /// Sets the eventfd of an MSI-X vector.
    ///
    /// # Errors
    ///
    /// The server refuses.
    pub fn set_interrupt(&mut self, vector: u32, eventfd: BorrowedFd<'_>) -> Result<()> {
        let set = wire::eventfds(wire::MSIX, vector, 1);
        self.ask(SET_IRQS, &set, Some(eventfd.as_raw_fd())).map(drop)
    }

    /// Reads a 32-bit register of a region.
    ///
    /// # Errors
    ///
    /// The server refuses.
    pub fn read(&mut self, region: u32, register: u64) -> Result<u32> {
        let reply = self.ask(REGION_READ, &wire::region(region, register, 4), None)?;
        let value = reply.get(16..).and_then(|value| value.try_into().ok());
        Ok(u32::from_ne_bytes(value.context("a reply has no register")?))
    }

    /// Writes a 32-bit register of a region.
    ///
    /// # Errors
    ///
    /// The server refuses.
    pub fn write(&mut self, region: u32, register: u64, value: u32) -> Result<()> {
        let write = wire::write(region, register, &value.to_ne_bytes());
        self.ask(REGION_WRITE, &write, None).map(drop)
    }

    /// Writes a 32-bit register of a region without a reply, as QEMU does if no region can be mapped.
    ///
    /// # Errors
    ///
    /// The message cannot be sent.
    pub fn post(&mut self, region: u32, register: u64, value: u32) -> Result<()> {
        let write = wire::write(region, register, &value.to_ne_bytes());
        let message = wire::message(0, REGION_WRITE, false, &write);
        self.socket.write_all(&message).context("posting a register write")
    }

    fn ask(&mut self, command: u16, payload: &[u8], fd: Option<RawFd>) -> Result<Vec<u8>> {
        self.ask_for_fd(command, payload, fd).map(|(reply, _)| reply)
    }

    /// The reply, and the descriptor that comes with it.
    fn ask_for_fd(
        &mut self,
        command: u16,
        payload: &[u8],
        fd: Option<RawFd>,
    ) -> Result<(Vec<u8>, Option<OwnedFd>)> {
        let message = wire::message(0, command, true, payload);
        let fds: Vec<RawFd> = fd.into_iter().collect();
        let fds = (!fds.is_empty()).then_some(ControlMessage::ScmRights(&fds));
        let iov = [IoSlice::new(&message)];
        let fds: Vec<_> = fds.into_iter().collect();
        let sent = sendmsg::<()>(self.socket.as_raw_fd(), &iov, &fds, MsgFlags::MSG_NOSIGNAL, None);
        let sent = sent.with_context(|| format!("sending vfio-user command {command}"))?;
        ensure!(sent == message.len(), "a vfio-user message was sent in part");
        let mut header = [0; HEADER];
        let received = loop {
            match receive(self.socket.as_fd(), &mut header) {
                Err(Errno::EAGAIN | Errno::EINTR) => {
                    let mut fds = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
                    // An interrupted wait is repeated.
                    let _ = poll(&mut fds, PollTimeout::NONE);
                }
                received => break received,
            }
        };
        let received = received.with_context(|| format!("receiving the reply to {command}"))?;
        let unread = header.get_mut(received.len..).unwrap_or_default();
        let read = self.socket.read_exact(unread);
        read.with_context(|| format!("receiving the reply to vfio-user command {command}"))?;
        let [command_and_id, size, flags, errno] = [0, 1, 2, 3]
            .map(|at| header.as_chunks().0.get(at).map_or(0, |w| u32::from_ne_bytes(*w)));
        let rest = (size as usize).checked_sub(HEADER).filter(|&rest| rest <= MAX_REPLY);
        let mut rest = vec![0; rest.with_context(|| format!("a reply of {size} bytes"))?];
        self.socket.read_exact(&mut rest).context("receiving a reply")?;
        ensure!(command_and_id >> 16 == u32::from(command), "a reply to another command");
        match flags {
            REPLY => Ok((rest, received.fds.into_iter().next())),
            _ => Err(anyhow!("vfio-user command {command}: {}", Errno::from_raw(errno as i32))),
        }
    }
}

//! A vfio-user client, as a VMM has it: guest memory by descriptor, interrupts by eventfd, registers by message.

use std::io::{IoSlice, Read};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

/// Commands of the protocol.
const VERSION: u16 = 1;
const DMA_MAP: u16 = 2;
const DMA_UNMAP: u16 = 3;
const SET_IRQS: u16 = 8;
const REGION_READ: u16 = 9;
const REGION_WRITE: u16 = 10;
const RESET: u16 = 13;
/// Flags of SET_IRQS: eventfds that interrupts trigger.
const EVENTFD_TRIGGER: u32 = 4 | 32;
/// The index of the MSI-X interrupts.
const MSIX: u32 = 2;
/// Flags of DMA_MAP: readable and writable.
const READ_WRITE: u32 = 3;
/// A reply without an error.
const REPLY: u32 = 1;
const HEADER: usize = 16;
/// The longest reply that is accepted, bytes.
const MAX_REPLY: usize = 1 << 16;

/// The region of BAR 0.
pub const BAR0: u32 = 0;
/// The region of PCI configuration space.
pub const CONFIG: u32 = 7;

/// Encodes 32-bit words in the byte order of the host, as the protocol does.
fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
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
        client.ask(VERSION, &words(&[0]), None).context("agreeing on a version")?;
        Ok(client)
    }

    /// Shares memory of `size` bytes at guest address `addr`: the first bytes of a file.
    ///
    /// # Errors
    ///
    /// The server refuses.
    pub fn map(&mut self, addr: u64, size: u64, file: BorrowedFd<'_>) -> Result<()> {
        let map = [words(&[32, READ_WRITE, 0, 0]), [addr, size].map(u64::to_ne_bytes).concat()];
        self.ask(DMA_MAP, &map.concat(), Some(file.as_raw_fd())).map(drop)
    }

    /// Takes back the memory of `size` bytes at guest address `addr`. Nothing uses it after the reply.
    ///
    /// # Errors
    ///
    /// The server refuses.
    pub fn unmap(&mut self, addr: u64, size: u64) -> Result<()> {
        let unmap = [words(&[24, 0]), [addr, size].map(u64::to_ne_bytes).concat()];
        self.ask(DMA_UNMAP, &unmap.concat(), None).map(drop)
    }

    /// Resets the device.
    ///
    /// # Errors
    ///
    /// The server refuses.
    pub fn reset(&mut self) -> Result<()> {
        self.ask(RESET, &[], None).map(drop)
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

    /// Sets the eventfd of an MSI-X vector.
    ///
    /// # Errors
    ///
    /// The server refuses.
    pub fn set_interrupt(&mut self, vector: u32, eventfd: BorrowedFd<'_>) -> Result<()> {
        let set = words(&[20, EVENTFD_TRIGGER, MSIX, vector, 1]);
        self.ask(SET_IRQS, &set, Some(eventfd.as_raw_fd())).map(drop)
    }

    /// Reads a 32-bit register of a region.
    ///
    /// # Errors
    ///
    /// The server refuses.
    pub fn read(&mut self, region: u32, register: u64) -> Result<u32> {
        let read = [&register.to_ne_bytes()[..], &words(&[region, 4])].concat();
        let reply = self.ask(REGION_READ, &read, None)?;
        let value = reply.get(16..).and_then(|value| value.try_into().ok());
        Ok(u32::from_ne_bytes(value.context("a reply has no register")?))
    }

    /// Writes a 32-bit register of a region.
    ///
    /// # Errors
    ///
    /// The server refuses.
    pub fn write(&mut self, region: u32, register: u64, value: u32) -> Result<()> {
        let write = [&register.to_ne_bytes()[..], &words(&[region, 4, value])].concat();
        self.ask(REGION_WRITE, &write, None).map(drop)
    }

    fn ask(&mut self, command: u16, payload: &[u8], fd: Option<RawFd>) -> Result<Vec<u8>> {
        let size = (HEADER + payload.len()) as u32;
        let header = words(&[u32::from(command) << 16, size, 0, 0]);
        let message = [&header[..], payload].concat();
        let fds: Vec<RawFd> = fd.into_iter().collect();
        let fds = (!fds.is_empty()).then_some(ControlMessage::ScmRights(&fds));
        let iov = [IoSlice::new(&message)];
        let fds: Vec<_> = fds.into_iter().collect();
        let sent = sendmsg::<()>(self.socket.as_raw_fd(), &iov, &fds, MsgFlags::MSG_NOSIGNAL, None);
        let sent = sent.with_context(|| format!("sending vfio-user command {command}"))?;
        ensure!(sent == message.len(), "a vfio-user message was sent in part");
        let mut header = [0; HEADER];
        let read = self.socket.read_exact(&mut header);
        read.with_context(|| format!("receiving the reply to vfio-user command {command}"))?;
        let [command_and_id, size, flags, errno] = [0, 1, 2, 3]
            .map(|at| header.as_chunks().0.get(at).map_or(0, |w| u32::from_ne_bytes(*w)));
        let rest = (size as usize).checked_sub(HEADER).filter(|&rest| rest <= MAX_REPLY);
        let mut rest = vec![0; rest.with_context(|| format!("a reply of {size} bytes"))?];
        self.socket.read_exact(&mut rest).context("receiving a reply")?;
        ensure!(command_and_id >> 16 == u32::from(command), "a reply to another command");
        match flags {
            REPLY => Ok(rest),
            _ => Err(anyhow!("vfio-user command {command}: {}", Errno::from_raw(errno as i32))),
        }
    }
}

//! A LUKS header in a node, read and written from a thread that may block.

use std::fmt::Display;
use std::sync::Arc;

use crypto::Secret;
use crypto::cipher::SECTOR;
use crypto::luks::{HEADER_LEN, Header, Step, VolumeKey};
use event_loop::{AlignedBuf, EventLoop, IoBufs, LoopConfig};
use nix::errno::Errno;

use crate::error::OpenError;
use crate::node::BlockNode;
use crate::request::Op;
use crate::submit::submit;

/// What any disk's requests are aligned to, bytes.
const ALIGN: u64 = 4096;

/// Reads a part of a node: the offset, and the number of bytes. Fewer at the end of the node.
pub(crate) type Read<'a> = &'a dyn Fn(u64, u64) -> Result<Secret, OpenError>;

fn not_valid(error: &dyn Display) -> OpenError {
    OpenError::new(error.to_string())
}

/// A LUKS header in a node, with a loop for it.
pub(super) struct Volume {
    event_loop: EventLoop,
    node: Arc<dyn BlockNode>,
    /// Where the header is: bytes.
    pub(super) start: u64,
}

impl Volume {
    /// Of a node that begins with a header.
    pub(super) fn new(node: Arc<dyn BlockNode>) -> Result<Volume, OpenError> {
        let config = LoopConfig { name: "luks".into(), entries: 32, ..LoopConfig::default() };
        let event_loop = EventLoop::new(config).map_err(|error| {
            OpenError::io(format!("Could not read node '{}'", node.name()), &error.error)
        })?;
        Ok(Volume { event_loop, node, start: 0 })
    }

    pub(super) fn header(&self) -> Result<Header, OpenError> {
        Header::read(&self.read(self.start, ALIGN)?).map_err(|error| not_valid(&error))
    }

    /// Finds the key with a slot's password. `None`: the slot has another one.
    pub(super) fn key(
        &self,
        header: &Header,
        index: usize,
        password: &[u8],
    ) -> Result<Option<VolumeKey>, OpenError> {
        let Some(slot) = header.slots.get(index).filter(|slot| slot.active) else {
            return Ok(None);
        };
        let (at, len) = header.stripes(slot);
        let stripes = self.read(self.start + at, len as u64)?;
        if stripes.len() < len {
            return Err(not_valid(&"LUKS header is not valid: the disk ends within a key slot"));
        }
        Ok(VolumeKey::unlock(header, slot, stripes, password))
    }

    /// Finds the key with a password.
    pub(super) fn unlock(&self, header: &Header, password: &[u8]) -> Result<VolumeKey, OpenError> {
        for index in header.active() {
            if let Some(key) = self.key(header, index, password)? {
                return Ok(key);
            }
        }
        Err(OpenError::new("Invalid password, cannot unlock any keyslot"))
    }

    /// Carries out the steps of a change.
    pub(super) fn carry_out(&self, steps: Vec<Step>) -> Result<(), OpenError> {
        for step in steps {
            match step {
                Step::Stripes(at, bytes) => self.write(self.start + at, &bytes)?,
                Step::Header(bytes) => {
                    let len = HEADER_LEN.next_multiple_of(SECTOR) as u64;
                    let mut sectors = self.read(self.start, len)?;
                    let Some(place) = sectors.get_mut(..HEADER_LEN) else {
                        return Err(not_valid(
                            &"LUKS header is not valid: the disk ends within it",
                        ));
                    };
                    place.copy_from_slice(&bytes[..]);
                    self.write(self.start, &sectors)?;
                }
                Step::Flush => drop(self.run(Op::Flush, 0, 0, IoBufs::new())?),
            }
        }
        Ok(())
    }

    /// Reads `len` bytes, or fewer at the end of the node.
    pub(super) fn read(&self, at: u64, len: u64) -> Result<Secret, OpenError> {
        let end = at.saturating_add(len.next_multiple_of(SECTOR as u64));
        let len = end.min(self.node.geometry().size).saturating_sub(at);
        if len == 0 {
            return Ok(Secret::default());
        }
        let bufs = self.run(Op::Read, at, len, memory(len)?)?;
        let mut bytes = Secret::new(vec![0; bufs.len()]);
        bufs.copy_out(0, &mut bytes);
        Ok(bytes)
    }

    fn write(&self, at: u64, bytes: &Secret) -> Result<(), OpenError> {
        let mut bufs = memory(bytes.len() as u64)?;
        bufs.copy_in(0, bytes);
        self.run(Op::Write { fua: false }, at, bytes.len() as u64, bufs).map(drop)
    }

    fn run(&self, op: Op, at: u64, len: u64, bufs: IoBufs) -> Result<IoBufs, OpenError> {
        let name = self.node.name();
        let failed = |error: &std::io::Error| match op {
            Op::Read => {
                OpenError::io(format!("Could not read LUKS header of node '{name}'"), error)
            }
            Op::Write { .. }
            | Op::WriteZeroes { .. }
            | Op::Flush
            | Op::Discard
            | Op::BlockStatus => {
                OpenError::io(format!("Could not write LUKS header of node '{name}'"), error)
            }
        };
        let channel = self.node.clone().open_channel(&self.event_loop);
        let channel = channel.map_err(|error| failed(&error))?;
        let (result, bufs) = self
            .event_loop
            .block_on(async move { submit(&channel, op, at, len, bufs).await })
            .map_err(|error| failed(&error))?;
        result.map_err(|errno| failed(&errno.into()))?;
        Ok(bufs)
    }
}

fn memory(len: u64) -> Result<IoBufs, OpenError> {
    let bufs = usize::try_from(len).ok().and_then(|len| AlignedBuf::io_bufs(len, ALIGN as usize));
    bufs.ok_or_else(|| OpenError::os("reading the LUKS header failed", Errno::ENOMEM))
}

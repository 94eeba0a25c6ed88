//! The protocol between a client and the device, without I/O: a message is answered, or becomes an
//! action.

#![forbid(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use devices::pci::{BARS, CONFIG_SPACE_SIZE, ConfigSpace};
use nix::errno::Errno;

use super::device::{Device, MappedArea};
use super::hand_over;
use super::interrupts::{IRQ_KINDS, Interrupts, Unmasker};
use super::memory::MAX_DMA_MAPS;
use super::wire::message::{number, region_write};
use super::wire::{DmaMap, DmaUnmap, Message, RegionInfo, RegionRead, RegionWrite, Reply};
use crate::vhost_user::handover::Saved;

/// Regions of a PCI device (linux/vfio.h): the BARs, the ROM, the configuration space, VGA.
const ROM: usize = BARS;
pub(super) const CONFIG: usize = 7;
const REGIONS: usize = 9;
/// Bytes of the configuration space of PCI Express. Beyond that of a conventional function there are only ones.
const EXTENDED_CONFIG_SIZE: u64 = 4096;

/// The major version of the protocol.
const MAJOR: u16 = 0;

/// The result of a message.
#[derive(Debug)]
pub enum MessageResult {
    /// A reply.
    Reply(Reply),
    /// A reply with a descriptor.
    ReplyWith(Reply, OwnedFd),
    /// Map memory.
    Map(DmaMap),
    /// Unmap memory.
    Unmap(DmaUnmap),
    /// Unmask the level interrupt by this eventfd from now on.
    Unmasker(Unmasker),
    /// The device was reset: end the requests that it has begun, and reply then.
    Settle(Reply),
}

/// A client's session with a device.
pub struct Session<'a> {
    device: &'a dyn Device,
    interrupts: Arc<Interrupts>,
    config: ConfigSpace,
    has_version: bool,
}

/// The state of a session, without that of the device and its interrupts.
pub(super) struct SessionState {
    config: ConfigSpace,
    has_version: bool,
}

impl<'a> Session<'a> {
    /// Returns a new session.
    pub fn new(device: &'a dyn Device, interrupts: Arc<Interrupts>) -> Self {
        let config = ConfigSpace::new(device.description());
        Session { device, interrupts, config, has_version: false }
    }

    /// A session that goes on with the state of another.
    pub(super) fn with_state(
        device: &'a dyn Device,
        interrupts: Arc<Interrupts>,
        state: SessionState,
    ) -> Self {
        let SessionState { config, has_version } = state;
        Session { device, interrupts, config, has_version }
    }

    /// The state, for [`with_state`](Self::with_state).
    pub(super) fn into_state(self) -> SessionState {
        SessionState { config: self.config, has_version: self.has_version }
    }

    /// The messages that bring a new session, and the interrupts of its device, to this state.
    ///
    /// # Errors
    ///
    /// As of fcntl(2).
    pub(super) fn save(&self) -> io::Result<Vec<Saved>> {
        if !self.has_version {
            return Ok(Vec::new());
        }
        let version = [MAJOR, 0].map(u16::to_ne_bytes).concat();
        let mut config = [0; CONFIG_SPACE_SIZE];
        self.config.read(0, &mut config);
        let mut messages = vec![
            hand_over::message(number::VERSION, version, None)?,
            hand_over::message(number::REGION_WRITE, region_write(CONFIG as u32, &config), None)?,
        ];
        messages.extend(self.interrupts.save()?);
        if let Some(MappedArea { file, .. }) = self.device.mapped_area()? {
            messages.push(hand_over::mapped_area(file));
        }
        Ok(messages)
    }

    /// Returns whether a version was negotiated.
    pub fn has_version(&self) -> bool {
        self.has_version
    }

    /// Handles a message.
    ///
    /// # Errors
    ///
    /// The error for the client.
    pub fn step(&mut self, message: Message<'_>) -> Result<MessageResult, Errno> {
        if self.has_version == matches!(message, Message::Version { .. }) {
            return Err(Errno::EINVAL);
        }
        let reply = match message {
            Message::Version { major: MAJOR, minor: _ } => {
                self.has_version = true;
                Reply::Version { max_dma_maps: MAX_DMA_MAPS }
            }
            Message::Version { major: _, minor: _ } => return Err(Errno::EINVAL),
            Message::DmaMap(map) => return Ok(MessageResult::Map(map)),
            Message::DmaUnmap(unmap) => return Ok(MessageResult::Unmap(unmap)),
            Message::DeviceInfo => Reply::DeviceInfo { regions: REGIONS as u32, irqs: IRQ_KINDS },
            Message::RegionInfo { index, room } => {
                let size = self.region_size(index).ok_or(Errno::EINVAL)?;
                let area = self.device.mapped_area().map_err(|_| Errno::EMFILE)?;
                let mut info = RegionInfo { index, size, area: None, room };
                match area.filter(|area| area.bar == index as usize) {
                    Some(MappedArea { offset, size, file, .. }) => {
                        info.area = Some((offset, size));
                        return Ok(MessageResult::ReplyWith(Reply::RegionInfo(info), file));
                    }
                    None => Reply::RegionInfo(info),
                }
            }
            Message::IrqInfo(index) => {
                Reply::IrqInfo(self.interrupts.info(index).ok_or(Errno::EINVAL)?)
            }
            Message::SetIrqs(irqs) => match self.interrupts.set(irqs)? {
                Some(unmasker) => return Ok(MessageResult::Unmasker(unmasker)),
                None => Reply::Done,
            },
            Message::RegionRead(RegionRead { region, offset, count }) => {
                self.check(region, offset, count)?;
                let mut data = vec![0; count];
                match region as usize {
                    CONFIG => self.config.read(offset, &mut data),
                    bar => self.device.read_bar(bar, offset, &mut data),
                }
                Reply::RegionData { region, offset, data }
            }
            Message::RegionWrite(write) => {
                let was_reset = self.write(write)?;
                let RegionWrite { region, offset, data } = write;
                let reply = Reply::RegionWritten { region, offset, count: data.len() };
                return Ok(if was_reset {
                    MessageResult::Settle(reply)
                } else {
                    MessageResult::Reply(reply)
                });
            }
            Message::RegionWriteMulti(writes) => {
                let mut was_reset = false;
                for write in writes.iter() {
                    was_reset |= self.write(write)?;
                }
                let reply = Reply::RegionsWritten(writes.len());
                return Ok(if was_reset {
                    MessageResult::Settle(reply)
                } else {
                    MessageResult::Reply(reply)
                });
            }
            Message::Reset => {
                self.reset();
                return Ok(MessageResult::Settle(Reply::Done));
            }
            // The kernel's answer for features that a device lacks.
            Message::Feature => return Err(Errno::ENOTTY),
            Message::Unknown(_) => return Err(Errno::ENOSYS),
        };
        Ok(MessageResult::Reply(reply))
    }

    /// Size of a region in bytes; `None`: PCI devices have no such region.
    fn region_size(&self, index: u32) -> Option<u64> {
        match index as usize {
            bar @ 0..BARS => Some(self.device.description().bar_size(bar)),
            CONFIG => Some(CONFIG_SPACE_SIZE as u64),
            ROM..REGIONS => Some(0),
            _ => None,
        }
    }

    /// Checks that an access lies in a region of the device.
    fn check(&self, region: u32, offset: u64, count: usize) -> Result<(), Errno> {
        let size = match region as usize {
            // Cloud Hypervisor passes on what guests read beyond the space of a conventional function, and waits
            // for data: an error reply has none.
            CONFIG => EXTENDED_CONFIG_SIZE,
            _ => self.region_size(region).filter(|size| *size > 0).ok_or(Errno::EINVAL)?,
        };
        match offset.checked_add(count as u64) {
            Some(end) if end <= size => Ok(()),
            Some(_) | None => Err(Errno::EINVAL),
        }
    }

    fn reset(&mut self) {
        self.config.reset();
        self.device.reset();
    }

    /// Writes to a region. Returns whether the device was reset by it.
    fn write(&mut self, write: RegionWrite<'_>) -> Result<bool, Errno> {
        let RegionWrite { region, offset, data } = write;
        self.check(region, offset, data.len())?;
        match region as usize {
            CONFIG => {
                let is_reset = self.config.write(offset, data);
                if is_reset {
                    self.reset();
                }
                Ok(is_reset)
            }
            bar => {
                self.device.write_bar(bar, offset, data);
                Ok(false)
            }
        }
    }
}

//! The protocol between a client and the device, without I/O: a message is answered, or becomes an
//! action.

#![forbid(unsafe_code)]

use std::sync::Arc;

use devices::pci::{BARS, CONFIG_SPACE_SIZE, ConfigSpace};
use nix::errno::Errno;

use super::device::Device;
use super::interrupts::{IRQ_KINDS, Interrupts, Unmasker};
use super::memory::MAX_DMA_MAPS;
use super::wire::{DmaMap, DmaUnmap, Message, RegionInfo, RegionRead, RegionWrite, Reply};

/// Regions of a PCI device (linux/vfio.h): the BARs, the ROM, the configuration space, VGA.
const ROM: usize = BARS;
const CONFIG: usize = 7;
const REGIONS: usize = 9;

/// The major version of the protocol.
const MAJOR: u16 = 0;

/// The result of a message.
#[derive(Debug)]
pub enum Step {
    /// A reply.
    Reply(Reply),
    /// Map memory.
    Map(DmaMap),
    /// Unmap memory.
    Unmap(DmaUnmap),
    /// Unmask the level interrupt by this eventfd from now on.
    Unmasker(Unmasker),
    /// The device was reset: end the requests that it has begun.
    Settle,
}

/// A client's session with a device.
pub struct Session<'a> {
    device: &'a dyn Device,
    interrupts: Arc<Interrupts>,
    config: ConfigSpace,
    has_version: bool,
}

impl<'a> Session<'a> {
    /// A new session.
    pub fn new(device: &'a dyn Device, interrupts: Arc<Interrupts>) -> Self {
        let config = ConfigSpace::new(device.description());
        Session { device, interrupts, config, has_version: false }
    }

    /// Whether a version was negotiated.
    pub fn has_version(&self) -> bool {
        self.has_version
    }

    /// Handles a message.
    ///
    /// # Errors
    ///
    /// The error for the client.
    pub fn step(&mut self, message: Message<'_>) -> Result<Step, Errno> {
        if self.has_version == matches!(message, Message::Version { .. }) {
            return Err(Errno::EINVAL);
        }
        let reply = match message {
            Message::Version { major: MAJOR, minor: _ } => {
                self.has_version = true;
                Reply::Version { max_dma_maps: MAX_DMA_MAPS }
            }
            Message::Version { major: _, minor: _ } => return Err(Errno::EINVAL),
            Message::DmaMap(map) => return Ok(Step::Map(map)),
            Message::DmaUnmap(unmap) => return Ok(Step::Unmap(unmap)),
            Message::DeviceInfo => Reply::DeviceInfo { regions: REGIONS as u32, irqs: IRQ_KINDS },
            Message::RegionInfo(index) => {
                let size = self.region_size(index).ok_or(Errno::EINVAL)?;
                Reply::RegionInfo(RegionInfo { index, size })
            }
            Message::IrqInfo(index) => {
                Reply::IrqInfo(self.interrupts.info(index).ok_or(Errno::EINVAL)?)
            }
            Message::SetIrqs(irqs) => match self.interrupts.set(irqs)? {
                Some(unmasker) => return Ok(Step::Unmasker(unmasker)),
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
                self.write(write)?;
                let RegionWrite { region, offset, data } = write;
                Reply::RegionWritten { region, offset, count: data.len() }
            }
            Message::RegionWriteMulti(writes) => {
                for write in writes.iter() {
                    self.write(write)?;
                }
                Reply::RegionsWritten(writes.len())
            }
            Message::Reset => {
                self.config.reset();
                self.device.reset();
                return Ok(Step::Settle);
            }
            // The kernel's answer for features that a device lacks.
            Message::Feature => return Err(Errno::ENOTTY),
            Message::Unknown(_) => return Err(Errno::ENOSYS),
        };
        Ok(Step::Reply(reply))
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
        let size = self.region_size(region).filter(|size| *size > 0).ok_or(Errno::EINVAL)?;
        match offset.checked_add(count as u64) {
            Some(end) if end <= size => Ok(()),
            Some(_) | None => Err(Errno::EINVAL),
        }
    }

    fn write(&mut self, write: RegionWrite<'_>) -> Result<(), Errno> {
        let RegionWrite { region, offset, data } = write;
        self.check(region, offset, data.len())?;
        match region as usize {
            CONFIG => self.config.write(offset, data),
            bar => self.device.write_bar(bar, offset, data),
        }
        Ok(())
    }
}

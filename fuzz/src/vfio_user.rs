//! A hostile vfio-user client before a whole session: messages in a row, the guest's memory, interrupts and an
//! AHCI controller behind them.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use devices::ahci::{ABAR_SIZE, Ahci};
use devices::pci::{Bar, Description, FunctionReset, Identity, InterruptPin, Msi, MsiX};
use exports::vfio_user::device::{Device, Flushed, HandsOver, MappedArea, Settled};
use exports::vfio_user::interrupts::Interrupts;
use exports::vfio_user::memory::Memory;
use exports::vfio_user::session::{MessageResult, Session};
use exports::vfio_user::wire::{HEADER_LEN, Header, MAX_DATA, MAX_PAYLOAD, Message, Reply, parse};
use guest_memory::GuestMemory;
use guest_memory::test_util::memfd_region;
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::input::Input;

/// The most messages of an input.
const MESSAGES: usize = 64;
/// Bytes of a memfd that stands for memory.
const FILE: u64 = 1 << 16;

const DESCRIPTION: Description = Description {
    identity: Identity {
        vendor: 1,
        device: 2,
        subsystem_vendor: 3,
        subsystem: 4,
        class: [1, 6, 1],
        revision: 0,
    },
    bars: [
        Some(Bar::Memory64 { size: 1 << 40 }),
        None,
        None,
        None,
        None,
        Some(Bar::Memory32 { size: ABAR_SIZE as u32 }),
    ],
    pin: Some(InterruptPin::A),
    msi: Some(Msi { at: 0x80 }),
    msix: Some(MsiX { at: 0x40, vectors: 4, bar: 0, table: 0x2000, pending: 0x3000 }),
    reset: Some(FunctionReset { at: 0x50 }),
    vendor_register: None,
};

struct Controller {
    ahci: Arc<Ahci>,
}

impl Device for Controller {
    fn description(&self) -> &Description {
        &DESCRIPTION
    }

    fn read_bar(&self, bar: usize, offset: u64, data: &mut [u8]) {
        check(bar, offset, data.len());
        for (at, byte) in (offset..).zip(data) {
            *byte = self.ahci.mmio_read(at, 1) as u8;
        }
    }

    fn write_bar(&self, bar: usize, offset: u64, data: &[u8]) {
        check(bar, offset, data.len());
        for (at, byte) in (offset..).zip(data) {
            self.ahci.mmio_write(at, 1, (*byte).into());
        }
    }

    /// Registers of BAR 0 that clients map.
    fn mapped_area(&self) -> io::Result<Option<MappedArea>> {
        let file = memfd_region(0, FILE).map_err(io::Error::other)?.fd;
        Ok(Some(MappedArea { bar: 0, offset: 0x1000, size: 0x1000, file }))
    }

    fn renew_mapped_area(&self) -> io::Result<()> {
        Ok(())
    }

    fn set_memory(&self, memory: Arc<GuestMemory>) {
        self.ahci.set_memory(memory);
    }

    fn reset(&self) {
        self.ahci.reset();
    }

    fn settle(&self) -> Settled {
        unreachable!("nothing is begun")
    }

    fn flush(&self) -> Flushed {
        unreachable!("no message flushes")
    }

    fn hands_over(&self) -> &dyn HandsOver {
        unreachable!("nothing is handed over")
    }
}

fn check(bar: usize, offset: u64, len: usize) {
    let end = offset.checked_add(len as u64).expect("a range");
    assert!(matches!(bar, 0 | 5) && end <= DESCRIPTION.bar_size(bar) && len <= MAX_DATA);
}

/// Plays the client.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let interrupts = Arc::new(Interrupts::new(&DESCRIPTION));
    let (line, message) = (interrupts.clone(), interrupts.clone());
    let ahci = Ahci::with_messages(
        1,
        Arc::new(GuestMemory::new()),
        move |level| line.set_level(level),
        move || message.send(0),
    );
    let device = Controller { ahci: ahci.expect("a controller") };
    let mut session = Session::new(&device, interrupts.clone());
    let mut memory = Memory::new(1 << 40);
    for _ in 0..MESSAGES {
        if input.is_empty() {
            return;
        }
        let what = input.u8();
        if what & 0x80 != 0 {
            interrupts.set_level(what & 1 != 0);
            interrupts.send(usize::from(what >> 1 & 7));
            interrupts.unmask();
            continue;
        }
        let (command, len) = (u16::from(input.u8()), usize::from(input.u8()));
        let payload: Vec<u8> = (0..len).map(|_| input.u8()).collect();
        let fds: Vec<OwnedFd> = (0..what & 3).map(|_| descriptor(what)).collect();
        let header = Header { id: 1, command, no_reply: false, payload_len: len };
        let Ok(message) = Message::parse(command, &payload, fds) else { continue };
        let had_version = session.has_version();
        let is_version = matches!(message, Message::Version { .. });
        let Ok(step) = session.step(message) else { continue };
        assert!(had_version != is_version, "versions come first, and once");
        let reply = match step {
            MessageResult::Reply(reply) => reply,
            MessageResult::Map(map) => {
                let range = map.range;
                let Ok(now) = memory.map(map) else { continue };
                let regions = now.regions().iter();
                let inside = regions.filter(|region| region.guest_addr() == range.address());
                assert!(inside.count() <= 1);
                device.set_memory(now);
                Reply::Done
            }
            MessageResult::Unmap(unmap) => {
                let Ok(now) = memory.unmap(unmap) else { continue };
                assert!(unmap.range.is_some() || now.regions().is_empty());
                device.set_memory(now);
                Reply::DmaUnmapped(unmap)
            }
            MessageResult::ReplyWith(reply, _) => reply,
            MessageResult::Unmasker(_) => Reply::Done,
            MessageResult::Settle(reply) => reply,
        };
        let bytes = reply.encode(&header);
        assert!(bytes.len() <= HEADER_LEN + MAX_PAYLOAD);
        let said = u32::from_ne_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        assert_eq!(said as usize, bytes.len());
        // A reply is no command.
        parse(&bytes, Vec::new()).expect_err("a reply");
    }
}

/// An eventfd, or memory.
fn descriptor(what: u8) -> OwnedFd {
    if what & 4 != 0 {
        memfd_region(0, FILE).expect("a memfd").fd
    } else {
        let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
        EventFd::from_flags(flags).expect("an eventfd").into()
    }
}

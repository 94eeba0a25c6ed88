//! AHCI over vfio-user: a block node offered to a virtual machine as a SATA drive.

#![forbid(unsafe_code)]

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use block::flush::flush;
use block::node::{BlockNode, Channel};
use devices::ahci::{ABAR_SIZE, Ahci, Drive, DriveConfig};
use devices::pci::{Bar, Description, Identity, InterruptPin, Msi};
use event_loop::{EventLoop, LoopHandle, mailbox, oneshot};
use guest_memory::GuestMemory;
use nix::errno::Errno;
use stats::InFlight;
use stats::QueueStats;

use super::device::{Device, Ended, Served};
use super::interrupts::Interrupts;
use crate::vhost_user::ExportError;

/// The controller of Intel's ICH9, which drivers of all systems know.
const DESCRIPTION: Description = Description {
    identity: Identity {
        vendor: 0x8086,
        device: 0x2922,
        // Red Hat's, as of other emulated devices.
        subsystem_vendor: 0x1af4,
        subsystem: 0x1100,
        // Mass storage, SATA, AHCI.
        class: [0x01, 0x06, 0x01],
        revision: 2,
    },
    bars: [None, None, None, None, None, Some(Bar::Memory32 { size: ABAR_SIZE as u32 })],
    pin: Some(InterruptPin::A),
    msi: Some(Msi { at: 0x80 }),
    msix: None,
};

/// The BAR with the controller's registers (AHCI 1.3.1, section 2.1.11).
const ABAR: usize = 5;

/// Most bytes of a register access.
const ACCESS: usize = 8;

type Job = Box<dyn FnOnce(&OnLoop) + Send>;

/// A controller with one drive.
pub(super) struct AhciDevice {
    ahci: Arc<Ahci>,
    stats: Vec<Arc<QueueStats>>,
    jobs: mailbox::Sender<Job>,
    gone: Cell<Option<oneshot::Receiver<()>>>,
}

/// The drive on the I/O thread.
struct OnLoop {
    drive: Rc<Drive>,
    channel: Rc<dyn Channel>,
}

/// What a drive is made of, beside its node.
pub(super) struct DriveOptions {
    pub(super) writable: bool,
    pub(super) writethrough: bool,
    pub(super) serial: String,
}

impl AhciDevice {
    /// A controller without memory, whose drive works on `io_thread`.
    ///
    /// # Errors
    ///
    /// The node cannot be used from that thread.
    pub(super) async fn start(
        io_thread: &LoopHandle,
        node: Arc<dyn BlockNode>,
        options: DriveOptions,
    ) -> Result<(Self, Arc<Interrupts>), ExportError> {
        let interrupts = Arc::new(Interrupts::new(&DESCRIPTION));
        let (line, message) = (interrupts.clone(), interrupts.clone());
        let ahci = Ahci::with_messages(
            1,
            Arc::new(GuestMemory::new()),
            move |level| line.set_level(level),
            move || message.send(0),
        )
        .map_err(|error| ExportError::Config(error.to_string()))?;
        let (jobs, mut receiver) = mailbox::channel::<Job>();
        let (answer, attached) = oneshot::channel();
        let (is_gone, gone) = oneshot::channel();
        let controller = ahci.clone();
        io_thread.spawn(move |event_loop| {
            let on_loop = match OnLoop::attach(event_loop, &controller, node, options) {
                Ok(on_loop) => on_loop,
                Err(error) => return answer.send(Err(error)),
            };
            answer.send(Ok(on_loop.drive.stats().clone()));
            event_loop.spawn(async move {
                while let Some(job) = receiver.receive().await {
                    job(&on_loop);
                }
                let (detached, is_detached) = oneshot::channel();
                on_loop.drive.detach(|| detached.send(()));
                // The channel is dropped after its last answer.
                let _ = is_detached.await;
                drop(on_loop);
                is_gone.send(());
            });
        })?;
        let stats = attached
            .await?
            .map_err(|error| ExportError::Attach { io_thread: io_thread.name().into(), error })?;
        Ok((AhciDevice { ahci, stats: vec![stats], jobs, gone: Cell::new(Some(gone)) }, interrupts))
    }

    fn ask<R: Send + 'static>(
        &self,
        job: impl FnOnce(&OnLoop, oneshot::Sender<R>) + Send + 'static,
    ) -> oneshot::Receiver<R> {
        let (sender, receiver) = oneshot::channel();
        // A job that cannot be sent is dropped, its sender with it; the receiver then says so.
        let _ = self.jobs.send(Box::new(move |on_loop| job(on_loop, sender)));
        receiver
    }
}

impl OnLoop {
    fn attach(
        event_loop: &EventLoop,
        ahci: &Arc<Ahci>,
        node: Arc<dyn BlockNode>,
        options: DriveOptions,
    ) -> std::io::Result<Self> {
        let DriveOptions { writable, writethrough, serial } = options;
        let geometry = node.geometry();
        let channel = node.open_channel(event_loop)?;
        let config = DriveConfig {
            geometry,
            writable,
            write_cache: !writethrough,
            serial,
            model: "ringmill".into(),
        };
        let drive = Drive::attach(event_loop, ahci, 0, channel.clone(), config)
            .map_err(std::io::Error::other)?;
        Ok(OnLoop { drive, channel })
    }
}

impl Device for AhciDevice {
    fn description(&self) -> &Description {
        &DESCRIPTION
    }

    fn read_bar(&self, bar: usize, offset: u64, data: &mut [u8]) {
        debug_assert_eq!(bar, ABAR);
        for (at, piece) in (offset..).step_by(ACCESS).zip(data.chunks_mut(ACCESS)) {
            let value = self.ahci.mmio_read(at, piece.len()).to_le_bytes();
            piece.iter_mut().zip(value).for_each(|(to, from)| *to = from);
        }
    }

    fn write_bar(&self, bar: usize, offset: u64, data: &[u8]) {
        debug_assert_eq!(bar, ABAR);
        for (at, piece) in (offset..).step_by(ACCESS).zip(data.chunks(ACCESS)) {
            let mut value = [0; ACCESS];
            value.iter_mut().zip(piece).for_each(|(to, from)| *to = *from);
            self.ahci.mmio_write(at, piece.len(), u64::from_le_bytes(value));
        }
    }

    fn set_memory(&self, memory: Arc<GuestMemory>) {
        self.ahci.set_memory(memory);
    }

    fn reset(&self) {
        self.ahci.reset();
    }

    fn settle(&self) -> oneshot::Receiver<()> {
        self.ask(|on_loop, answer| on_loop.drive.settle(|| answer.send(())))
    }

    fn flush(&self) -> oneshot::Receiver<Result<(), Errno>> {
        self.ask(|on_loop, answer| {
            let channels = std::iter::once(&on_loop.channel);
            flush(channels, Box::new(|result| answer.send(result)));
        })
    }
}

impl Served for AhciDevice {
    fn stats(&self) -> &[Arc<QueueStats>] {
        &self.stats
    }

    fn in_flight(&self) -> oneshot::Receiver<Vec<(u64, InFlight)>> {
        self.ask(|on_loop, answer| {
            let of_port = |request| (0, request);
            answer.send(on_loop.drive.in_flight().into_iter().map(of_port).collect());
        })
    }

    fn end(self: Rc<Self>) -> Ended {
        let gone = self.gone.take();
        drop(self);
        Box::pin(async move {
            // A drive whose loop is gone is gone with it.
            if let Some(gone) = gone {
                let _ = gone.await;
            }
        })
    }
}

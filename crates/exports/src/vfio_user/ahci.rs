//! AHCI over vfio-user: block nodes offered to a virtual machine as SATA drives.

#![forbid(unsafe_code)]

use std::cell::Cell;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use block::flush::flush;
use block::node::{BlockNode, Channel};
use devices::ahci::{ABAR_SIZE, Ahci, Drive, DriveConfig};
use devices::pci::{Bar, Description, FunctionReset, Identity, InterruptPin, Msi, VendorRegister};
use event_loop::{EventLoop, LoopGone, LoopHandle, mailbox, oneshot};
use guest_memory::GuestMemory;
use stats::{InFlight, QueueStats};

use super::device::{
    AllInFlight, Device, Ended, Flushed, HandsOver, MappedArea, Paused, Restore, Served, Settled,
};
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
    // As ICH9 has them (its data sheet, 14.1.34 and 14.1.29): the reset capability, and Port Control and Status. There,
    // drivers of AHCI set the bits of ports 0 to 5, which have no effect.
    reset: Some(FunctionReset { at: 0xb0 }),
    vendor_register: Some(VendorRegister { at: 0x92, value: 0x3f, writable: 0x3f }),
};

/// The BAR with the controller's registers (AHCI 1.3.1, section 2.1.11).
const ABAR: usize = 5;

/// The most characters of a serial number (ATA8-ACS, IDENTIFY DEVICE).
const MAX_SERIAL: usize = 20;

/// Most bytes of a register access.
const ACCESS: usize = 8;

type Job = Box<dyn FnOnce(&OnLoop) + Send>;

/// A controller with a drive at each port.
pub(super) struct AhciDevice {
    ahci: Arc<Ahci>,
    stats: Vec<Arc<QueueStats>>,
    drives: Vec<DriveEnd>,
    threads: usize,
}

/// The control loop's end of a drive.
struct DriveEnd {
    jobs: mailbox::Sender<Job>,
    gone: Cell<Option<oneshot::Receiver<()>>>,
}

/// The drive on its I/O thread.
struct OnLoop {
    drive: Rc<Drive>,
    channel: Rc<dyn Channel>,
}

/// What a controller is made of, beside its nodes.
pub(super) struct DriveOptions {
    pub(super) writable: bool,
    pub(super) writethrough: bool,
    pub(super) serial: String,
}

impl DriveOptions {
    /// The serial number of a drive. Guests refuse a second one with the same.
    fn serial_of(&self, drive: usize) -> String {
        if drive == 0 {
            return self.serial.clone();
        }
        let suffix = format!("-{drive}");
        let kept = MAX_SERIAL - suffix.len();
        self.serial.chars().take(kept).chain(suffix.chars()).collect()
    }
}

impl AhciDevice {
    /// A controller without memory, with a drive for each node, at port 0 and on. The drives work on these threads in turn.
    ///
    /// # Errors
    ///
    /// There are too many nodes, or a node cannot be used from its thread.
    pub(super) async fn start(
        io_threads: &[LoopHandle],
        nodes: Vec<Arc<dyn BlockNode>>,
        options: DriveOptions,
    ) -> Result<(Self, Arc<Interrupts>), ExportError> {
        let interrupts = Arc::new(Interrupts::new(&DESCRIPTION));
        let (line, message) = (interrupts.clone(), interrupts.clone());
        let ahci = Ahci::with_messages(
            nodes.len(),
            Arc::new(GuestMemory::new()),
            move |level| line.set_level(level),
            move || message.send(0),
        )
        .map_err(|error| ExportError::Config(error.to_string()))?;
        let (stats, drives) = (Vec::new(), Vec::new());
        let mut device = AhciDevice { ahci, stats, drives, threads: io_threads.len() };
        for (port, (node, io_thread)) in
            nodes.into_iter().zip(io_threads.iter().cycle()).enumerate()
        {
            if let Err(error) = device.attach(port, io_thread, node, &options).await {
                // The drives before this one have channels of their nodes.
                Rc::new(device).end().await;
                return Err(error);
            }
        }
        Ok((device, interrupts))
    }

    /// Attaches the drive of the next port.
    async fn attach(
        &mut self,
        port: usize,
        io_thread: &LoopHandle,
        node: Arc<dyn BlockNode>,
        options: &DriveOptions,
    ) -> Result<(), ExportError> {
        let (jobs, mut receiver) = mailbox::channel::<Job>();
        let (answer, attached) = oneshot::channel();
        let (is_gone, gone) = oneshot::channel();
        let controller = self.ahci.clone();
        let config = DriveConfig {
            geometry: node.geometry(),
            writable: options.writable,
            write_cache: !options.writethrough,
            serial: options.serial_of(port),
            model: "ringmill".into(),
        };
        io_thread.spawn(move |event_loop| {
            let on_loop = match OnLoop::attach(event_loop, &controller, port, node, config) {
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
        self.stats.push(stats);
        self.drives.push(DriveEnd { jobs, gone: Cell::new(Some(gone)) });
        Ok(())
    }

    /// Has each drive do something. Completes with the answers of all, or with an error if a loop is gone.
    fn ask_all<R, F>(&self, job: F) -> impl Future<Output = Result<Vec<R>, LoopGone>> + use<R, F>
    where
        R: Send + 'static,
        F: Fn(&OnLoop, oneshot::Sender<R>) + Clone + Send + 'static,
    {
        let ask = |drive: &DriveEnd| {
            let (sender, receiver) = oneshot::channel();
            let job = job.clone();
            // A job that cannot be sent is dropped, its sender with it; the receiver then says so.
            let _ = drive.jobs.send(Box::new(move |on_loop| job(on_loop, sender)));
            receiver
        };
        let answers = oneshot::all(self.drives.iter().map(ask).collect());
        async move { answers.await.into_iter().collect() }
    }
}

impl OnLoop {
    fn attach(
        event_loop: &EventLoop,
        ahci: &Arc<Ahci>,
        port: usize,
        node: Arc<dyn BlockNode>,
        config: DriveConfig,
    ) -> std::io::Result<Self> {
        let channel = node.open_channel(event_loop)?;
        let drive = Drive::attach(event_loop, ahci, port, channel.clone(), config)
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

    fn mapped_area(&self) -> io::Result<Option<MappedArea>> {
        Ok(None)
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
        let settled = self.ask_all(|on_loop, answer| on_loop.drive.settle(|| answer.send(())));
        Box::pin(async move { settled.await.map(drop) })
    }

    fn flush(&self) -> Flushed {
        let flushed = self.ask_all(|on_loop, answer| {
            let channels = std::iter::once(&on_loop.channel);
            flush(channels, Box::new(|result| answer.send(result)));
        });
        Box::pin(async move { Ok(flushed.await?.into_iter().collect()) })
    }

    fn hands_over(&self) -> &dyn HandsOver {
        self
    }
}

impl HandsOver for AhciDevice {
    fn pause(&self) -> Paused {
        let paused = self.ask_all(|on_loop, answer| on_loop.drive.pause(|| answer.send(())));
        let ahci = self.ahci.clone();
        Box::pin(async move { paused.await.map(|_| ahci.save()) })
    }

    fn resume(&self) {
        let resumed = self.ask_all(|on_loop, answer| {
            on_loop.drive.resume();
            answer.send(());
        });
        // The jobs are sent, and nothing waits for their ends.
        drop(resumed);
    }

    fn check(&self, state: &[u8]) -> Result<Restore, String> {
        let restored = self.ahci.check(state).map_err(|error| error.to_string())?;
        let ahci = self.ahci.clone();
        Ok(Box::new(move || ahci.restore(&restored)))
    }

    fn adopt_mapped_area(&self, _file: OwnedFd) -> Result<(), String> {
        Err("no registers are mapped".to_owned())
    }
}

impl Served for AhciDevice {
    fn stats(&self) -> &[Arc<QueueStats>] {
        &self.stats
    }

    fn in_flight(&self) -> AllInFlight {
        let asked = self.ask_all(|on_loop, answer| answer.send(on_loop.drive.in_flight()));
        Box::pin(async move {
            // A drive has no requests after its loop has ended.
            let drives = (0..).zip(asked.await.unwrap_or_default());
            let of_drive = |(drive, requests): (u64, Vec<InFlight>)| {
                requests.into_iter().map(move |request| (drive, request))
            };
            drives.flat_map(of_drive).collect()
        })
    }

    fn thread_of(&self, drive: usize) -> usize {
        drive % self.threads
    }

    fn end(self: Rc<Self>) -> Ended {
        let gone: Vec<_> = self.drives.iter().filter_map(|drive| drive.gone.take()).collect();
        drop(self);
        Box::pin(async move {
            for gone in gone {
                // An error means that the loop has ended, and the drive with it.
                let _ = gone.await;
            }
        })
    }
}

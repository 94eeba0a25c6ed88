//! NVMe over vfio-user: block nodes offered to a virtual machine as namespaces of an NVMe controller.

#![forbid(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use block::node::{BlockNode, Watcher};
use devices::nvme::{
    BAR_SIZE, Controller, ControllerConfig, DoorbellMode, DoorbellPage, MSIX_PENDING_AT,
    MSIX_TABLE_AT, NamespaceConfig, SUBSYSTEM_VENDOR, VENDOR,
};
use devices::pci::{Bar, Description, FunctionReset, Identity, MsiX};
use event_loop::{EventLoop, LoopHandle, oneshot};
use guest_memory::GuestMemory;
use stats::QueueStats;

use super::device::{
    AllInFlight, Device, Ended, Flushed, HandsOver, MappedArea, Paused, Restore, Served, Settled,
};
use super::interrupts::{Interrupts, Messenger};
use crate::vhost_user::ExportError;

/// The BAR with the controller's registers.
const BAR: usize = 0;

/// The IDs of SPDK's controller over vfio-user: drivers go by the class. With those of QEMU's own controller, Linux would
/// do without Write Zeroes and identifiers.
fn description(num_queues: u16) -> Description {
    Description {
        identity: Identity {
            vendor: VENDOR,
            device: 0x0001,
            subsystem_vendor: SUBSYSTEM_VENDOR,
            subsystem: 0x1100,
            // Mass storage, non-volatile memory, NVM Express.
            class: [0x01, 0x08, 0x02],
            revision: 2,
        },
        bars: [Some(Bar::Memory64 { size: BAR_SIZE }), None, None, None, None, None],
        pin: None,
        msi: None,
        msix: Some(MsiX {
            at: 0x40,
            vectors: num_queues + 1,
            bar: BAR as u8,
            table: MSIX_TABLE_AT,
            pending: MSIX_PENDING_AT,
        }),
        reset: Some(FunctionReset { at: 0x50 }),
        vendor_register: None,
    }
}

/// A controller with namespaces.
pub(super) struct NvmeDevice {
    description: Description,
    controller: Rc<Controller>,
}

/// What a controller is made of, beside its nodes.
pub(super) struct NvmeOptions {
    pub(super) writable: bool,
    pub(super) writethrough: bool,
    pub(super) serial: String,
    /// Distinguishes its identifiers from those of other controllers.
    pub(super) identity: String,
    /// 1 to [`MAX_IO_QUEUES`](devices::nvme::MAX_IO_QUEUES).
    pub(super) num_queues: u16,
    pub(super) doorbells: DoorbellMode,
}

impl NvmeDevice {
    /// A controller without memory, whose I/O queues are on these threads in turn, with a namespace for each node.
    ///
    /// # Errors
    ///
    /// A node cannot be used from such a thread; there is no eventfd.
    pub(super) async fn start(
        control_loop: &EventLoop,
        io_threads: &[LoopHandle],
        nodes: Vec<Arc<dyn BlockNode>>,
        options: NvmeOptions,
    ) -> Result<(Self, Arc<Interrupts>), ExportError> {
        let NvmeOptions { writable, writethrough, serial, identity, num_queues, doorbells } =
            options;
        let description = description(num_queues);
        let interrupts = Arc::new(Interrupts::new(&description));
        let namespace = |node: &Arc<dyn BlockNode>| {
            let geometry = node.geometry();
            NamespaceConfig { geometry, writable }
        };
        let config = ControllerConfig {
            serial,
            model: "ringmill".into(),
            identity,
            num_queues,
            doorbells,
            write_cache: !writethrough,
            namespaces: nodes.iter().map(namespace).collect(),
        };
        let messenger = Box::new(Messenger::new(interrupts.clone()));
        let made = Controller::new(control_loop, config, messenger, io_threads.len());
        let (controller, attachments) =
            made.map_err(|error| ExportError::Config(error.to_string()))?;
        watch(control_loop, &nodes, &controller);
        let device = NvmeDevice { description, controller };
        for (io_thread, attachment) in io_threads.iter().zip(attachments) {
            let (answer, attached) = oneshot::channel();
            let (nodes, of_loop) = (nodes.clone(), interrupts.clone());
            io_thread.spawn(move |event_loop| {
                let channels = nodes.into_iter().map(|node| node.open_channel(event_loop));
                match channels.collect::<Result<Vec<_>, _>>() {
                    Ok(channels) => {
                        let messenger = Box::new(Messenger::new(of_loop));
                        attachment.attach(event_loop, channels, messenger);
                        answer.send(Ok(()));
                    }
                    Err(error) => answer.send(Err(error)),
                }
            })?;
            let attached = attached.await?;
            let failed = |error| ExportError::Attach { io_thread: io_thread.name().into(), error };
            if let Err(error) = attached.map_err(failed) {
                // The threads before this one have channels of the nodes.
                Rc::new(device).end().await;
                return Err(error);
            }
        }
        Ok((device, interrupts))
    }
}

/// Tells the driver of new sizes of the nodes.
fn watch(event_loop: &EventLoop, nodes: &[Arc<dyn BlockNode>], controller: &Rc<Controller>) {
    let (watcher, mut changes) = Watcher::new();
    nodes.iter().for_each(|node| node.watch(watcher.clone()));
    drop(watcher);
    // The nodes end the task.
    let nodes: Vec<_> = nodes.iter().map(Arc::downgrade).collect();
    let controller = Rc::downgrade(controller);
    event_loop.spawn(async move {
        while changes.next().await.is_some() {
            let Some(controller) = controller.upgrade() else { return };
            for (place, node) in nodes.iter().enumerate() {
                if let Some(node) = node.upgrade() {
                    controller.set_geometry(place, &node.geometry());
                }
            }
        }
    });
}

impl Device for NvmeDevice {
    fn description(&self) -> &Description {
        &self.description
    }

    fn read_bar(&self, bar: usize, offset: u64, data: &mut [u8]) {
        debug_assert_eq!(bar, BAR);
        self.controller.mmio_read(offset, data);
    }

    fn write_bar(&self, bar: usize, offset: u64, data: &[u8]) {
        debug_assert_eq!(bar, BAR);
        self.controller.mmio_write(offset, data);
    }

    fn mapped_area(&self) -> io::Result<Option<MappedArea>> {
        let Some(page) = self.controller.doorbell_page() else { return Ok(None) };
        let file = page.file().try_clone()?;
        let (offset, size) = (DoorbellPage::OFFSET, DoorbellPage::SIZE);
        Ok(Some(MappedArea { bar: BAR, offset, size, file }))
    }

    fn renew_mapped_area(&self) -> io::Result<()> {
        if self.controller.doorbell_page().is_some() {
            self.controller.set_doorbell_page(DoorbellPage::new()?);
        }
        Ok(())
    }

    fn set_memory(&self, memory: Arc<GuestMemory>) {
        self.controller.set_memory(memory);
    }

    fn reset(&self) {
        self.controller.reset();
    }

    fn settle(&self) -> Settled {
        Box::pin(self.controller.settle())
    }

    fn flush(&self) -> Flushed {
        Box::pin(self.controller.flush())
    }

    fn hands_over(&self) -> &dyn HandsOver {
        self
    }
}

impl HandsOver for NvmeDevice {
    fn pause(&self) -> Paused {
        Box::pin(self.controller.pause())
    }

    fn resume(&self) {
        self.controller.resume();
    }

    fn check(&self, state: &[u8]) -> Result<Restore, String> {
        let restored = self.controller.check(state).map_err(|error| error.to_string())?;
        let controller = self.controller.clone();
        Ok(Box::new(move || controller.restore(restored)))
    }

    fn adopt_mapped_area(&self, file: OwnedFd) -> Result<(), String> {
        if self.controller.doorbell_page().is_none() {
            return Err("doorbells are not mapped".to_owned());
        }
        self.controller.set_doorbell_page(DoorbellPage::received(file)?);
        Ok(())
    }
}

impl Served for NvmeDevice {
    fn stats(&self) -> &[Arc<QueueStats>] {
        self.controller.stats()
    }

    fn in_flight(&self) -> AllInFlight {
        Box::pin(self.controller.in_flight())
    }

    fn thread_of(&self, queue: usize) -> usize {
        self.controller.thread_of(queue)
    }

    fn end(self: Rc<Self>) -> Ended {
        let controller = self.controller.clone();
        drop(self);
        Box::pin(controller.end())
    }
}

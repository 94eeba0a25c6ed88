//! NVMe over vfio-user: block nodes offered to a virtual machine as namespaces of an NVMe controller.

#![forbid(unsafe_code)]

use std::rc::Rc;
use std::sync::Arc;

use block::node::{BlockNode, Watcher};
use devices::nvme::{
    BAR_SIZE, Controller, ControllerConfig, MSIX_PENDING_AT, MSIX_TABLE_AT, NamespaceConfig,
    SUBSYSTEM_VENDOR, VENDOR,
};
use devices::pci::{Bar, Description, Identity, MsiX};
use event_loop::{EventLoop, LoopHandle, oneshot};
use guest_memory::GuestMemory;
use nix::errno::Errno;
use stats::{InFlight, QueueStats};

use super::device::{Device, Ended, Served};
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
    /// What tells its identifiers from those of others.
    pub(super) identity: String,
    /// 1 to [`MAX_IO_QUEUES`](devices::nvme::MAX_IO_QUEUES).
    pub(super) num_queues: u16,
}

impl NvmeDevice {
    /// A controller without memory, whose I/O queues are on `io_thread`, with a namespace for each node.
    ///
    /// # Errors
    ///
    /// A node cannot be used from that thread; there is no eventfd.
    pub(super) async fn start(
        control_loop: &EventLoop,
        io_thread: &LoopHandle,
        nodes: Vec<Arc<dyn BlockNode>>,
        options: NvmeOptions,
    ) -> Result<(Self, Arc<Interrupts>), ExportError> {
        let NvmeOptions { writable, writethrough, serial, identity, num_queues } = options;
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
            write_cache: !writethrough,
            namespaces: nodes.iter().map(namespace).collect(),
        };
        let messenger = Box::new(Messenger::new(interrupts.clone()));
        let made = Controller::new(control_loop, config, messenger);
        let (controller, attachment) =
            made.map_err(|error| ExportError::Config(error.to_string()))?;
        watch(control_loop, &nodes, &controller);
        let (answer, attached) = oneshot::channel();
        let of_loop = interrupts.clone();
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
        attached
            .await?
            .map_err(|error| ExportError::Attach { io_thread: io_thread.name().into(), error })?;
        Ok((NvmeDevice { description, controller }, interrupts))
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

    fn set_memory(&self, memory: Arc<GuestMemory>) {
        self.controller.set_memory(memory);
    }

    fn reset(&self) {
        self.controller.reset();
    }

    fn settle(&self) -> oneshot::Receiver<()> {
        self.controller.settle()
    }

    fn flush(&self) -> oneshot::Receiver<Result<(), Errno>> {
        self.controller.flush()
    }
}

impl Served for NvmeDevice {
    fn stats(&self) -> &[Arc<QueueStats>] {
        self.controller.stats()
    }

    fn in_flight(&self) -> oneshot::Receiver<Vec<(u64, InFlight)>> {
        self.controller.in_flight()
    }

    fn end(self: Rc<Self>) -> Ended {
        let controller = self.controller.clone();
        drop(self);
        Box::pin(controller.end())
    }
}

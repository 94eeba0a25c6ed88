//! Exports over FUSE.

use std::future::ready;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use block::OwnMount;
use block::node::ResizeError;
use control::{AllowOther, ExportOptions, FuseOptions};
use event_loop::{EventLoop, until};
use exports::fuse::mount::{self, MountOptions, Mounted};
use exports::fuse::{FileAttributes, FuseConfig, FuseExport, Resize};
use exports::vhost_user::ExportError;
use nix::errno::Errno;
use stats::QueueStats;

use super::super::Message;
use super::super::statistics::QueueStatistics;
use super::super::upgrade::document::{Collected, Document};
use super::super::upgrade::{Part, TakenPart, part};
use super::{Asked, Daemon, DaemonError, InFlightOf, Later, Running, counted};
use crate::spawner::Spawner;

/// How long a closed file may count as open, in nanoseconds: the kernel reports the last close(2) after it
/// has returned.
const CLOSED_NS: u64 = 100_000_000;

/// An export with its mount.
struct Fuse {
    export: FuseExport,
    mountpoint: PathBuf,
    helper: Option<Rc<Spawner>>,
    event_loop: EventLoop,
    /// Keeps nodes from opening files on the mount.
    own: OwnMount,
}

impl Running for Fuse {
    fn is_connected(&self) -> bool {
        self.export.is_connected()
    }

    fn hung_up_are_gone(&self) -> Later<()> {
        let closed = self.export.closed();
        let enough = self.event_loop.sleep_until(self.event_loop.now_ns() + CLOSED_NS);
        Box::pin(async move {
            let _ = until(closed, enough).await;
        })
    }

    fn device(&self) -> Option<PathBuf> {
        None
    }

    fn spare_nobody(&self) {}

    fn queue_stats(&self) -> &[Arc<QueueStats>] {
        self.export.queue_stats()
    }

    fn queues(&self) -> Vec<QueueStatistics> {
        self.export.queues().map(counted).collect()
    }

    fn in_flight(&self) -> Later<InFlightOf> {
        Box::pin(self.export.in_flight())
    }

    /// Does nothing: an inactive node serves reads and fails writes with `EPERM`.
    fn set_paused(&self, _paused: bool) -> Later<()> {
        Box::pin(ready(()))
    }

    fn flush(&self) -> Asked<()> {
        Box::pin(self.export.flush())
    }

    fn describe(&self) -> Option<Asked<Part>> {
        let devices = self.export.hand_over();
        let allow_other = self.export.file().allow_other;
        Some(Box::pin(async move {
            let devices = devices.map_err(|error| format!("duplicating failed: {error}"))?;
            Ok(part(move |fds| Ok(fds.mount(devices, allow_other))))
        }))
    }

    fn quiesce(&self, flush: bool) -> Asked<Part> {
        let (paused, file) = (self.export.pause(flush), self.export.shared_file());
        Box::pin(async move {
            paused.await?;
            let state = Collected::file(file.owner(), file.opens());
            Ok(part(|_| Ok(state)))
        })
    }

    fn restart_queues(&self) -> Asked<()> {
        self.export.resume();
        Box::pin(ready(Ok(())))
    }

    fn resume(&self) {
        self.export.resume();
    }

    fn prepare(&self, TakenPart { json, .. }: TakenPart<'_>) -> Result<(), String> {
        let (owner, opens) = Document::file(&json)?;
        self.export.file().set_owner(owner);
        self.export.file().set_opens(opens);
        Ok(())
    }

    fn begin(&self) -> Later<()> {
        self.export.resume();
        Box::pin(ready(()))
    }

    fn disconnect_clients(&self) -> Option<Later<()>> {
        None
    }

    fn stop(self: Box<Self>, on_quiet: Box<dyn FnOnce()>) -> Later<Result<(), ExportError>> {
        let Fuse { export, mountpoint, helper, event_loop, own } = *self;
        Box::pin(async move {
            // Unmount while the export still serves: umount programs may access the file.
            unmount(helper.as_deref(), &event_loop, &mountpoint).await;
            let stopped = export.stop_telling(on_quiet).await;
            drop(own);
            stopped
        })
    }
}

/// Takes the mount that [`describe`](Running::describe) returned in another process.
fn mounted(TakenPart { json, document }: TakenPart<'_>) -> Result<Mounted, String> {
    let (devices, allow_other) = document.mount(&json)?;
    Ok(Mounted { devices, allow_other })
}

async fn unmount(helper: Option<&Spawner>, event_loop: &EventLoop, mountpoint: &Path) {
    let unmounted = match helper {
        Some(helper) => helper.unmount(event_loop, mountpoint).await,
        None => Err("there is no process that could".to_owned()),
    };
    if let Err(why) = unmounted {
        let path = mountpoint.display();
        log::error!("{why}; a dead mount stays there: remove it by 'fusermount3 -u {path}'");
    }
}

impl Daemon {
    pub(super) async fn start_fuse(
        &mut self,
        options: &ExportOptions,
        own: &FuseOptions,
    ) -> Result<Box<dyn Running>, DaemonError> {
        let mountpoint = std::path::absolute(&own.mountpoint).map_err(DaemonError::new)?;
        let io_threads = self.threads.handles(&options.iothreads)?;
        let node = self.nodes.get(&options.node_name)?;
        let helper = self.process.spawner.clone();
        let taken = self.origin.export(&options.id);
        let taken = taken.map(mounted).transpose().map_err(DaemonError::new)?;
        let is_taken = taken.is_some();
        let own_mount = self.nodes.services().own_mounts().add(&options.id, &mountpoint);
        let mounted = match (taken, &helper) {
            (Some(mounted), _) => mounted,
            (None, Some(helper)) => {
                let options = MountOptions {
                    mountpoint: mountpoint.clone(),
                    writable: options.writable,
                    allow_other: match own.allow_other {
                        AllowOther::Off => mount::AllowOther::Off,
                        AllowOther::On => mount::AllowOther::On,
                        AllowOther::Auto => mount::AllowOther::Auto,
                    },
                    devices: io_threads.len(),
                };
                helper.mount(&self.control, &options).await.map_err(DaemonError::new)?
            }
            (None, None) => {
                return Err(DaemonError::new(
                    "there is no process that could mount: with --user or --sandbox upgrade=off, FUSE exports \
                     are on the command line",
                ));
            }
        };
        let geometry = node.geometry();
        let block_size = geometry.physical_block_size.max(4096);
        let file = FileAttributes::new(
            geometry.size,
            block_size,
            options.writable,
            own.growable,
            mounted.allow_other,
        );
        let (mailbox, id) = (self.agenda.mailbox.clone(), options.id.clone());
        let config = FuseConfig {
            id: options.id.clone(),
            node,
            io_threads,
            devices: mounted.devices,
            file,
            writethrough: options.writethrough,
            resize: Rc::new(move |resize| mailbox.push(Message::Resize(id.clone(), resize))),
        };
        match FuseExport::start(&self.control, config).await {
            Ok(export) => {
                let event_loop = self.control.clone();
                Ok(Box::new(Fuse { export, mountpoint, helper, event_loop, own: own_mount }))
            }
            Err(error) => {
                if !is_taken {
                    unmount(helper.as_deref(), &self.control, &mountpoint).await;
                }
                Err(DaemonError::with_advice(error))
            }
        }
    }

    /// Resizes the node of an export at the export's request.
    pub(crate) fn resize_for(&self, export: &str, Resize { size, answer }: Resize) {
        let nodes = self.inventory.nodes_of(export);
        let Some(Ok(resized)) =
            nodes.first().map(|node| self.nodes.resize(node, size, &self.control))
        else {
            return answer.send(Err(Errno::EIO));
        };
        let id = export.to_owned();
        self.control.spawn(async move {
            answer.send(resized.await.map_err(|error| {
                log::warn!("export {id}: giving its node {size} bytes failed: {error}");
                match error {
                    ResizeError::Os { errno, .. } => errno,
                    ResizeError::ReadOnly => Errno::EROFS,
                    ResizeError::TooLarge(_) => Errno::EFBIG,
                    ResizeError::Busy => Errno::EBUSY,
                    ResizeError::Slow => Errno::ETIMEDOUT,
                    ResizeError::NotSupported
                    | ResizeError::FixedSize
                    | ResizeError::Offset
                    | ResizeError::Device
                    | ResizeError::Format(_) => Errno::EOPNOTSUPP,
                }
            }));
        });
    }
}

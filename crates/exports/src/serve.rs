//! A node that a program serves without being a daemon. One call starts a thread with an event loop.
//!
//! ```
//! use exports::serve;
//! use img::{Access, Images, NewImage, Source};
//!
//! # let folder = std::env::temp_dir().join(format!("exports-serve-{}", std::process::id()));
//! # std::fs::create_dir_all(&folder)?;
//! # let path = folder.join("disk.qcow2");
//! let name = path.display().to_string();
//! let mut images = Images::new()?;
//! # let new = NewImage { name: name.clone(), format: "qcow2".into(), size: Some(1 << 20), ..NewImage::default() };
//! # images.create(&new)?;
//! let image = images.open(&Source::new(name), &Access::WRITE)?;
//!
//! let socket = path.with_extension("nbd");
//! let served = serve::nbd(image.node(), "disk", socket.as_path())?;
//! let disk = serve::vhost_user_blk(image.node(), path.with_extension("vhost"), 4)?;
//! // nbdinfo 'nbd+unix:///disk?socket=disk.nbd'; a VMM connects to disk.vhost.
//! disk.stop()?;
//! served.stop()?;
//! # std::fs::remove_dir_all(&folder)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use block::node::BlockNode;
use event_loop::{EventLoop, IoThread, IoThreadConfig, LoopConfig, oneshot};

use crate::nbd::{NbdExportConfig, NbdListen, NbdServer, NbdServerConfig};
use crate::vhost_user::{ExportError, Listen, VhostUserConfig, VhostUserExport};

/// Clients of an NBD server at the same time, as of qemu-storage-daemon.
const MAX_CONNECTIONS: u32 = 100;
/// Seconds in which a client has to choose an export.
const HANDSHAKE_SECONDS: u32 = 10;

/// A node that is served.
///
/// Dropping it ends the service as [`stop`](Self::stop) does. A failed flush is logged then.
pub struct Served {
    /// `None`: it has ended.
    running: Option<Running>,
    /// Its loop lives until the service has ended.
    _thread: IoThread,
}

/// A service that runs.
struct Running {
    /// Dropped to end the service.
    end: oneshot::Sender<()>,
    ended: oneshot::Receiver<Result<(), ExportError>>,
}

/// The side of a [`Served`] that its service has.
pub struct Service {
    begun: oneshot::Sender<()>,
    end: oneshot::Receiver<()>,
}

/// Serves a node as export `name` of an NBD server, to every client that can connect.
///
/// The export is writable if the node is.
///
/// # Errors
///
/// No thread can be started, the address cannot be listened on, or the node cannot be used.
pub fn nbd(
    node: Arc<dyn BlockNode>,
    name: &str,
    at: impl Into<NbdListen>,
) -> Result<Served, ExportError> {
    let (name, listen) = (name.to_owned(), at.into());
    let server = NbdServerConfig {
        listen,
        max_connections: MAX_CONNECTIONS,
        handshake_max_seconds: HANDSHAKE_SECONDS,
        tls: None,
        // Clients that come before the export wait for it.
        held: true,
    };
    Served::start(named("nbd"), move |event_loop, service| async move {
        let server = NbdServer::start(&event_loop, server)?;
        let export = NbdExportConfig {
            id: name.clone(),
            name,
            description: String::new(),
            writable: !node.geometry().read_only,
            node,
            io_threads: vec![event_loop.handle()],
            writethrough: false,
            allocation_depth: false,
            bitmaps: Vec::new(),
        };
        let export = match server.add(export).await {
            Ok(export) => export,
            Err(error) => {
                server.stop().await;
                return Err(error);
            }
        };
        server.resume();
        service.runs().await;
        server.stop().await;
        export.stop().await
    })
}

/// Serves a node as a virtio-blk device with `num_queues` queues over a vhost-user socket, to one VMM at a time.
///
/// The device is writable if the node is. Its serial number is empty.
///
/// # Errors
///
/// No thread can be started, the socket cannot be listened on, `num_queues` is not 1 to 256, or the node cannot be used.
pub fn vhost_user_blk(
    node: Arc<dyn BlockNode>,
    socket: impl Into<PathBuf>,
    num_queues: u16,
) -> Result<Served, ExportError> {
    let listen = Listen::Path(socket.into());
    Served::start(named("vhost-user-blk"), move |event_loop, service| async move {
        let config = VhostUserConfig {
            num_queues: Some(num_queues),
            writable: !node.geometry().read_only,
            ..VhostUserConfig::new("vhost-user-blk", listen, vec![event_loop.handle()])
        };
        let export = VhostUserExport::blk(event_loop, config, node, String::new()).await?;
        service.runs().await;
        export.stop().await
    })
}

fn named(name: &str) -> LoopConfig {
    LoopConfig { name: name.to_owned(), ..LoopConfig::default() }
}

impl Served {
    /// Starts a service on the loop of a new thread, and waits until it [runs](Service::runs): for exports that this module
    /// has no function for.
    ///
    /// # Errors
    ///
    /// No thread can be started; or the error with which `service` ends before it runs.
    pub fn start<F>(
        event_loop: LoopConfig,
        service: impl FnOnce(EventLoop, Service) -> F + Send + 'static,
    ) -> Result<Served, ExportError>
    where
        F: Future<Output = Result<(), ExportError>> + 'static,
    {
        let io_thread = event_loop.name.clone();
        let config = IoThreadConfig { event_loop, ..IoThreadConfig::default() };
        let thread = IoThread::spawn(config)
            .map_err(|error| ExportError::Attach { io_thread, error: io::Error::other(error) })?;
        let (begun, has_begun) = oneshot::channel();
        let (end, is_ending) = oneshot::channel();
        let seen = Service { begun, end: is_ending };
        let ended = thread.handle().run(move |event_loop| service(event_loop, seen));
        match has_begun.wait() {
            Ok(()) => Ok(Served { running: Some(Running { end, ended }), _thread: thread }),
            // The service has ended before it ran.
            Err(error) => Err(ended.wait()?.err().unwrap_or_else(|| error.into())),
        }
    }

    /// Ends the service: disconnects its clients, finishes their requests, flushes the node and removes the socket.
    ///
    /// # Errors
    ///
    /// The flush failed: what clients wrote since theirs may not be on stable storage.
    pub fn stop(mut self) -> Result<(), ExportError> {
        self.finish()
    }

    fn finish(&mut self) -> Result<(), ExportError> {
        let Some(Running { end, ended }) = self.running.take() else { return Ok(()) };
        drop(end);
        ended.wait()?
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Err(error) = self.finish() {
            log::error!("a served node: {error}");
        }
    }
}

impl Service {
    /// Tells that the service runs, and completes when it has to end.
    pub async fn runs(self) {
        self.begun.send(());
        // The other end is dropped, never used.
        let _ = self.end.await;
    }
}

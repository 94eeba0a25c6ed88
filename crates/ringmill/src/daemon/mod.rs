//! The daemon: what a command line asks for, made, run and taken down again.

mod signals;
mod status;
mod threads;

use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::task::Poll;

use block::NodeRegistry;
use control::{Action, Addr, Step};
use event_loop::{EventLoop, LoopConfig};
use exports::vhost_user::{Listen, VhostUserBlkConfig, VhostUserBlkExport};

use signals::StopSignals;
pub(crate) use status::Status;
use threads::IoThreads;

/// Something could not be made; everything made before it is gone again.
#[derive(Debug)]
pub(crate) struct DaemonError(String);

impl fmt::Display for DaemonError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl DaemonError {
    pub(crate) fn new(error: impl fmt::Display) -> Self {
        DaemonError(error.to_string())
    }
}

/// Exports, the nodes they offer and the threads that serve them; dropped in this order.
pub(crate) struct Daemon {
    exports: Vec<VhostUserBlkExport>,
    nodes: NodeRegistry,
    threads: IoThreads,
    control: EventLoop,
}

/// Makes what `steps` ask for, calls `ready` once it is all there, serves until a signal comes, and
/// takes everything down: requests in flight are finished and flushed, sockets removed. A second
/// signal ends the process at once.
pub(crate) fn run(
    steps: &[Step],
    ready: impl FnOnce(&Daemon) -> Result<Option<Status>, DaemonError>,
) -> Result<(), DaemonError> {
    let blocked = signals::block()
        .map_err(|errno| DaemonError(format!("sigprocmask failed: {}", errno.desc())))?;
    let config = LoopConfig { name: "control".into(), ..LoopConfig::default() };
    let control = EventLoop::new(config).map_err(DaemonError::new)?;
    let mut stop = StopSignals::new(&control, &blocked)
        .map_err(|errno| DaemonError(format!("signalfd failed: {}", errno.desc())))?;
    let mut daemon = Daemon {
        exports: Vec::new(),
        nodes: NodeRegistry::new(),
        threads: IoThreads::default(),
        control: control.clone(),
    };
    let status = match daemon.make(steps).and_then(|()| ready(&daemon)) {
        Ok(status) => status,
        Err(error) => {
            // Sockets are removed by the tasks that listen on them, which end here.
            let _ = control.block_on(daemon.take_down());
            return Err(error);
        }
    };
    if let Some(status) = status {
        control.spawn(status.show(control.clone(), daemon.sources()));
    }
    let served = control.block_on(async move {
        let signal = stop.next().await;
        log::info!("{signal}: finishing the requests in flight; a second signal ends at once");
        let down = daemon.take_down();
        until(down, stop.insisted(signal)).await
    });
    match served {
        Ok(Some(true)) => Ok(()),
        Ok(Some(false)) => Err(DaemonError("not all that was written could be flushed".into())),
        Ok(None) => std::process::exit(1),
        Err(error) => Err(DaemonError(format!("the control loop failed: {error}"))),
    }
}

/// Waits for `work`, but no longer than for `end`; `None` when that came first.
async fn until<T, U>(work: impl Future<Output = T>, end: impl Future<Output = U>) -> Option<T> {
    let (mut work, mut end) = (pin!(work), pin!(end));
    std::future::poll_fn(|cx| match work.as_mut().poll(cx) {
        Poll::Ready(done) => Poll::Ready(Some(done)),
        Poll::Pending => end.as_mut().poll(cx).map(|_| None),
    })
    .await
}

impl Daemon {
    fn make(&mut self, steps: &[Step]) -> Result<(), DaemonError> {
        steps.iter().try_for_each(|step| {
            self.take(&step.action)
                .map_err(|error| DaemonError(format!("{}: {error}", step.origin)))
        })
    }

    fn take(&mut self, action: &Action) -> Result<(), DaemonError> {
        match action {
            Action::Object(iothread) => self.threads.add(iothread),
            Action::Blockdev(options) => {
                let opened = self.nodes.open(options);
                opened.map(drop).map_err(|error| match error.hint() {
                    Some(hint) => DaemonError(format!("{error}\n{hint}")),
                    None => DaemonError::new(error),
                })
            }
            Action::Export(export) => self.add_export(export),
        }
    }

    fn add_export(&mut self, options: &control::VhostUserBlkExport) -> Result<(), DaemonError> {
        let node = self.nodes.get(&options.node_name).map_err(DaemonError::new)?;
        let listen = match &options.addr {
            Addr::Unix { path } => Listen::Path(path.clone()),
            Addr::Fd { fd } => Listen::inherited(*fd).map_err(DaemonError::new)?,
        };
        let config = VhostUserBlkConfig {
            id: options.id.clone(),
            listen,
            node,
            io_threads: self.threads.handles(&options.iothreads)?,
            num_queues: options.num_queues,
            writable: options.writable,
            writethrough: options.writethrough,
            logical_block_size: options.logical_block_size,
            serial: options.id.clone(),
        };
        let start = VhostUserBlkExport::start(self.control.clone(), config);
        let export = self
            .control
            .block_on(start)
            .map_err(|error| DaemonError(format!("the control loop failed: {error}")))?
            .map_err(DaemonError::new)?;
        self.exports.push(export);
        Ok(())
    }

    /// Where the status line's numbers come from.
    fn sources(&self) -> status::Sources {
        status::Sources {
            queues: self.exports.iter().flat_map(|export| export.queue_stats().to_vec()).collect(),
            loops: self.threads.all(),
        }
    }

    /// What each I/O thread runs on.
    pub(crate) fn rings(&self) -> impl Iterator<Item = (&str, &event_loop::Chosen)> {
        self.threads.rings()
    }

    /// Whether everything that guests were told is on stable storage.
    async fn take_down(self) -> bool {
        let mut clean = true;
        for export in self.exports {
            let id = export.id().to_owned();
            if let Err(error) = export.stop().await {
                log::error!("export {id}: {error}");
                clean = false;
            }
        }
        drop(self.nodes);
        drop(self.threads);
        clean
    }
}

//! The daemon: what a command line asks for, made, run and taken down again.

mod open_files;
mod signals;
mod status;
mod threads;

use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::task::Poll;

use block::NodeRegistry;
use control::{Action, Addr, ExportKind, ExportOptions, Step};
use event_loop::{EventLoop, LoopConfig};
use exports::vhost_user::{Listen, VhostUserBlkConfig, VhostUserExport, VhostUserScsiConfig};

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

    /// Of something that takes descriptors: with advice where there are too few.
    fn with_advice(error: impl std::error::Error + 'static) -> Self {
        match open_files::advice(&error) {
            Some(advice) => DaemonError(format!("{error}\n{advice}")),
            None => DaemonError::new(error),
        }
    }
}

/// Exports, the nodes they offer and the threads that serve them; dropped in this order.
pub(crate) struct Daemon {
    exports: Vec<VhostUserExport>,
    nodes: NodeRegistry,
    threads: IoThreads,
    control: EventLoop,
}

/// How long the exports have to finish once an I/O thread has failed: those that it served never do.
const AFTER_FAILURE_NS: u64 = 5_000_000_000;

/// How serving ended.
enum Served {
    /// By a signal; whether all that was written could be flushed.
    Stopped(bool),
    /// By two signals.
    Insisted,
    /// An I/O thread has failed.
    Failed(DaemonError),
}

/// Makes what `steps` ask for, calls `ready` once it is all there, serves until a signal comes, and
/// takes everything down: requests in flight are finished and flushed, sockets removed. A second
/// signal ends the process at once. An I/O thread that fails ends the daemon with an error.
pub(crate) fn run(
    steps: &[Step],
    ready: impl FnOnce(&Daemon) -> Result<Option<Status>, DaemonError>,
) -> Result<(), DaemonError> {
    let blocked = signals::block()
        .map_err(|errno| DaemonError(format!("sigprocmask failed: {}", errno.desc())))?;
    open_files::raise_limit();
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
        let signal = match until(daemon.threads.first_end(), stop.next()).await {
            Ok(error) => {
                log::error!("{error}: the daemon ends, for its exports to be started again");
                daemon.abandon().await;
                return Served::Failed(error);
            }
            Err(signal) => signal,
        };
        log::info!("{signal}: finishing the requests in flight; a second signal ends at once");
        let down = daemon.take_down();
        until(down, stop.insisted(signal)).await.map_or(Served::Insisted, Served::Stopped)
    });
    match served {
        Ok(Served::Stopped(true)) => Ok(()),
        Ok(Served::Stopped(false)) => {
            Err(DaemonError("not all that was written could be flushed".into()))
        }
        Ok(Served::Insisted) => std::process::exit(1),
        Ok(Served::Failed(error)) => Err(error),
        Err(error) => Err(DaemonError(format!("the control loop failed: {error}"))),
    }
}

/// Waits for `work`, but no longer than for `end`; an error when that came first.
async fn until<T, U>(work: impl Future<Output = T>, end: impl Future<Output = U>) -> Result<T, U> {
    let (mut work, mut end) = (pin!(work), pin!(end));
    std::future::poll_fn(|cx| match work.as_mut().poll(cx) {
        Poll::Ready(done) => Poll::Ready(Ok(done)),
        Poll::Pending => end.as_mut().poll(cx).map(Err),
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
                    None => DaemonError::with_advice(error),
                })
            }
            Action::Export(export) => self.add_export(export),
        }
    }

    fn add_export(&mut self, options: &ExportOptions) -> Result<(), DaemonError> {
        let vhost_user = options.vhost_user();
        let listen = match &vhost_user.addr {
            Addr::Unix { path } => Listen::Path(path.clone()),
            Addr::Fd { fd } => Listen::inherited(*fd).map_err(DaemonError::new)?,
        };
        let node = |name: &String| self.nodes.get(name).map_err(DaemonError::new);
        let (id, control) = (options.id.clone(), self.control.clone());
        let io_threads = self.threads.handles(&options.iothreads)?;
        let (num_queues, logical_block_size) =
            (vhost_user.num_queues, vhost_user.logical_block_size);
        let (writable, writethrough) = (options.writable, options.writethrough);
        let started = match &options.kind {
            ExportKind::VhostUserBlk(_) => {
                let config = VhostUserBlkConfig {
                    serial: id.clone(),
                    id,
                    listen,
                    node: node(&options.node_name)?,
                    io_threads,
                    num_queues,
                    writable,
                    writethrough,
                    logical_block_size,
                };
                self.control.block_on(VhostUserExport::blk(control, config))
            }
            ExportKind::VhostUserScsi { .. } => {
                let config = VhostUserScsiConfig {
                    id,
                    listen,
                    nodes: options.nodes().map(node).collect::<Result<_, _>>()?,
                    io_threads,
                    num_queues,
                    writable,
                    writethrough,
                    logical_block_size,
                };
                self.control.block_on(VhostUserExport::scsi(control, config))
            }
        };
        let export = started
            .map_err(|error| DaemonError(format!("the control loop failed: {error}")))?
            .map_err(DaemonError::with_advice)?;
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
        let clean = stop_all(self.exports).await;
        drop(self.nodes);
        drop(self.threads);
        clean
    }

    /// After a thread has failed: stops the exports, but takes no longer than [`AFTER_FAILURE_NS`].
    /// The threads are left to the end of the process, since the one that failed may never come to
    /// be joined.
    async fn abandon(self) {
        let deadline = self.control.now_ns() + AFTER_FAILURE_NS;
        let end = self.control.sleep_until(deadline);
        std::mem::forget(self.threads);
        // Each error was logged.
        let _ = until(stop_all(self.exports), end).await;
    }
}

/// Whether all could be flushed.
async fn stop_all(exports: Vec<VhostUserExport>) -> bool {
    let mut clean = true;
    for export in exports {
        let id = export.id().to_owned();
        if let Err(error) = export.stop().await {
            log::error!("export {id}: {error}");
            clean = false;
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

    use super::*;

    /// From here on this thread cannot enter a ring.
    fn deny_rings() {
        let calls = [nix::libc::SYS_io_uring_enter, nix::libc::SYS_epoll_pwait2];
        let rules = calls.into_iter().map(|call| (call, Vec::new())).collect();
        let deny = SeccompAction::Errno(nix::libc::EIO.cast_unsigned());
        let arch = std::env::consts::ARCH.try_into().unwrap();
        let filter = SeccompFilter::new(rules, SeccompAction::Allow, deny, arch).unwrap();
        seccompiler::apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
    }

    #[test]
    fn an_io_thread_that_fails_ends_the_daemon_with_an_error() {
        let socket = std::env::temp_dir().join(format!("daemon-{}.sock", std::process::id()));
        let export = format!(
            "vhost-user-blk,id=e,node-name=n,iothread=worker,addr.type=unix,addr.path={}",
            socket.display()
        );
        let arguments = [
            "ringmill",
            "storage-daemon",
            "--object",
            "iothread,id=worker",
            "--object",
            "iothread,id=idle",
            "--blockdev",
            "null-co,node-name=n",
            "--export",
            &export,
        ];
        let command = control::parse_args(arguments.map(Into::into)).unwrap();
        let control::Command::StorageDaemon(options) = command else { panic!() };
        let (done, is_done) = mpsc::channel::<()>();
        std::thread::spawn(move || {
            if is_done.recv_timeout(Duration::from_secs(60)) == Err(mpsc::RecvTimeoutError::Timeout)
            {
                eprintln!("LOST: the end of a daemon whose I/O thread has failed");
                std::process::abort();
            }
        });
        let error = run(&options.steps, |daemon| {
            assert!(socket.exists());
            let worker = daemon.threads.all().into_iter().next().unwrap();
            worker.spawn(|_| deny_rings()).unwrap();
            Ok(None)
        });
        let error = error.unwrap_err().to_string();
        assert!(error.starts_with("I/O thread \"worker\": "), "{error}");
        assert!(error.contains(" failed: ") && error.contains("os error 5"), "{error}");
        assert!(!socket.exists());
        drop(done);
    }
}

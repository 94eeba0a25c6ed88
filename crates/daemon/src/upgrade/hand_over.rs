//! The side of the old process.

use std::cell::{Cell, RefCell};
use std::env;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;

use block::driver::HandOver;
use block::options::BlockdevOptions;
use block::{Child, OpenImage};
use event_loop::{EventLoop, until};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use serde_json::{Map, Value as Json, json};

use super::super::{Daemon, DaemonError};
use super::document::{Collected, GO, HAVE, INVENTORY, Part, QUEUES, READY, REFUSED, VERSION};
use super::packets::Packets;
use super::take_over::{TakenListener, nbd_listener};
use super::{bitmaps, contents};
use crate::spawner::is_null;

/// Time limit of the new process until it is ready, nanoseconds.
const READY_NS: u64 = 10_000_000_000;
/// Time limit of a front end for the rest of a message, and of an I/O thread for its answer, nanoseconds.
const DESCRIBE_NS: u64 = 1_000_000_000;
/// Greatest age of a request in flight at the start of an upgrade, nanoseconds. Also the time limit of the first flush.
const OLDEST_NS: u64 = 2_000_000_000;
/// Time limit of all steps after the queues have been asked to stop, nanoseconds.
const STILL_NS: u64 = 5_000_000_000;

/// Time limit of an attempt to stop the queues, nanoseconds. It is short, so that a disk that is slow for a moment
/// does not stop all exports. The last attempt has [`STILL_NS`].
const TRY_NS: u64 = 50_000_000;
/// Number of attempts before the last one.
const TRIES: usize = 4;
/// Shortest time between two attempts, nanoseconds. All exports serve meanwhile.
const BETWEEN_NS: u64 = 100_000_000;

/// Time limit of the new process until the pid file has its id, nanoseconds. Longer than its start of the exports.
const SETTLED_NS: u64 = 10_000_000_000;
/// Begins the error of a new program that says why it does not take over.
const SAYS: &str = "the new program says: ";

/// Another process serves now.
pub(crate) struct HandedOver {
    /// Its process ID.
    pub(crate) pid: u32,
    /// The longest time that requests had to wait, nanoseconds.
    pub(crate) pause_ns: u64,
    /// The new process closes its end once the pid file has its id.
    packets: Packets,
}

impl HandedOver {
    /// Waits until the pid file has the new process's id, at most [`SETTLED_NS`].
    pub(crate) async fn settled(&self, control: &EventLoop) {
        let limit = control.sleep_until(control.now_ns() + SETTLED_NS);
        if !matches!(until(self.packets.receive(), limit).await, Ok(Err(_))) {
            let seconds = SETTLED_NS / 1_000_000_000;
            log::warn!("upgrade: pid {} has not written the pid file within {seconds} s", self.pid);
        }
    }
}

/// Whether no other process can open a node.
fn is_bound(node: &BlockdevOptions) -> bool {
    match node.driver.hand_over() {
        HandOver::Never => true,
        HandOver::AtOnce | HandOver::HoldsBack | HandOver::Journal | HandOver::Flush => false,
    }
}

/// The state once all queues have stopped.
struct Still {
    /// What the new process starts the queues with, by export name.
    stopped: Vec<(String, Part)>,
    /// When the queues were asked to stop, nanoseconds.
    since_ns: u64,
    /// The longest pause of an earlier attempt, nanoseconds.
    before_ns: u64,
}

impl Daemon {
    /// Starts the program anew and hands everything over. On success, this process must only exit, without taking
    /// anything down.
    ///
    /// # Errors
    ///
    /// The hand-over has failed. This process serves as before.
    pub(crate) async fn upgrade(&mut self) -> Result<HandedOver, DaemonError> {
        let refused = |why: String| DaemonError::new(format!("cannot upgrade: {why}"));
        self.stop_localizing().await;
        let arguments = self.arguments_for_another().map_err(refused)?;
        let Some(successor) = self.process.successor() else {
            return Err(refused(
                "there is no process that could start the new program: with --user or --sandbox \
                 upgrade=off none is kept, and else a warning in the log says why"
                    .into(),
            ));
        };
        self.oldest().await.map_err(refused)?;
        let flags = SockFlag::SOCK_CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)
            .map_err(|errno| refused(format!("socketpair failed: {}", errno.desc())))?;
        let pid = successor
            .start(&self.control, theirs)
            .await
            .map_err(|error| refused(format!("the new program cannot be started: {error}")))?;
        log::info!("upgrade: started the new program, pid {pid}");
        let packets = Packets::new(&self.control, ours);
        match self.hand_over(&packets, arguments).await {
            Ok(pause_ns) => Ok(HandedOver { pid, pause_ns, packets }),
            Err(why) => {
                let ended = self.resume().await;
                // A program that says why writes the same to its log.
                let line = successor.last_error().filter(|_| !why.starts_with(SAYS));
                let line = line.map(|line| format!(": {line}")).unwrap_or_default();
                Err(refused(format!("{why}; {ended}{line}")))
            }
        }
    }

    /// Cancels a hand-over: ends the new process and resumes the exports. Returns how the new process ended.
    pub(crate) async fn resume(&self) -> String {
        let Some(successor) = self.process.successor() else { return "there is none".to_owned() };
        let asked = successor.end();
        // Exports resume before the new process has ended, which may take time: the new process touches no queue.
        self.exports.resume();
        if let Some(server) = &self.entrances.nbd_server {
            server.resume();
        }
        let ended = match asked {
            Ok(()) => successor.ended(&self.control).await,
            Err(error) => Err(error),
        };
        self.nodes.retake_images();
        match ended {
            Ok(status) => match (status.code(), status.signal()) {
                (Some(code), _) => format!("it has ended with status {code}"),
                (None, Some(9)) => "it was killed".to_owned(),
                (None, _) => format!("it has ended by {status}"),
            },
            Err(error) => error.to_string(),
        }
    }

    /// The command line that reproduces the current configuration.
    fn arguments_for_another(&self) -> Result<Vec<String>, String> {
        self.jobs.check_replaceable()?;
        if self.agenda.is_waiting() {
            return Err(
                "a command of a monitor waits for an image: try again when it is answered".into()
            );
        }
        if let Some(export) = self.exports.all(&self.inventory).find(|export| export.shutting_down)
        {
            return Err(format!("export '{}' is shutting down", export.id));
        }
        if let Some(node) = self.nodes.all().find(|node| is_bound(node.options)) {
            return Err(format!(
                "node '{}' uses a socket that this process inherited, and no other process can connect again",
                node.name
            ));
        }
        self.check_flushes()?;
        if let Some(arguments) = &self.origin.command_line {
            return Ok(arguments.clone());
        }
        let describe = |names: Vec<&str>| self.nodes.describe(names.into_iter());
        self.inventory.command_line(describe).map_err(|error| error.to_string())
    }

    /// Fails if a flush of an image has failed. The kernel reports lost writes only once: a flush by the new
    /// process would succeed.
    fn check_flushes(&self) -> Result<(), String> {
        match self.nodes.image_with_failed_flush() {
            Some(path) => Err(format!(
                "flushing {} has failed, and another process would believe it whole",
                path.display()
            )),
            None => Ok(()),
        }
    }

    /// Whether `is` holds for the driver of a node or of one below it. Inactive nodes do not count: they have written
    /// everything.
    fn is_any(&self, name: &str, is: fn(HandOver) -> bool) -> bool {
        self.nodes.info(name).filter(|node| node.active).is_some_and(|node| {
            let below = |child: &Child| self.is_any(child.edge.node().name(), is);
            is(node.options.driver.hand_over()) || node.children.iter().any(below)
        })
    }

    /// Whether a node, or one below it, delays requests. It releases them when its queues stop.
    fn holds_back(&self, name: &str) -> bool {
        self.is_any(name, |how| match how {
            HandOver::HoldsBack => true,
            HandOver::AtOnce | HandOver::Journal | HandOver::Flush | HandOver::Never => false,
        })
    }

    /// When the oldest request in flight was taken, nanoseconds. Queues stop once their requests are done: with a slow
    /// disk, all exports would stop in vain.
    ///
    /// # Errors
    ///
    /// The oldest request is older than [`OLDEST_NS`], or an I/O thread does not answer.
    async fn oldest(&self) -> Result<Option<u64>, String> {
        let oldest = self
            .exports
            .oldest(|export| self.inventory.any_node(export, |node| self.holds_back(node)));
        let limit = self.control.sleep_until(self.control.now_ns() + DESCRIBE_NS);
        let oldest = until(oldest, limit).await;
        let oldest = oldest.map_err(|()| "an I/O thread does not answer".to_owned())?;
        let Some((started_ns, id)) = oldest else { return Ok(None) };
        let age = self.control.now_ns().saturating_sub(started_ns);
        match age > OLDEST_NS {
            true => Err(format!(
                "export '{id}' has a request that has taken {} ms so far: try again when it is done",
                age / 1_000_000
            )),
            false => Ok(Some(started_ns)),
        }
    }

    /// Returns the longest time that requests had to wait, nanoseconds.
    async fn hand_over(&self, packets: &Packets, arguments: Vec<String>) -> Result<u64, String> {
        let limit = |ns| self.control.sleep_until(self.control.now_ns() + ns);
        let awaited = RefCell::default();
        let inventory = until(self.describe(arguments, &awaited), limit(DESCRIBE_NS)).await;
        let within =
            |()| format!("the front end of export '{}' is within a message", awaited.take());
        let (inventory, fds) = inventory.map_err(within)??;
        let prepared = until(prepare(packets, &inventory, fds), limit(READY_NS)).await;
        prepared.map_err(|()| late("the new program has not been ready", READY_NS))??;
        // Leaves little to write while the queues are stopped.
        let flushed = until(
            self.exports
                .flush(|export| self.inventory.any_node(export, |node| self.keeps_back(node))),
            limit(OLDEST_NS),
        )
        .await;
        let Still { stopped, since_ns, before_ns } = self.stop_queues(flushed.is_ok()).await?;
        let awaited = Cell::new("");
        let end = self.control.sleep_until(since_ns + STILL_NS);
        let passed_on = until(self.pass_on(packets, stopped, &awaited), end).await;
        passed_on.map_err(|()| late(awaited.get(), STILL_NS))??;
        Ok((self.control.now_ns() - since_ns).max(before_ns))
    }

    /// The configuration, and all state that does not change while queues run. `awaited`: the export that has not
    /// answered.
    async fn describe(
        &self,
        arguments: Vec<String>,
        awaited: &RefCell<String>,
    ) -> Result<(Json, Vec<OwnedFd>), String> {
        let mut fds = Collected::default();
        let duplicate = |fd: &OwnedFd| fd.try_clone().map_err(|error| dup_failed(&error));
        let stdin = io::stdin().as_fd().try_clone_to_owned().map_err(|error| dup_failed(&error))?;
        let stdin = fds.add(stdin);
        let mut images = Vec::new();
        for OpenImage { path, fd, lock } in self.nodes.images() {
            let lock = lock.map(|lock| Ok::<_, String>(fds.add(duplicate(&lock)?))).transpose()?;
            let path = path.to_str().ok_or_else(|| format!("{} is not UTF-8", path.display()))?;
            images.push(json!({"path": path, "fd": fds.add(duplicate(&fd)?), "lock": lock}));
        }
        let mut listeners = Map::new();
        for (name, (fd, file)) in self.entrances.listeners() {
            let listener = json!({"fd": fds.add(duplicate(fd)?), "file": file});
            listeners.insert(name.clone(), listener);
        }
        for (name, (fd, file)) in self.nbd_listeners()? {
            listeners.insert(name, json!({"fd": fds.add(fd), "file": file}));
        }
        let mut exports = Map::new();
        // All at once: each may have to wait for its front end.
        for (id, described) in self.exports.describe() {
            awaited.replace(id.clone());
            let failed = |why| format!("export '{id}': {why}");
            let described = described.await.map_err(failed)?;
            let described = described(&mut fds).map_err(failed)?;
            exports.insert(id, described);
        }
        let pidfile = match self.process.pidfile.get() {
            Some(pidfile) => {
                let (path, file) = pidfile.hand_over().map_err(|error| dup_failed(&error))?;
                json!({"path": path, "fd": fds.add(file.into())})
            }
            None => Json::Null,
        };
        let state = match &self.origin.keeping {
            Some(keeping) => {
                let (path, file) = keeping.file.hand_over().map_err(|error| dup_failed(&error))?;
                json!({"path": path, "fd": fds.add(file)})
            }
            None => Json::Null,
        };
        let inventory = json!({
            "version": VERSION,
            "program": concat!("ringmill ", env!("CARGO_PKG_VERSION")),
            "pid": std::process::id(),
            "arguments": arguments,
            "directory": env::current_dir().ok().as_deref().and_then(Path::to_str),
            "stdin": stdin,
            "detached": is_null(io::stderr()),
            "watchdog": self.process.manager.as_ref().is_some_and(|manager| manager.watchdog_ns().is_some()),
            "pidfile": pidfile,
            "state": state,
            "images": images,
            "listeners": listeners,
            "exports": exports,
            "bitmaps": bitmaps::describe(&self.nodes),
            "storing": self.nodes.storing().collect::<Vec<_>>(),
            "contents": contents::describe(&self.nodes),
        });
        Ok((inventory, fds.0))
    }

    /// The NBD server's sockets, by name. The server accepts no more connections.
    fn nbd_listeners(&self) -> Result<Vec<(String, TakenListener)>, String> {
        let Some(server) = &self.entrances.nbd_server else { return Ok(Vec::new()) };
        let sockets = server.hand_over().map_err(|error| dup_failed(&error))?;
        Ok((0..).map(nbd_listener).zip(sockets).collect())
    }

    /// Whether a node, or one below it, keeps written data back. The data that it still keeps when queues stop
    /// reaches the new process through its journal or a flush.
    fn keeps_back(&self, name: &str) -> bool {
        self.is_any(name, |how| match how {
            HandOver::Journal | HandOver::Flush => true,
            HandOver::AtOnce | HandOver::HoldsBack | HandOver::Never => false,
        })
    }

    /// Whether only a flush by this process makes the data of a node, or of one below it, durable.
    fn is_elsewhere(&self, name: &str) -> bool {
        self.is_any(name, |how| match how {
            HandOver::Flush => true,
            HandOver::AtOnce | HandOver::HoldsBack | HandOver::Journal | HandOver::Never => false,
        })
    }

    /// Stops all queues. If requests in flight take long, the queues run again before the next attempt. `flushed`: the
    /// first flush has completed.
    async fn stop_queues(&self, flushed: bool) -> Result<Still, String> {
        let mut before_ns = 0;
        for tried in 0..=TRIES {
            let since_ns = self.control.now_ns();
            let limit_ns = if tried < TRIES { TRY_NS } else { STILL_NS };
            let end = self.control.sleep_until(since_ns + limit_ns);
            match until(self.stopped_queues(flushed), end).await {
                Ok(stopped) => return Ok(Still { stopped: stopped?, since_ns, before_ns }),
                Err(()) if tried == TRIES => break,
                Err(()) => {}
            }
            let _ =
                until(self.exports.restart_queues(), self.control.sleep_until(since_ns + STILL_NS))
                    .await;
            before_ns = before_ns.max(self.control.now_ns() - since_ns);
            log::info!("upgrade: requests in flight take long, so all go on: to be tried again");
            // Until the requests that made the attempt fail are done.
            loop {
                self.control.sleep_until(self.control.now_ns() + BETWEEN_NS).await;
                if self.oldest().await?.is_none_or(|started_ns| started_ns > since_ns) {
                    break;
                }
            }
        }
        Err(late("requests in flight have not ended", STILL_NS))
    }

    async fn stopped_queues(&self, flushed: bool) -> Result<Vec<(String, Part)>, String> {
        let mut all = Vec::new();
        // A flush under way is awaited: the kernel reports lost writes only to the first flush.
        let is = |node: &str| self.is_elsewhere(node) || !flushed && self.keeps_back(node);
        let flushes = |export: &str| self.inventory.any_node(export, is);
        for (id, stopped) in self.exports.stop_queues(flushes) {
            let stopped = stopped.await.map_err(|why| format!("export '{id}': {why}"))?;
            all.push((id, stopped));
        }
        Ok(all)
    }

    /// Sends the state of the stopped queues, and lets the new process start them. `awaited`: what has not
    /// happened yet, for the error.
    async fn pass_on(
        &self,
        packets: &Packets,
        stopped: Vec<(String, Part)>,
        awaited: &Cell<&'static str>,
    ) -> Result<(), String> {
        let mut fds = Collected::default();
        let mut exports = Map::new();
        for (id, stopped) in stopped {
            let stopped = stopped(&mut fds).map_err(|why| format!("export '{id}': {why}"))?;
            exports.insert(id, stopped);
        }
        self.check_flushes()?;
        let failed = |(name, error)| format!("node '{name}' cannot be let go: {error}");
        awaited.set("the disk of an image with a journal has not answered");
        self.nodes.release_for_handover().await.map_err(failed)?;
        awaited.set("the new program has not taken over");
        let bits = bitmaps::bits(&self.nodes, &mut fds)?;
        let queues = json!({"exports": exports, "bitmaps": bits});
        packets.send_document(QUEUES, &queues, &fds.0).await.map_err(|error| gone(&error))?;
        expect(packets, HAVE).await?;
        packets.send(GO, &[], &[]).await.map_err(|error| gone(&error))
    }
}

/// Sends the configuration, and waits until the new process is ready.
async fn prepare(packets: &Packets, inventory: &Json, fds: Vec<OwnedFd>) -> Result<(), String> {
    let sent = packets.send_document(INVENTORY, inventory, &fds).await;
    drop(fds);
    // A new process that refuses or dies may make sending fail. Its own reason then counts.
    match (sent, expect(packets, READY).await) {
        (_, Err(why)) => Err(why),
        (sent, Ok(())) => sent.map_err(|error| gone(&error)),
    }
}

async fn expect(packets: &Packets, wanted: u8) -> Result<(), String> {
    let received = match packets.receive().await {
        // The new process has ended with messages unread. Its last message can still be received.
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => packets.receive().await,
        received => received,
    };
    match received {
        Ok((kind, ..)) if kind == wanted => Ok(()),
        Ok((REFUSED, why, _)) => Err(format!("{SAYS}{}", String::from_utf8_lossy(&why))),
        Ok(_) => Err("the new program says what makes no sense".into()),
        Err(error) => Err(gone(&error)),
    }
}

fn gone(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
            "the new program has given up".into()
        }
        _ => format!("the new program cannot be talked to: {error}"),
    }
}

fn late(what: &str, limit_ns: u64) -> String {
    format!("{what} within {} s", limit_ns / 1_000_000_000)
}

fn dup_failed(error: &io::Error) -> String {
    format!("duplicating a descriptor failed: {error}")
}

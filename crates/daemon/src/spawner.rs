//! A separate process that starts the new program of an upgrade, mounts FUSE exports, and makes ublk devices.
//!
//! The daemon cannot do that itself: it may be confined, and fork(2) is unsafe with threads.
//! So the spawner is forked before there are threads, waits for requests of the daemon, and ends with the
//! daemon. It shares the pages that the daemon has at that time.
//!
//! The spawner is not confined. It checks its requests: it starts one program, and mounts, or makes devices, only where
//! the command line allows it ([`Allowed`], [`Devices`]).

#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::env;
use std::ffi::{CString, OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, IoSlice, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::{Child, Command, ExitStatus};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use control::{Action, SandboxOptions, Step, TAKE_OVER};
use event_loop::{EventLoop, Readiness, until};
use exports::fuse::mount::{AllowOther, Allowed, MountOptions, Mounted, mount, unmount};
use exports::ublk::control::{self as ublk, Control, Failed, Order, Outcome};
use exports::ublk::wire::Command as UblkCommand;
use exports::vhost_user::fd_passing::{receive, send};
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl;
use nix::sys::signal::{SigHandler, SigmaskHow, Signal, signal};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, socketpair};
use nix::sys::stat::{SFlag, fstat};
use nix::unistd::{ForkResult, dup2_stderr, dup2_stdin, dup2_stdout, fork, pipe2};

use crate::errno::words;
use crate::host::Successor;
use crate::{Signal as Event, handled_signals};

/// Request: start the program, with the socket of the handover, standard output and standard error
/// as descriptors.
const START: u8 = b'S';
/// Request: kill the program if it still runs, and report its exit status.
const END: u8 = b'E';
/// Request: mount a file, with its options and path.
const MOUNT: u8 = b'M';
/// Request: unmount the path.
const UNMOUNT: u8 = b'U';
/// Request: carry out a command to /dev/ublk-control: its number, the device's, the command's data and structure.
const UBLK: u8 = b'B';
/// Request: open the file of a ublk device.
const UBLK_FILE: u8 = b'F';
/// Longest request and answer in bytes: a path, or a sentence with one.
const MAX_MESSAGE: usize = 8192;
/// Most characters of the program's last line of errors.
const MAX_LINE: usize = 300;
/// Name in lists of processes. It differs from the daemon's name, so pidof(8) and pgrep(1) find only the daemon.
const NAME: &str = "spawner";
/// More time than starting a program takes.
const PATIENCE: Duration = Duration::from_secs(5);
/// More time than a command of ublk takes, which may wait for requests.
const PATIENCE_WITH_UBLK: Duration = Duration::from_secs(600);

/// The daemon's handle of its spawner, which ends when this is dropped.
#[derive(Debug)]
pub struct Spawner {
    socket: Arc<OwnedFd>,
    /// An answer is outstanding. A late answer would be taken for that of the next request.
    owes: Cell<bool>,
    /// The program that it starts, if any.
    program: Option<PathBuf>,
    /// The errors of the program that was started last, if this process' standard error goes nowhere.
    errors: RefCell<Option<OwnedFd>>,
    /// A task has sent a request and waits for the answer.
    taken: Cell<bool>,
    free: Event,
}

/// The exclusive right of a task to send a request.
struct Turn<'a>(&'a Spawner);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.taken.set(false);
        self.0.free.notify();
    }
}

/// Starts the spawner.
///
/// If that fails, the daemon serves, but cannot be upgraded, and logs that. A daemon that changes its user, or
/// has upgrades switched off, gets a spawner that starts no programs: the spawner would keep privileges that the
/// daemon drops. Such a spawner only mounts the mount points on the command line.
pub fn start(sandbox: &SandboxOptions, named: &Named, has_monitor: bool) -> Option<Spawner> {
    let Named { mountpoints, devices } = named;
    let starts = sandbox.user.is_none() && !sandbox.no_upgrade;
    if !starts && mountpoints.is_empty() && devices.is_empty() {
        return None;
    }
    let devices = match (&sandbox.user, &sandbox.paths) {
        (None, None) if has_monitor => Devices::Any,
        _ => devices.iter().copied().collect::<Option<_>>().map_or(Devices::Any, Devices::Only),
    };
    let named = mountpoints.iter().map(PathBuf::as_path);
    let allowed = match (&sandbox.user, &sandbox.paths) {
        (None, None) if has_monitor => Allowed::Anywhere,
        (None, Some(paths)) => Allowed::only(named.chain(paths.iter().map(PathBuf::as_path))),
        (Some(_), _) | (None, None) => Allowed::only(named),
    };
    Spawner::start(starts, &allowed, &devices)
        .inspect_err(|error| log::warn!("live upgrade will not be possible: fork failed: {error}"))
        .ok()
}

/// What exports on a command line need of the spawner.
#[derive(Debug, Default)]
pub struct Named {
    /// Mount points.
    pub mountpoints: Vec<PathBuf>,
    /// Numbers of ublk devices; `None`: the kernel's choice.
    pub devices: Vec<Option<u32>>,
}

impl Named {
    /// Adds what steps of a command line need.
    pub fn add(&mut self, steps: &[Step]) {
        for step in steps {
            let needs = match &step.action {
                Action::Export(export) => export.kind.needs(),
                Action::Object(_)
                | Action::Blockdev(_)
                | Action::Chardev(_)
                | Action::Monitor(_)
                | Action::NbdServer(_)
                | Action::Metrics(_) => continue,
            };
            self.mountpoints.extend(needs.mountpoint.map(Path::to_owned));
            self.devices.extend(needs.ublk);
        }
    }
}

/// The ublk devices that the spawner makes, changes and opens.
#[derive(Debug)]
pub(crate) enum Devices {
    /// Any.
    Any,
    /// Those of these numbers.
    Only(Vec<u32>),
}

impl Devices {
    fn has(&self, id: u32) -> bool {
        match self {
            Devices::Any => true,
            Devices::Only(ids) => ids.contains(&id),
        }
    }
}

/// Returns whether a command line has a monitor.
pub fn has_monitor(steps: &[Step]) -> bool {
    steps.iter().any(|step| matches!(step.action, Action::Monitor(_)))
}

impl Spawner {
    /// Forks the spawner. Called while the process has one thread.
    ///
    /// # Errors
    ///
    /// As of socketpair(2) and fork(2).
    fn start(starts: bool, allowed: &Allowed, devices: &Devices) -> io::Result<Self> {
        // Before the daemon changes its working directory.
        let program = starts.then(Program::of_this_process).transpose()?;
        let flags = SockFlag::SOCK_CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?;
        // Signals to the whole process group must not end the spawner, which ends with the daemon.
        let before = handled_signals().thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
        // SAFETY: the process has a single thread, so the child is complete. It never returns from
        // `serve`.
        let forked = unsafe { fork() };
        if !matches!(forked, Ok(ForkResult::Child)) {
            before.thread_set_mask()?;
        }
        match forked? {
            ForkResult::Parent { .. } => {
                // The spawner is the daemon's only child. With SIGCHLD ignored, the kernel reaps a spawner that
                // ends first.
                // SAFETY: no handler is installed; the process waits for no child.
                unsafe { signal(Signal::SIGCHLD, SigHandler::SigIgn)? };
                Ok(Spawner {
                    socket: Arc::new(ours),
                    owes: Cell::new(false),
                    program: program.map(|program| program.path),
                    errors: RefCell::default(),
                    taken: Cell::new(false),
                    free: Event::default(),
                })
            }
            ForkResult::Child => {
                close_all_but(&theirs);
                let code = i32::from(serve(&theirs, program.as_ref(), allowed, devices).is_err());
                // SAFETY: the daemon's destructors and exit handlers must not run in this process.
                unsafe { libc::_exit(code) }
            }
        }
    }

    /// Whether it starts programs.
    pub(crate) fn starts(&self) -> bool {
        self.program.is_some()
    }

    /// Waits until no other task waits for an answer.
    async fn turn(&self) -> Turn<'_> {
        self.free.until(|| (!self.taken.replace(true)).then_some(())).await;
        Turn(self)
    }

    /// Mounts a file.
    ///
    /// # Errors
    ///
    /// A sentence.
    pub(crate) async fn mount(
        &self,
        event_loop: &EventLoop,
        options: &MountOptions,
    ) -> Result<Mounted, String> {
        let MountOptions { mountpoint, writable, allow_other, devices } = options;
        let allow_other = match allow_other {
            AllowOther::Off => 0,
            AllowOther::On => 1,
            AllowOther::Auto => 2,
        };
        let devices = u8::try_from(*devices).map_err(|_| "too many threads".to_owned())?;
        let mut request = vec![MOUNT, u8::from(*writable), allow_other, devices];
        request.extend_from_slice(mountpoint.as_os_str().as_encoded_bytes());
        let (others, devices) = self.place(event_loop, &request).await?;
        Ok(Mounted { devices, allow_other: others })
    }

    /// Unmounts a file.
    ///
    /// # Errors
    ///
    /// A sentence.
    pub(crate) async fn unmount(&self, event_loop: &EventLoop, path: &Path) -> Result<(), String> {
        let mut request = vec![UNMOUNT];
        request.extend_from_slice(path.as_os_str().as_encoded_bytes());
        self.place(event_loop, &request).await.map(drop)
    }

    /// Sends a command of ublk, and returns the driver's answer and the file that was opened.
    async fn ublk(&self, event_loop: &EventLoop, request: &[u8]) -> UblkAnswer {
        let _turn = self.turn().await;
        let answered = async {
            self.ask(request, &[])?;
            self.answered_within(event_loop, PATIENCE_WITH_UBLK, || self.received()).await
        };
        read_answer(answered.await.map_err(|error| Failed::of(&error))?)
    }

    /// Sends a command of ublk, and blocks until the answer. An answer that a task waits for is lost.
    fn ublk_now(&self, request: &[u8]) -> UblkAnswer {
        let answered = || {
            if self.owes.get() {
                self.received()?;
            }
            self.ask(request, &[])?;
            self.received()
        };
        read_answer(answered().map_err(|error| Failed::of(&error))?)
    }

    async fn place(
        &self,
        event_loop: &EventLoop,
        request: &[u8],
    ) -> Result<(bool, Vec<OwnedFd>), String> {
        let _turn = self.turn().await;
        let failed = |error: io::Error| format!("the process that mounts does not answer: {error}");
        self.ask(request, &[]).map_err(failed)?;
        let answer = self.answered(event_loop, || self.received()).await.map_err(failed)?;
        match answer.0.split_first() {
            Some((&MOUNTED, others)) => Ok((others == [1], answer.1)),
            Some((_, why)) => Err(String::from_utf8_lossy(why).into_owned()),
            None => Err(failed(io::ErrorKind::UnexpectedEof.into())),
        }
    }

    /// Starts the program of an upgrade, with its end of the handover as standard input. Returns its
    /// process ID.
    async fn spawn(&self, event_loop: &EventLoop, to: OwnedFd) -> io::Result<u32> {
        let (stdout, stderr) = (io::stdout(), io::stderr());
        let _turn = self.turn().await;
        let mut errors = stderr.as_fd().try_clone_to_owned()?;
        self.errors.take();
        if is_null(&stderr) {
            // Without O_NONBLOCK, a program with many errors would wait for this process.
            let (ours, theirs) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
            self.errors.replace(Some(ours));
            errors = theirs;
        }
        self.ask(&[START], &[to.as_raw_fd(), stdout.as_raw_fd(), errors.as_raw_fd()])?;
        drop((to, errors));
        match self.answered(event_loop, || self.answer()).await? {
            [0, pid] => Ok(pid.cast_unsigned()),
            [errno, _] => {
                let (path, error) = (self.program.as_deref(), io::Error::from_raw_os_error(errno));
                let path = path.unwrap_or(Path::new(NAME)).display();
                Err(io::Error::new(error.kind(), format!("{path}: {}", words(&error))))
            }
        }
    }

    /// The exit status of the program that was started last.
    async fn exit_status(&self, event_loop: &EventLoop) -> io::Result<ExitStatus> {
        let [status, _] = self.answered(event_loop, || self.answer()).await?;
        Ok(ExitStatus::from_raw(status))
    }

    async fn answered<T>(
        &self,
        event_loop: &EventLoop,
        answer: impl Fn() -> io::Result<T>,
    ) -> io::Result<T> {
        self.answered_within(event_loop, PATIENCE, answer).await
    }

    async fn answered_within<T>(
        &self,
        event_loop: &EventLoop,
        patience: Duration,
        answer: impl Fn() -> io::Result<T>,
    ) -> io::Result<T> {
        let events = PollFlags::POLLIN.bits().cast_unsigned().into();
        let ready = Readiness::new(event_loop, self.socket.clone(), events);
        let answered = async {
            loop {
                let mut poll_fd = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
                match poll(&mut poll_fd, PollTimeout::ZERO) {
                    Ok(0) | Err(Errno::EINTR) => ready.wait().await,
                    _ => return answer(),
                }
            }
        };
        let patience = u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX);
        let limit = event_loop.sleep_until(event_loop.now_ns() + patience);
        until(answered, limit).await.map_err(|()| late())?
    }

    fn ask(&self, what: &[u8], fds: &[i32]) -> io::Result<()> {
        if self.owes.replace(true) {
            let message =
                "the process that starts it has not answered before: upgrade by a restart";
            return Err(io::Error::other(message));
        }
        send(self.socket.as_fd(), &[IoSlice::new(what)], fds, MsgFlags::empty())?;
        Ok(())
    }

    /// Receives the answer to a mount, which has arrived.
    fn received(&self) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
        let mut answer = vec![0; MAX_MESSAGE];
        let received = receive(self.socket.as_fd(), &mut answer)?;
        self.owes.set(false);
        answer.truncate(received.len);
        Ok((answer, received.fds))
    }

    /// Receives an outstanding answer, which has arrived.
    fn answer(&self) -> io::Result<[i32; 2]> {
        let mut answer = [0; 8];
        let len = receive(self.socket.as_fd(), &mut answer)?.len;
        let gone =
            || io::Error::new(io::ErrorKind::BrokenPipe, "the process that starts it is gone");
        match answer.as_chunks() {
            ([first, second], []) if len == answer.len() => {
                self.owes.set(false);
                Ok([i32::from_ne_bytes(*first), i32::from_ne_bytes(*second)])
            }
            _ => Err(gone()),
        }
    }
}

impl Successor for Spawner {
    fn start<'a>(
        &'a self,
        control: &'a EventLoop,
        to: OwnedFd,
    ) -> Pin<Box<dyn Future<Output = io::Result<u32>> + 'a>> {
        Box::pin(self.spawn(control, to))
    }

    fn end(&self) -> io::Result<()> {
        self.ask(&[END], &[])
    }

    fn last_error(&self) -> Option<String> {
        let mut text = Vec::new();
        // Fails with EAGAIN, after all that is there, if a child of the program lives on.
        let _ = File::from(self.errors.take()?).read_to_end(&mut text);
        let text = String::from_utf8_lossy(&text);
        let line = text.lines().rev().map(str::trim).find(|line| !line.is_empty())?;
        Some(line.chars().filter(|c| !c.is_control()).take(MAX_LINE).collect())
    }

    fn ended<'a>(
        &'a self,
        control: &'a EventLoop,
    ) -> Pin<Box<dyn Future<Output = io::Result<ExitStatus>> + 'a>> {
        Box::pin(self.exit_status(control))
    }
}

/// Whether the file is `/dev/null`.
pub(crate) fn is_null(file: impl AsFd) -> bool {
    let null = nix::sys::stat::makedev(1, 3);
    fstat(file).is_ok_and(|found| {
        SFlag::from_bits_truncate(found.st_mode) & SFlag::S_IFMT == SFlag::S_IFCHR
            && found.st_rdev == null
    })
}

fn late() -> io::Error {
    let seconds = PATIENCE.as_secs();
    let message = format!("the process that starts it has not answered within {seconds} s");
    io::Error::new(io::ErrorKind::TimedOut, message)
}

/// Closes all descriptors except the standard ones and this one. Before Linux 5.9 the daemon's descriptors
/// stay open until the spawner ends.
fn close_all_but(socket: &OwnedFd) {
    let socket = socket.as_raw_fd().cast_unsigned();
    for (first, last) in [(3, socket.saturating_sub(1)), (socket.saturating_add(1), u32::MAX)] {
        // SAFETY: takes numbers only. Rust owners of these descriptors belong to the daemon's code, which
        // does not run in this process, and are never dropped.
        unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    }
}

/// Overwrites the command line of this process, limited to its length.
fn set_command_line(line: &[u8]) -> io::Result<()> {
    // proc_pid_stat(5): the second field is a name in brackets; 48 and 49 are arg_start and arg_end.
    let stat = fs::read_to_string("/proc/self/stat")?;
    let fields = stat.rsplit_once(") ").map(|(_, fields)| fields.split(' ')).into_iter().flatten();
    let mut ends = fields.skip(45).map_while(|field| field.parse::<u64>().ok());
    let (Some(start), Some(end)) = (ends.next(), ends.next()) else {
        return Err(io::Error::from(io::ErrorKind::InvalidData));
    };
    let room = usize::try_from(end.saturating_sub(start)).unwrap_or_default();
    let mut new = vec![0; room];
    // The last byte stays zero: otherwise the kernel shows the environment as part of the line.
    new.iter_mut().take(room.saturating_sub(1)).zip(line).for_each(|(to, from)| *to = *from);
    // The program has its own copy of the arguments and does not read these again.
    File::options().write(true).open("/proc/self/mem")?.write_all_at(&new, start)
}

/// The main loop of the spawner.
fn serve(
    socket: &OwnedFd,
    program: Option<&Program>,
    allowed: &Allowed,
    devices: &Devices,
) -> io::Result<()> {
    // The daemon ignores SIGCHLD. The spawner must not: it waits for its own child.
    // SAFETY: no handler is installed.
    unsafe { signal(Signal::SIGCHLD, SigHandler::SigDfl)? };
    prctl::set_name(&CString::new(NAME)?)?;
    // A failure matters only to lists of processes.
    let _ = set_command_line(NAME.as_bytes());
    // The daemon's terminal, or the reader of its output, has to see the end of the daemon, not of the spawner.
    let null = File::options().read(true).write(true).open("/dev/null")?;
    dup2_stdin(&null)?;
    dup2_stdout(&null)?;
    dup2_stderr(&null)?;
    drop(null);
    let mut child: Option<Child> = None;
    loop {
        let mut poll_fd = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
        match poll(&mut poll_fd, PollTimeout::NONE) {
            Err(Errno::EINTR) => continue,
            result => result?,
        };
        let mut request = [0; MAX_MESSAGE];
        let received = receive(socket.as_fd(), &mut request)?;
        let answer = match (request.get(..received.len).unwrap_or_default(), program) {
            ([], _) => return Ok(()),
            ([MOUNT | UNMOUNT, ..], _) => {
                let request = request.get(..received.len).unwrap_or_default();
                place(socket, request, allowed)?;
                continue;
            }
            (request @ [UBLK | UBLK_FILE, ..], _) => {
                ublk_command(socket, request, devices)?;
                continue;
            }
            ([START], Some(program)) => match program.start(received.fds) {
                Ok(started) => {
                    let pid = started.id().cast_signed();
                    child = Some(started);
                    [0, pid]
                }
                Err(error) => [error.raw_os_error().unwrap_or(Errno::EIO as i32), 0],
            },
            ([END], _) => match child.take() {
                Some(mut child) => {
                    // Fails if the program has ended by itself.
                    let _ = child.kill();
                    [child.wait()?.into_raw(), 0]
                }
                None => [0, 0],
            },
            _ => [Errno::EINVAL as i32, 0],
        };
        let answer = answer.map(i32::to_ne_bytes);
        send(socket.as_fd(), &[IoSlice::new(answer.as_flattened())], &[], MsgFlags::empty())?;
    }
}

/// First byte of a successful answer; for a mount, access of other users follows, and for ublk a structure. Of a mount
/// that failed, a sentence follows.
const MOUNTED: u8 = b'+';

/// Carries out a mount or unmount, and answers.
fn place(socket: &OwnedFd, request: &[u8], allowed: &Allowed) -> io::Result<()> {
    let path = |path: &[u8]| PathBuf::from(OsStr::from_bytes(path));
    let done = match request {
        [MOUNT, writable, allow_other, devices, rest @ ..] => {
            let allow_other = match allow_other {
                0 => AllowOther::Off,
                1 => AllowOther::On,
                _ => AllowOther::Auto,
            };
            let (mountpoint, writable) = (path(rest), *writable != 0);
            let devices = usize::from(*devices);
            mount(&MountOptions { mountpoint, writable, allow_other, devices }, allowed)
                .map(|mounted| (vec![MOUNTED, u8::from(mounted.allow_other)], mounted.devices))
        }
        [_, rest @ ..] => unmount(&path(rest), allowed).map(|()| (vec![MOUNTED], Vec::new())),
        [] => return Ok(()),
    };
    let (answer, devices) = done.unwrap_or_else(|why| {
        let sentence = why.into_bytes();
        let sentence = sentence.get(..MAX_MESSAGE - 1).unwrap_or(&sentence);
        ([b"-", sentence].concat(), Vec::new())
    });
    let fds: Vec<i32> = devices.iter().map(AsRawFd::as_raw_fd).collect();
    send(socket.as_fd(), &[IoSlice::new(&answer)], &fds, MsgFlags::empty())?;
    Ok(())
}

/// First byte of the answer to a failed command of ublk, if the file of the commands cannot be opened. An errno follows.
const NOT_OPENED: u8 = b'o';
/// First byte of the answer to any other failed command of ublk. An errno follows.
const FAILED: u8 = b'-';

/// Carries out a command of ublk, or opens a device's file, and answers.
fn ublk_command(socket: &OwnedFd, request: &[u8], devices: &Devices) -> io::Result<()> {
    let done = match ublk_request(request) {
        Some((_, order)) if !devices.has(order.id) && !is_of_no_device(&order) => {
            Err(Failed::Command(Errno::EPERM))
        }
        Some((false, order)) => ublk::carry_out(order).map(|memory| (memory, None)),
        Some((true, order)) => {
            ublk::open(order.id).map(|file| (Vec::new(), Some(file))).map_err(Failed::Command)
        }
        None => Err(Failed::Command(Errno::EINVAL)),
    };
    let (answer, file) = match done {
        Ok((memory, file)) => ([&[MOUNTED], &*memory].concat(), file),
        Err(failed) => {
            let kind = if matches!(failed, Failed::Open(_)) { NOT_OPENED } else { FAILED };
            ([&[kind], (failed.errno() as i32).to_ne_bytes().as_slice()].concat(), None)
        }
    };
    let fds: Vec<i32> = file.iter().map(AsRawFd::as_raw_fd).collect();
    send(socket.as_fd(), &[IoSlice::new(&answer)], &fds, MsgFlags::empty())?;
    Ok(())
}

/// Whether the order asks for the driver's features.
fn is_of_no_device(order: &Order) -> bool {
    order.command == UblkCommand::GetFeatures
}

/// Returns the request of that kind with an order.
fn request_for(kind: u8, order: &Order) -> Vec<u8> {
    let (id, data) = (order.id.to_ne_bytes(), order.data.to_ne_bytes());
    [&[kind, order.command as u8], &id[..], &data[..], &order.memory].concat()
}

/// Reads a request of [`UBLK`] or [`UBLK_FILE`], and whether it is the latter. `None`: it is malformed.
fn ublk_request(request: &[u8]) -> Option<(bool, Order)> {
    let (kind, rest) = request.split_first()?;
    let (number, rest) = rest.split_first()?;
    let (id, rest) = rest.split_first_chunk()?;
    let (data, memory) = rest.split_first_chunk()?;
    let order = Order {
        command: UblkCommand::of(*number)?,
        id: u32::from_ne_bytes(*id),
        data: u64::from_ne_bytes(*data),
        memory: memory.to_vec(),
    };
    Some((*kind == UBLK_FILE, order))
}

/// The driver's answer, and the file that was opened.
type UblkAnswer = Result<(Vec<u8>, Vec<OwnedFd>), Failed>;

/// Reads the spawner's answer to a command of ublk.
fn read_answer((answer, fds): (Vec<u8>, Vec<OwnedFd>)) -> UblkAnswer {
    let errno = |bytes: &[u8]| {
        bytes.first_chunk().map_or(Errno::EIO, |bytes| Errno::from_raw(i32::from_ne_bytes(*bytes)))
    };
    match answer.split_first() {
        Some((&MOUNTED, memory)) => Ok((memory.to_vec(), fds)),
        Some((&NOT_OPENED, why)) => Err(Failed::Open(errno(why))),
        Some((_, why)) => Err(Failed::Command(errno(why))),
        None => Err(Failed::Command(Errno::EPIPE)),
    }
}

/// Has the spawner carry out commands of ublk, for a daemon that is confined.
pub(crate) struct BySpawner {
    pub(crate) spawner: Rc<Spawner>,
    pub(crate) event_loop: EventLoop,
}

impl BySpawner {
    /// Carries out the request in a separate task, which receives the spawner's answer even if the caller stops waiting.
    fn ask(&self, kind: u8, order: &Order) -> ublk::Later<UblkAnswer> {
        let request = request_for(kind, order);
        let (spawner, event_loop) = (self.spawner.clone(), self.event_loop.clone());
        let asked = self.event_loop.spawn(async move { spawner.ublk(&event_loop, &request).await });
        Box::pin(async move {
            let gone = |_| Err(Failed::Command(Errno::ECANCELED));
            asked.await.unwrap_or_else(gone)
        })
    }
}

impl Control for BySpawner {
    fn command(&self, order: Order) -> ublk::Later<Outcome> {
        let asked = self.ask(UBLK, &order);
        Box::pin(async move { Ok(asked.await?.0) })
    }

    fn command_now(&self, order: Order) -> Outcome {
        Ok(self.spawner.ublk_now(&request_for(UBLK, &order))?.0)
    }

    fn open(&self, id: u32) -> ublk::Later<Result<OwnedFd, Errno>> {
        let order = Order { command: UblkCommand::GetInfo, id, data: 0, memory: Vec::new() };
        let asked = self.ask(UBLK_FILE, &order);
        Box::pin(async move {
            let (_, mut fds) = asked.await.map_err(Failed::errno)?;
            fds.pop().ok_or(Errno::EPROTO)
        })
    }
}

/// The program to start.
struct Program {
    path: PathBuf,
    name: OsString,
    /// Arguments of this process. The program ignores them, but lists of processes show them.
    arguments: Vec<OsString>,
}

impl Program {
    /// The program at the path by which this process was started; the file may be a new version by then.
    fn of_this_process() -> io::Result<Self> {
        let mut arguments = env::args_os();
        let name = arguments.next().unwrap_or_default();
        let mut arguments: Vec<OsString> = arguments.collect();
        // After an upgrade, the arguments of the first process.
        if arguments.first().is_some_and(|first| first == TAKE_OVER) {
            arguments.remove(0);
        }
        let found = find(Path::new(&name)).map_or_else(|| fs::read_link("/proc/self/exe"), Ok);
        Ok(Program { path: found?, name, arguments })
    }

    fn start(&self, fds: Vec<OwnedFd>) -> io::Result<Child> {
        let [hand_over, stdout, stderr] = <[OwnedFd; 3]>::try_from(fds)
            .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        Command::new(&self.path)
            .arg0(self.name.clone())
            .arg(TAKE_OVER)
            .args(&self.arguments)
            .stdin(hand_over)
            .stdout(stdout)
            .stderr(stderr)
            .spawn()
    }
}

/// The path of a program that the shell found in PATH; `None`: not found.
fn find(name: &Path) -> Option<PathBuf> {
    if name.as_os_str().as_encoded_bytes().contains(&b'/') {
        return std::path::absolute(name).ok().filter(|path| path.exists());
    }
    let path = env::var_os("PATH")?;
    let mut found = env::split_paths(&path).map(|folder| folder.join(name));
    let found = found.find(|path| path.is_file())?;
    std::path::absolute(found).ok()
}

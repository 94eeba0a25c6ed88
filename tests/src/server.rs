//! The storage daemon under test.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::pty::{OpenptyResult, openpty};
use nix::sys::prctl;
use nix::sys::signal::{self, Signal};
use nix::sys::termios::{SetArg, cfmakeraw, tcgetattr, tcsetattr};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::program::{daemon, tied_command};
use crate::{Image, Scratch, eventually};

/// Builds a storage daemon's command line.
#[derive(Debug)]
pub struct ServerCommand<'a> {
    scratch: &'a Scratch,
    wrapper: Vec<String>,
    environment: Vec<(&'static str, String)>,
    name: &'static str,
    command: &'static str,
    as_qsd: bool,
    arguments: Vec<String>,
    stdin: Option<OwnedFd>,
    log_level: Option<&'static str>,
    on_terminal: bool,
}

/// The process of a daemon.
#[derive(Debug)]
enum Process {
    /// A child of the test.
    Started(Child),
    /// A process that took over in an upgrade.
    TookOver(Pid),
}

impl Process {
    fn pid(&self) -> Pid {
        match self {
            Process::Started(child) => Pid::from_raw(i32::try_from(child.id()).expect("a pid")),
            Process::TookOver(pid) => *pid,
        }
    }

    fn try_wait(&mut self) -> Option<ExitStatus> {
        match self {
            Process::Started(child) => child.try_wait().expect("the daemon is our child"),
            Process::TookOver(pid) => {
                match waitpid(*pid, Some(WaitPidFlag::WNOHANG)).expect("the daemon is our child") {
                    WaitStatus::Exited(_, code) => Some(ExitStatus::from_raw(code << 8)),
                    WaitStatus::Signaled(_, signal, _) => Some(ExitStatus::from_raw(signal as i32)),
                    _ => None,
                }
            }
        }
    }

    /// Waits for its end, with any status.
    fn reap(&mut self) {
        let _ = match self {
            Process::Started(child) => child.wait().is_ok(),
            Process::TookOver(pid) => waitpid(*pid, None).is_ok(),
        };
    }

    fn kill(&mut self) {
        // Fails if it has ended by itself.
        let _ = match self {
            Process::Started(child) => child.kill().is_ok(),
            Process::TookOver(pid) => signal::kill(*pid, Signal::SIGKILL).is_ok(),
        };
    }
}

/// A running storage daemon. Killed when it is dropped; [`Server::stop`] is the orderly end.
#[derive(Debug)]
pub struct Server {
    process: Process,
    dir: PathBuf,
    log: PathBuf,
}

impl<'a> ServerCommand<'a> {
    /// A daemon with its sockets, pid file and log in `scratch`.
    pub fn new(scratch: &'a Scratch) -> Self {
        Self::other_command(scratch, "storage-daemon")
    }

    /// Another command of ringmill. Methods that add QSD's options do not apply.
    pub fn other_command(scratch: &'a Scratch, command: &'static str) -> Self {
        let (name, arguments, stdin) = ("daemon", Vec::new(), None);
        let (wrapper, environment, log_level) = (Vec::new(), Vec::new(), Some("info"));
        let (as_qsd, on_terminal) = (false, false);
        Self {
            scratch,
            wrapper,
            environment,
            name,
            command,
            as_qsd,
            arguments,
            stdin,
            log_level,
            on_terminal,
        }
    }

    /// Names the daemon, which is necessary for two in one folder.
    pub fn named(mut self, name: &'static str) -> Self {
        self.name = name;
        self
    }

    /// Runs the daemon under the name `qemu-storage-daemon`.
    pub fn called_qemu_storage_daemon(mut self) -> Self {
        self.as_qsd = true;
        self
    }

    /// Adds one argument.
    pub fn arg(mut self, argument: impl Into<String>) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// Adds several arguments.
    pub fn args<const N: usize>(mut self, arguments: [&str; N]) -> Self {
        self.arguments.extend(arguments.map(str::to_owned));
        self
    }

    /// Adds `--object iothread,id=ID`.
    pub fn iothread(self, id: &str) -> Self {
        self.arg("--object").arg(format!("iothread,id={id}"))
    }

    /// Adds a monitor on the socket [`Server::socket`] of `id`.
    pub fn monitor(self, id: &str) -> Self {
        let path = socket(self.scratch.dir(), id);
        let chardev = format!("socket,id={id},path={},server=on,wait=off", path.display());
        self.arg("--chardev").arg(chardev).arg("--monitor").arg(format!("chardev={id}"))
    }

    /// Adds `--blockdev` for an image with the `file` driver and a node name, with more `options`.
    pub fn file(self, node: &str, image: &Image, options: &str) -> Self {
        let path = image.path().display();
        let blockdev = format!("driver=file,node-name={node},filename={path}{}", more(options));
        self.arg("--blockdev").arg(blockdev)
    }

    /// Adds `--export` for a node over vhost-user-blk, on the socket [`Server::socket`] of the node, with more `options`.
    /// Writable unless `options` has `writable`.
    pub fn export(self, node: &str, options: &str) -> Self {
        let socket = socket(self.scratch.dir(), node);
        let writable = if options.contains("writable=") { "" } else { ",writable=on" };
        self.arg("--export").arg(format!(
            "type=vhost-user-blk,id={node},node-name={node},addr.type=unix,addr.path={}{writable}{}",
            socket.display(),
            more(options)
        ))
    }

    /// Adds `--export` for `nodes` over vhost-user-scsi as LUN 0 and on, on the socket [`Server::socket`] of `id`, with more
    /// `options`. Writable unless `options` has `writable`.
    pub fn export_scsi(self, id: &str, nodes: &[&str], options: &str) -> Self {
        let socket = socket(self.scratch.dir(), id);
        let writable = if options.contains("writable=") { "" } else { ",writable=on" };
        let luns: String =
            (0..).zip(nodes).map(|(lun, node)| format!(",luns.{lun}={node}")).collect();
        self.arg("--export").arg(format!(
            "type=vhost-user-scsi,id={id}{luns},addr.type=unix,addr.path={}{writable}{}",
            socket.display(),
            more(options)
        ))
    }

    /// Starts the daemon by `program`, which receives the daemon's command line.
    pub fn wrapped_by(self, program: impl AsRef<Path>) -> Self {
        self.wrapped_by_with(program, &[])
    }

    /// The same, with arguments for the program before the daemon's command line.
    pub fn wrapped_by_with(mut self, program: impl AsRef<Path>, arguments: &[String]) -> Self {
        self.wrapper = vec![program.as_ref().to_str().expect("a path in UTF-8").to_owned()];
        self.wrapper.extend_from_slice(arguments);
        self
    }

    /// Sets a variable in the daemon's environment.
    pub fn env(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.environment.push((name, value.into()));
        self
    }

    /// Sets the log level by `RINGMILL_LOG`; `info` by default. `None`: the daemon's own default.
    pub fn logging(mut self, level: Option<&'static str>) -> Self {
        self.log_level = level;
        self
    }

    /// Gives the daemon a terminal as its standard output, as a person does. The log has its output.
    pub fn on_terminal(mut self) -> Self {
        self.on_terminal = true;
        self
    }

    /// Lets the daemon inherit `fd` as its fd 0.
    pub fn stdin(mut self, fd: impl Into<OwnedFd>) -> Self {
        self.stdin = Some(fd.into());
        self
    }

    /// Starts the daemon, and waits until it serves and its sandbox is in force. The log shows the sandbox at level `info`;
    /// at lower levels this waits only until the daemon serves.
    ///
    /// # Panics
    ///
    /// If it ends instead.
    pub fn start(self) -> Server {
        let speaks = matches!(self.log_level, Some("info" | "debug"));
        let pid_file = self.scratch.path(self.name).with_extension("pid");
        let path = pid_file.to_str().expect("a path in UTF-8").to_owned();
        let mut server = self.arg("--pidfile").arg(path).spawn();
        let pid = eventually("the daemon's pid file", || {
            if let Some(status) = server.process.try_wait() {
                panic!("the daemon ended with {status}");
            }
            fs::read_to_string(&pid_file).ok()?.trim().parse::<u32>().ok()
        });
        assert_eq!(pid, server.pid(), "the number in the pid file");
        // The sandbox comes later, and opens files for a moment. QEMU's daemon logs nothing about it.
        if speaks && daemon().file_name() != Some(OsStr::new("qemu-storage-daemon")) {
            eventually("what the sandbox is", || {
                if let Some(status) = server.process.try_wait() {
                    panic!("the daemon ended with {status}");
                }
                server.log().contains("sandbox: ").then_some(())
            });
        }
        server
    }

    /// Starts the daemon with its default log level, and waits for its end. Returns the status, and the text on stdout and
    /// stderr.
    pub fn run(self) -> (ExitStatus, String) {
        let mut server = self.logging(None).spawn();
        let status = server.wait();
        (status, server.log())
    }

    /// Starts the daemon without waiting.
    pub fn spawn(self) -> Server {
        let mut daemon = daemon().to_owned();
        if self.as_qsd {
            let link = self.scratch.path("qemu-storage-daemon");
            symlink(daemon, &link).expect("a new link");
            daemon = link;
        }
        let mut command = match self.wrapper.split_first() {
            Some((wrapper, arguments)) => {
                let mut command = tied_command(Path::new(wrapper));
                command.args(arguments).arg(&daemon);
                command
            }
            None => tied_command(&daemon),
        };
        command
            .env_remove("RINGMILL_LOG")
            .envs(self.log_level.map(|level| ("RINGMILL_LOG", level)));
        command.envs(self.environment);
        if daemon.file_name() != Some(OsStr::new("qemu-storage-daemon")) {
            command.arg(self.command);
        }
        let log = self.scratch.path(self.name).with_extension("log");
        let stdout = File::create(&log).expect("a new log");
        let stderr = stdout.try_clone().expect("another fd");
        command.args(&self.arguments).stderr(stderr);
        command.stdout(if self.on_terminal { terminal(stdout) } else { Stdio::from(stdout) });
        command.stdin(self.stdin.map_or_else(Stdio::null, Stdio::from));
        let child = command.spawn().expect("the daemon can be run");
        let process = Process::Started(child);
        Server { process, dir: self.scratch.dir().to_owned(), log }
    }
}

/// Returns a terminal, whose output goes to `log`.
fn terminal(mut log: File) -> Stdio {
    let OpenptyResult { master, slave } = openpty(None, None).expect("a terminal");
    let mut modes = tcgetattr(&slave).expect("a terminal");
    // Lines end as they are written.
    cfmakeraw(&mut modes);
    tcsetattr(&slave, SetArg::TCSANOW, &modes).expect("a terminal");
    // Reading ends with an error when the last writer has closed the terminal.
    thread::spawn(move || io::copy(&mut File::from(master), &mut log));
    Stdio::from(slave)
}

impl Server {
    /// The socket of the export of `node`, or of a monitor.
    pub fn socket(&self, node: &str) -> PathBuf {
        socket(&self.dir, node)
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.process.pid().as_raw().cast_unsigned()
    }

    /// The number in its pid file.
    pub fn pid_file(&self) -> u32 {
        let text = fs::read_to_string(self.log.with_extension("pid")).expect("the pid file");
        text.trim().parse().expect("a number")
    }

    /// Its output on stdout and stderr so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).expect("the daemon's log")
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.pid()).expect("a pid");
        signal::kill(Pid::from_raw(pid), signal).expect("the daemon is there");
    }

    /// Stops the process with SIGSTOP, and waits until all its threads have stopped.
    pub fn pause(&self) {
        self.signal(Signal::SIGSTOP);
        // proc(5): the state in `stat`.
        let has_stopped = |task: PathBuf| {
            let stat = fs::read_to_string(task.join("stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('T'))
        };
        eventually("all threads to stop", || self.tasks().all(has_stopped).then_some(()));
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> ExitStatus {
        let pid = self.pid();
        eventually(&format!("the end of the daemon (pid {pid})"), || self.process.try_wait())
    }

    /// Sends SIGINT until it ends. A daemon that ends already takes it as new only after a second.
    pub fn insist(&mut self) -> ExitStatus {
        eventually("the end of a daemon that is told again and again", || {
            self.signal(Signal::SIGINT);
            self.process.try_wait()
        })
    }

    /// Ends it with SIGTERM.
    ///
    /// # Panics
    ///
    /// If the daemon fails, or leaves a socket behind that is not an NBD server's.
    pub fn stop(mut self) {
        self.signal(Signal::SIGTERM);
        let status = self.wait();
        assert!(status.success(), "on SIGTERM the daemon ended with {status}");
        for entry in fs::read_dir(&self.dir).expect("the folder is there") {
            let path = entry.expect("the folder can be read").path();
            // As in QSD, the socket of an NBD server stays.
            if path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"nbd")) {
                continue;
            }
            assert_ne!(path.extension(), Some(OsStr::new("sock")), "left behind: {path:?}");
        }
    }

    /// Upgrades the daemon: another process serves from now on.
    ///
    /// # Panics
    ///
    /// Unless the old process exits with 0, and the pid file has another number.
    pub fn upgrade(&mut self) {
        self.upgrade_by(|server| server.signal(Signal::SIGUSR2));
    }

    /// Upgrades the daemon by `ask`.
    ///
    /// # Panics
    ///
    /// As [`Server::upgrade`].
    pub fn upgrade_by(&mut self, ask: impl FnOnce(&Server)) {
        // The new process is a descendant, which has to be found, and killed at the end.
        prctl::set_child_subreaper(true).expect("this process can adopt");
        let before = self.pid();
        ask(self);
        let status = self.wait();
        assert!(status.success(), "the daemon that was upgraded ended with {status}");
        let pid = self.pid_file();
        assert_ne!(pid, before, "the pid file has the id of the daemon that took over");
        let pid = Pid::from_raw(pid.cast_signed());
        eventually("the end of the spawner, after which this process adopts the daemon", || {
            (waitpid(pid, Some(WaitPidFlag::WNOHANG)) != Err(Errno::ECHILD)).then_some(())
        });
        self.process = Process::TookOver(pid);
    }

    /// Starts an upgrade, and kills the daemon with SIGKILL `after` that. Returns the daemon that has taken over by then, or
    /// `None` if no process is left.
    pub fn kill_in_upgrade(mut self, after: Duration) -> Option<Self> {
        prctl::set_child_subreaper(true).expect("this process can adopt");
        let before = self.pid();
        self.signal(Signal::SIGUSR2);
        thread::sleep(after);
        self.process.kill();
        self.wait();
        let file = self.log.with_extension("pid");
        let successor = eventually("one that serves, or the end of all", || {
            let left = self.processes_left();
            let pid = fs::read_to_string(&file).ok().and_then(|pid| pid.trim().parse().ok());
            let successor = pid.filter(|pid| *pid != before && left.contains(pid));
            let is_ours = |pid: &u32| {
                let pid = Pid::from_raw(pid.cast_signed());
                waitpid(pid, Some(WaitPidFlag::WNOHANG)) != Err(Errno::ECHILD)
            };
            match successor {
                Some(pid) => is_ours(&pid).then_some(Some(pid)),
                None => left.is_empty().then_some(None),
            }
        });
        match successor {
            Some(pid) => {
                self.process = Process::TookOver(Pid::from_raw(pid.cast_signed()));
                Some(self)
            }
            None => {
                fs::remove_file(file).expect("it was started by its pid file");
                None
            }
        }
    }

    /// Returns the ids of the daemon and of the processes started to take over.
    fn processes_left(&self) -> Vec<u32> {
        let dir = self.dir.as_os_str().as_encoded_bytes();
        let is_ours = |pid: &u32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let program = line.split(|byte| *byte == 0).next().unwrap_or_default();
            program.ends_with(b"ringmill") && line.windows(dir.len()).any(|part| part == dir)
        };
        let entries = fs::read_dir("/proc").expect("processes").filter_map(Result::ok);
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.filter(is_ours).collect()
    }

    /// Kills it with SIGKILL, and removes its pid file.
    pub fn kill(mut self) {
        self.process.kill();
        self.wait();
        fs::remove_file(self.log.with_extension("pid")).expect("it was started by its pid file");
    }

    /// Number of its open files.
    pub fn open_files(&self) -> usize {
        self.proc_entries("fd").count()
    }

    /// Whether it has a descriptor of this number.
    pub fn has_open(&self, number: u32) -> bool {
        Path::new(&format!("/proc/{}/fd/{number}", self.pid())).symlink_metadata().is_ok()
    }

    /// Describes its files and threads, for a failed test.
    pub fn what_is_open(&self) -> String {
        let files = self.proc_entries("fd").filter_map(|path| fs::read_link(path).ok());
        let files = files.map(|path| path.display().to_string());
        let threads = self.tasks().filter_map(|task| fs::read_to_string(task.join("comm")).ok());
        files.chain(threads).map(|line| format!("  {}\n", line.trim_end())).collect()
    }

    /// Its only child, the process that starts new versions.
    pub fn spawner(&self) -> Option<u32> {
        let pid = self.pid();
        let path = format!("/proc/{pid}/task/{pid}/children");
        fs::read_to_string(path).expect("its children").trim().parse().ok()
    }

    /// The folders of its threads in /proc, without the kernel's threads for io_uring. Those come and go; the last one stays
    /// and wakes every 5 s. Such a thread has the name of its creator until it runs.
    pub fn tasks(&self) -> impl Iterator<Item = PathBuf> {
        // linux/sched.h
        const PF_IO_WORKER: u64 = 0x10;
        self.proc_entries("task").filter(|task| {
            // proc_pid_stat(5): field 9; the second is a name in brackets. An ended thread has no stat.
            let stat = fs::read_to_string(task.join("stat")).unwrap_or_default();
            let flags = stat.rsplit_once(") ").and_then(|(_, fields)| fields.split(' ').nth(6));
            let flags = flags.and_then(|flags| flags.parse::<u64>().ok());
            flags.is_some_and(|flags| flags & PF_IO_WORKER == 0)
        })
    }

    /// Number of [`Server::tasks`].
    pub fn threads(&self) -> usize {
        self.tasks().count()
    }

    /// Its thread of that name.
    ///
    /// # Panics
    ///
    /// If it has none.
    pub fn thread(&self, name: &str) -> Pid {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid())).expect("it is there");
        let comm = |task: &Path| fs::read_to_string(task.join("comm")).unwrap_or_default();
        let task = tasks
            .filter_map(|task| task.ok().map(|task| task.path()))
            .find(|task| comm(task).trim_end() == name)
            .unwrap_or_else(|| panic!("no thread of the name {name}"));
        let id = task.file_name().and_then(OsStr::to_str).and_then(|id| id.parse().ok());
        Pid::from_raw(id.expect("a number in /proc"))
    }

    /// How often its thread of that name has gone to sleep.
    pub fn sleeps(&self, thread: &str) -> u64 {
        let status = self.proc(&format!("task/{}/status", self.thread(thread)));
        let field = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        field.and_then(|field| field.trim().parse().ok()).expect("a number in /proc")
    }

    /// Number of context switches of [`Server::tasks`].
    pub fn context_switches(&self) -> u64 {
        let status = |task: PathBuf| fs::read_to_string(task.join("status")).unwrap_or_default();
        let switches = |status: String| {
            let fields = status.lines().filter(|line| line.contains("ctxt_switches:"));
            let number = |field: &str| field.split_whitespace().nth(1)?.parse::<u64>().ok();
            fields.filter_map(number).sum::<u64>()
        };
        self.tasks().map(|task| switches(status(task))).sum()
    }

    /// Number of its mappings of front ends' shared memory.
    pub fn guest_mappings(&self) -> usize {
        self.proc("maps").lines().filter(|line| line.contains("/memfd:")).count()
    }

    /// Number of all its mappings.
    pub fn mappings(&self) -> usize {
        self.proc("maps").lines().count()
    }

    /// Its resident private memory in KiB.
    pub fn private_kib(&self) -> u64 {
        self.status_kib("RssAnon:")
    }

    /// Its pinned memory in KiB. Memory pinned twice counts twice.
    pub fn pinned_kib(&self) -> u64 {
        self.status_kib("VmPin:")
    }

    fn status_kib(&self, name: &str) -> u64 {
        let status = self.proc("status");
        let field = status.lines().find_map(|line| line.strip_prefix(name));
        let number = field.and_then(|field| field.trim().strip_suffix(" kB"));
        number.and_then(|number| number.parse().ok()).expect("a field of /proc/PID/status")
    }

    fn proc(&self, file: &str) -> String {
        fs::read_to_string(format!("/proc/{}/{file}", self.pid())).expect("the daemon is there")
    }

    fn proc_entries(&self, folder: &str) -> impl Iterator<Item = PathBuf> + use<> {
        let path = format!("/proc/{}/{folder}", self.pid());
        let entries = fs::read_dir(path).expect("the daemon is there");
        entries.filter_map(Result::ok).map(|entry| entry.path())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Fails if the process has ended.
        self.process.kill();
        self.process.reap();
        let log = self.log();
        if thread::panicking() {
            eprintln!("--- the daemon's log:\n{log}---");
        } else {
            // In every test: the sandbox permits all calls that the daemon makes.
            assert!(!log.contains("sandbox: refused"), "--- the daemon's log:\n{log}---");
        }
    }
}

fn socket(dir: &Path, node: &str) -> PathBuf {
    dir.join(node).with_extension("sock")
}

/// `options` as the end of an option list.
fn more(options: &str) -> String {
    if options.is_empty() { String::new() } else { format!(",{options}") }
}

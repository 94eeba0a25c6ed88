//! A Linux guest under QEMU, without KVM. Its disks are vhost-user-blk, vhost-user-scsi and vfio-user exports.

use std::env;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::json;
use tempfile::TempDir;

use crate::program::{guest_file, tied_command};
use crate::{Initramfs, Qmp, eventually, qemu_faults, tool};

/// Time limit of a guest. A correct one ends within seconds.
pub(crate) const TIME_LIMIT: Duration = Duration::from_secs(240);

/// How often a guest may be booted, see `qemu_faults`.
const BOOTS: u32 = 3;

/// How often the console of a guest whose job has not started is read.
const BETWEEN_LOOKS: Duration = Duration::from_secs(1);

/// The line that a guest prints before its job.
const STARTED: &str = "the job starts";

/// QEMU's device for a vfio-user export.
const VFIO_USER: &str = "vfio-user-pci";

/// QEMU from the tree that `scripts/setup-peers.sh` makes.
pub(crate) fn peers_qemu() -> Vec<String> {
    let tree = env::var_os("RINGMILL_PEERS").unwrap_or_else(|| "/var/tmp/ringmill-peers".into());
    qemu_in(&PathBuf::from(tree), "scripts/setup-vfio-user.sh")
}

/// QEMU of a tree of another Debian release, which `script` makes, run by that tree's loader with its libraries.
fn qemu_in(tree: &Path, script: &str) -> Vec<String> {
    let file = |name: &str| {
        let path = tree.join(name);
        assert!(path.exists(), "{} does not exist: run {script}", path.display());
        path.display().to_string()
    };
    let own = |folder: &str| ["-L".to_owned(), file(folder)];
    let mut program = vec![
        tool("env").display().to_string(),
        // It would load this machine's.
        format!("QEMU_MODULE_DIR={}", tree.join("usr/lib/x86_64-linux-gnu/qemu").display()),
        file("usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"),
        "--library-path".to_owned(),
        file("usr/lib/x86_64-linux-gnu"),
        file("usr/bin/qemu-system-x86_64"),
    ];
    program.extend(["usr/share/seabios", "usr/share/qemu"].map(own).into_iter().flatten());
    program
}

/// Builds a guest's description.
#[derive(Debug)]
pub struct Guest {
    initramfs: &'static str,
    kernel: &'static str,
    /// QEMU and its first arguments.
    pub(crate) qemu: Vec<String>,
    files: Option<Initramfs>,
    kernel_options: &'static str,
    time_limit: Duration,
    memory_mib: u32,
    cpus: u32,
    /// Number of queues; `None` for QEMU's default.
    queues: Option<u32>,
    chardev_options: String,
    /// Sockets, and QEMU's device for each, with its options.
    disks: Vec<(PathBuf, String)>,
    attachment: Option<String>,
    more: Vec<String>,
    reboots: bool,
    machine: &'static str,
    accel: &'static str,
}

/// A running guest. Killed when it is dropped.
///
/// The job and the test exchange lines. [`Boot::line`] and [`Boot::expect`] read the lines that the job prints,
/// and [`Boot::send`] writes a line for it to read. A job prints a line before it reads one.
#[derive(Debug)]
pub struct Boot {
    qemu: Child,
    to_job: ChildStdin,
    from_job: Receiver<String>,
    transcript: Vec<String>,
    deadline: Instant,
    dir: TempDir,
    /// What QEMU was started as: the program with its first arguments, and the others.
    command: (Vec<String>, Vec<String>),
    boots: u32,
    has_started: bool,
}

impl Guest {
    /// A guest with 256 MiB, two processors and no disk.
    #[expect(
        clippy::new_without_default,
        reason = "a guest without a disk is a start, not a default"
    )]
    pub fn new() -> Self {
        Self {
            initramfs: "initramfs",
            kernel: "vmlinux",
            qemu: vec![tool("qemu-system-x86_64").display().to_string()],
            files: None,
            kernel_options: "",
            time_limit: TIME_LIMIT,
            memory_mib: 256,
            cpus: 2,
            queues: Some(1),
            chardev_options: String::new(),
            disks: Vec::new(),
            attachment: None,
            more: Vec::new(),
            reboots: false,
            machine: "q35",
            accel: "tcg",
        }
    }

    /// Adds a disk: `/dev/vda` is the first one.
    pub fn disk(mut self, socket: PathBuf) -> Self {
        self.disks.push((socket, "vhost-user-blk-pci".to_owned()));
        self
    }

    /// Adds such a disk, with options of its QEMU device, separated by commas.
    pub fn disk_with(mut self, socket: PathBuf, options: &str) -> Self {
        let comma = if options.is_empty() { "" } else { "," };
        self.disks.push((socket, format!("vhost-user-blk-pci{comma}{options}")));
        self
    }

    /// Adds a SCSI controller, each of whose logical units is a disk: `/dev/sda` is the first one.
    pub fn scsi(mut self, socket: PathBuf) -> Self {
        self.disks.push((socket, "vhost-user-scsi-pci,param_change=on".to_owned()));
        self
    }

    /// Adds the PCI device of a vfio-user export, and Debian's generic kernel, which has drivers for more
    /// controllers: `/dev/sda` is a SATA drive. QEMU is that of the tree that `scripts/setup-peers.sh` makes.
    pub fn vfio_user(mut self, socket: PathBuf) -> Self {
        self.kernel = "generic/vmlinuz";
        self.initramfs = "generic/initramfs";
        self.memory_mib = 512;
        self.qemu = peers_qemu();
        self.disks.push((socket, VFIO_USER.to_owned()));
        self
    }

    /// Adds a SCSI controller, with options of its QEMU device, separated by commas.
    pub fn scsi_with(mut self, socket: PathBuf, options: &str) -> Self {
        let comma = if options.is_empty() { "" } else { "," };
        self.disks.push((socket, format!("vhost-user-scsi-pci{comma}{options}")));
        self
    }

    /// Uses QEMU of a Debian release, from the tree that `scripts/setup-field.sh` makes; `None`: this machine's.
    pub fn qemu_of(mut self, release: Option<&str>) -> Self {
        if let Some(release) = release {
            let field = env::var_os("RINGMILL_FIELD");
            let field = PathBuf::from(field.unwrap_or_else(|| "/var/tmp/ringmill-field".into()));
            self.qemu = qemu_in(&field.join(release), "scripts/setup-field.sh");
        }
        self
    }

    /// Sets the time limit, seconds.
    pub fn time_limit(mut self, seconds: u32) -> Self {
        self.time_limit = Duration::from_secs(seconds.into());
        self
    }

    /// Adds options of the Linux kernel.
    pub fn kernel_options(mut self, options: &'static str) -> Self {
        self.kernel_options = options;
        self
    }

    /// Uses these QEMU options for memory and disk instead of the harness's own.
    pub fn attached_by(mut self, options: &str) -> Self {
        self.attachment = Some(options.to_owned());
        self
    }

    /// Adds arguments of QEMU.
    pub fn with_arguments(mut self, arguments: &[&str]) -> Self {
        self.more.extend(arguments.iter().map(|argument| (*argument).to_owned()));
        self
    }

    /// Sets the number of request queues of each disk, and of the guest's processors, as Linux uses at most one queue
    /// per processor.
    pub fn queues(mut self, queues: u32) -> Self {
        self.queues = Some(queues);
        self.cpus = self.cpus.max(queues);
        self
    }

    /// Leaves the number of queues to QEMU, which requests one per processor.
    pub fn unsaid_queues(mut self) -> Self {
        self.queues = None;
        self
    }

    /// QEMU's machine; the default is q35.
    pub fn machine(mut self, machine: &'static str) -> Self {
        self.machine = machine;
        self
    }

    /// Adds options to each disk's `-chardev socket`.
    pub fn chardev_options(mut self, options: &str) -> Self {
        if !options.is_empty() {
            self.chardev_options = format!(",{options}");
        }
        self
    }

    /// Runs Debian sid's kernel, which has ublk and VDUSE, with fio and these files: for a daemon in the guest.
    pub fn of_host(mut self, files: Initramfs) -> Self {
        self.kernel = "host/vmlinux";
        self.initramfs = "host/initramfs";
        self.files = Some(files);
        self.memory_mib = 1024;
        self
    }

    /// Runs systemd as the first process, with these files. systemd runs the job as `job.service`.
    pub fn with_systemd(mut self, files: Initramfs) -> Self {
        self.initramfs = "initramfs-systemd";
        self.files = Some(files);
        self.kernel_options = " systemd.unit=job.service printk.devkmsg=on";
        self.memory_mib = 512;
        // With each reload it starts another daemon, whose first seconds are slow under TCG.
        self.time_limit *= 2;
        self
    }

    /// Runs all the guest's processors in one thread, for tests that change the guest's memory map. QEMU 10.0's TCG
    /// aborts at times if another thread is within an access (`iotlb_to_section: Assertion failed`).
    pub fn single_threaded(mut self) -> Self {
        self.accel = "tcg,thread=single";
        self
    }

    /// Lets the guest reboot; otherwise a reboot ends it. After a reboot the job runs again from its start.
    pub fn reboots(mut self) -> Self {
        self.reboots = true;
        self
    }

    /// Boots the guest, runs `job` and waits for the end. Returns the lines that the job printed. The job is a script
    /// for busybox sh under `set -eu`, with the functions of `tests/guest/functions.sh`.
    ///
    /// # Panics
    ///
    /// If the job's exit status is not 0, or the guest hangs.
    pub fn run(self, job: &str) -> Vec<String> {
        self.boot(job).finish()
    }

    /// Boots the guest and starts `job`, as [`Guest::run`] does, without waiting for the end.
    pub fn boot(mut self, job: &str) -> Boot {
        let dir = TempDir::with_prefix_in("ringmill-guest-", "/var/tmp").expect("a folder");
        let started = format!("echo '{STARTED}'\n");
        let job = [&started, include_str!("../guest/functions.sh"), job].concat();
        fs::write(dir.path().join("job"), job).expect("space for the job");
        if let Some(files) = self.files.take() {
            files.write_behind(&guest_file(self.initramfs), &dir.path().join("initramfs"));
        }
        let stderr = File::create_new(dir.path().join("stderr")).expect("a new file");
        let arguments = self.arguments(dir.path());
        let (qemu, to_job, from_job) = start(&self.qemu, &arguments, stderr);
        Boot {
            qemu,
            to_job,
            from_job,
            transcript: Vec::new(),
            deadline: Instant::now() + self.time_limit,
            dir,
            command: (self.qemu, arguments),
            boots: 1,
            has_started: false,
        }
    }

    fn arguments(&self, dir: &Path) -> Vec<String> {
        let file = |name: &str| dir.join(name).display().to_string();
        let mut arguments = self.attachment.as_ref().map_or_else(
            || self.attachment(),
            |options| options.split_whitespace().map(String::from).collect(),
        );
        let mut add = |name: &str, value: String| arguments.extend([format!("-{name}"), value]);
        add("machine", self.machine.into());
        add("accel", self.accel.into());
        add("cpu", "max".into());
        add("smp", self.cpus.to_string());
        add("kernel", guest_file(self.kernel).display().to_string());
        let own = dir.join("initramfs");
        let initramfs = if own.exists() { own } else { guest_file(self.initramfs) };
        add("initrd", initramfs.display().to_string());
        // The kernel counts ticks to test the timer, and panics if a busy host runs the guest too little for
        // that moment. What takes a tenth of a second under TCG, and no job needs, is left out.
        let options = self.kernel_options;
        let append = format!(
            "console=ttyS0 quiet loglevel=4 panic=-1 no_timer_check mitigations=off cryptomgr.notests \
             initcall_blacklist=init_kprobe_trace,crypto_kdf108_init,load_system_certificate_list,init_encrypted{options}"
        );
        add("append", append);
        add("serial", format!("file:{}", file("console")));
        add("chardev", "stdio,id=job,signal=off".into());
        add("serial", "chardev:job".into());
        add("fw_cfg", format!("name=opt/ringmill/job,file={}", file("job")));
        add("qmp", format!("unix:{},server=on,wait=off", file("qmp")));
        arguments.extend(["-no-user-config", "-nodefaults"].map(String::from));
        arguments.extend(["-display", "none"].map(String::from));
        if !self.reboots {
            arguments.push("-no-reboot".into());
        }
        arguments.extend_from_slice(&self.more);
        arguments
    }

    /// The options for memory and disks.
    fn attachment(&self) -> Vec<String> {
        let memory = self.memory_mib;
        let mut arguments = Vec::new();
        let mut add = |name: &str, value: String| arguments.extend([format!("-{name}"), value]);
        add("m", format!("{memory}M,slots=2,maxmem=2G"));
        // The daemon maps this memory, so it must be shared.
        add("object", format!("memory-backend-memfd,id=ram,size={memory}M,share=on"));
        add("machine", "memory-backend=ram".into());
        for (index, (socket, device)) in self.disks.iter().enumerate() {
            let path = socket.display();
            if *device == VFIO_USER {
                let socket = json!({"type": "unix", "path": socket});
                add("device", json!({"driver": device, "socket": socket}).to_string());
                continue;
            }
            let options = &self.chardev_options;
            add("chardev", format!("socket,id=chardev{index},path={path}{options}"));
            let device = format!("{device},id=disk{index},chardev=chardev{index}");
            let option = if device.contains("scsi") { "num_queues" } else { "num-queues" };
            let queues = self.queues.map(|queues| format!(",{option}={queues}"));
            let queues = queues.unwrap_or_default();
            add("device", format!("{device}{queues}"));
        }
        arguments
    }
}

/// Starts QEMU. Returns the job's input and its lines.
pub(crate) fn start(
    program: &[String],
    arguments: &[String],
    stderr: File,
) -> (Child, ChildStdin, Receiver<String>) {
    let (qemu, own) = program.split_first().expect("a program");
    let mut qemu = tied_command(Path::new(qemu))
        .args(own)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(stderr)
        .spawn()
        .expect("QEMU can be run");
    let to_job = qemu.stdin.take().expect("a pipe");
    let output = BufReader::new(qemu.stdout.take().expect("a pipe"));
    let (lines, from_job) = mpsc::channel();
    thread::spawn(move || {
        for line in output.split(b'\n').map_while(Result::ok) {
            if lines.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                break;
            }
        }
    });
    (qemu, to_job, from_job)
}

impl Boot {
    /// Migrates the guest live to another QEMU, with the disks of `there` and otherwise the same description. Calls
    /// `hand_over` once the guest is paused and its disks' queues are stopped. The job must print nothing meanwhile.
    ///
    /// # Panics
    ///
    /// If the migration fails.
    pub fn migrate(&mut self, there: &Guest, hand_over: impl FnOnce()) {
        let dir = TempDir::with_prefix_in("ringmill-guest-", "/var/tmp").expect("a folder");
        fs::copy(self.dir.path().join("job"), dir.path().join("job")).expect("space for the job");
        let stderr = File::create_new(dir.path().join("stderr")).expect("a new file");
        let uri = format!("unix:{}", dir.path().join("migration").display());
        let mut arguments = there.arguments(dir.path());
        arguments.extend(["-incoming".to_owned(), uri.clone()]);
        let (qemu, to_job, from_job) = start(&there.qemu, &arguments, stderr);
        // With the monitor, it also listens for the guest.
        Qmp::connect(&dir.path().join("qmp"));

        let mut source = self.qmp();
        let pause = json!({"capability": "pause-before-switchover", "state": true});
        source.execute("migrate-set-capabilities", json!({"capabilities": [pause]}));
        // Without a speed limit.
        source.execute("migrate-set-parameters", json!({"max-bandwidth": 1u64 << 40}));
        source.execute("migrate", json!({"uri": uri}));
        let until = |source: &mut Qmp, wanted: &str| {
            eventually(wanted, || {
                let migration = source.execute("query-migrate", json!({}));
                let status = migration["status"].as_str().unwrap_or_default().to_owned();
                if ["failed", "cancelled"].contains(&status.as_str()) {
                    self.fail(&format!("the migration: {migration}"));
                }
                (status == wanted).then_some(())
            });
        };
        until(&mut source, "pre-switchover");
        hand_over();
        source.execute("migrate-continue", json!({"state": "pre-switchover"}));
        until(&mut source, "completed");
        let mut before = std::mem::replace(&mut self.qemu, qemu);
        (self.to_job, self.from_job, self.dir) = (to_job, from_job, dir);
        before.kill().expect("QEMU is our child");
        before.wait().expect("QEMU is our child");
    }

    /// Saves the guest to a file and ends its QEMU, calls `meanwhile`, and restores it in a QEMU with the disks of `there`.
    /// The job must print nothing meanwhile. A guest that is not `stopped` before is migrated live to the file;
    /// `virsh save` stops it.
    ///
    /// # Panics
    ///
    /// If one of both fails.
    pub fn save_and_restore(&mut self, there: &Guest, stopped: bool, meanwhile: impl FnOnce()) {
        let file = self.dir.path().join("saved");
        let mut qmp = self.qmp();
        if stopped {
            qmp.execute("stop", json!({}));
        }
        qmp.execute("migrate", json!({"uri": format!("exec:cat >{}", file.display())}));
        eventually("the file", || {
            let migration = qmp.execute("query-migrate", json!({}));
            match migration["status"].as_str() {
                Some("failed" | "cancelled") => self.fail(&format!("save: {migration}")),
                status => (status == Some("completed")).then_some(()),
            }
        });
        qmp.execute("quit", json!({}));
        eventually("the end of QEMU", || self.qemu.try_wait().expect("our child"));
        meanwhile();

        let dir = TempDir::with_prefix_in("ringmill-guest-", "/var/tmp").expect("a folder");
        fs::copy(self.dir.path().join("job"), dir.path().join("job")).expect("space for the job");
        let saved = dir.path().join("saved");
        fs::rename(&file, &saved).expect("one file system");
        let stderr = File::create_new(dir.path().join("stderr")).expect("a new file");
        let mut arguments = there.arguments(dir.path());
        arguments.extend(["-incoming".to_owned(), format!("exec:cat {}", saved.display())]);
        (self.qemu, self.to_job, self.from_job) = start(&there.qemu, &arguments, stderr);
        self.dir = dir;
        let mut qmp = self.qmp();
        eventually("the guest", || {
            if let Some(status) = self.qemu.try_wait().expect("our child") {
                self.fail(&format!("restore: QEMU ended with {status}"));
            }
            let state = qmp.execute("query-status", json!({}));
            (state["status"] != json!("inmigrate")).then_some(())
        });
        if stopped {
            qmp.execute("cont", json!({}));
        }
    }

    /// Returns the next line that the job prints.
    ///
    /// # Panics
    ///
    /// If the guest ends or its time is over.
    pub fn line(&mut self) -> String {
        match self.next_line() {
            Some(line) => line,
            None => self.fail("the guest has ended"),
        }
    }

    /// Reads the job's lines until one that is `line`.
    pub fn expect(&mut self, line: &str) {
        while self.line() != line {}
    }

    /// Writes a line for the job to read.
    pub fn send(&mut self, line: &str) {
        if let Err(error) = writeln!(self.to_job, "{line}") {
            self.fail(&format!("the guest takes no input: {error}"));
        }
    }

    /// A connection to QEMU's monitor.
    pub fn qmp(&self) -> Qmp {
        Qmp::connect(&self.dir.path().join("qmp"))
    }

    /// Waits for the guest's end. Returns all lines that the job has printed.
    ///
    /// # Panics
    ///
    /// If the job's exit status is not 0, or the guest hangs.
    pub fn finish(mut self) -> Vec<String> {
        while self.next_line().is_some() {}
        let status = eventually("the end of QEMU", || self.qemu.try_wait().expect("our child"));
        if !status.success() {
            self.fail(&format!("QEMU ended with {status}"));
        }
        if self.transcript.last().is_none_or(|last| last != "exit status: 0") {
            self.fail("the job failed");
        }
        self.transcript.pop();
        std::mem::take(&mut self.transcript)
    }

    /// Returns what QEMU has written to stderr.
    pub fn stderr(&self) -> String {
        fs::read_to_string(self.dir.path().join("stderr")).expect("QEMU's stderr")
    }

    /// Kills QEMU.
    pub fn kill(mut self) {
        self.qemu.kill().expect("QEMU is our child");
    }

    fn next_line(&mut self) -> Option<String> {
        loop {
            let patience = self.deadline.saturating_duration_since(Instant::now());
            let look = if self.may_boot_again() { BETWEEN_LOOKS.min(patience) } else { patience };
            match self.from_job.recv_timeout(look) {
                // Once more after each reboot.
                Ok(line) if line == STARTED => self.has_started = true,
                Ok(line) => {
                    self.transcript.push(line.clone());
                    return Some(line);
                }
                Err(RecvTimeoutError::Disconnected) if self.has_failed_before_the_job() => {
                    self.boot_again("QEMU failed");
                }
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) if patience.is_zero() => {
                    self.fail("the guest's time is over");
                }
                Err(RecvTimeoutError::Timeout) if self.stalls_before_the_job() => {
                    self.boot_again("the guest's kernel stalled");
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    fn may_boot_again(&self) -> bool {
        !self.has_started && self.boots < BOOTS
    }

    /// Whether an assertion in QEMU's own code ended it before the job.
    fn has_failed_before_the_job(&mut self) -> bool {
        if !self.may_boot_again() {
            return false;
        }
        let status = eventually("the end of QEMU", || self.qemu.try_wait().expect("our child"));
        status.signal() == Some(Signal::SIGABRT as i32)
            && qemu_faults::is_known_assertion(&self.stderr())
    }

    /// Whether the guest's kernel has said on the console that a processor lost its timer, and the job has not started.
    fn stalls_before_the_job(&self) -> bool {
        self.may_boot_again() && qemu_faults::has_lost_a_timer(&self.written("console"))
    }

    fn boot_again(&mut self, why: &str) {
        let (stderr, console) = (self.stderr(), self.written("console"));
        eprintln!("{why} before the job, the guest boots again: {stderr}{console}");
        // Fails if QEMU has ended.
        let _ = self.qemu.kill();
        self.qemu.wait().expect("QEMU is our child");
        self.boots += 1;
        let stderr = File::create(self.dir.path().join("stderr")).expect("a file");
        let (program, arguments) = &self.command;
        (self.qemu, self.to_job, self.from_job) = start(program, arguments, stderr);
    }

    /// Returns what is in a file of QEMU's, which need not exist and whose text may be cut.
    fn written(&self, name: &str) -> String {
        let data = fs::read(self.dir.path().join(name)).unwrap_or_default();
        String::from_utf8_lossy(&data).into_owned()
    }

    fn fail(&self, what: &str) -> ! {
        panic!(
            "{what}\n--- the job's output:\n{}\n--- QEMU's stderr:\n{}\n--- the guest's console:\n{}---",
            self.transcript.join("\n"),
            self.written("stderr"),
            self.written("console")
        );
    }
}

impl Drop for Boot {
    fn drop(&mut self) {
        // Fails if QEMU has ended.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

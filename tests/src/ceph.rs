//! A Ceph cluster of one node: a monitor, and an OSD on a file.

use std::fs;
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use test_requirements::{Needs, untested};

use crate::{Port, Scratch, eventually, tied_command, tool};

/// The user of the daemons under test: it may use images, and administer nothing.
const USER: &str = "vm";
/// The pool.
const POOL: &str = "rbd";
/// Bytes of the OSD's file, of which holes take none.
const OSD_SIZE: u64 = 4 << 30;

/// A running cluster, in a folder of its own. It ends when it is dropped.
#[derive(Debug)]
pub struct Ceph {
    mon: Child,
    osd: Child,
    // After the processes, which write there.
    scratch: Scratch,
    _ports: [Port; 2],
}

impl Ceph {
    /// Starts a cluster with a pool and a user. `None`: Ceph is not installed.
    ///
    /// # Panics
    ///
    /// The cluster does not start.
    pub fn start() -> Option<Ceph> {
        if !Path::new("/usr/bin/ceph-mon").exists() {
            untested(Needs::Ceph, "a cluster takes ceph-mon, which scripts/setup-ceph.sh installs");
            return None;
        }
        let (scratch, ports) = (Scratch::new(), [Port::new(), Port::new()]);
        let osd_id = uuid();
        for folder in ["mon", "osd", "run"] {
            fs::create_dir(scratch.path(folder)).expect("a folder");
        }
        let cluster_id = uuid();
        let address =
            format!("[v2:127.0.0.1:{},v1:127.0.0.1:{}]", ports[0].number(), ports[1].number());
        fs::write(scratch.path("ceph.conf"), configuration(&scratch, &cluster_id, &address))
            .expect("a configuration");
        // Keys of the monitor and of its administrator, and the map that says where the monitor is.
        let run = |program: &str, arguments: &str| {
            let arguments = arguments.replace("DIR", scratch.dir().to_str().expect("UTF-8"));
            // A space within an argument is written `%`.
            let arguments = arguments.split(' ').map(|argument| argument.replace('%', " "));
            succeed(command(&scratch, program).args(arguments))
        };
        run("ceph-authtool", "--create-keyring DIR/keyring --gen-key -n mon. --cap mon allow%*");
        run(
            "ceph-authtool",
            "DIR/keyring --gen-key -n client.admin --cap mon allow%* --cap osd allow%*",
        );
        let map = format!("--create --fsid {cluster_id} --addv a {address} DIR/monmap");
        run("monmaptool", &map);
        run("ceph-mon", "--mkfs -i a --monmap DIR/monmap --keyring DIR/keyring");
        let mon = start_mon(&scratch);
        // Both sides have to know the OSD by one id, or it stays "booting".
        run("ceph", &format!("osd new {osd_id}"));
        run(
            "ceph",
            "auth get-or-create osd.0 mon allow%profile%osd osd allow%* -o DIR/osd/keyring",
        );
        run("ceph-osd", &format!("-i 0 --mkfs --osd-uuid {osd_id}"));
        let osd = spawn(&scratch, "ceph-osd", "0");
        run("ceph", &format!("osd pool create {POOL} 8"));
        let (caps, file) = ("mon profile%rbd osd profile%rbd", "DIR/ceph.client.vm.keyring");
        run("ceph", &format!("auth get-or-create client.{USER} {caps} -o {file}"));
        Some(Ceph { mon, osd, scratch, _ports: ports })
    }

    /// Runs `rbd` as the administrator; gives what it wrote to standard output.
    ///
    /// # Panics
    ///
    /// It fails.
    pub fn rbd(&self, arguments: &[&str]) -> String {
        let output = succeed(command(&self.scratch, "rbd").args(arguments));
        String::from_utf8(output.stdout).expect("text")
    }

    /// Returns whether the machine's librbd opens clones with another passphrase than that of their parents: Ceph 18.
    ///
    /// # Panics
    ///
    /// `rbd` does not say its version.
    pub fn encrypts_clones(&self) -> bool {
        let version = self.rbd(&["--version"]);
        let number = version.split_whitespace().nth(2).and_then(|word| word.split('.').next());
        number.and_then(|number| number.parse::<u32>().ok()).expect("a version") >= 18
    }

    /// Returns the md5 sum of an image's contents.
    ///
    /// # Panics
    ///
    /// The image cannot be read.
    pub fn md5(&self, image: &str) -> String {
        let script = "rbd --no-progress export \"$1\" - | md5sum | cut -d ' ' -f 1";
        let mut shell = command(&self.scratch, "sh");
        let output = succeed(shell.args(["-ec", script, "sh", image]));
        String::from_utf8(output.stdout).expect("text").trim().to_owned()
    }

    /// Returns `--blockdev` of an image, with more `options`.
    pub fn node(&self, node: &str, image: &str, options: &str) -> String {
        let conf = self.scratch.path("ceph.conf");
        let conf = conf.display();
        format!("rbd,node-name={node},pool={POOL},image={image},conf={conf},user={USER}{options}")
    }

    /// Removes the keyring of the daemons' user, and returns its text.
    ///
    /// # Panics
    ///
    /// There is none.
    pub fn take_keyring(&self) -> String {
        let file = self.scratch.path("ceph.client.vm.keyring");
        let text = fs::read_to_string(&file).expect("a keyring");
        fs::remove_file(&file).expect("a file");
        text
    }

    /// Puts back what [`take_keyring`](Self::take_keyring) has removed.
    ///
    /// # Panics
    ///
    /// It cannot be written.
    pub fn put_keyring(&self, text: &str) {
        fs::write(self.scratch.path("ceph.client.vm.keyring"), text).expect("a file");
    }

    /// Starts an object store on the cluster. `None`: radosgw is not installed.
    ///
    /// # Panics
    ///
    /// The store does not start.
    pub fn object_store(&self) -> Option<ObjectStore> {
        if !Path::new("/usr/bin/radosgw").exists() {
            untested(
                Needs::Ceph,
                "an object store takes radosgw, which scripts/setup-ceph.sh installs",
            );
            return None;
        }
        let port = Port::new();
        let log = fs::File::create(self.scratch.path("radosgw.log")).expect("a log");
        let mut radosgw = command(&self.scratch, "radosgw");
        radosgw.args(["-f", "-n", "client.admin"]);
        radosgw.arg(format!("--rgw_frontends=beast endpoint=127.0.0.1:{}", port.number()));
        let child = radosgw.stdout(Stdio::null()).stderr(log).spawn().expect("it can be run");
        let store = ObjectStore { child, port };
        let user = ["user", "create", "--uid", "vm", "--display-name", "vm"];
        let key =
            ["--access-key", ObjectStore::ACCESS_KEY, "--secret-key", ObjectStore::SECRET_KEY];
        succeed(command(&self.scratch, "radosgw-admin").args(user).args(key));
        eventually("the object store", || TcpStream::connect(store.address()).ok());
        Some(store)
    }

    /// Returns the path of a file in the cluster's folder: `ceph.conf`.
    pub fn conf(&self) -> String {
        self.scratch.path("ceph.conf").display().to_string()
    }

    /// Sends the OSD a signal.
    ///
    /// # Panics
    ///
    /// It has ended.
    pub fn signal_osd(&self, signal: Signal) {
        let pid = Pid::from_raw(self.osd.id().cast_signed());
        signal::kill(pid, signal).expect("the OSD runs");
    }

    /// Kills the monitor.
    ///
    /// # Panics
    ///
    /// It has ended.
    pub fn kill_mon(&mut self) {
        self.mon.kill().expect("the monitor runs");
        self.mon.wait().expect("our child");
    }

    /// Starts the monitor again.
    pub fn restart_mon(&mut self) {
        self.mon = start_mon(&self.scratch);
    }
}

impl Drop for Ceph {
    fn drop(&mut self) {
        for process in [&mut self.osd, &mut self.mon] {
            // A process that has ended already was reported by its client.
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// Ceph's object store, with a user. It ends when it is dropped.
#[derive(Debug)]
pub struct ObjectStore {
    child: Child,
    port: Port,
}

impl ObjectStore {
    /// The user's key.
    pub const ACCESS_KEY: &str = "AKIARINGMILL";
    /// The same, which is secret.
    pub const SECRET_KEY: &str = "5ec3e7/5ec3e7+5ec3e7/5ec3e7+5ec3e7/5ec3e";

    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port.number())
    }

    /// Returns the store's URL.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address())
    }

    /// Puts a file under an encoded path: `bucket/key`. Without a file, makes the bucket. `header`: one more.
    ///
    /// # Panics
    ///
    /// The store refuses it.
    pub fn put(&self, path: &str, file: Option<&Path>, header: &str) {
        let mut curl = tied_command(&tool("curl"));
        curl.args(["--silent", "--show-error", "--fail", "--aws-sigv4", "aws:amz:us-east-1:s3"]);
        curl.args(["--user", &format!("{}:{}", ObjectStore::ACCESS_KEY, ObjectStore::SECRET_KEY)]);
        curl.args(["-H", "x-amz-content-sha256: UNSIGNED-PAYLOAD", "-H", header]);
        match file {
            Some(file) => curl.arg("--upload-file").arg(file),
            None => curl.args(["-X", "PUT"]),
        };
        succeed(curl.arg(format!("{}/{path}", self.endpoint())));
    }
}

impl Drop for ObjectStore {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn uuid() -> String {
    let uuid = fs::read_to_string("/proc/sys/kernel/random/uuid").expect("a number");
    uuid.trim().to_owned()
}

fn configuration(scratch: &Scratch, id: &str, address: &str) -> String {
    let dir = scratch.dir().display();
    let text = format!(
        "[global]
        fsid = {id}
        mon host = {address}
        public addr = 127.0.0.1
        cluster addr = 127.0.0.1
        keyring = {dir}/keyring
        run dir = {dir}/run
        log file =
        auth cluster required = cephx
        auth service required = cephx
        auth client required = cephx
        osd pool default size = 1
        osd pool default min size = 1
        osd pool default pg num = 8
        mon allow pool size one = true
        osd crush chooseleaf type = 0
        [client.{USER}]
        keyring = {dir}/ceph.client.{USER}.keyring
        [mon]
        mon data = {dir}/mon
        mon cluster log file =
        mon data avail crit = 1
        [osd]
        osd data = {dir}/osd
        keyring = {dir}/osd/keyring
        bluestore block size = {OSD_SIZE}\n"
    );
    // Sections begin at the beginning of a line.
    text.lines().map(str::trim_start).flat_map(|line| [line, "\n"]).collect()
}

/// A program of Ceph's, with the cluster's configuration.
fn command(scratch: &Scratch, program: &str) -> Command {
    let mut command = tied_command(&tool(program));
    command.env("CEPH_CONF", scratch.path("ceph.conf")).env_remove("CEPH_ARGS");
    command.stdin(Stdio::null());
    command
}

fn spawn(scratch: &Scratch, program: &str, id: &str) -> Child {
    let log = fs::File::create(scratch.path(&format!("{program}.log"))).expect("a log");
    let mut command = command(scratch, program);
    command.args(["-f", "-i", id]).stdout(Stdio::null()).stderr(log);
    command.spawn().expect("it can be run")
}

fn start_mon(scratch: &Scratch) -> Child {
    let mon = spawn(scratch, "ceph-mon", "a");
    eventually("a monitor that answers", || {
        let mut ask = command(scratch, "ceph");
        let asked = ask.args(["--connect-timeout", "5", "mon", "stat"]).output().expect("it runs");
        asked.status.success().then_some(())
    });
    mon
}

/// Runs a program that has to succeed.
fn succeed(command: &mut Command) -> Output {
    let output = command.output().expect("the program can be run");
    assert!(output.status.success(), "{command:?}: {output:?}");
    output
}

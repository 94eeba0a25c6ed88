//! The compared servers: their programs and options.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::tree::Tree;

/// qemu-storage-daemon in the peers tree.
const QSD: &str = "usr/bin/qemu-storage-daemon";

/// The password of images that are encrypted, as an object.
pub(crate) const SECRET: &str = "secret,id=s,data=0123456789abcdef";

/// The disk that is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Node {
    /// A disk of 1 GiB that answers at once; reads clear the buffer.
    Null,
    /// A file with O_DIRECT and io_uring.
    File(PathBuf),
    /// A qcow2 image in such a file, and such a file behind it.
    Qcow2(PathBuf, Option<PathBuf>),
    /// An image of driver luks in such a file, with [`SECRET`] as its password.
    Luks(PathBuf),
    /// A block device, likewise.
    Device(PathBuf),
    /// A file per export, with the export's number appended to this name.
    Files(PathBuf),
    /// One of these per export.
    Each(Vec<Node>),
}

/// Whether the server may busy-poll.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Polling {
    /// The server's default.
    Default,
    /// Off, as polling is not work.
    Off,
    /// ringmill only: these options of its I/O threads.
    Given(&'static str),
}

/// The task of a server, in terms that apply to all contenders.
#[derive(Debug, Clone)]
pub(crate) struct Setup {
    /// The disk. Each export gets a separate node.
    pub(crate) node: Node,
    /// Busy-polling.
    pub(crate) polling: Polling,
    /// Queues per export.
    pub(crate) queues: usize,
    /// I/O threads, which share the queues of each export. More than one only for ringmill.
    pub(crate) io_threads: usize,
    /// One vhost-user-blk export on each socket.
    pub(crate) sockets: Vec<PathBuf>,
}

/// A server. To add one, add a `Contender` with the function that turns a [`Setup`] into its options, and a line in
/// [`find`].
#[derive(Debug, Clone)]
pub(crate) struct Contender<S = Setup> {
    /// Its name in the table.
    pub(crate) name: String,
    /// Its version, as reported by the program.
    pub(crate) version: String,
    /// The program, with the arguments that precede its options.
    pub(crate) program: Vec<OsString>,
    /// Returns its options.
    pub(crate) options: OptionsFor<S>,
}

/// Turns a task into options.
pub(crate) type OptionsFor<S = Setup> = fn(&S) -> Vec<String>;

impl<S> Contender<S> {
    /// The command that serves `setup` in the foreground.
    pub(crate) fn command(&self, setup: &S) -> Vec<OsString> {
        let mut command = self.program.clone();
        command.extend((self.options)(setup).into_iter().map(OsString::from));
        command
    }
}

/// Paths of contenders.
#[derive(Debug, Clone, Default)]
pub(crate) struct Places {
    /// `--qsd`.
    pub(crate) qsd: Option<PathBuf>,
    /// `--qsd-chroot`.
    pub(crate) qsd_tree: Option<PathBuf>,
    /// `--ringmill`.
    pub(crate) ringmill: Option<PathBuf>,
}

impl Places {
    /// The tree of peers.
    pub(crate) fn tree(&self) -> Tree {
        Tree::new(self.qsd_tree.as_deref())
    }
}

/// The contender called `name`.
pub(crate) fn find(name: &str, places: &Places) -> Result<Contender> {
    let (program, options): (Vec<OsString>, OptionsFor) = match name {
        "qsd" => (qsd_program(places)?, storage_daemon_options),
        "ringmill" => {
            let path = ringmill_program(places)?;
            (vec![path.into(), "storage-daemon".into()], storage_daemon_options)
        }
        "pinned" => {
            let path = ringmill_program(places)?;
            (vec![path.into(), "storage-daemon".into()], pinned_options)
        }
        _ => bail!("unknown contender '{name}'; known are qsd, ringmill, pinned"),
    };
    let version = version(&program).with_context(|| format!("asking {name} for its version"))?;
    let name = if name == "pinned" { "ringmill pinned" } else { name };
    Ok(Contender { name: name.to_owned(), version, program, options })
}

/// Whether ringmill knows `pin-memory`.
pub(crate) fn can_pin(places: &Places) -> Result<bool> {
    let output = Command::new(ringmill_program(places)?)
        .args(["storage-daemon", "--export", "vhost-user-blk,help"])
        .output()
        .context("asking ringmill for its options")?;
    Ok(String::from_utf8_lossy(&output.stdout).contains("pin-memory"))
}

/// The options of qemu-storage-daemon, which are ringmill's too.
fn storage_daemon_options(setup: &Setup) -> Vec<String> {
    options_with(setup, "")
}

/// ringmill's options with guest memory registered with the ring. Opt-in, since pinned memory cannot be reclaimed from a
/// guest.
fn pinned_options(setup: &Setup) -> Vec<String> {
    options_with(setup, ",pin-memory=on")
}

fn options_with(setup: &Setup, of_export: &str) -> Vec<String> {
    let polling = match setup.polling {
        Polling::Default => String::new(),
        Polling::Off => ",poll-max-ns=0".into(),
        Polling::Given(options) => format!(",{options}"),
    };
    let mut options: Vec<String> = (0..setup.io_threads)
        .flat_map(|i| ["--object".into(), format!("iothread,id=io{i}{polling}")])
        .collect();
    let io_threads = match setup.io_threads {
        1 => "iothread=io0".into(),
        several => {
            (0..several).map(|i| format!("iothread.{i}=io{i}")).collect::<Vec<_>>().join(",")
        }
    };
    if let Node::Luks(_) = setup.node {
        options.extend(["--object".into(), SECRET.into()]);
    }
    for (i, socket) in setup.sockets.iter().enumerate() {
        options.push("--blockdev".into());
        options.push(format!("{},node-name=disk{i}", setup.node.spelled(i)));
        options.push("--export".into());
        options.push(format!(
            "type=vhost-user-blk,id=export{i},node-name=disk{i},writable=on,num-queues={},\
             {io_threads},addr.type=unix,addr.path={}{of_export}",
            setup.queues,
            quoted(socket)
        ));
    }
    options
}

impl Node {
    /// The options of export `i`'s node.
    fn spelled(&self, i: usize) -> String {
        match self {
            Node::Null => "driver=null-co,size=1073741824,read-zeroes=on".into(),
            Node::File(path) => image("file", path),
            Node::Device(path) => image("host_device", path),
            Node::Qcow2(path, base) => {
                let backing = base.as_ref().map_or(String::new(), |base| {
                    format!(",{},backing.read-only=on", child("backing", base))
                });
                format!("driver=qcow2,{}{backing}", child("file", path))
            }
            Node::Luks(path) => format!("driver=luks,key-secret=s,{}", child("file", path)),
            Node::Files(path) => image("file", &numbered(path, i)),
            Node::Each(nodes) => nodes[i].spelled(i),
        }
    }
}

fn image(driver: &str, path: &Path) -> String {
    format!("driver={driver},filename={},cache.direct=on,aio=io_uring", quoted(path))
}

fn child(name: &str, path: &Path) -> String {
    let path = quoted(path);
    format!("{name}.driver=file,{name}.filename={path},{name}.cache.direct=on,{name}.aio=io_uring")
}

/// The file of export `i` for [`Node::Files`].
pub(crate) fn numbered(path: &Path, i: usize) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    path.push(i.to_string());
    path.into()
}

/// A path as an option value, with commas doubled.
pub(crate) fn quoted(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

/// qemu-storage-daemon: the given one, else the newest that scripts/setup-peers.sh has set up, else the machine's.
pub(crate) fn qsd_program(places: &Places) -> Result<Vec<OsString>> {
    if let Some(path) = &places.qsd {
        return Ok(vec![path.into()]);
    }
    let tree = places.tree();
    if places.qsd_tree.is_some() || tree.has(QSD) {
        return tree.program(QSD);
    }
    if let Some(path) = in_path("qemu-storage-daemon") {
        return Ok(vec![path.into()]);
    }
    bail!(
        "qemu-storage-daemon is neither in {} (made by scripts/setup-peers.sh) nor in PATH \
         (Debian packages qemu-system-common or qemu-utils); --qsd PATH names it",
        tree.path().display()
    )
}

/// ringmill: the given one, else the one built next to this program.
pub(crate) fn ringmill_program(places: &Places) -> Result<PathBuf> {
    let path = match &places.ringmill {
        Some(path) => path.clone(),
        None => beside_this("ringmill")?,
    };
    if !path.exists() {
        bail!("{} is missing; build it: cargo build --release -p ringmill", path.display());
    }
    Ok(path)
}

/// A program in this program's directory.
pub(crate) fn beside_this(name: &str) -> Result<PathBuf> {
    let this = std::env::current_exe().context("finding this program's own path")?;
    Ok(this.with_file_name(name))
}

/// A program of the machine.
pub(crate) fn in_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(name)).find(|path| path.is_file())
}

/// The first line of a program's version output.
pub(crate) fn version(program: &[OsString]) -> Result<String> {
    let (first, rest) = program.split_first().context("no program")?;
    let output = Command::new(first)
        .args(rest)
        .arg("--version")
        .output()
        .with_context(|| format!("starting {}", first.display()))?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        bail!("{} --version: {}: {}", first.display(), output.status, error.trim());
    }
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_node_is_spelled_as_qsd_wants_it() {
        let setup = Setup {
            node: Node::File("/tmp/a,b.dat".into()),
            polling: Polling::Off,
            queues: 4,
            io_threads: 1,
            sockets: vec!["/tmp/s.sock".into()],
        };
        assert_eq!(
            storage_daemon_options(&setup).join(" "),
            "--object iothread,id=io0,poll-max-ns=0 \
             --blockdev driver=file,filename=/tmp/a,,b.dat,cache.direct=on,aio=io_uring,node-name=disk0 \
             --export type=vhost-user-blk,id=export0,node-name=disk0,writable=on,num-queues=4,\
             iothread=io0,addr.type=unix,addr.path=/tmp/s.sock"
        );
    }
}

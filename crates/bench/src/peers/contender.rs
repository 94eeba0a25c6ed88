//! The compared servers: their programs, and the options that all storage daemons share.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::tree::{LIBRARY_PATH, Tree};
use crate::options::Options;

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

/// The task of a storage daemon.
#[derive(Debug, Clone)]
pub(crate) struct Setup {
    /// A disk per export.
    pub(crate) nodes: Vec<Node>,
    /// Busy-polling.
    pub(crate) polling: Polling,
    /// Queues per export.
    pub(crate) queues: usize,
    /// I/O threads, which share the queues of each export. More than one only for ringmill.
    pub(crate) io_threads: usize,
    /// One vhost-user-blk export on each socket.
    pub(crate) sockets: Vec<PathBuf>,
}

/// A server. To add one, add its program in [`Contender::find`], and its options where they are made.
#[derive(Debug, Clone)]
pub(crate) struct Contender {
    /// Its name on the command line.
    pub(crate) key: String,
    /// Its name in the table.
    pub(crate) name: String,
    /// Its version, as reported by the program.
    pub(crate) version: String,
    /// The program, with the arguments that precede its options.
    pub(crate) program: Vec<OsString>,
}

impl Contender {
    /// Those of a run: the given ones, else all that are `known` but the `unusual` last ones. One that is named twice gets a
    /// number.
    pub(crate) fn all(options: &Options, known: &[&str], unusual: usize) -> Result<Vec<Self>> {
        let mut names = options.list("contenders");
        if names.is_empty() {
            names = known[..known.len() - unusual].iter().map(|&name| name.into()).collect();
        }
        let mut found: Vec<Self> = Vec::new();
        for name in &names {
            let known_names =
                || format!("unknown contender '{name}'; known are {}", known.join(", "));
            ensure!(known.contains(&name.as_str()), known_names());
            let mut contender = Self::find(name, &options.places())?;
            let before = found.iter().filter(|other| other.key == *name).count();
            if before > 0 {
                contender.name += &format!("#{}", before + 1);
            }
            found.push(contender);
        }
        Ok(found)
    }

    /// The contender called `key`.
    pub(crate) fn find(key: &str, places: &Places) -> Result<Self> {
        let program = Self::program(key, places).with_context(|| format!("looking for {key}"))?;
        let version = match key {
            "bare" => "a loop of this program".to_owned(),
            _ => version(&program).with_context(|| format!("asking {key} for its version"))?,
        };
        let name = match key {
            "pinned" | "unpolled" => format!("ringmill {key}"),
            "img" => "ringmill img".into(),
            _ => key.to_owned(),
        };
        Ok(Self { key: key.to_owned(), name, version, program })
    }

    fn program(key: &str, places: &Places) -> Result<Vec<OsString>> {
        match key {
            "qsd" => match &places.qsd {
                Some(path) => Ok(vec![path.into()]),
                None => peer("qemu-storage-daemon", &places.tree()),
            },
            "ringmill" | "pinned" | "unpolled" => {
                Ok(vec![ringmill_program(places)?.into(), "storage-daemon".into()])
            }
            "img" => Ok(vec![ringmill_program(places)?.into(), "img".into()]),
            "bare" => {
                let this = std::env::current_exe().context("finding this program's own path")?;
                Ok(vec![this.into(), "bare-fuse".into()])
            }
            name => peer(name, &places.tree()),
        }
    }

    /// Whether this is ringmill, however it is set up.
    pub(crate) fn is_ringmill(&self) -> bool {
        self.name.starts_with("ringmill")
    }

    /// The libraries beside it, if it is a program of a tree: by itself it would load modules of the machine.
    pub(crate) fn libraries(&self) -> Option<&Path> {
        match self.program.as_slice() {
            [_, option, libraries, _] if option == LIBRARY_PATH => Some(Path::new(libraries)),
            _ => None,
        }
    }

    /// Its command with these options.
    pub(crate) fn command<T: Into<OsString>>(&self, options: Vec<T>) -> Vec<OsString> {
        self.program.iter().cloned().chain(options.into_iter().map(Into::into)).collect()
    }

    /// The command of a storage daemon that serves `setup` in the foreground.
    pub(crate) fn serving(&self, setup: &Setup) -> Vec<OsString> {
        // Opt-in, since pinned memory cannot be reclaimed from a guest.
        let of_export = if self.key == "pinned" { ",pin-memory=on" } else { "" };
        self.command(storage_daemon_options(setup, of_export))
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

/// The options of qemu-storage-daemon, which are ringmill's too.
fn storage_daemon_options(setup: &Setup, of_export: &str) -> Vec<String> {
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
    if setup.nodes.iter().any(|node| matches!(node, Node::Luks(_))) {
        options.extend(["--object".into(), SECRET.into()]);
    }
    for (i, (socket, node)) in setup.sockets.iter().zip(&setup.nodes).enumerate() {
        options.push("--blockdev".into());
        options.push(format!("{},node-name=disk{i}", node.spelled()));
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
    /// Its options.
    pub(crate) fn spelled(&self) -> String {
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

/// A path as an option value, with commas doubled.
pub(crate) fn quoted(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

/// A peer: that of scripts/setup-peers.sh, else the machine's.
fn peer(name: &str, tree: &Tree) -> Result<Vec<OsString>> {
    let of_tree = format!("usr/bin/{name}");
    if tree.has(&of_tree) {
        return tree.program(&of_tree);
    }
    let path = in_path(name).with_context(|| {
        let tree = tree.path().display();
        format!("{name} is neither in {tree} (scripts/setup-peers.sh) nor in PATH (scripts/setup-tests.sh)")
    })?;
    Ok(vec![path.into()])
}

/// Runs qemu-img of the peers' tree, else the machine's.
pub(crate) fn qemu_img(tree: &Tree, options: &[&str], paths: &[&OsStr]) -> Result<()> {
    let program = peer("qemu-img", tree)?;
    let mut command = Command::new(&program[0]);
    command.args(&program[1..]).args(options).args(paths).stdout(Stdio::null());
    let status = command.status().context("starting qemu-img")?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
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
            nodes: vec![Node::File("/tmp/a,b.dat".into())],
            polling: Polling::Off,
            queues: 4,
            io_threads: 1,
            sockets: vec!["/tmp/s.sock".into()],
        };
        assert_eq!(
            storage_daemon_options(&setup, "").join(" "),
            "--object iothread,id=io0,poll-max-ns=0 \
             --blockdev driver=file,filename=/tmp/a,,b.dat,cache.direct=on,aio=io_uring,node-name=disk0 \
             --export type=vhost-user-blk,id=export0,node-name=disk0,writable=on,num-queues=4,\
             iothread=io0,addr.type=unix,addr.path=/tmp/s.sock"
        );
    }
}

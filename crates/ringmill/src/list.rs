//! `ringmill list`: what is served and attached on this host, by which process.
//!
//! Daemons are found by their command lines in /proc. A daemon with a monitor on a unix socket is asked for its exports, as
//! commands may have changed them.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use block::driver::Needs;
use block::options::{BlockdevOptions, BlockdevRef};
use control::{
    Action, Address, ChardevBackend, Command, CtlSocket, ExportOptions, ListOptions, ServeDevice,
    ServeOptions, SocketAddr, Step, TAKE_OVER, parse_args,
};
use serde_json::{Map, Value as Json, json};

use crate::attachments;
use crate::check::print;
use crate::ctl::client::Client;
use crate::ctl::table::{Cell, Table};
use crate::host_device::name;
use daemon::DaemonError;

/// A line of the list.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Served {
    /// The daemon's process; `None`: it was killed.
    process: Option<i32>,
    /// The type of the export.
    kind: String,
    /// The images, or what is served in their place.
    image: String,
    /// Where it is served.
    at: String,
}

/// Prints the list.
pub(crate) fn run(options: &ListOptions) -> Result<(), DaemonError> {
    let mut all = attached();
    for process in processes() {
        if let Some(served) = by_command_line(process) {
            all.extend(served);
        }
    }
    print(&if options.json { in_json(&all) } else { table(&all) });
    Ok(())
}

fn in_json(all: &[Served]) -> String {
    let one = |served: &Served| {
        let Served { process, kind, image, at } = served;
        json!({"pid": process, "type": kind, "image": image, "at": at})
    };
    format!("{:#}\n", Json::Array(all.iter().map(one).collect()))
}

fn table(all: &[Served]) -> String {
    let mut table = Table::new(&["process", "type", "image", "at"]);
    for Served { process, kind, image, at } in all {
        let process = process.map_or("killed".to_owned(), |pid| pid.to_string());
        table.row([&process, kind, image, at].map(Cell::text).into());
    }
    table.render()
}

/// What `attach` has recorded. Only root can read it.
fn attached() -> Vec<Served> {
    let all = attachments::all().unwrap_or_default().into_iter();
    let is_there = |attached: &attachments::Attached| attached.has_device();
    all.filter(is_there)
        .map(|attached| Served {
            process: attached.daemon(),
            kind: attached.host_device().map_or("", |device| name(device.kind)).into(),
            at: attached.device.display().to_string(),
            image: attached.images().next().map_or_else(String::new, |image| image.name.clone()),
        })
        .collect()
}

/// All processes, by number.
fn processes() -> Vec<i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut all: Vec<i32> =
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    all.sort_unstable();
    all
}

/// What the command line of a process serves. `None`: the process is no daemon, or one that `attach` has recorded.
fn by_command_line(process: i32) -> Option<Vec<Served>> {
    let line = fs::read(format!("/proc/{process}/cmdline")).ok()?;
    let mut words: Vec<OsString> =
        line.split(|byte| *byte == 0).map(|word| OsString::from_vec(word.to_vec())).collect();
    // The last word has an end, too.
    words.pop();
    let name = Path::new(words.first()?).file_name()?;
    if name != "ringmill" && name != "qemu-storage-daemon" {
        return None;
    }
    // A process that has taken over.
    if words.get(1).is_some_and(|word| word == TAKE_OVER) {
        words.remove(1);
    }
    // The names of files are relative to it.
    let folder = fs::read_link(format!("/proc/{process}/cwd")).unwrap_or_default();
    match parse_args(words).ok()? {
        Command::Serve(options) => Some(vec![of_serve(process, &folder, &options)]),
        Command::StorageDaemon(options) if !options.check => {
            let steps = &options.steps;
            let asked = monitor(steps).and_then(|path| by_monitor(process, &folder, path, steps));
            Some(asked.unwrap_or_else(|| by_steps(process, &folder, steps)))
        }
        _ => None,
    }
}

fn of_serve(process: i32, folder: &Path, options: &ServeOptions) -> Served {
    let (kind, at) = match (&options.mount, options.device) {
        (Some(mount), _) => ("fuse", &mount.mountpoint),
        (None, ServeDevice::VirtioBlk) => ("vhost-user-blk", &options.socket),
        (None, ServeDevice::Nvme) => ("vfio-user-nvme", &options.socket),
        (None, ServeDevice::Ahci) => ("vfio-user-ahci", &options.socket),
    };
    let image = match (&options.overlay, &options.web) {
        (Some(overlay), _) => shown(folder, overlay),
        (None, Some(_)) => options.shown(),
        (None, None) => shown(folder, &options.image),
    };
    Served { process: Some(process), kind: kind.into(), image, at: shown(folder, at) }
}

fn shown(folder: &Path, path: &Path) -> String {
    folder.join(path).display().to_string()
}

/// Returns the exports of a command line.
fn by_steps(process: i32, folder: &Path, steps: &[Step]) -> Vec<Served> {
    let of = |export: &ExportOptions| {
        let images = export.nodes().map(|node| image_of(steps, folder, node));
        Served {
            process: Some(process),
            kind: export.kind.type_name().into(),
            image: images.collect::<Vec<_>>().join(","),
            at: place(folder, export, None),
        }
    };
    exports(steps).map(of).collect()
}

/// Asks a daemon for its exports. `None`: it does not answer.
fn by_monitor(process: i32, folder: &Path, path: &Path, steps: &[Step]) -> Option<Vec<Served>> {
    let mut client = Client::connect(&CtlSocket::Unix(folder.join(path))).ok()?;
    let found = client.execute("query-block-exports", Map::new()).ok()?;
    let nodes = client.execute("query-named-block-nodes", Map::new()).ok()?;
    let file_of = |node: &str| {
        let node = nodes.as_array()?.iter().find(|found| found["node-name"] == *node)?;
        // Images that a node has in memory have no name.
        Some(node["file"].as_str().filter(|file| !file.is_empty())?.to_owned())
    };
    let of = |export: &Json| {
        let text = |name: &str| export[name].as_str().map(str::to_owned);
        let lists = ["drives", "luns", "namespaces"].map(|list| export[list].as_array());
        let list = lists.into_iter().flatten().flatten().filter_map(Json::as_str);
        let nodes: Vec<&str> = list.collect();
        let nodes = if nodes.is_empty() { vec![export["node-name"].as_str()?] } else { nodes };
        let image = |node: &&str| {
            file_of(node).map_or_else(
                || image_of(steps, folder, node),
                |file| if file.contains("://") { file } else { shown(folder, Path::new(&file)) },
            )
        };
        let id = text("id")?;
        let known = exports(steps).find(|known| known.id == id);
        let device = text("device");
        Some(Served {
            process: Some(process),
            kind: text("type")?,
            image: nodes.iter().map(image).collect::<Vec<_>>().join(","),
            at: match known {
                Some(known) => place(folder, known, device),
                None => device.unwrap_or(format!("export {id}")),
            },
        })
    };
    found.as_array()?.iter().map(of).collect()
}

fn exports(steps: &[Step]) -> impl Iterator<Item = &ExportOptions> {
    steps.iter().filter_map(|step| match &step.action {
        Action::Export(export) => Some(export),
        Action::Object(_)
        | Action::Blockdev(_)
        | Action::Chardev(_)
        | Action::Monitor(_)
        | Action::NbdServer(_)
        | Action::Metrics(_) => None,
    })
}

/// Returns where an export is.
fn place(folder: &Path, export: &ExportOptions, device: Option<String>) -> String {
    match export.kind.address() {
        Address::Path(path) | Address::Mountpoint(path) => shown(folder, &path),
        Address::Fd(name) => format!("fd {name}"),
        Address::Nbd(name) => format!("NBD export {name}"),
        // As `vdpa dev` shows it.
        Address::Vduse(name) => format!("VDUSE device {name}"),
        Address::Ublk(number) => device
            .or_else(|| number.map(|number| format!("/dev/ublkb{number}")))
            .unwrap_or_else(|| format!("export {}", export.id)),
    }
}

/// Returns the image of a node, or the node's name.
pub(crate) fn image_of(steps: &[Step], folder: &Path, name: &str) -> String {
    let image = node(steps, name).and_then(|options| image_below(steps, folder, options, 0));
    image.unwrap_or_else(|| format!("node {name}"))
}

fn node<'a>(steps: &'a [Step], name: &str) -> Option<&'a BlockdevOptions> {
    steps.iter().find_map(|step| match &step.action {
        Action::Blockdev(options) => {
            (options.node_name.as_deref() == Some(name)).then_some(options)
        }
        Action::Object(_)
        | Action::Export(_)
        | Action::Chardev(_)
        | Action::Monitor(_)
        | Action::NbdServer(_)
        | Action::Metrics(_) => None,
    })
}

/// The most nodes between an export and its image.
const MAX_HEIGHT: u32 = 64;

fn image_below(
    steps: &[Step],
    folder: &Path,
    options: &BlockdevOptions,
    height: u32,
) -> Option<String> {
    let Needs { files, servers, .. } = options.driver.needs();
    if let Some(file) = files.first() {
        return Some(shown(folder, file));
    }
    if let Some((host, port)) = servers.first() {
        return Some(format!("{host}:{port}"));
    }
    // A node's own image is the first of its children.
    let first = options.driver.children().into_iter().next().filter(|_| height < MAX_HEIGHT)?;
    let below = match first.node {
        BlockdevRef::Inline(options) => options,
        BlockdevRef::Name(name) => node(steps, name)?,
    };
    image_below(steps, folder, below, height + 1)
}

/// The unix socket of a monitor.
fn monitor(steps: &[Step]) -> Option<&Path> {
    let devices = steps.iter().filter_map(|step| match &step.action {
        Action::Monitor(monitor) => Some(&monitor.chardev),
        _ => None,
    });
    let path = |name: &String| {
        steps.iter().find_map(|step| match &step.action {
            Action::Chardev(chardev) if chardev.id == *name => match &chardev.backend {
                ChardevBackend::Listen { addr: SocketAddr::Unix(path), .. } => Some(path),
                _ => None,
            },
            _ => None,
        })
    };
    devices.filter_map(path).map(PathBuf::as_path).next()
}

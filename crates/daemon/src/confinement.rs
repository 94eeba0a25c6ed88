//! `--sandbox` and `--user`: converts the options to a sandbox configuration.

use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use block::driver::Needs;
use block::options::{BlockdevOptions, BlockdevRef};
use control::{
    Action, ChardevBackend, ChardevOptions, ExportNeeds, MetricsOptions, NbdAddr, SandboxMode,
    SandboxOptions, SocketAddr, Step, UserOptions,
};
use exports::vduse::record_folder;
use exports::vduse::wire::FOLDER;
use nix::unistd::{Gid, Group, Uid, User, getgrouplist};
use sandbox::{
    Beneath, Calls, Capabilities, Config, Identity, InForce, Mode, Purpose, Reach, Sandbox,
};
use serde_json::{Value as Json, json};

use crate::DaemonError;
use crate::journals::Home;
use crate::libraries;
use crate::pidfile::{self, Renaming};

/// Starts the sandbox of a new daemon.
///
/// Call on the main thread, before other threads start.
///
/// Returns `None` if the options disable the sandbox.
///
/// # Errors
///
/// The user or group of `--user` does not exist, or is given with the sandbox switched off. A library that the
/// configuration needs cannot be loaded. A mechanism of the sandbox that the kernel has cannot be put in force.
pub fn begin(
    options: &SandboxOptions,
    steps: &[Step],
    pidfile: Option<&Path>,
    kept: Option<Kept<'_>>,
) -> Result<Option<Sandbox>, DaemonError> {
    let identity = options.user.as_ref().map(identity).transpose()?;
    if let Some(identity) = &identity
        && !identity.is_possible().map_err(DaemonError::new)?
    {
        let message = "--user: only root can change the user and groups of a process";
        return Err(DaemonError::new(message));
    }
    let mode = match options.mode {
        SandboxMode::On => Mode::On,
        SandboxMode::Log => Mode::Log,
        SandboxMode::Off if identity.is_some() => {
            let message = "--user: there is no changing of users with --sandbox off";
            return Err(DaemonError::new(message));
        }
        SandboxMode::Off => return Ok(None),
    };
    let has_monitor = kept.is_some_and(|kept| !kept.more.is_empty())
        || steps.iter().any(|step| matches!(step.action, Action::Monitor(_)));
    let keep = keep(identity.is_some(), steps, has_monitor);
    let journals = Home::of(identity.as_ref()).folder;
    let is_any = has_monitor && options.paths.is_none();
    for missing in options.paths.iter().flatten().filter(|path| !path.exists()) {
        log::warn!(
            "--sandbox paths={}: no such file: it stays out of reach, also if it is made later",
            missing.display()
        );
    }
    let library = libraries::load(options, steps, kept.map_or(&[], |kept| kept.more), is_any)?;
    let mut reach = reach(options.paths.as_deref(), steps, pidfile, &journals, has_monitor);
    if let (Some(Reach { files: Some(read), .. }), Some(files)) = (&library, &mut reach.files)
        && has_monitor
    {
        // A command may start the library's threads, which inherit what the control thread lacks.
        files.extend_from_slice(read);
    }
    if let (Some(kept), Some(files)) = (kept, &mut reach.files) {
        let folder = kept.file.parent().unwrap_or(Path::new("/"));
        files.push(Beneath { path: folder.to_owned(), purpose: Purpose::Replace });
    }
    Sandbox::begin(Config { mode, identity, keep, reach, library })
        .map(Some)
        .map_err(DaemonError::new)
}

/// A state file, as far as the sandbox needs it.
#[derive(Debug, Clone, Copy)]
pub struct Kept<'a> {
    /// The absolute path. New files are renamed to this path.
    pub file: &'a Path,
    /// The steps that the command line lacks. They need what commands of a monitor need.
    pub more: &'a [Step],
}

/// `x-query-sandbox`; `None`: nothing is in force.
pub(crate) fn told(in_force: Option<&InForce>) -> Json {
    let Some(in_force) = in_force else {
        return json!({
            "mode": "off", "no-new-privs": false, "ring-restrictions": false,
            "not-in-force": ["all of it (--sandbox off, or an error in the log)"],
        });
    };
    let mut told = json!({
        "mode": match in_force.mode() {
            Mode::On => "on",
            Mode::Log => "log",
        },
        "no-new-privs": true,
        "capabilities": in_force.capabilities().names().collect::<Json>(),
        "ring-restrictions": in_force.rings_restricted(),
        "not-in-force": in_force.missing(),
    });
    if let Some(Identity { uid, gid, .. }) = in_force.identity() {
        (told["user"], told["group"]) = ((*uid).into(), (*gid).into());
    }
    if let Some(Calls { control, io, pool }) = in_force.seccomp() {
        told["seccomp"] = json!({"control": control, "io": io, "pool": pool});
    }
    if let Some((abi, reach)) = in_force.landlock() {
        told["landlock"] = json!({"abi": abi});
        if let Some(files) = reach.files {
            let paths = files.iter().map(|beneath| beneath.path.to_string_lossy());
            told["landlock"]["paths"] = paths.collect();
        }
        if let Some(ports) = reach.connect {
            told["landlock"]["connect"] = ports.into();
        }
    }
    told
}

/// Returns what the control thread can reach: everything that the command line names, and `paths`.
///
/// With a monitor and without `paths`, access is unrestricted, as commands may name any file. `journals`: the folder of
/// the journals of qcow2 images.
fn reach(
    paths: Option<&[PathBuf]>,
    steps: &[Step],
    pidfile: Option<&Path>,
    journals: &Path,
    has_monitor: bool,
) -> Reach {
    if has_monitor && paths.is_none() {
        return Reach { abstract_sockets: true, vsock: true, ..Reach::default() };
    }
    let mut named = Named::default();
    steps.iter().for_each(|step| named.add(&step.action));
    // Source of statistics and of the owners of image locks.
    let mut files = vec![Beneath { path: "/proc".into(), purpose: Purpose::Read }];
    let mut add = |path: &Path, purpose| {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        if !files.iter().any(|known| known.path == path && known.purpose == purpose) {
            files.push(Beneath { path, purpose });
        }
    };
    for socket in named.sockets.iter().map(PathBuf::as_path).chain(pidfile) {
        // The socket may have been made through a symbolic link: allow both folders.
        let real = std::fs::canonicalize(socket);
        for path in [Some(socket), real.as_deref().ok()].into_iter().flatten() {
            if let Some(folder) = path.parent() {
                let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
                add(folder, Purpose::Remove);
            }
        }
    }
    if let Some(folder) = pidfile.and_then(pidfile::folder) {
        add(&folder, Purpose::Rename);
    }
    if has_monitor || named.has_journal {
        add(journals, Purpose::Use);
    }
    if has_monitor {
        named.images.iter().for_each(|image| add(image, Purpose::Use));
        // Queue properties of block devices.
        add(Path::new("/sys"), Purpose::Read);
        // Nodes of driver `https` that a command adds.
        AUTHORITIES.iter().for_each(|path| add(Path::new(path), Purpose::Read));
    }
    named.devices.iter().for_each(|folder| add(folder, Purpose::Use));
    paths.unwrap_or_default().iter().for_each(|path| add(path, Purpose::Use));
    // Commands may name hosts, too.
    if named.looks_names_up || has_monitor {
        NAME_SERVICES.iter().for_each(|path| add(Path::new(path), Purpose::Read));
        // Links may lead anywhere.
        let files = NAMES.iter().filter_map(|path| std::fs::canonicalize(path).ok());
        files.for_each(|file| add(&file, Purpose::Read));
    }
    if !has_monitor && named.looks_names_up {
        // Those files may be replaced. Commands are not to have others there opened.
        add(Path::new("/etc"), Purpose::Read);
    }
    let connect = (!has_monitor).then_some(named.ports);
    let abstract_sockets = has_monitor || named.has_abstract_sockets;
    let vsock = has_monitor || named.has_vsock;
    Reach { files: Some(files), connect, abstract_sockets, vsock }
}

/// What the C library looks names of hosts up in.
pub(crate) const NAMES: [&str; 5] =
    ["/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/gai.conf", "/etc/host.conf"];
/// Where services keep the first of these.
pub(crate) const NAME_SERVICES: [&str; 2] = ["/run/systemd/resolve", "/run/resolvconf"];
/// Where the system keeps certificate authorities.
const AUTHORITIES: [&str; 4] =
    ["/etc/ssl", "/usr/share/ca-certificates", "/usr/local/share/ca-certificates", "/etc/pki"];
/// The port of name servers, for answers that are too long for a datagram.
const DNS: u16 = 53;

/// What a command line names.
#[derive(Default)]
struct Named {
    sockets: Vec<PathBuf>,
    images: Vec<PathBuf>,
    devices: Vec<PathBuf>,
    /// That are connected to.
    ports: Vec<u16>,
    looks_names_up: bool,
    has_abstract_sockets: bool,
    has_vsock: bool,
    has_journal: bool,
}

impl Named {
    fn add(&mut self, action: &Action) {
        match action {
            Action::Blockdev(options) => self.add_node(options),
            Action::Export(export) => {
                // The helper process mounts, and makes devices.
                let ExportNeeds { socket, pins_memory: _, mountpoint: _, ublk: _, vduse } =
                    export.kind.needs();
                if vduse {
                    // The kernel makes and removes the device's file.
                    let folders = [FOLDER.into(), record_folder()];
                    self.devices.extend(folders);
                }
                self.sockets.extend(socket.map(Path::to_owned));
            }
            Action::NbdServer(server) => match &server.addr {
                NbdAddr::Unix { path } => self.sockets.push(path.clone()),
                NbdAddr::Vsock { .. } => self.has_vsock = true,
                NbdAddr::Abstract { .. } | NbdAddr::Inet { .. } | NbdAddr::Fd { .. } => {}
            },
            Action::Metrics(MetricsOptions { addr: SocketAddr::Unix(path) })
            | Action::Chardev(ChardevOptions {
                backend: ChardevBackend::Listen { addr: SocketAddr::Unix(path), .. },
                ..
            }) => self.sockets.push(path.clone()),
            Action::Metrics(_) | Action::Chardev(_) | Action::Object(_) | Action::Monitor(_) => {}
        }
    }

    fn add_server(&mut self, host: &str, port: u16) {
        self.ports.push(port);
        if host.parse::<IpAddr>().is_err() {
            self.looks_names_up = true;
            self.ports.push(DNS);
        }
    }

    fn add_node(&mut self, options: &BlockdevOptions) {
        // Unix sockets stay in reach.
        let Needs { files, sockets: _, servers, abstract_sockets, vsock, journal } =
            options.driver.needs();
        // A library reads its files on threads of its own.
        if options.driver.kind().library.is_none() {
            self.images.extend(files.into_iter().map(Path::to_owned));
        }
        servers.into_iter().for_each(|(host, port)| self.add_server(host, port));
        self.has_abstract_sockets |= abstract_sockets;
        self.has_vsock |= vsock;
        self.has_journal |= journal;
        for child in options.driver.children() {
            if let BlockdevRef::Inline(options) = child.node {
                self.add_node(options);
            }
        }
    }
}

/// What the control thread goes on needing.
fn keep(becomes_another: bool, steps: &[Step], has_monitor: bool) -> Capabilities {
    let any = |is: fn(&Action) -> bool| steps.iter().any(|step| is(&step.action));
    let mut keep = Capabilities::NONE;
    // A monitor's client may ask for an export that pins.
    if has_monitor || any(pins_memory) {
        keep = keep.and(Capabilities::IPC_LOCK);
    }
    if !becomes_another {
        // Images that come by QMP, and sockets that go at the end, may be in directories that are
        // others'.
        keep = keep.and(Capabilities::DAC_OVERRIDE);
        if has_monitor {
            keep = keep.and(Capabilities::NET_BIND_SERVICE);
        }
    }
    keep
}

fn pins_memory(action: &Action) -> bool {
    match action {
        Action::Export(export) => export.kind.needs().pins_memory,
        Action::Object(_)
        | Action::Blockdev(_)
        | Action::Chardev(_)
        | Action::Monitor(_)
        | Action::NbdServer(_)
        | Action::Metrics(_) => false,
    }
}

/// Returns the id of the user that the daemon becomes.
///
/// # Errors
///
/// The user or group does not exist.
pub fn user(options: &SandboxOptions) -> Result<Option<u32>, DaemonError> {
    let identity = options.user.as_ref().map(identity).transpose()?;
    Ok(identity.map(|identity| identity.uid))
}

/// Whether the pid file may still be renamed once the daemon is confined.
///
/// # Errors
///
/// The user or group does not exist.
pub fn renaming(options: &SandboxOptions, pidfile: Option<&Path>) -> Result<Renaming, DaemonError> {
    let Some(user) = user(options)? else { return Ok(Renaming::Possible) };
    let folder = pidfile.and_then(pidfile::folder);
    let owner = folder.and_then(|folder| folder.metadata().ok()).map(|folder| folder.uid());
    // Users may rename what is in a folder of theirs, also files of others.
    Ok(match owner == Some(user) {
        true => Renaming::Possible,
        false => Renaming::Impossible,
    })
}

/// Who that is. Names are looked up now: later the files and libraries for it may be out of reach.
fn identity(options: &UserOptions) -> Result<Identity, DaemonError> {
    let UserOptions { user: name, group } = options;
    let failed = |what: String| DaemonError::new(format!("--user: {what}"));
    let user = User::from_name(name)
        .map_err(|errno| failed(format!("looking up user '{name}' failed: {}", errno.desc())))?;
    let uid = match (&user, name.parse()) {
        (Some(user), _) => user.uid,
        (None, Ok(number)) => Uid::from_raw(number),
        (None, Err(_)) => return Err(failed(format!("there is no user '{name}'"))),
    };
    // A number may be that of a user with groups.
    let user = user.or_else(|| User::from_uid(uid).ok().flatten());
    let (gid, groups) = match (group, user) {
        (Some(group), _) => {
            let gid = gid(group)?;
            (gid, vec![gid])
        }
        (None, Some(user)) => {
            let name = std::ffi::CString::new(user.name).map_err(DaemonError::new)?;
            let groups = getgrouplist(&name, user.gid)
                .map_err(|errno| failed(format!("getgrouplist failed: {}", errno.desc())))?;
            (user.gid, groups)
        }
        (None, None) => {
            return Err(failed(format!("user {uid} has no name, and so no group: {uid}:<group>")));
        }
    };
    let groups = groups.into_iter().map(Gid::as_raw).collect();
    Ok(Identity { uid: uid.as_raw(), gid: gid.as_raw(), groups })
}

fn gid(name: &str) -> Result<Gid, DaemonError> {
    let failed = |what: String| DaemonError::new(format!("--user: {what}"));
    let group = Group::from_name(name)
        .map_err(|errno| failed(format!("looking up group '{name}' failed: {}", errno.desc())))?;
    match (group, name.parse()) {
        (Some(group), _) => Ok(group.gid),
        (None, Ok(number)) => Ok(Gid::from_raw(number)),
        (None, Err(_)) => Err(failed(format!("there is no group '{name}'"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pid_file_is_renamed_late_only_in_a_folder_of_the_later_user() {
        let pidfile = std::env::temp_dir().join(format!("confinement-{}", std::process::id()));
        std::fs::create_dir(&pidfile).expect("a directory");
        let owner = pidfile.metadata().expect("it is there").uid();
        let pidfile = pidfile.join("a.pid");
        let of = |user: Option<u32>| {
            let user = user
                .map(|user| UserOptions { user: user.to_string(), group: Some("1".to_owned()) });
            let options = SandboxOptions { user, ..SandboxOptions::default() };
            renaming(&options, Some(&pidfile)).expect("the user exists")
        };
        assert_eq!(of(None), Renaming::Possible);
        assert_eq!(of(Some(owner)), Renaming::Possible);
        assert_eq!(of(Some(owner + 1)), Renaming::Impossible);
        drop(std::fs::remove_dir(pidfile.parent().expect("a directory")));
    }
}

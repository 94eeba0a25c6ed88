//! `ringmill attach IMAGE`: the short way to a block device of this host.

use std::cell::OnceCell;
use std::env;
use std::fs::{self, File};
use std::io::{self, IsTerminal, Seek, SeekFrom, Write as _};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;

use crate::attachments::kept::{self, Kept};
use block::{CreateQcow2, create_qcow2};
use control::{
    AttachedAt, Attachment, HostDevice as Kind, ImageKind, SERVED_NODE, SecretOptions, ServeFormat,
    ServeOptions, masked,
};
use daemon::pidfile::{Pidfile, Renaming};
use daemon::{DaemonError, Environment, Finish, Ready, Start, Status, confinement, spawner};
use nix::unistd::mkstemp;

use crate::attachments::identity::{self, Identity, Image, choose, replaced};
use crate::attachments::lock::{Lock, Wait};
use crate::attachments::{self, Attached, KILLED_MS, Mode};
use crate::daemonize::{self, Daemon, Detached, Role};
use crate::detach::users;
use crate::host_device::{self, HostDevice};
use crate::kernel_nbd::keeper::{self, Keeper};
use crate::serve::{Found, credentials, describe_image, find_or_make};
use crate::{trace, udev};

/// Where temporary overlays are, unless `TMPDIR` says otherwise: `/tmp` may be memory.
const TEMPORARY: &str = "/var/tmp";

/// Attaches the image. In the foreground, serves it until a signal or `detach` comes.
pub(crate) fn run(options: &ServeOptions) -> Result<ExitCode, DaemonError> {
    if keeper::is_keeper() {
        return Ok(keeper::run());
    }
    let attach = options.attach.clone().unwrap_or_default();
    let (mut child, mut parent) = (None, None);
    if !attach.foreground {
        match daemonize::split() {
            Ok(Role::Parent { code, said }) => {
                if let Some((device, opened)) = said.split_once('\n').filter(|_| code == 0) {
                    udev::wait_for(Path::new(device));
                    print(Path::new(device), opened).map_err(|error| {
                        let what =
                            format!("{device} is attached, and printing that failed: {error}");
                        DaemonError::new(what).with_hint(&format!(
                            "Detach it, if it is not needed: ringmill detach {device}"
                        ))
                    })?;
                }
                return Ok(ExitCode::from(code));
            }
            Ok(Role::Child(daemon)) => {
                parent = Some(daemon.parent());
                child = Some(daemon);
            }
            Err(error) => {
                return Err(DaemonError::new(format!("cannot go to the background: {error}")));
            }
        }
    }
    let kind = host_device::choose(attach.device)?;
    let mut options = options.clone();
    let image = place(&mut options)?;
    let mode = match (attach.snapshot, options.read_only) {
        (true, _) => Mode::Snapshot,
        (false, true) => Mode::ReadOnly,
        (false, false) => Mode::Write,
    };
    let mut claim = claim(&image, mode, (attach.device, kind))?;
    let HostDevice { kind: device_kind, number } = claim.device;
    let mut environment = Environment::of_environment(parent)?;
    let (mut named, mut keeper) = (spawner::Named::default(), None);
    match device_kind {
        Kind::Ublk => named.devices.push(Some(number)),
        Kind::Nbd => keeper = Some(Rc::new(Keeper::start()?)),
    }
    let spawner = spawner::start(&options.sandbox, &named, true);
    trace::start(&options.trace)?;
    let attached = claim.attached.clone();
    if let Some(kept) = &attached.kept {
        kept.check(&attached)?;
        Kept::add_paths(&attached, &mut options);
    }
    let found = match attached.moved() {
        // The image that was named need not exist any more.
        Some(_) => {
            Found { kind: ImageKind::File, format: ServeFormat::Raw, made: None, cache: None }
        }
        None => find_or_make(&options)?,
    };
    let Found { kind, format, made, cache: _ } = found;
    let is_made = made.is_some();
    claim.identify(&options)?;
    let shown = options.clone();
    let mut temporary = Temporary(made);
    if attach.snapshot {
        let overlay = make_overlay(&options, format)?;
        temporary = Temporary(Some(overlay.clone()));
        options.overlay = Some(overlay);
    }
    let attachment = Attachment {
        id: attached.id.clone(),
        at: match device_kind {
            // Without its overlay, a snapshot cannot be continued.
            Kind::Ublk => AttachedAt::Ublk { dev_id: number, recovery: !attach.snapshot },
            Kind::Nbd => AttachedAt::Nbd(attached.file("nbd")),
        },
        monitor: attached.file("qmp"),
    };
    let mut steps = options.attached(kind, format, &attachment).map_err(DaemonError::new)?;
    // The state file may not have secrets.
    let is_kept = !attach.snapshot && !options.secrets.iter().any(SecretOptions::is_told);
    let mut start = Start::default();
    let mut kept_file = None;
    if is_kept {
        let path = attached.file("kept");
        let keep = kept::keep(&path, steps, attached.moved().is_some())?;
        (start.keeping, steps, start.kept) = (Some(keep.0), keep.1.given, keep.1.kept);
        kept_file = Some(start.keeping.as_ref().map_or(path, |kept| kept.file.path().to_owned()));
    }
    let pid = attached.file("pid");
    let kept = kept_file.as_deref().map(|file| confinement::Kept { file, more: &start.kept });
    environment.sandbox = confinement::begin(&options.sandbox, &steps, Some(&pid), kept)?;
    let pidfile = Rc::<OnceCell<_>>::default();
    let start = Start {
        steps,
        spawner,
        pidfile: pidfile.clone(),
        stop_timeout: options.stop_timeout.limit(),
        ..start
    };
    let result = daemon::run(start, environment, |daemon| {
        let created = Pidfile::create_if(Some(&pid), Renaming::Possible)?;
        let mut opened = match attached.moved() {
            // Their nodes are opened later.
            Some(moved) => {
                let image = moved.image.as_ref().unwrap_or(&attached.image);
                format!("{}: as the monitor's commands have left the disk\n", image.name)
            }
            None => {
                claim.check(&shown)?;
                let geometry = daemon.node(SERVED_NODE)?.geometry();
                describe_image(&shown, &geometry, (kind, format), is_made)
            }
        };
        if attach.snapshot {
            opened += "Writes go to a temporary file, and are lost at the end\n";
            // It stays while it is open, and a kill leaves nothing behind.
            drop(temporary);
        } else {
            temporary.keep();
        }
        let (detached, status) =
            match child.map(Daemon::detach).transpose().map_err(cannot_leave)? {
                Some(detached) => {
                    write!(io::stdout(), "{}\n{opened}", attached.device.display())
                        .map_err(|error| cannot_print(&error))?;
                    (Some(detached), None)
                }
                None => {
                    if keeper.is_none() {
                        print(&attached.device, &opened).map_err(|error| cannot_print(&error))?;
                    }
                    let is_traced =
                        !options.trace.events.is_empty() && options.trace.file.is_none();
                    (None, Some(Status::new(is_traced)))
                }
            };
        daemon.confine()?;
        let (pidfile, lock) = (pidfile.clone(), claim.lock.take());
        // The keeper's device is made by now.
        let later = (keeper.is_some() && detached.is_none()).then(|| attached.device.clone());
        let tell = move || {
            if let Some(device) = later {
                print(&device, &opened).map_err(|error| cannot_print(&error))?;
            }
            Pidfile::fill_if(created, &pidfile)?;
            drop(lock);
            detached.map_or(Ok(()), Detached::ready).map_err(cannot_leave)
        };
        let made_by = |keeper: Rc<Keeper>| -> Finish {
            let (event_loop, id) = (daemon.control().clone(), attached.id.clone());
            Box::pin(async move { keeper.make(&event_loop, &id).await })
        };
        let finish = keeper.clone().map(made_by);
        Ok(Ready { status, finish, tell: Box::new(tell) })
    });
    keeper.inspect(|keeper| keeper.end());
    // While the record keeps the number.
    let stays = attached.has_device();
    drop((pidfile, claim));
    match (result, stays) {
        (Ok(()), true) => Err(waits(&attached)),
        (result, _) => result.map(|()| ExitCode::SUCCESS),
    }
}

/// The error at the end of a daemon whose device is in use.
fn waits(attached: &Attached) -> DaemonError {
    let (device, command) = (attached.device.display(), attached.command.join(" "));
    let users = users(&attached.device);
    DaemonError::new(format!("{device} is {users}, and stays: its requests wait")).with_hint(
        &format!(
            "Go on with it: {command}\nThen unmount it, and detach it: ringmill detach {device}"
        ),
    )
}

fn cannot_print(error: &io::Error) -> DaemonError {
    DaemonError::new(format!("cannot print the device's name: {error}"))
}

/// A file that is removed, unless it is to stay.
struct Temporary(Option<PathBuf>);

impl Temporary {
    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            let _ = fs::remove_file(path);
        }
    }
}

fn cannot_leave(error: io::Error) -> DaemonError {
    DaemonError::new(format!("cannot leave the terminal: {error}"))
}

/// Makes the paths of the image and the overlay absolute, without links, and returns what is attached.
fn place(options: &mut ServeOptions) -> Result<Image, DaemonError> {
    let url = options.web.is_some().then(|| options.image.to_string_lossy().into_owned());
    if url.is_none() {
        options.image = identity::absolute(&options.image).map_err(DaemonError::new)?;
    }
    if let Some(overlay) = &mut options.overlay {
        *overlay = identity::absolute(overlay).map_err(DaemonError::new)?;
    }
    let identity = identify(options).map_err(|error| {
        DaemonError::new(format!("{}: stat failed: {error}", options.image.display()))
    })?;
    Ok(match (&options.overlay, url) {
        (Some(overlay), base) => Image { name: overlay.display().to_string(), identity, base },
        (None, Some(url)) => {
            Image { name: options.shown(), identity: Some(Identity::Url(url)), base: None }
        }
        (None, None) => Image { name: options.shown(), identity, base: None },
    })
}

/// Returns what identifies the file that has the writes; `None`: it does not exist, or the image is on a server.
fn identify(options: &ServeOptions) -> io::Result<Option<Identity>> {
    let file = match (&options.overlay, &options.web) {
        (Some(overlay), _) => overlay,
        (None, None) => &options.image,
        (None, Some(_)) => return Ok(None),
    };
    match Identity::of(file) {
        Ok(identity) => Ok(Some(identity)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// A device's number that is this command's, with its record. Other commands wait for the lock, until the device can be
/// used. At the end, the record of a device that is not there goes.
struct Claim {
    attached: Attached,
    device: HostDevice,
    lock: Option<Lock>,
}

impl Claim {
    /// Records the identity of an image that was made.
    fn identify(&mut self, options: &ServeOptions) -> Result<(), DaemonError> {
        if self.attached.image.identity.is_none() {
            self.attached.image.identity = identify(options).map_err(DaemonError::new)?;
            self.attached.record()?;
        }
        Ok(())
    }

    /// Checks that the path still leads to the image: the node was opened by its path.
    fn check(&self, options: &ServeOptions) -> Result<(), DaemonError> {
        let known = &self.attached.image;
        if matches!(known.identity, Some(Identity::Url(_))) {
            return Ok(());
        }
        let identity = identify(options).map_err(DaemonError::new)?;
        match identity == known.identity {
            true => Ok(()),
            false => Err(replaced(&self.attached, known, &Image { identity, ..known.clone() })),
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // A device in use waits for the next daemon.
        if !self.attached.has_device() {
            self.attached.forget();
        }
    }
}

/// Chooses the device: that which a killed daemon has left of this image, else a new one with the lowest free number.
/// `kind`: the kind that the user has asked for, and that of a new one.
fn claim(
    image: &Image,
    mode: Mode,
    (wanted, kind): (Option<Kind>, Kind),
) -> Result<Claim, DaemonError> {
    loop {
        let choosing = Lock::of_all()?;
        let mut all = attachments::all()?;
        all.retain(|left| !left.clear_if_ended());
        kept::clear(&all);
        let mut locks = Vec::new();
        let mut busy = None;
        for known in all.iter().filter(|known| known.images().any(|own| own.concerns(image))) {
            match known.lock(Wait::No)? {
                Some(lock) => locks.push((&known.id, lock)),
                None => busy = Some(known),
            }
        }
        if let Some(busy) = busy {
            // Then the choice is another one.
            drop((choosing, locks));
            busy.lock(Wait::Ever)?;
            continue;
        }
        let serves = |known: &Attached| {
            known.daemon().filter(|pid| !attachments::has_ended_within(*pid, KILLED_MS.into()))
        };
        if let Some(found) = choose(&all, image, mode, serves)? {
            let lock = locks.into_iter().find(|(id, _)| **id == found.id).map(|(_, lock)| lock);
            let device = found.host_device().unwrap_or(HostDevice { kind, number: 0 });
            if wanted.is_some_and(|wanted| wanted != device.kind) {
                return Err(identity::waits(found, &found.image.name, ""));
            }
            return Ok(Claim { attached: found.clone(), device, lock });
        }
        return new(image, mode, kind, &all);
    }
}

/// Records an image for a new device, with the lowest number that is free.
fn new(image: &Image, mode: Mode, kind: Kind, all: &[Attached]) -> Result<Claim, DaemonError> {
    let taken = |device| all.iter().any(|known| known.host_device() == Some(device));
    let device = HostDevice { kind, number: host_device::free_number(kind, taken)? };
    let mut command: Vec<String> =
        env::args_os().map(|word| masked(&word.to_string_lossy())).collect();
    if let Some(program) = command.first_mut() {
        *program = "ringmill".into();
    }
    // A number of its own: what this process removes at its end is not another one's.
    let manner = format!("{} {}", mode.word(), std::process::id());
    let attached = Attached {
        id: attachments::id_of(&image.name, &manner),
        image: image.clone(),
        mode,
        device: device.path(),
        command,
        kept: None,
    };
    // Of a killed process of the same number.
    attached.forget();
    let lock = attached.lock(Wait::No)?;
    attached.record()?;
    Ok(Claim { attached, device, lock })
}

/// Makes the empty overlay of an image, under a name that no other user can take before.
fn make_overlay(options: &ServeOptions, format: ServeFormat) -> Result<PathBuf, DaemonError> {
    let image = &options.image;
    let size = match &options.web {
        Some(web) => block::probe_url(web, &credentials(options)?)?.size,
        None => size_of(image, format)
            .map_err(|error| DaemonError::new(format!("{}: {error}", image.display())))?,
    };
    let folder = env::var_os("TMPDIR").map_or_else(|| TEMPORARY.into(), PathBuf::from);
    let name = std::path::absolute(folder.join("ringmill-attach-XXXXXX"));
    let name = name.map_err(DaemonError::new)?;
    // Only its owner may read it.
    let (file, overlay) = mkstemp(&name)
        .map_err(|errno| DaemonError::new(format!("{}: {}", name.display(), errno.desc())))?;
    drop(file);
    let made = Temporary(Some(overlay.clone()));
    create_qcow2(&overlay, &CreateQcow2::new(size / 512 * 512)).map_err(DaemonError::from)?;
    made.keep();
    Ok(overlay)
}

/// The size of the disk in an image, bytes.
fn size_of(image: &Path, format: ServeFormat) -> io::Result<u64> {
    let mut file = File::open(image)?;
    match format {
        ServeFormat::Raw | ServeFormat::ProbedRaw => file.seek(SeekFrom::End(0)),
        ServeFormat::Qcow2 => {
            // The field `size` of the header.
            let mut size = [0; 8];
            file.read_exact_at(&mut size, 24)?;
            Ok(u64::from_be_bytes(size))
        }
    }
}

/// Prints the device for programs, and on a terminal how to use it.
///
/// # Errors
///
/// Standard output cannot be written to.
fn print(device: &Path, opened: &str) -> io::Result<()> {
    writeln!(io::stdout(), "{}", device.display())?;
    if !io::stderr().is_terminal() {
        return Ok(());
    }
    let partitions = udev::partitions(device);
    let mountable = partitions.first().map_or(device, PathBuf::as_path);
    let mut text = opened.to_owned();
    if !partitions.is_empty() {
        let names: Vec<_> = partitions.iter().map(|name| name.display().to_string()).collect();
        text += &format!("Partitions: {}\n", names.join(" "));
    }
    let (device, mountable) = (device.display(), mountable.display());
    text += &format!(
        "Mount it:   mount {mountable} /mnt\nDetach it:  umount /mnt && ringmill detach {device}\n"
    );
    // The terminal may have gone.
    let _ = io::stderr().write_all(text.as_bytes());
    Ok(())
}

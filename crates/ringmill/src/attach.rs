//! `ringmill attach IMAGE`: the short way to a block device of this host.

use std::cell::OnceCell;
use std::env;
use std::fs::{self, File};
use std::io::{self, IsTerminal, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;

use block::{CreateQcow2, Credentials, create_qcow2};
use control::{Attachment, SERVED_NODE, ServeFormat, ServeOptions};
use daemon::pidfile::{Pidfile, Renaming};
use daemon::ublk::{control as ublk, wire::owner};
use daemon::{DaemonError, Environment, Ready, Start, Status, check_ublk, confinement, spawner};

use crate::attachments::{self, Attached, KILLED_MS};
use crate::daemonize::{self, Daemon, Detached, Role};
use crate::serve::{Found, describe_image, find_or_make};
use crate::{trace, udev};

/// Where temporary overlays are, unless `TMPDIR` says otherwise: `/tmp` may be memory.
const TEMPORARY: &str = "/var/tmp";

/// Attaches the image. In the foreground, serves it until a signal or `detach` comes.
pub(crate) fn run(options: &ServeOptions) -> Result<ExitCode, DaemonError> {
    let attach = options.attach.clone().unwrap_or_default();
    let (mut child, mut parent) = (None, None);
    if !attach.foreground {
        match daemonize::split() {
            Ok(Role::Parent { code, said }) => {
                if let Some((device, opened)) = said.split_once('\n').filter(|_| code == 0) {
                    udev::wait_for(Path::new(device));
                    print(Path::new(device), opened);
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
    check_ublk()?;
    let lock = attachments::lock()?;
    for left in attachments::all()? {
        left.clear_if_ended();
    }
    let mut options = options.clone();
    let image = place(&mut options)?;
    let (attached, dev_id) = plan(&options, image, attach.snapshot)?;
    let mut environment = Environment::of_environment(parent)?;
    let named = spawner::Named { devices: vec![Some(dev_id)], ..spawner::Named::default() };
    let spawner = spawner::start(&options.sandbox, &named, true);
    trace::start(&options.trace)?;
    let Found { kind, format, made } = find_or_make(&options)?;
    let is_made = made.is_some();
    let shown = options.clone();
    let mut temporary = Temporary(made);
    if attach.snapshot {
        let overlay = make_overlay(&options, format, &attached.id)?;
        temporary = Temporary(Some(overlay.clone()));
        options.overlay = Some(overlay);
    }
    let attachment = Attachment {
        id: attached.id.clone(),
        dev_id,
        // Without its overlay, a snapshot cannot be continued.
        recovery: !attach.snapshot,
        monitor: attached.file("qmp"),
    };
    let steps = options.attached(kind, format, &attachment).map_err(DaemonError::new)?;
    let pid = attached.file("pid");
    environment.sandbox = confinement::begin(&options.sandbox, &steps, Some(&pid), None)?;
    let pidfile = Rc::<OnceCell<_>>::default();
    let start = Start {
        steps,
        spawner,
        pidfile: pidfile.clone(),
        stop_timeout: options.stop_timeout.limit(),
        ..Start::default()
    };
    let result = daemon::run(start, environment, |daemon| {
        let created = Pidfile::create_if(Some(&pid), Renaming::Possible)?;
        let geometry = daemon.node(SERVED_NODE)?.geometry();
        let mut opened = describe_image(&shown, &geometry, (kind, format), is_made);
        if attach.snapshot {
            opened += "Writes go to a temporary file, and are lost at the end\n";
            // It stays while it is open, and a kill leaves nothing behind.
            drop(temporary);
        } else {
            temporary.keep();
        }
        attached.record()?;
        let (detached, status) =
            match child.map(Daemon::detach).transpose().map_err(cannot_leave)? {
                Some(detached) => {
                    print!("{}\n{opened}", attached.device.display());
                    (Some(detached), None)
                }
                None => {
                    print(&attached.device, &opened);
                    let is_traced =
                        !options.trace.events.is_empty() && options.trace.file.is_none();
                    (None, Some(Status::new(is_traced)))
                }
            };
        daemon.confine()?;
        let pidfile = pidfile.clone();
        let tell = move || {
            Pidfile::fill_if(created, &pidfile)?;
            drop(lock);
            detached.map_or(Ok(()), Detached::ready).map_err(cannot_leave)
        };
        Ok(Ready { status, tell: Box::new(tell) })
    });
    drop(pidfile);
    // A device in use waits for the next daemon.
    if !attached.has_device() {
        attached.forget();
    }
    result.map(|()| ExitCode::SUCCESS)
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

/// Makes the image's path absolute, with links followed, and returns the name that the image is recorded by.
fn place(options: &mut ServeOptions) -> Result<String, DaemonError> {
    if options.web.is_none() {
        // An image that is to be made is not there.
        let found = fs::canonicalize(&options.image);
        options.image =
            found.or_else(|_| std::path::absolute(&options.image)).map_err(DaemonError::new)?;
    }
    if let Some(overlay) = &mut options.overlay {
        *overlay = std::path::absolute(&*overlay).map_err(DaemonError::new)?;
        // The overlay has the writes: an image on a web server may have several overlays.
        return Ok(overlay.display().to_string());
    }
    Ok(options.shown())
}

/// Chooses a number for the device: that of the device that a killed daemon has left, else the lowest free one.
fn plan(
    options: &ServeOptions,
    image: String,
    is_snapshot: bool,
) -> Result<(Attached, u32), DaemonError> {
    let manner = match (is_snapshot, options.read_only) {
        (true, _) => format!("snapshot {}", std::process::id()),
        (false, true) => "read-only".into(),
        (false, false) => String::new(),
    };
    let id = attachments::id_of(&image, &manner);
    let devices = ublk::devices().map_err(|failed| {
        let why = failed.errno().desc();
        DaemonError::new(format!("looking for ublk devices failed: {why}"))
            .with_hint("ublk devices need root, or CAP_SYS_ADMIN and access to /dev/ublk-control.")
    })?;
    let mut command: Vec<String> =
        env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    if let Some(program) = command.first_mut() {
        *program = "ringmill".into();
    }
    let device = |number: u32| PathBuf::from(format!("/dev/ublkb{number}"));
    let own = devices.iter().find(|found| found.owner == owner(&id)).map(|found| found.id);
    let free = (0..).find(|number| devices.iter().all(|found| found.id != *number));
    let number = own.or(free).unwrap_or_default();
    let attached = Attached { id, image, device: device(number), command };
    if own.is_some()
        && let Some(pid) = attached.daemon()
        && !attachments::has_ended_within(pid, KILLED_MS.into())
    {
        let (image, device) = (&attached.image, attached.device.display());
        return Err(DaemonError::new(format!(
            "{image} is attached already: {device}, by process {pid}"
        )));
    }
    Ok((attached, number))
}

/// Makes the empty overlay of an image.
fn make_overlay(
    options: &ServeOptions,
    format: ServeFormat,
    id: &str,
) -> Result<PathBuf, DaemonError> {
    let image = &options.image;
    let size = match &options.web {
        Some(web) => block::probe_url(web, &Credentials::default())?.1,
        None => size_of(image, format)
            .map_err(|error| DaemonError::new(format!("{}: {error}", image.display())))?,
    };
    let folder = env::var_os("TMPDIR").map_or_else(|| TEMPORARY.into(), PathBuf::from);
    let overlay = std::path::absolute(folder.join(format!("ringmill-{id}.qcow2")));
    let overlay = overlay.map_err(DaemonError::new)?;
    // The file must not exist before, and only its owner may read it.
    let mut new = File::options();
    std::os::unix::fs::OpenOptionsExt::mode(&mut new, 0o600);
    new.write(true)
        .create_new(true)
        .open(&overlay)
        .map_err(|error| DaemonError::new(format!("{}: {error}", overlay.display())))?;
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
fn print(device: &Path, opened: &str) {
    println!("{}", device.display());
    if !io::stderr().is_terminal() {
        return;
    }
    let partitions = udev::partitions(device);
    eprint!("{opened}");
    let mountable = partitions.first().map_or(device, PathBuf::as_path);
    if !partitions.is_empty() {
        let names: Vec<_> = partitions.iter().map(|name| name.display().to_string()).collect();
        eprintln!("Partitions: {}", names.join(" "));
    }
    let (device, mountable) = (device.display(), mountable.display());
    eprintln!(
        "Mount it:   mount {mountable} /mnt\nDetach it:  umount /mnt && ringmill detach {device}"
    );
}

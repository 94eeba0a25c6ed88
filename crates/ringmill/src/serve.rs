//! `ringmill serve IMAGE`: the short way to a served disk.

mod cache;

use std::cell::OnceCell;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, IsTerminal};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use block::node::Geometry;
use block::options::UrlOptions;
use block::{CreateQcow2, Credentials, Format, OverlayFile, create_qcow2, probe_url};
use control::{
    FuseOptions, ImageKind, ObjectOptions, SERVED_NODE, ServeDevice, ServeFormat, ServeOptions,
    Step,
};

pub(crate) use self::cache::CacheGuard;
use crate::check::print;
use crate::probe::bytes;
use crate::trace;
use daemon::pidfile::Pidfile;
use daemon::{DaemonError, Environment, Localize, Ready, Start, Status};
use daemon::{confinement, spawner};

/// Serves the image until a signal comes.
pub(crate) fn run(options: &ServeOptions) -> Result<(), DaemonError> {
    let mut environment = Environment::of_environment(None)?;
    let mountpoints = options.mount.iter().map(|mount| mount.mountpoint.clone()).collect();
    let named = spawner::Named { mountpoints, ..spawner::Named::default() };
    let spawner = spawner::start(&options.sandbox, &named, false);
    trace::start(&options.trace)?;
    let Found { kind, format, made, cache } = find_or_make(options)?;
    let steps = options.steps(kind, format);
    environment.sandbox =
        confinement::begin(&options.sandbox, &steps, options.pidfile.as_deref(), None)?;
    let words = std::env::args_os().skip(1).map(std::ffi::OsString::into_string);
    let words = words.collect::<Result<Vec<_>, _>>().ok();
    let command_line = words.map(|words| with_format(&words, options, format));
    let pidfile = Rc::<OnceCell<_>>::default();
    let start = Start {
        steps,
        command_line,
        spawner,
        pidfile: pidfile.clone(),
        stop_timeout: options.stop_timeout.limit(),
        localize: localize(options, kind),
        ..Start::default()
    };
    let (is_made, mut is_ready) = (made.is_some(), false);
    let result = daemon::run(start, environment, |daemon| {
        let path = options.pidfile.as_deref();
        let created = Pidfile::create_if(path, confinement::renaming(&options.sandbox, path)?)?;
        let geometry = daemon.node(SERVED_NODE)?.geometry();
        let described = describe(options, &geometry, (kind, format), is_made)?;
        // The nodes are open, and have their locks.
        drop(cache);
        daemon.confine()?;
        Pidfile::fill_if(created, &pidfile)?;
        is_ready = true;
        print(&described);
        let traced = !options.trace.events.is_empty() && options.trace.file.is_none();
        Ok(Ready::new(Some(Status::new(traced))))
    });
    if let (Some(path), false) = (made, is_ready) {
        // No client could use the image yet: no empty image is left behind.
        let _ = fs::remove_file(path);
    }
    result
}

/// Returns the background copy of an image on a web server to its overlay. `None`: there is none, or it is done.
pub(crate) fn localize(options: &ServeOptions, kind: ImageKind) -> Option<Localize> {
    match kind {
        ImageKind::File | ImageKind::BlockDevice => {
            let speed = options.localize?;
            Some(Localize { node: SERVED_NODE.to_owned(), speed })
        }
        ImageKind::Localized => None,
    }
}

/// Returns how the overlay belongs to its image. `None`: there is no such file.
fn overlay_found(options: &ServeOptions) -> Result<Option<OverlayFile>, DaemonError> {
    let overlay = options.overlay.as_ref().filter(|overlay| overlay.is_file());
    let look = |overlay: &PathBuf| {
        OverlayFile::of(overlay).map_err(|error| failed(overlay, "reading the overlay", &error))
    };
    overlay.map(look).transpose()
}

/// Returns the steps with which this process continues another process' serving, and the words of its command
/// line. The image is not probed again: the guest has written to it since.
pub(crate) fn go_on(options: &ServeOptions, arguments: &[String]) -> Result<GoOn, DaemonError> {
    let kind = match fs::metadata(&options.image) {
        _ if options.web.is_some() => match overlay_found(options)? {
            Some(OverlayFile::Whole) => ImageKind::Localized,
            Some(OverlayFile::Begun | OverlayFile::Empty | OverlayFile::Other) | None => {
                ImageKind::File
            }
        },
        Ok(metadata) if metadata.file_type().is_block_device() => ImageKind::BlockDevice,
        Ok(_) => ImageKind::File,
        Err(error) => return Err(failed(&options.image, "stat", &error)),
    };
    // Versions without `--format` served all images as raw.
    let format = options.format.unwrap_or(ServeFormat::ProbedRaw);
    Ok(GoOn {
        steps: options.steps(kind, format),
        command_line: with_format(arguments, options, format),
        localize: localize(options, kind),
    })
}

/// How this process continues another process' serving.
pub(crate) struct GoOn {
    pub(crate) steps: Vec<Step>,
    pub(crate) command_line: Vec<String>,
    pub(crate) localize: Option<Localize>,
}

/// Returns the words of a command line, with the decided format added.
fn with_format(words: &[String], options: &ServeOptions, format: ServeFormat) -> Vec<String> {
    let mut words = words.to_vec();
    if options.format.is_none() {
        // The option goes behind the command's name.
        let at = words.len().min(1);
        words.insert(at, format!("--format={}", format.name()));
    }
    words
}

/// The result of looking at the image.
pub(crate) struct Found {
    pub(crate) kind: ImageKind,
    pub(crate) format: ServeFormat,
    /// The image was made, and is removed if serving does not begin.
    pub(crate) made: Option<PathBuf>,
    /// Keeps other processes from replacing the image's cache, until this process has it open.
    pub(crate) cache: Option<CacheGuard>,
}

/// Returns the kind and format of the image. A missing image is created with the given size. An existing image is
/// never resized.
pub(crate) fn find_or_make(options: &ServeOptions) -> Result<Found, DaemonError> {
    let image = &options.image;
    if let Some(web) = &options.web {
        return on_web(options, web);
    }
    let kind = match fs::metadata(image) {
        Ok(metadata) if metadata.file_type().is_block_device() => ImageKind::BlockDevice,
        Ok(metadata) if metadata.is_file() => ImageKind::File,
        Ok(_) => {
            let why = format!("{}: neither a file nor a block device", image.display());
            return Err(DaemonError::new(why));
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let Some(size) = options.size else {
                return Err(DaemonError::new(format!(
                    "{}: no such image\nAdd --size to make one, for example --size 1G.",
                    image.display()
                )));
            };
            let format = format_to_make(options)?;
            make(image, size, format)?;
            let (kind, made) = (ImageKind::File, Some(image.clone()));
            return Ok(Found { kind, format, made, cache: None });
        }
        Err(error) => return Err(failed(image, "stat", &error)),
    };
    Ok(Found { kind, format: format_found(options)?, made: None, cache: None })
}

/// Looks at an image on a web server, and makes a missing overlay.
fn on_web(options: &ServeOptions, web: &UrlOptions) -> Result<Found, DaemonError> {
    let there = overlay_found(options)?;
    if there == Some(OverlayFile::Whole) {
        let format = options.format.unwrap_or(ServeFormat::ProbedRaw);
        return Ok(Found { kind: ImageKind::Localized, format, made: None, cache: None });
    }
    let probed = probe_url(web, &credentials(options)?)?;
    let size = probed.size;
    let format = match (options.format, probed.format) {
        (Some(format @ (ServeFormat::Raw | ServeFormat::ProbedRaw)), _) => format,
        (_, Some(Format::Qcow2)) => ServeFormat::Qcow2,
        (None, None) => ServeFormat::ProbedRaw,
        (Some(ServeFormat::Qcow2), None) => {
            let name = options.shown();
            return Err(DaemonError::new(format!(
                "{name}: --format qcow2: it has no qcow2 header"
            )));
        }
        (_, Some(format)) => {
            let (name, format) = (options.shown(), format.name());
            let why =
                "which ringmill does not read; if its contents only look like one: --format raw";
            return Err(DaemonError::new(format!("{name}: a {format} image, {why}")));
        }
    };
    let cache = cache::find_or_make(options, format, &probed)?;
    let missing = options.overlay.as_ref().filter(|overlay| {
        fs::symlink_metadata(overlay).is_err_and(|error| error.kind() == ErrorKind::NotFound)
    });
    match (missing, &options.overlay) {
        (Some(overlay), _) => make(overlay, size, ServeFormat::Qcow2)?,
        (None, Some(overlay)) => {
            let file = File::open(overlay)
                .map_err(|error| failed(overlay, "opening the overlay", &error))?;
            let found =
                Format::of_file(&file).map_err(|error| failed(overlay, "reading", &error))?;
            if found != Some(Format::Qcow2) {
                let why = format!("overlay {}: it is no qcow2 image", overlay.display());
                return Err(DaemonError::new(why));
            }
            if there == Some(OverlayFile::Other) {
                let (overlay, url) = (overlay.display(), options.shown());
                return Err(DaemonError::new(format!(
                    "overlay {overlay}: it is a disk of its own, or has a backing file; {url} would take the place of \
                     what it does not store. Name a file that does not exist"
                )));
            }
        }
        (None, None) => {}
    }
    Ok(Found { kind: ImageKind::File, format, made: missing.cloned(), cache })
}

/// Returns the secrets of `--object`.
pub(crate) fn credentials(options: &ServeOptions) -> Result<Credentials, DaemonError> {
    let mut credentials = Credentials::default();
    for secret in &options.secrets {
        daemon::add_credentials(&mut credentials, &ObjectOptions::Secret(secret.clone()))?;
    }
    Ok(credentials)
}

fn failed(image: &Path, call: &str, error: &io::Error) -> DaemonError {
    DaemonError::new(format!("{}: {call} failed: {error}", image.display()))
}

/// Returns the format of an existing image: by `--format`, otherwise by the header.
fn format_found(options: &ServeOptions) -> Result<ServeFormat, DaemonError> {
    let image = &options.image;
    if let Some(format @ (ServeFormat::Raw | ServeFormat::ProbedRaw)) = options.format {
        return Ok(format);
    }
    let file = File::open(image).map_err(|error| failed(image, "opening the image", &error))?;
    let found = Format::of_file(&file).map_err(|error| failed(image, "reading", &error))?;
    let name = image.display();
    match found {
        Some(Format::Qcow2) => Ok(ServeFormat::Qcow2),
        found if options.format == Some(ServeFormat::Qcow2) => {
            let what = match found {
                Some(format) => format!("it is a {} image", format.name()),
                None => "it has no qcow2 header".to_owned(),
            };
            let why = format!("{name}: --format qcow2: not a qcow2 image: {what}");
            Err(DaemonError::new(why))
        }
        Some(format) => Err(unknown_format(image, format)),
        None => {
            if Format::of_name(image) == Some(Format::Qcow2) {
                log::warn!("{name}: no qcow2 header, whatever its name says: served as raw");
            }
            Ok(ServeFormat::ProbedRaw)
        }
    }
}

/// Returns the error for an image in a format that is not served.
fn unknown_format(image: &Path, format: Format) -> DaemonError {
    let (path, name) = (image.display(), format.name());
    let to = new_name(image);
    let from = match format {
        Format::Luks => format!(
            "--object secret,id=key,file=KEYFILE --image-opts \
             driver=luks,key-secret=key,file.filename={path}"
        ),
        Format::Bochs
        | Format::Cloop
        | Format::Dmg
        | Format::Parallels
        | Format::Qcow
        | Format::Qcow2
        | Format::Qed
        | Format::Vdi
        | Format::Vhdx
        | Format::Vmdk
        | Format::Vpc => format!("-f {name} {path}"),
    };
    // The driver `luks` reads such an image, but `serve` has no option for its key.
    let (what, otherwise) = match format {
        Format::Luks => (
            ": serve has no option for its key",
            format!(
                "Or serve what it holds: ringmill storage-daemon --object secret,id=key,file=KEYFILE --blockdev \
                 driver=luks,node-name=disk,key-secret=key,file.driver=file,file.filename={path} --export ...\n"
            ),
        ),
        Format::Bochs
        | Format::Cloop
        | Format::Dmg
        | Format::Parallels
        | Format::Qcow
        | Format::Qcow2
        | Format::Qed
        | Format::Vdi
        | Format::Vhdx
        | Format::Vmdk
        | Format::Vpc => (", which ringmill does not read", String::new()),
    };
    DaemonError::new(format!(
        "{path}: a {name} image{what}\n\
         Convert it, and serve the new image: qemu-img convert -O qcow2 {from} {}\n\
         {otherwise}\
         If it is a raw disk whose contents look like {name}: --format raw",
        to.display()
    ))
}

/// A name for the image converted to qcow2. qemu-img would overwrite a file of that name without a word.
fn new_name(image: &Path) -> PathBuf {
    let mut name = image.with_extension("qcow2");
    while name.symlink_metadata().is_ok() {
        name.set_extension("new.qcow2");
    }
    name
}

/// Returns the format for a new image: by `--format`, otherwise by the image's name.
fn format_to_make(options: &ServeOptions) -> Result<ServeFormat, DaemonError> {
    match (options.format, Format::of_name(&options.image)) {
        (Some(format), _) => Ok(format),
        (None, Some(Format::Qcow2)) => Ok(ServeFormat::Qcow2),
        (None, None) => Ok(ServeFormat::ProbedRaw),
        (None, Some(format)) => Err(DaemonError::new(format!(
            "{}: by its name a {} image, which ringmill does not make\n\
             Give it a name that ends in .qcow2 or .img, or add --format raw.",
            options.image.display(),
            format.name()
        ))),
    }
}

/// Creates a sparse image. Only its owner has access, since disks are confidential.
fn make(image: &Path, size: u64, format: ServeFormat) -> Result<(), DaemonError> {
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(image);
    let file = file.map_err(|error| failed(image, "creating the image", &error))?;
    let made = match format {
        ServeFormat::Raw | ServeFormat::ProbedRaw => {
            file.set_len(size).map_err(|error| failed(image, "creating the image", &error))
        }
        ServeFormat::Qcow2 => {
            create_qcow2(image, &CreateQcow2::new(size)).map_err(DaemonError::from)
        }
    };
    made.inspect_err(|_| {
        let _ = fs::remove_file(image);
    })
}

/// Returns which image is served, and what has become of `--size`.
pub(crate) fn describe_image(
    options: &ServeOptions,
    geometry: &Geometry,
    (kind, format): (ImageKind, ServeFormat),
    is_made: bool,
) -> String {
    let (image, size) = (options.shown(), bytes(geometry.size));
    if let Some(overlay) = &options.overlay {
        let what = if is_made { "Made" } else { "Opened" };
        let of = match kind {
            ImageKind::File | ImageKind::BlockDevice => format!("an overlay of {image}"),
            ImageKind::Localized => format!("which needs {image} no more"),
        };
        return format!("{what} {} ({size}), {of}\n", overlay.display());
    }
    let format = match format {
        ServeFormat::Qcow2 => "qcow2",
        ServeFormat::Raw | ServeFormat::ProbedRaw => "raw",
    };
    let what = if is_made { "Made" } else { "Opened" };
    let ignored = match options.size {
        Some(wanted) if !is_made && wanted != geometry.size => {
            format!("{image} exists and has {size}: --size was ignored\n")
        }
        _ => String::new(),
    };
    let read_only = if geometry.read_only { ", read-only" } else { "" };
    format!("{what} {image} ({format}, {size}{read_only})\n{ignored}")
}

/// Returns which image is served and where. On a terminal, instructions for attaching the disk follow: a journal
/// would repeat them at each start.
fn describe(
    options: &ServeOptions,
    geometry: &Geometry,
    found: (ImageKind, ServeFormat),
    is_made: bool,
) -> Result<String, DaemonError> {
    let mut text = describe_image(options, geometry, found, is_made);
    if let Some(FuseOptions { mountpoint, .. }) = &options.mount {
        let (image, file) = (options.shown(), mountpoint.display());
        return Ok(format!("{text}Serving {image} as the file {file}\n"));
    }
    let socket = std::path::absolute(&options.socket).map_err(DaemonError::new)?;
    let socket = socket.display();
    let queues = options.queues;
    text += &format!("Serving {} on {socket}\n", options.shown());
    if !io::stdout().is_terminal() && !io::stderr().is_terminal() {
        return Ok(text);
    }
    // A comma in an option's value is doubled: QEMU's keyval syntax.
    let quoted = socket.to_string().replace(',', ",,");
    let (needs, older, qemu, cloud_hypervisor) = match options.device {
        ServeDevice::VirtioBlk => (
            "",
            "; before QEMU 9.2: reconnect=1, not reconnect-ms=100",
            format!(
                "-chardev socket,id=disk0,path={quoted},reconnect-ms=100 \\
  -device vhost-user-blk-pci,chardev=disk0,num-queues={queues}"
            ),
            format!("--disk vhost_user=true,socket={socket},num_queues={queues},queue_size=128"),
        ),
        ServeDevice::Nvme | ServeDevice::Ahci => {
            let path = serde_json::Value::from(socket.to_string());
            (
                " from version 10.1 on",
                "",
                format!(
                    "-device '{{\"driver\":\"vfio-user-pci\",\"socket\":{{\"type\":\"unix\",\"path\":{path}}}}}'"
                ),
                format!("--user-device socket={socket}"),
            )
        }
    };
    text += &format!(
        "
Attach it to QEMU{needs} (the guest's memory must be shared with ringmill{older}):
  -object memory-backend-memfd,id=mem,size=2G,share=on -machine memory-backend=mem -m 2G \\
  {qemu}

Or to Cloud Hypervisor:
  --memory size=2G,shared=on \\
  {cloud_hypervisor}

"
    );
    Ok(text)
}

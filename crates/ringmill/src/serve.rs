//! `ringmill serve IMAGE`: the short way to a served disk.

use std::cell::OnceCell;
use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use control::{ImageKind, ServeOptions, Step};

use crate::daemon::{self, DaemonError, Start, Status, Surroundings};
use crate::pidfile::Pidfile;
use crate::{sandbox, spawner, trace};

/// Serves the image until a signal comes.
pub(crate) fn run(options: &ServeOptions) -> Result<(), DaemonError> {
    let mut surroundings = Surroundings::of_environment(None)?;
    let spawner = spawner::start(&options.sandbox);
    trace::start(&options.trace)?;
    let (kind, made) = find_or_make(options)?;
    let steps = options.steps(kind);
    surroundings.sandbox = sandbox::begin(&options.sandbox, &steps, options.pidfile.as_deref())?;
    let words = std::env::args_os().skip(1).map(std::ffi::OsString::into_string);
    let command_line = words.collect::<Result<_, _>>().ok();
    let pidfile = Rc::<OnceCell<_>>::default();
    let start =
        Start { steps, command_line, spawner, pidfile: pidfile.clone(), ..Start::default() };
    let mut is_ready = false;
    let result = daemon::run(start, surroundings, |daemon| {
        is_ready = true;
        if let Some(path) = &options.pidfile {
            let _ = pidfile.set(Pidfile::create(path).map_err(DaemonError::new)?);
        }
        print!("{}", describe(options)?);
        daemon.confine()?;
        let traced = !options.trace.events.is_empty() && options.trace.file.is_none();
        Ok(Some(Status::new(traced)))
    });
    if let (Some(path), false) = (made, is_ready) {
        // Nothing is left behind that nobody could use yet.
        let _ = fs::remove_file(path);
    }
    result
}

/// What serving an image that is there comes to.
pub(crate) fn steps(options: &ServeOptions) -> Result<Vec<Step>, DaemonError> {
    let (kind, _) = find_or_make(options)?;
    Ok(options.steps(kind))
}

/// What the image is; made with the size asked for when there is none. An image that exists is
/// never resized.
fn find_or_make(options: &ServeOptions) -> Result<(ImageKind, Option<PathBuf>), DaemonError> {
    let image = &options.image;
    let failed = |call: &str, error: std::io::Error| {
        DaemonError::new(format!("{}: {call} failed: {error}", image.display()))
    };
    match fs::metadata(image) {
        Ok(metadata) if metadata.file_type().is_block_device() => {
            Ok((ImageKind::BlockDevice, None))
        }
        Ok(metadata) if metadata.is_file() => Ok((ImageKind::File, None)),
        Ok(_) => {
            Err(DaemonError::new(format!("{}: neither a file nor a block device", image.display())))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let Some(size) = options.size else {
                return Err(DaemonError::new(format!(
                    "{}: no such image\nAdd --size to make one, for example --size 1G.",
                    image.display()
                )));
            };
            make(image, size).map_err(|error| failed("creating the image", error))?;
            Ok((ImageKind::File, Some(image.clone())))
        }
        Err(error) => Err(failed("stat", error)),
    }
}

/// Makes a sparse image. Only its owner may read it: it will hold somebody's disk.
fn make(image: &Path, size: u64) -> std::io::Result<()> {
    let file: File = OpenOptions::new().write(true).create_new(true).mode(0o600).open(image)?;
    file.set_len(size).inspect_err(|_| {
        let _ = fs::remove_file(image);
    })
}

/// How to attach the disk.
fn describe(options: &ServeOptions) -> Result<String, DaemonError> {
    let socket = std::path::absolute(&options.socket).map_err(DaemonError::new)?;
    let socket = socket.display();
    let queues = options.queues;
    let mut text = format!("Serving {} on {socket}\n", options.image.display());
    // A comma in an option's value is doubled: QEMU's keyval syntax.
    let quoted = socket.to_string().replace(',', ",,");
    text += &format!(
        "
Attach it to QEMU (the guest's memory must be shared with ringmill):
  -object memory-backend-memfd,id=mem,size=2G,share=on -machine memory-backend=mem -m 2G \\
  -chardev socket,id=disk0,path={quoted} \\
  -device vhost-user-blk-pci,chardev=disk0,num-queues={queues}

Or to Cloud Hypervisor:
  --memory size=2G,shared=on \\
  --disk vhost_user=true,socket={socket},num_queues={queues},queue_size=128

"
    );
    Ok(text)
}

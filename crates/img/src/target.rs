//! The file of a new image, which has no name until the image is complete.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::libc;
use rustix::fs::{AtFlags, CWD, linkat};

use crate::error::Error;
use crate::source::path_of;

/// The place of a new image.
///
/// A file that is not there yet is made without a name, by `O_TMPFILE`. [`complete`](Self::complete) gives it the name. The
/// kernel removes the file of a process that ends before. An image that is there is written in place, and so is one on a file
/// system without such files.
pub struct Target {
    name: String,
    unnamed: Option<Unnamed>,
}

struct Unnamed {
    file: File,
    path: PathBuf,
}

impl Target {
    /// Returns the place for an image of that name.
    ///
    /// # Errors
    ///
    /// The folder cannot be written.
    pub fn new(name: &str) -> Result<Target, Error> {
        let of = |unnamed| Target { name: name.to_owned(), unnamed };
        let Some(path) = path_of(name).filter(|_| !name.starts_with("json:")) else {
            return Ok(of(None));
        };
        match path.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Ok(_) | Err(_) => return Ok(of(None)),
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let mut options = OpenOptions::new();
        options.read(true).write(true).mode(0o644).custom_flags(libc::O_TMPFILE);
        match options.open(folder.unwrap_or(Path::new("."))) {
            Ok(file) => Ok(of(Some(Unnamed { file, path: path.to_owned() }))),
            // The file system has no such files, or the folder is missing: making the image tells.
            Err(_) => Ok(of(None)),
        }
    }

    /// Returns the name by which the image is made and opened.
    pub fn name(&self) -> String {
        match &self.unnamed {
            Some(Unnamed { file, .. }) => format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()),
            None => self.name.clone(),
        }
    }

    /// Returns an error with the image's own name.
    #[must_use]
    pub fn named(&self, error: Error) -> Error {
        let own = self.name();
        let message = error.message().replace(&own, &self.name);
        let named = Error::new(message);
        match error.hint() {
            Some(hint) => named.with_hint(hint.replace(&own, &self.name)),
            None => named,
        }
    }

    /// Gives the complete image its name. It has to be closed.
    ///
    /// # Errors
    ///
    /// Another file has the name by now.
    pub fn complete(self) -> Result<(), Error> {
        let Some(Unnamed { path, .. }) = &self.unnamed else { return Ok(()) };
        let linked = linkat(CWD, self.name(), CWD, path, AtFlags::SYMLINK_FOLLOW);
        linked.map_err(|errno| {
            let errno = Errno::from_raw(errno.raw_os_error());
            Error::os(format!("Could not create '{}'", path.display()), errno)
        })
    }
}

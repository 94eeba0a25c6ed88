//! `serve --cache-dir`: finds or makes the cache of an image on a server.
//!
//! A cache is a qcow2 image above the image on the server. Its header records the content that it belongs to. Its allocated
//! clusters are what is stored.

use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use block::{LEFT_LOCKED, OverlayFile, ProbedUrl, ToldBy};
use control::{ServeFormat, ServeOptions};
use daemon::DaemonError;
use nix::fcntl::{FcntlArg, Flock, FlockArg, fcntl};
use nix::libc;

use super::{failed, make};

/// How often a cache is looked at that a killed process may have left locked.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// The longest content that a header records, bytes.
const LONGEST: usize = 160;

/// The lock of a folder of caches.
pub(crate) struct CacheGuard(#[expect(dead_code, reason = "dropping it unlocks")] Flock<File>);

/// Finds the cache of an image, or makes it. A cache of another content is replaced.
pub(super) fn find_or_make(
    options: &ServeOptions,
    format: ServeFormat,
    image: &ProbedUrl,
) -> Result<Option<CacheGuard>, DaemonError> {
    let (Some(folder), Some(cache)) = (&options.cache_dir.folder, options.cache_file(format))
    else {
        return Ok(None);
    };
    fs::create_dir_all(folder).map_err(|error| failed(folder, "creating the folder", &error))?;
    let opened = File::open(folder).map_err(|error| failed(folder, "opening", &error))?;
    let guard = Flock::lock(opened, FlockArg::LockExclusive)
        .map_err(|(_, errno)| failed(folder, "locking", &errno.into()))?;
    let name = cache.display();
    match fs::symlink_metadata(&cache) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(failed(&cache, "stat", &error)),
        Ok(found) if !found.is_file() => {
            return Err(DaemonError::new(format!("cache {name}: not a file")));
        }
        Ok(_) => {
            refuse_if_used(&cache)?;
            let read = |error| failed(&cache, "reading the cache", &error);
            let why = match OverlayFile::of(&cache).map_err(read)? {
                OverlayFile::Begun => {
                    let stored = OverlayFile::content(&cache).map_err(read)?.unwrap_or_default();
                    match is_lasting(options, image) {
                        true if stored == image.content => return Ok(Some(CacheGuard(guard))),
                        true => format!(
                            "it belongs to an image of {stored}, and the server has one of {}",
                            image.content
                        ),
                        false => {
                            "the server does not tell whether its image has changed".to_owned()
                        }
                    }
                }
                // A process made it, and ended before it had it open. Or it is half made.
                OverlayFile::Empty => "it is empty".to_owned(),
                OverlayFile::Other if found_half_made(&cache) => "it was not made whole".to_owned(),
                OverlayFile::Whole | OverlayFile::Other => {
                    return Err(DaemonError::new(format!("cache {name}: it is another image"))
                        .with_hint("Name another folder with --cache-dir"));
                }
            };
            log::warn!("cache {name}: started anew: {why}");
            fs::remove_file(&cache).map_err(|error| failed(&cache, "removing", &error))?;
        }
    }
    if !is_lasting(options, image) {
        log::warn!(
            "cache {name}: used until the end of this process only: the server does not tell whether its image has changed"
        );
    }
    make(&cache, image.size, ServeFormat::Qcow2)?;
    Ok(Some(CacheGuard(guard)))
}

/// Whether a later process can tell that the image is the same one.
fn is_lasting(options: &ServeOptions, image: &ProbedUrl) -> bool {
    // The cache's name is without the query, which may tell images from each other.
    let has_query = options.image.as_os_str().as_encoded_bytes().contains(&b'?');
    let is_told = match image.told_by {
        ToldBy::Etag => true,
        ToldBy::Time => !has_query,
        ToldBy::Length => false,
    };
    is_told && image.content.len() <= LONGEST
}

/// A kill while the file was made: it has no header yet.
fn found_half_made(cache: &Path) -> bool {
    let mut magic = [0; 4];
    let read = File::open(cache)
        .and_then(|file| std::os::unix::fs::FileExt::read_at(&file, &mut magic, 0));
    read.is_ok() && magic == [0; 4]
}

/// Refuses a cache that another process has open: its image locks are locks on bytes of the file.
fn refuse_if_used(cache: &Path) -> Result<(), DaemonError> {
    let file = OpenOptions::new().read(true).write(true).open(cache);
    let file = file.map_err(|error| failed(cache, "opening the cache", &error))?;
    let begun = Instant::now();
    loop {
        let mut lock = libc::flock {
            l_type: libc::F_WRLCK as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: 0,
            l_len: 0,
            l_pid: 0,
        };
        match fcntl(&file, FcntlArg::F_OFD_GETLK(&mut lock)) {
            Ok(_) if i32::from(lock.l_type) == libc::F_UNLCK => return Ok(()),
            // The kernel finishes requests of a killed process before it closes the file. No event announces the end.
            Ok(_) if begun.elapsed() < LEFT_LOCKED => thread::sleep(LOOK_AGAIN),
            Ok(_) => break,
            // The file system has no such locks. The image's node says so, too.
            Err(_) => return Ok(()),
        }
    }
    let why = format!("cache {}: another process uses it", cache.display());
    Err(DaemonError::new(why).with_hint(
        "One process uses a cache at a time: name another folder with --cache-dir, or serve several disks by one ringmill \
         storage-daemon",
    ))
}

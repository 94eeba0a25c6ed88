//! An open image.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_int, c_void};
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::{Arc, Mutex};

use event_loop::sync::lock;
use nix::errno::Errno;

use crate::cluster::{Cluster, Pool, c_string};
use crate::encryption::{Encryption, Format, NewEncryption};
use crate::error::Error;
use crate::library::{Handle, Library};

/// `RBD_FEATURE_FAST_DIFF`.
const FAST_DIFF: u64 = 1 << 4;
/// `RBD_FLAG_FAST_DIFF_INVALID`.
const FAST_DIFF_INVALID: u64 = 1 << 1;

/// Bytes of a new image in which every encryption header fits. That of LUKS 2 has 16 MiB.
const ROOM_FOR_HEADER: u64 = 64 << 20;

/// The first bytes of a LUKS header; a version of two bytes follows.
const MAGIC: [u8; 6] = *b"LUKS\xba\xbe";
/// The same in a clone that is encrypted otherwise than its parent.
const MAGIC_OF_CLONE: [u8; 6] = *b"RBDL\xba\xbe";

fn format_of(bytes: [u8; 8]) -> Option<Format> {
    let [magic @ .., high, low] = bytes;
    if magic != MAGIC && magic != MAGIC_OF_CLONE {
        return None;
    }
    [Format::Luks1, Format::Luks2].into_iter().zip(1..).find_map(|(format, version)| {
        (u16::from_be_bytes([high, low]) == version).then_some(format)
    })
}

/// What an iteration is ended with. Not an error that the library returns by itself.
const ENDED: c_int = -9000;

/// Names an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageName {
    /// The pool.
    pub pool: String,
    /// The namespace in the pool; empty for the default one.
    pub namespace: String,
    /// The image.
    pub image: String,
    /// A snapshot of the image. `None`: the image as it is now.
    pub snapshot: Option<String>,
}

/// An image to be created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Creation {
    /// Its size in bytes, without an encryption header.
    pub size: u64,
    /// Bytes of its objects as a power of two. 0: Ceph's default.
    pub object_order: u32,
    /// Its encryption. `None`: it has none.
    pub encryption: Option<NewEncryption>,
}

/// A part of an image that has objects, or has none and reads as zeroes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The first byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Whether there is data.
    pub exists: bool,
}

/// An open image. Dropping it closes it, which blocks.
pub struct Image {
    pool: Pool,
    handle: Handle,
    is_read_only: bool,
    /// Bytes before the decrypted contents. `None`: the image is not decrypted.
    header_len: Option<u64>,
    notice: Mutex<Option<Notice>>,
}

/// A registered notice of changes: its number, and what is called.
struct Notice {
    number: u64,
    call: *mut Call,
}

type Call = Box<dyn Fn() + Send + Sync>;

// SAFETY: a `rbd_image_t` may be used by any thread, and by several at a time. `Notice` is `Send` and `Sync`, as the
// call that it points to is.
unsafe impl Send for Image {}
// SAFETY: as above.
unsafe impl Sync for Image {}

impl Image {
    /// Opens an image.
    ///
    /// A user that may not write to the pool gets it for reading. With `encryption`, size and requests are those of the
    /// decrypted contents.
    ///
    /// # Errors
    ///
    /// Pool, image or snapshot do not exist, or the user may not use them. The image has no such encryption, or another
    /// passphrase.
    pub fn open(
        cluster: &Arc<Cluster>,
        name: &ImageName,
        encryption: Option<&Encryption>,
    ) -> Result<Image, Error> {
        let pool = Pool::open(cluster.clone(), &name.pool, &name.namespace)?;
        let image = c_string(&name.image)?;
        let snapshot = name.snapshot.as_deref().map(c_string).transpose()?;
        let rbd = &cluster.library().rbd;
        let open = |open: unsafe extern "C" fn(_, _, _, _) -> c_int| {
            let mut handle = ptr::null_mut();
            let snapshot = snapshot.as_deref().map_or(ptr::null(), CStr::as_ptr);
            // SAFETY: the pool is open; the names are C strings, or null for no snapshot.
            let result = unsafe { open(pool.handle(), image.as_ptr(), &raw mut handle, snapshot) };
            Error::check(result, || format!("error reading header from {}", name.image))?;
            Ok(handle)
        };
        let explained = |error: Error| match error.errno {
            Errno::ENOENT => pool.explain(&name.namespace, error),
            _ => error,
        };
        let (handle, is_read_only) = match open(rbd.rbd_open) {
            Err(Error { errno: Errno::EPERM | Errno::EACCES | Errno::EROFS, .. }) => {
                (open(rbd.rbd_open_read_only)?, true)
            }
            opened => (opened.map_err(explained)?, name.snapshot.is_some()),
        };
        let mut image =
            Image { pool, handle, is_read_only, header_len: None, notice: Mutex::default() };
        if let Some(encryption) = encryption {
            let stored = image.size()?;
            // SAFETY: the image was opened above.
            unsafe { encryption.load(image.library(), handle)? };
            image.header_len = Some(stored.saturating_sub(image.size()?));
        }
        Ok(image)
    }

    /// Creates an image with the features that the configuration names.
    ///
    /// # Errors
    ///
    /// The image exists, or the user may not create it.
    pub fn create(
        cluster: &Arc<Cluster>,
        name: &ImageName,
        creation: Creation,
    ) -> Result<(), Error> {
        let pool = Pool::open(cluster.clone(), &name.pool, &name.namespace)?;
        let image = c_string(&name.image)?;
        let what = || "error rbd create".to_owned();
        let order = c_int::try_from(creation.object_order);
        let mut order = order.map_err(|_| Error::new(what(), Errno::EINVAL))?;
        let rbd = &cluster.library().rbd;
        // A header has to fit in. The length becomes exact once that of the header is known.
        let stored = match creation.encryption {
            Some(_) => creation.size.max(ROOM_FOR_HEADER),
            None => creation.size,
        };
        // SAFETY: the pool is open, the name a C string; the order is read and written during the call.
        let created =
            unsafe { (rbd.rbd_create)(pool.handle(), image.as_ptr(), stored, &raw mut order) };
        Error::check(created, what).map_err(|error| pool.explain(&name.namespace, error))?;
        match creation.encryption {
            Some(encryption) => {
                Image::open(cluster, name, None)?.encrypt(&encryption, creation.size)
            }
            None => Ok(()),
        }
    }

    /// Gives a new image an encryption header, and its contents `size` bytes.
    fn encrypt(mut self, encryption: &NewEncryption, size: u64) -> Result<(), Error> {
        let stored = self.size()?;
        // SAFETY: the image is open.
        unsafe { encryption.format(self.library(), self.handle)? };
        // The image is open with its encryption now.
        self.header_len = Some(stored.saturating_sub(self.size()?));
        self.resize(size)
    }

    /// Returns the size now, in bytes.
    ///
    /// # Errors
    ///
    /// The cluster does not answer.
    pub fn size(&self) -> Result<u64, Error> {
        let mut size = 0;
        // SAFETY: the image is open; the pointer is valid for the call.
        let got = unsafe { (self.library().rbd.rbd_get_size)(self.handle, &raw mut size) };
        Error::check(got, || "error getting the size".to_owned())?;
        Ok(size)
    }

    /// Returns the encryption format of the contents, by their first bytes.
    ///
    /// `None`: they have no encryption header. Blocks.
    ///
    /// # Errors
    ///
    /// The cluster does not answer.
    pub fn encryption_format(&self) -> Result<Option<Format>, Error> {
        let mut bytes = [0u8; MAGIC.len() + 2];
        if self.size()? < bytes.len() as u64 {
            return Ok(None);
        }
        // SAFETY: the image is open; the memory is valid for the call, and as long as said.
        let read = unsafe {
            let read = self.library().rbd.rbd_read;
            read(self.handle, 0, bytes.len(), bytes.as_mut_ptr().cast())
        };
        Error::check(c_int::try_from(read).unwrap_or(c_int::MAX), || "error reading".to_owned())?;
        Ok(format_of(bytes))
    }

    /// Gives the image another size, in bytes.
    ///
    /// # Errors
    ///
    /// The user may not, or the cluster is full.
    pub fn resize(&self, size: u64) -> Result<(), Error> {
        let Some(header_len) = self.header_len else { return self.resize_to(size) };
        // librbd takes the length with the header, as of 16; later versions may take that of the contents. The longer
        // one comes first: the other would cut contents off.
        self.resize_to(size.saturating_add(header_len))?;
        match self.size()? == size {
            true => Ok(()),
            false => self.resize_to(size),
        }
    }

    fn resize_to(&self, size: u64) -> Result<(), Error> {
        // SAFETY: the image is open.
        let resized = unsafe { (self.library().rbd.rbd_resize)(self.handle, size) };
        Error::check(resized, || "failed to resize".to_owned())
    }

    /// Whether the cluster knows without reading objects which of them exist.
    fn has_fast_diff(&self) -> bool {
        let rbd = &self.library().rbd;
        let (mut features, mut flags) = (0, 0);
        // SAFETY: the image is open; the pointers are valid for the calls.
        let known = unsafe {
            (rbd.rbd_get_features)(self.handle, &raw mut features) >= 0
                && (rbd.rbd_get_flags)(self.handle, &raw mut flags) >= 0
        };
        known && features & FAST_DIFF != 0 && flags & FAST_DIFF_INVALID == 0
    }

    /// Gives the allocated parts of a range to `each`, in order.
    ///
    /// The range has `len` bytes from byte `offset` on. Ends when `each` breaks.
    ///
    /// `false`: the image has no fast-diff feature, or is encrypted, and nothing was given.
    ///
    /// # Errors
    ///
    /// The cluster does not answer.
    pub fn spans(
        &self,
        offset: u64,
        len: u64,
        mut each: impl FnMut(Span) -> ControlFlow<()>,
    ) -> Result<bool, Error> {
        // Of an encrypted image, librbd gives the places with the header, in some versions.
        if self.header_len.is_some() || !self.has_fast_diff() {
            return Ok(false);
        }
        let mut each: &mut dyn FnMut(Span) -> ControlFlow<()> = &mut each;
        // SAFETY: the image is open. `each` outlives the call, which calls `on_span` on this thread alone or on others
        // while this one waits, one call at a time.
        let result = unsafe {
            (self.library().rbd.rbd_diff_iterate2)(
                self.handle,
                ptr::null(),
                offset,
                len,
                1,
                1,
                on_span,
                (&raw mut each).cast(),
            )
        };
        match result {
            ENDED => Ok(true),
            other => Error::check(other, || "error listing extents".to_owned()).map(|()| true),
        }
    }

    /// Has `call` called, by a thread of the library, whenever the image has changed.
    ///
    /// It must not block.
    ///
    /// # Errors
    ///
    /// There is a call already, or the image is open without permission to write.
    pub fn notify(&self, call: impl Fn() + Send + Sync + 'static) -> Result<(), Error> {
        let what = || "error watching the image".to_owned();
        let mut notice = lock(&self.notice);
        if notice.is_some() {
            return Err(Error::new(what(), Errno::EBUSY));
        }
        let call: *mut Call = Box::into_raw(Box::new(Box::new(call)));
        let mut number = 0;
        // SAFETY: the image is open. `call` lives until the notice is removed, in `drop`.
        let watched = unsafe {
            let rbd = &self.library().rbd;
            (rbd.rbd_update_watch)(self.handle, &raw mut number, on_change, call.cast())
        };
        if let Err(error) = Error::check(watched, what) {
            // SAFETY: made above; the library has not kept it.
            drop(unsafe { Box::from_raw(call) });
            return Err(error);
        }
        *notice = Some(Notice { number, call });
        Ok(())
    }

    /// Returns whether writes fail.
    ///
    /// The image is a snapshot, or the user may not write to it.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    /// Returns the connection.
    #[must_use]
    pub fn cluster(&self) -> &Arc<Cluster> {
        self.pool.cluster()
    }

    pub(crate) fn handle(&self) -> Handle {
        self.handle
    }

    pub(crate) fn library(&self) -> &Library {
        self.pool.cluster().library()
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let rbd = &self.pool.cluster().library().rbd;
        let notice = lock(&self.notice).take();
        // SAFETY: the image is open, and used no more: `Lane` keeps it while requests are under way. Once the notice
        // is removed or the image closed, no call of it is under way, and none follows.
        unsafe {
            if let Some(notice) = &notice {
                (rbd.rbd_update_unwatch)(self.handle, notice.number);
            }
            (rbd.rbd_close)(self.handle);
            if let Some(notice) = notice {
                drop(Box::from_raw(notice.call));
            }
        }
    }
}

unsafe extern "C" fn on_change(call: *mut c_void) {
    // SAFETY: what `notify` has registered, which lives until the notice is removed.
    let call = unsafe { &*call.cast::<Call>() };
    // C++ is not to see a panic.
    let _ = catch_unwind(AssertUnwindSafe(call));
}

unsafe extern "C" fn on_span(offset: u64, len: usize, exists: c_int, each: *mut c_void) -> c_int {
    // SAFETY: what `spans` has passed, which lives during the iteration; calls do not overlap.
    let each = unsafe { &mut *each.cast::<&mut dyn FnMut(Span) -> ControlFlow<()>>() };
    let span = Span { offset, len: len as u64, exists: exists != 0 };
    match catch_unwind(AssertUnwindSafe(|| each(span))) {
        Ok(ControlFlow::Continue(())) => 0,
        Ok(ControlFlow::Break(())) | Err(_) => ENDED,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_shows_its_format() {
        let of = |magic: &[u8; 6], version| {
            let mut bytes = [0, 0, 0, 0, 0, 0, 0, version];
            bytes[..6].copy_from_slice(magic);
            format_of(bytes)
        };
        for magic in [&MAGIC, &MAGIC_OF_CLONE] {
            assert_eq!(of(magic, 1), Some(Format::Luks1));
            assert_eq!(of(magic, 2), Some(Format::Luks2));
            assert_eq!([of(magic, 0), of(magic, 3)], [None, None]);
        }
        assert_eq!(of(b"LUKS\0\0", 1), None);
    }
}

//! Encryption of images by librbd: LUKS, with the header at the image's beginning.

#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};
use std::fmt;
use std::mem::size_of;

use nix::errno::Errno;
use zeroize::Zeroizing;

use crate::error::Error;
use crate::library::{Encrypt, Handle, Library};

/// The format of an encrypted image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// LUKS, version 1.
    Luks1,
    /// LUKS, version 2.
    Luks2,
}

impl Format {
    /// `rbd_encryption_format_t`.
    fn number(self) -> c_int {
        match self {
            Format::Luks1 => 0,
            Format::Luks2 => 1,
        }
    }
}

/// The cipher of a new image, in XTS mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cipher {
    /// AES with a key of 128 bits.
    Aes128,
    /// AES with a key of 256 bits.
    Aes256,
}

impl Cipher {
    /// `rbd_encryption_algorithm_t`.
    fn number(self) -> c_int {
        match self {
            Cipher::Aes128 => 0,
            Cipher::Aes256 => 1,
        }
    }
}

/// How an image is encrypted.
#[derive(Clone, PartialEq, Eq)]
pub struct Encryption {
    /// The format.
    pub format: Format,
    /// The passphrase. Overwritten with zeroes when dropped.
    pub passphrase: Zeroizing<Vec<u8>>,
}

impl fmt::Debug for Encryption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encryption").field("format", &self.format).finish_non_exhaustive()
    }
}

/// `rbd_encryption_luks1_format_options_t`, and the same of LUKS 2.
#[repr(C)]
struct Options {
    algorithm: c_int,
    passphrase: *const c_char,
    passphrase_size: usize,
}

type Call = unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> c_int;

impl Encryption {
    /// Opens the encryption of an open image: from now on, requests have its contents.
    ///
    /// # Safety
    ///
    /// The handle is that of an image that is open.
    pub(crate) unsafe fn load(&self, library: &Library, image: Handle) -> Result<(), Error> {
        let what = "error loading encryption";
        // Loading ignores the cipher: the header names it.
        // SAFETY: as of this function.
        unsafe {
            self.call(library, |encrypt| encrypt.rbd_encryption_load, image, Cipher::Aes256, what)
        }
    }

    /// Writes an encryption header to an open image. The image's data are lost.
    ///
    /// # Safety
    ///
    /// The handle is that of an image that is open.
    pub(crate) unsafe fn format(
        &self,
        library: &Library,
        image: Handle,
        cipher: Cipher,
    ) -> Result<(), Error> {
        let what = "error formatting encryption";
        // SAFETY: as of this function.
        unsafe { self.call(library, |encrypt| encrypt.rbd_encryption_format, image, cipher, what) }
    }

    /// # Safety
    ///
    /// The handle is that of an image that is open.
    unsafe fn call(
        &self,
        library: &Library,
        function: fn(&Encrypt) -> Call,
        image: Handle,
        cipher: Cipher,
        what: &str,
    ) -> Result<(), Error> {
        let Some(encrypt) = &library.encrypt else {
            return Err(Error::new(format!("{what}: librbd has no encryption"), Errno::ENOTSUP));
        };
        let options = Options {
            algorithm: cipher.number(),
            passphrase: self.passphrase.as_ptr().cast(),
            passphrase_size: self.passphrase.len(),
        };
        // SAFETY: the image is open. The options are the structure that both formats take, and valid for the call,
        // which copies the passphrase.
        let result = unsafe {
            let options = (&raw const options).cast();
            function(encrypt)(image, self.format.number(), options, size_of::<Options>())
        };
        Error::check(result, || what.to_owned())
    }
}

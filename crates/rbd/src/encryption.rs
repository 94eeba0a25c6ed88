//! Encryption of images by librbd: LUKS, with the header at the image's beginning.

#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};
use std::fmt;
use std::mem::size_of;

use nix::errno::Errno;
use zeroize::Zeroizing;

use crate::error::Error;
use crate::library::{Handle, Library};

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

/// How an image and the images that it was cloned from are decrypted.
#[derive(Clone, PartialEq, Eq)]
pub struct Encryption {
    /// The format. `None`: any version of LUKS.
    pub format: Option<Format>,
    /// The passphrase. Overwritten with zeroes when dropped.
    pub passphrase: Zeroizing<Vec<u8>>,
    /// How the image's parent is decrypted. `None`: as the image, or the parent is not encrypted.
    pub parent: Option<Box<Encryption>>,
}

impl fmt::Debug for Encryption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Encryption");
        shown.field("format", &self.format).field("parent", &self.parent).finish_non_exhaustive()
    }
}

/// The encryption of a new image.
#[derive(Clone, PartialEq, Eq)]
pub struct NewEncryption {
    /// The format.
    pub format: Format,
    /// The cipher.
    pub cipher: Cipher,
    /// The passphrase. Overwritten with zeroes when dropped.
    pub passphrase: Zeroizing<Vec<u8>>,
}

impl fmt::Debug for NewEncryption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NewEncryption { format, cipher, passphrase: _ } = self;
        let mut shown = f.debug_struct("NewEncryption");
        shown.field("format", format).field("cipher", cipher).finish_non_exhaustive()
    }
}

/// `rbd_encryption_luks1_format_options_t`, and the same of LUKS 2.
#[repr(C)]
struct Options {
    algorithm: c_int,
    passphrase: *const c_char,
    passphrase_size: usize,
}

/// `rbd_encryption_luks_format_options_t`.
#[repr(C)]
struct AnyOptions {
    passphrase: *const c_char,
    passphrase_size: usize,
}

/// `RBD_ENCRYPTION_FORMAT_LUKS`.
const ANY: c_int = 2;

/// `rbd_encryption_spec_t`.
#[repr(C)]
struct Spec {
    format: c_int,
    options: *const c_void,
    options_size: usize,
}

/// Options for one image of a chain. librbd has a structure for each format.
enum Given {
    Exact(Format, Options),
    Any(AnyOptions),
}

impl Given {
    fn of(encryption: &Encryption) -> Given {
        let passphrase = encryption.passphrase.as_ptr().cast();
        let passphrase_size = encryption.passphrase.len();
        match encryption.format {
            // Loading ignores the cipher: the header names it.
            Some(format) => {
                let algorithm = Cipher::Aes256.number();
                Given::Exact(format, Options { algorithm, passphrase, passphrase_size })
            }
            None => Given::Any(AnyOptions { passphrase, passphrase_size }),
        }
    }

    fn spec(&self) -> Spec {
        match self {
            Given::Exact(format, options) => Spec {
                format: format.number(),
                options: (&raw const *options).cast(),
                options_size: size_of::<Options>(),
            },
            Given::Any(options) => Spec {
                format: ANY,
                options: (&raw const *options).cast(),
                options_size: size_of::<AnyOptions>(),
            },
        }
    }
}

impl Encryption {
    /// The encryptions of the image and of its ancestors.
    fn chain(&self) -> impl Iterator<Item = &Encryption> {
        std::iter::successors(Some(self), |encryption| encryption.parent.as_deref())
    }

    /// Opens the encryption of an open image: from now on, requests have its contents.
    ///
    /// # Safety
    ///
    /// The handle is that of an image that is open.
    pub(crate) unsafe fn load(&self, library: &Library, image: Handle) -> Result<(), Error> {
        let what = "error loading encryption";
        let Some(encrypt) = &library.encrypt else { return Err(no_encryption(what)) };
        let given: Vec<Given> = self.chain().map(Given::of).collect();
        let specs: Vec<Spec> = given.iter().map(Given::spec).collect();
        let result = match (given.as_slice(), specs.as_slice()) {
            // As of librbd 16.
            ([Given::Exact(..)], [spec]) => {
                // SAFETY: the image is open. The options are the structure of the format, and valid for the call,
                // which copies the passphrase.
                unsafe {
                    let load = encrypt.rbd_encryption_load;
                    load(image, spec.format, spec.options, spec.options_size)
                }
            }
            (_, specs) => {
                let Some(layered) = &library.layered else {
                    let what = "RBD library does not support layered encryption or luks-any: it has no \
                                rbd_encryption_load2";
                    return Err(Error::new(what.to_owned(), Errno::ENOTSUP));
                };
                // SAFETY: the image is open. There are as many specifications as said, each with the structure of
                // its format. All are valid for the call, which copies the passphrases.
                unsafe { (layered.rbd_encryption_load2)(image, specs.as_ptr().cast(), specs.len()) }
            }
        };
        Error::check(result, || what.to_owned())
    }
}

impl NewEncryption {
    /// Writes an encryption header to an open image. The image's data are lost.
    ///
    /// # Safety
    ///
    /// The handle is that of an image that is open.
    pub(crate) unsafe fn format(&self, library: &Library, image: Handle) -> Result<(), Error> {
        let what = "error formatting encryption";
        let Some(encrypt) = &library.encrypt else { return Err(no_encryption(what)) };
        let options = Options {
            algorithm: self.cipher.number(),
            passphrase: self.passphrase.as_ptr().cast(),
            passphrase_size: self.passphrase.len(),
        };
        // SAFETY: the image is open. The options are the structure that both formats take, and valid for the call,
        // which copies the passphrase.
        let result = unsafe {
            let options = (&raw const options).cast();
            let format = encrypt.rbd_encryption_format;
            format(image, self.format.number(), options, size_of::<Options>())
        };
        Error::check(result, || what.to_owned())
    }
}

fn no_encryption(what: &str) -> Error {
    Error::new(format!("{what}: librbd has no encryption"), Errno::ENOTSUP)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_is_given_from_the_image_to_its_ancestors() {
        let encryption = |format, passphrase: &str, parent| Encryption {
            format,
            passphrase: Zeroizing::new(passphrase.into()),
            parent,
        };
        let grandparent = encryption(Some(Format::Luks1), "a", None);
        let parent = encryption(None, "bc", Some(Box::new(grandparent)));
        let image = encryption(Some(Format::Luks2), "def", Some(Box::new(parent)));
        let given: Vec<Given> = image.chain().map(Given::of).collect();
        let specs: Vec<Spec> = given.iter().map(Given::spec).collect();
        let shown: Vec<_> = specs.iter().map(|spec| (spec.format, spec.options_size)).collect();
        assert_eq!(shown, [(1, 24), (2, 16), (0, 24)]);
    }
}

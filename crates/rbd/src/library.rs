//! librados and librbd: their functions, looked up at run time.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::sync::Arc;

/// `rados_t`, `rados_ioctx_t`, `rbd_image_t` and `rbd_completion_t`.
pub(crate) type Handle = *mut c_void;

/// librbd, and librados, which librbd depends on.
const LIBRADOS: &CStr = c"librados.so.2";
const LIBRBD: &CStr = c"librbd.so.1";

/// Declares the functions of a library, as its header has them, and looks them up.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident { $($name:ident($($argument:ty),*) $(-> $result:ty)?;)+ }) => {
        $(#[$doc])*
        #[allow(non_snake_case, reason = "the library's names")]
        pub(crate) struct $table {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)+
        }

        impl $table {
            fn look_up(library: Handle) -> Result<$table, LoadError> {
                Ok($table {
                    $($name: {
                        let name = concat!(stringify!($name), "\0").as_bytes();
                        // SAFETY: the name ends with a zero; the library stays open.
                        let found = unsafe { libc::dlsym(library, name.as_ptr().cast()) };
                        if found.is_null() {
                            return Err(LoadError::TooOld(stringify!($name)));
                        }
                        // SAFETY: the library's function of this name has this type, as of the version that has
                        // all functions of the table.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($argument),*) $(-> $result)?,
                            >(found)
                        }
                    },)+
                })
            }
        }
    };
}

functions! {
    /// Of `rados/librados.h`.
    Rados {
        rados_create(*mut Handle, *const c_char) -> c_int;
        rados_conf_read_file(Handle, *const c_char) -> c_int;
        rados_conf_parse_env(Handle, *const c_char) -> c_int;
        rados_conf_set(Handle, *const c_char, *const c_char) -> c_int;
        rados_conf_get(Handle, *const c_char, *mut c_char, usize) -> c_int;
        rados_connect(Handle) -> c_int;
        rados_shutdown(Handle);
        rados_ioctx_create(Handle, *const c_char, *mut Handle) -> c_int;
        rados_ioctx_set_namespace(Handle, *const c_char);
        rados_ioctx_destroy(Handle);
    }
}

functions! {
    /// Of `rbd/librbd.h`, unless librbd is built without them.
    Encrypt {
        rbd_encryption_load(Handle, c_int, *const c_void, usize) -> c_int;
        rbd_encryption_format(Handle, c_int, *const c_void, usize) -> c_int;
    }
}

functions! {
    /// Of `rbd/librbd.h`, as of Ceph 18.
    Layered {
        rbd_encryption_load2(Handle, *const c_void, usize) -> c_int;
    }
}

functions! {
    /// Of `rbd/librbd.h`.
    Rbd {
        rbd_namespace_exists(Handle, *const c_char, *mut bool) -> c_int;
        rbd_create(Handle, *const c_char, u64, *mut c_int) -> c_int;
        rbd_open(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
        rbd_open_read_only(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
        rbd_close(Handle) -> c_int;
        rbd_get_size(Handle, *mut u64) -> c_int;
        rbd_get_features(Handle, *mut u64) -> c_int;
        rbd_get_flags(Handle, *mut u64) -> c_int;
        rbd_resize(Handle, u64) -> c_int;
        rbd_read(Handle, u64, usize, *mut c_char) -> isize;
        rbd_update_watch(Handle, *mut u64, unsafe extern "C" fn(*mut c_void), *mut c_void) -> c_int;
        rbd_update_unwatch(Handle, u64) -> c_int;
        rbd_diff_iterate2(
            Handle, *const c_char, u64, u64, u8, u8,
            unsafe extern "C" fn(u64, usize, c_int, *mut c_void) -> c_int, *mut c_void
        ) -> c_int;
        rbd_aio_create_completion(
            *mut c_void, unsafe extern "C" fn(Handle, *mut c_void), *mut Handle
        ) -> c_int;
        rbd_aio_get_return_value(Handle) -> isize;
        rbd_aio_release(Handle);
        rbd_aio_readv(Handle, *const libc::iovec, c_int, u64, Handle) -> c_int;
        rbd_aio_writev(Handle, *const libc::iovec, c_int, u64, Handle) -> c_int;
        rbd_aio_discard(Handle, u64, u64, Handle) -> c_int;
        rbd_aio_write_zeroes(Handle, u64, usize, Handle, c_int, c_int) -> c_int;
        rbd_aio_flush(Handle, Handle) -> c_int;
    }
}

/// The functions of librados and librbd.
///
/// The libraries are never closed: their threads may outlive the last handle.
pub struct Library {
    pub(crate) rados: Rados,
    pub(crate) rbd: Rbd,
    /// `None`: librbd has no encryption.
    pub(crate) encrypt: Option<Encrypt>,
    /// `None`: librbd decrypts no parents of another passphrase.
    pub(crate) layered: Option<Layered>,
}

/// Whether the libraries may be mapped into the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loading {
    /// They are opened, unless they are already.
    Allowed,
    /// The process can map no code any more: they have to be open already.
    Forbidden,
}

impl Library {
    /// Opens the libraries.
    ///
    /// # Errors
    ///
    /// A library is missing or too old, or is not open and may not be opened.
    pub fn load(loading: Loading) -> Result<Arc<Library>, LoadError> {
        let rados = Rados::look_up(open(LIBRADOS, loading)?)?;
        let librbd = open(LIBRBD, loading)?;
        let rbd = Rbd::look_up(librbd)?;
        let encrypt = Encrypt::look_up(librbd).ok();
        let layered = Layered::look_up(librbd).ok();
        if encrypt.is_some() && loading == Loading::Allowed {
            open_old_ciphers(librbd);
        }
        Ok(Arc::new(Library { rados, rbd, encrypt, layered }))
    }
}

functions! {
    /// Of `openssl/provider.h` and `openssl/crypto.h`, version 3.
    OpenSsl {
        OSSL_LIB_CTX_new() -> Handle;
        OSSL_PROVIDER_load(Handle, *const c_char) -> Handle;
    }
}

/// Opens OpenSSL's module of old ciphers and hashes. librbd opens encrypted images by libcryptsetup, which opens the
/// module, and a confined process can map no code any more. Without OpenSSL 3 there is no such module.
fn open_old_ciphers(librbd: Handle) {
    let Ok(openssl) = OpenSsl::look_up(librbd) else { return };
    // SAFETY: the functions take no pointers but a context that was made, or null, and a C string. A context of its own
    // leaves the providers of others alone. It is never freed, which keeps the module mapped.
    unsafe {
        let context = (openssl.OSSL_LIB_CTX_new)();
        if !context.is_null() {
            (openssl.OSSL_PROVIDER_load)(context, c"legacy".as_ptr());
        }
    }
}

fn open(name: &CStr, loading: Loading) -> Result<Handle, LoadError> {
    let flags = match loading {
        Loading::Allowed => libc::RTLD_NOW | libc::RTLD_LOCAL,
        Loading::Forbidden => libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_NOLOAD,
    };
    // SAFETY: the name is a C string. The libraries' constructors and destructors are C++ that is written to be
    // opened at run time, as QEMU's modules do.
    let library = unsafe { libc::dlopen(name.as_ptr(), flags) };
    if !library.is_null() {
        return Ok(library);
    }
    if loading == Loading::Forbidden {
        return Err(LoadError::Forbidden);
    }
    // SAFETY: what dlerror(3) returns is a C string, valid until the thread's next call of its family.
    let why = unsafe {
        match libc::dlerror() {
            error if error.is_null() => format!("{}: not found", name.to_string_lossy()),
            error => CStr::from_ptr(error).to_string_lossy().into_owned(),
        }
    };
    Err(LoadError::Missing(why))
}

/// Why the libraries cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LoadError {
    /// The dynamic linker's words.
    Missing(String),
    /// They lack this function.
    TooOld(&'static str),
    /// They are not open, and the process can map no code any more.
    Forbidden,
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LoadError::Missing(why) => write!(f, "Ceph's library cannot be loaded: {why}"),
            LoadError::TooOld(name) => {
                write!(f, "Ceph's library is too old: it has no function {name}")
            }
            LoadError::Forbidden => f.write_str(
                "Ceph's library is not loaded, and the sandbox lets the daemon load no library",
            ),
        }
    }
}

impl std::error::Error for LoadError {}

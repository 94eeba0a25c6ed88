//! A connection to a cluster.

#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char};
use std::hash::{Hash, Hasher};
use std::path::PathBuf;
use std::ptr;
use std::sync::Arc;

use nix::errno::Errno;
use zeroize::Zeroizing;

use crate::error::Error;
use crate::library::{Handle, Library};

/// Bytes of the longest value of an option that is read.
const MAX_VALUE: usize = 256;

/// What [`Error::what`] is if the cluster cannot be connected to.
pub const CONNECTING: &str = "error connecting";

/// A user's key, in base64. Overwritten with zeroes when dropped.
#[derive(Clone, PartialEq, Eq)]
pub struct Key(Zeroizing<String>);

impl Key {
    /// Makes a key of its base64 text.
    #[must_use]
    pub fn new(base64: String) -> Key {
        Key(Zeroizing::new(base64))
    }
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.as_str().hash(state);
    }
}

/// How a cluster is reached. Nodes with equal values share a connection.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct Config {
    /// The configuration file. `None`: where Ceph looks for one, if there is one.
    pub file: Option<PathBuf>,
    /// The user, without `client.`. `None`: `admin`.
    pub user: Option<String>,
    /// The user's key. `None`: that of the user's keyring.
    pub key: Option<Key>,
    /// Options that are set beside the file: names and values.
    pub options: Vec<(&'static str, String)>,
}

/// A connection, with its threads.
pub struct Cluster {
    library: Arc<Library>,
    handle: Handle,
}

// SAFETY: a `rados_t` may be used by any thread, and by several at a time.
unsafe impl Send for Cluster {}
// SAFETY: as above.
unsafe impl Sync for Cluster {}

impl Cluster {
    /// Connects to a cluster.
    ///
    /// Options that `config` does not set are those of the file, then `defaults`, then Ceph's own.
    ///
    /// # Errors
    ///
    /// The file cannot be read, an option is refused, or no monitor lets the user in.
    pub fn connect(
        library: &Arc<Library>,
        config: &Config,
        defaults: &[(&str, &str)],
    ) -> Result<Cluster, Error> {
        let user = config.user.as_deref().map(c_string).transpose()?;
        let user = user.as_deref().map_or(ptr::null(), CStr::as_ptr);
        let mut handle = ptr::null_mut();
        // SAFETY: both pointers are valid for the call; the user is a C string or null.
        let created = unsafe { (library.rados.rados_create)(&raw mut handle, user) };
        Error::check(created, || "error initializing".to_owned())?;
        // Shuts the connection down if a later step fails.
        let cluster = Cluster { library: library.clone(), handle };
        for (name, value) in defaults {
            cluster.set(name, value)?;
        }
        cluster.read_file(config)?;
        for (name, value) in &config.options {
            cluster.set(name, value)?;
        }
        if let Some(Key(key)) = &config.key {
            cluster.set("key", key)?;
        }
        // SAFETY: the handle is that of `rados_create`, and not connected.
        let connected = unsafe { (library.rados.rados_connect)(handle) };
        Error::check(connected, || CONNECTING.to_owned())?;
        Ok(cluster)
    }

    fn read_file(&self, config: &Config) -> Result<(), Error> {
        let rados = &self.library.rados;
        let file = config.file.as_ref().map(|path| path.as_os_str().as_encoded_bytes());
        let file = file.map(CString::new).transpose().map_err(|_| nul())?;
        let path = file.as_deref().map_or(ptr::null(), CStr::as_ptr);
        // SAFETY: the handle is valid; the path is a C string or null.
        let read = unsafe { (rados.rados_conf_read_file)(self.handle, path) };
        if let Some(file) = &config.file {
            Error::check(read, || format!("error reading conf file {}", file.display()))?;
        }
        // SAFETY: the handle is valid; a null name stands for `CEPH_ARGS`.
        let parsed = unsafe { (rados.rados_conf_parse_env)(self.handle, ptr::null()) };
        Error::check(parsed, || "error reading CEPH_ARGS".to_owned())
    }

    fn set(&self, name: &str, value: &str) -> Result<(), Error> {
        let (option, text) = (c_string(name)?, c_string(value)?);
        // SAFETY: the handle is valid; name and value are C strings.
        let set = unsafe {
            (self.library.rados.rados_conf_set)(self.handle, option.as_ptr(), text.as_ptr())
        };
        Error::check(set, || format!("error setting {name}"))
    }

    /// Returns the value of a numeric option. `None`: the option has none.
    #[must_use]
    pub fn number(&self, name: &str) -> Option<u64> {
        let name = CString::new(name).ok()?;
        let mut value: [c_char; MAX_VALUE] = [0; MAX_VALUE];
        // SAFETY: the handle is valid, the name a C string; the call writes at most the given length.
        let got = unsafe {
            let value = value.as_mut_ptr();
            (self.library.rados.rados_conf_get)(self.handle, name.as_ptr(), value, MAX_VALUE)
        };
        let bytes = value.map(c_char::cast_unsigned);
        let text = CStr::from_bytes_until_nul(&bytes).ok()?.to_str().ok()?;
        (got >= 0).then(|| text.parse().ok()).flatten()
    }

    pub(crate) fn library(&self) -> &Library {
        &self.library
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: the handle is valid, and used no more: `Pool` keeps the cluster.
        unsafe { (self.library.rados.rados_shutdown)(self.handle) };
    }
}

/// A pool and a namespace of a cluster: `rados_ioctx_t`.
pub(crate) struct Pool {
    cluster: Arc<Cluster>,
    handle: Handle,
}

// SAFETY: after its namespace is set, a `rados_ioctx_t` may be used by any thread, and by several at a time.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    /// Opens a pool. An empty namespace is the default one.
    pub(crate) fn open(cluster: Arc<Cluster>, pool: &str, namespace: &str) -> Result<Pool, Error> {
        let (name, namespace) = (c_string(pool)?, c_string(namespace)?);
        let mut handle = ptr::null_mut();
        let rados = &cluster.library.rados;
        // SAFETY: the cluster is connected; the pointers are valid for the call.
        let created =
            unsafe { (rados.rados_ioctx_create)(cluster.handle, name.as_ptr(), &raw mut handle) };
        Error::check(created, || format!("error opening pool {pool}"))?;
        // SAFETY: the handle was made just now, and no other thread has it.
        unsafe { (rados.rados_ioctx_set_namespace)(handle, namespace.as_ptr()) };
        Ok(Pool { cluster, handle })
    }

    /// Replaces the error of an image that is not found, if what is missing is its namespace. Blocks.
    ///
    /// librbd says the same for both.
    pub(crate) fn explain(&self, namespace: &str, error: Error) -> Error {
        let Some(name) = CString::new(namespace).ok().filter(|_| !namespace.is_empty()) else {
            return error;
        };
        let mut exists = true;
        // SAFETY: the pool is open; the name is a C string, and the pointer valid for the call.
        let asked = unsafe {
            let exists = &raw mut exists;
            (self.cluster.library.rbd.rbd_namespace_exists)(self.handle, name.as_ptr(), exists)
        };
        match asked {
            0 if !exists => {
                let what = format!("namespace '{namespace}' does not exist");
                Error { what, errno: Errno::ENOENT, says_why: true }
            }
            _ => error,
        }
    }

    pub(crate) fn handle(&self) -> Handle {
        self.handle
    }

    pub(crate) fn cluster(&self) -> &Arc<Cluster> {
        &self.cluster
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: the handle is valid, and used no more: `Image` keeps its pool.
        unsafe { (self.cluster.library.rados.rados_ioctx_destroy)(self.handle) };
    }
}

/// Returns a C string of a name.
pub(crate) fn c_string(text: &str) -> Result<CString, Error> {
    CString::new(text).map_err(|_| nul())
}

fn nul() -> Error {
    Error::new("a name contains a NUL byte", Errno::EINVAL)
}

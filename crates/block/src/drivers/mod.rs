//! How images are read and written: one folder per driver, and the list of them.

pub(crate) mod align;
pub(crate) mod blkdebug;
pub(crate) mod common;
pub(crate) mod compress;
pub(crate) mod copy_before_write;
pub(crate) mod copy_on_read;
pub(crate) mod detect_zeroes;
mod encryption;
pub(crate) mod file;
pub(crate) mod http;
pub(crate) mod inactive;
mod live;
pub(crate) mod luks;
pub(crate) mod nbd;
pub(crate) mod null;
pub(crate) mod preallocate;
pub(crate) mod qcow2;
pub(crate) mod range_lock;
pub(crate) mod raw;
pub(crate) mod rbd;
pub(crate) mod s3;
pub(crate) mod snapshot_access;
pub mod throttle;
pub(crate) mod web;

use std::sync::OnceLock;

pub use self::encryption::KeySlots;
use crate::driver::DriverKind;

/// The drivers there are.
static DRIVERS: &[&DriverKind] = &[
    &file::options::FILE,
    &file::options::HOST_DEVICE,
    &raw::options::RAW,
    &qcow2::options::QCOW2,
    &null::NULL_CO,
    &null::NULL_AIO,
    &nbd::options::NBD,
    &http::options::HTTP,
    &http::options::HTTPS,
    &s3::options::S3,
    &rbd::options::RBD,
    &throttle::options::THROTTLE,
    &blkdebug::options::BLKDEBUG,
    &compress::COMPRESS,
    &preallocate::PREALLOCATE,
    &copy_on_read::COPY_ON_READ,
    &copy_before_write::COPY_BEFORE_WRITE,
    &snapshot_access::SNAPSHOT_ACCESS,
    &luks::LUKS,
];

/// Drivers that a program has beside those.
static ADDED: OnceLock<&'static [&'static DriverKind]> = OnceLock::new();

/// Returns all drivers, in the order in which help texts list them.
pub fn all() -> impl Iterator<Item = &'static DriverKind> {
    DRIVERS.iter().chain(ADDED.get().copied().unwrap_or_default()).copied()
}

/// Adds a program's own drivers to those that options can name.
///
/// Called at most once, before options are read.
///
/// # Errors
///
/// Drivers were added before, or the name is taken.
pub fn add(drivers: &'static [&'static DriverKind]) -> Result<(), AddError> {
    let taken = |driver: &&&DriverKind| all().any(|other| other.name == driver.name);
    match drivers.iter().find(taken) {
        Some(driver) => Err(AddError::Taken(driver.name)),
        None => ADDED.set(drivers).map_err(|_| AddError::Twice),
    }
}

/// Why drivers were not added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddError {
    /// There is a driver of that name.
    Taken(&'static str),
    /// Drivers were added before.
    Twice,
}

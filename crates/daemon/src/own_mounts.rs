//! Keeps a daemon from opening its own FUSE exports: it would wait for itself, and no signal ends that.

use std::path::Path;

use block::options::{BlockdevOptions, BlockdevRef};
use control::Graph;
use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};

use crate::DaemonError;

/// A file system: the major and minor number of its device.
type Device = (u32, u32);

/// Checks that no file of a node, or of those defined inside it, is an export of this daemon.
///
/// # Errors
///
/// One is.
pub(crate) fn check(graph: &Graph, options: &BlockdevOptions) -> Result<(), DaemonError> {
    let own: Vec<(&str, Device)> =
        graph.mountpoints().filter_map(|(id, path)| Some((id, device(path, true)?))).collect();
    match own.is_empty() {
        true => Ok(()),
        false => check_node(&own, options),
    }
}

fn check_node(own: &[(&str, Device)], options: &BlockdevOptions) -> Result<(), DaemonError> {
    for file in options.driver.needs().files {
        let found = device(file, false);
        if let Some((id, _)) = own.iter().find(|(_, device)| Some(*device) == found) {
            return Err(DaemonError::new(format!(
                "'{}' is on the mount of this daemon's own export '{id}': the daemon would wait for itself; use the export's \
                 node, or another daemon",
                file.display()
            )));
        }
    }
    for child in options.driver.children() {
        if let BlockdevRef::Inline(options) = child.node {
            check_node(own, options)?;
        }
    }
    Ok(())
}

/// Returns the file system of a file. `mounted`: only if the path is a mount point.
///
/// Asks no server of a file system, such as this process, for the file's attributes.
fn device(path: &Path, mounted: bool) -> Option<Device> {
    let found = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::empty()).ok()?;
    let is_root = found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT);
    (is_root || !mounted).then_some((found.stx_dev_major, found.stx_dev_minor))
}

//! qemu-storage-daemon (QSD), beside which tests run.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Child;

use crate::{Qmp, eventually, tied_command, tool};

/// Starts QSD with a monitor on a new socket at `path`. Kill the child in the end.
///
/// QSD connects to the socket, rather than listen on it: a listening QSD that is still starting opens a connection twice,
/// and loses what the client has sent between (seen with 10.0.2 on a busy machine).
///
/// # Panics
///
/// If QSD is not installed, or does not connect.
pub fn start_qsd(path: &Path) -> (Child, Qmp) {
    let listener = UnixListener::bind(path).expect("a new socket");
    listener.set_nonblocking(true).expect("a listening socket");
    let chardev = format!("socket,id=m,path={},server=off", path.display());
    let child = tied_command(&tool("qemu-storage-daemon"))
        .args(["--chardev", &chardev, "--monitor", "chardev=m"])
        .spawn()
        .expect("qemu-storage-daemon runs");
    let (stream, _) = eventually("QSD's monitor", || listener.accept().ok());
    (child, Qmp::on(stream))
}

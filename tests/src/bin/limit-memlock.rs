//! `limit-memlock PROGRAM [ARGUMENT...]`: runs a program that may pin 2 MiB of memory and no more, as an
//! ordinary user's may: enough for io_uring itself.

use std::env;
use std::error::Error;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::sys::resource::{Resource, setrlimit};

/// linux/capability.h
const CAP_IPC_LOCK: libc::c_ulong = 14;

fn main() -> Result<(), Box<dyn Error>> {
    setrlimit(Resource::RLIMIT_MEMLOCK, 2 << 20, 2 << 20)?;
    #[expect(unsafe_code, reason = "there is no safe way to it")]
    // SAFETY: prctl(2) with PR_CAPBSET_DROP takes a number.
    let dropped = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, CAP_IPC_LOCK) };
    let error = io::Error::last_os_error();
    // Who may not drop it does not have it either.
    if dropped < 0 && error.raw_os_error() != Some(libc::EPERM) {
        return Err(error.into());
    }
    let mut command = env::args_os().skip(1);
    let program = command.next().ok_or("usage: limit-memlock PROGRAM [ARGUMENT...]")?;
    Err(Command::new(program).args(command).exec().into())
}

//! `deny-io-uring PROGRAM [ARGUMENT...]`: runs a program in a process in which the io_uring system calls
//! fail with EPERM, as container runtimes and hardened hosts have it.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::env;
use std::os::unix::process::CommandExt;
use std::process::Command;

use seccompiler::{SeccompAction, SeccompFilter};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let calls = [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register];
    let rules = calls.map(|call| (call, Vec::new()));
    let denied = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    let arch = env::consts::ARCH.try_into()?;
    let filter = SeccompFilter::new(BTreeMap::from(rules), SeccompAction::Allow, denied, arch)?;
    let program: seccompiler::BpfProgram = filter.try_into()?;
    seccompiler::apply_filter(&program)?;

    let mut command = env::args_os().skip(1);
    let program = command.next().ok_or("usage: deny-io-uring PROGRAM [ARGUMENT...]")?;
    Err(Command::new(program).args(command).exec().into())
}

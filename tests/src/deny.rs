//! Programs run under a seccomp filter.

use std::collections::BTreeMap;
use std::env;
use std::error::Error;
use std::os::unix::process::CommandExt;
use std::process::Command;

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

/// Becomes the program that the command line names, with the arguments after it, in a process where
/// these system calls fail with `errno`.
///
/// # Errors
///
/// It did not become that.
pub fn run_without(calls: &[libc::c_long], errno: i32) -> Result<(), Box<dyn Error>> {
    let rules: BTreeMap<_, _> = calls.iter().map(|call| (*call, Vec::new())).collect();
    let denied = SeccompAction::Errno(errno.unsigned_abs());
    let arch = env::consts::ARCH.try_into()?;
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, denied, arch)?;
    let filter: BpfProgram = filter.try_into()?;
    seccompiler::apply_filter(&filter)?;
    run_program()
}

/// Becomes the program that the command line names, with the arguments after it.
///
/// # Errors
///
/// It did not become that.
pub fn run_program() -> Result<(), Box<dyn Error>> {
    let mut command = env::args_os().skip(1);
    let program = command.next().ok_or("usage: THIS PROGRAM [ARGUMENT...]")?;
    Err(Command::new(program).args(command).exec().into())
}

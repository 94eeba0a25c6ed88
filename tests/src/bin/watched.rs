//! `watched PROGRAM [ARGUMENT...]`: runs a program that a service manager watches: sd_watchdog_enabled(3).

#![forbid(unsafe_code)]

use std::os::unix::process::CommandExt;
use std::process::{Command, id};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let mut command = Command::new(arguments.next().ok_or("no program")?);
    command.args(arguments).env("WATCHDOG_PID", id().to_string()).env("WATCHDOG_USEC", "60000000");
    Err(command.exec().into())
}

//! The program `ringmill`: parses the command line and runs the command.

#![deny(unsafe_code)]

mod attach;
mod attachments;
mod check;
mod ctl;
mod daemonize;
mod detach;
mod dry_run;
mod host_device;
mod img;
mod journals;
mod kernel_nbd;
mod list;
mod probe;
mod serve;
mod storage_daemon;
mod take_over;
mod top;
mod trace;
mod udev;
mod upgrade;

use std::env;
use std::io::{self, Write};
use std::process::ExitCode;

use control::{Command, LogOptions, parse_args, program_name};

use daemon::{DaemonError, logger};

fn main() -> ExitCode {
    event_loop::bound_heap();
    daemon::register_commands();
    let program = program_name(&env::args_os().next().unwrap_or_default());
    let command = match parse_args(env::args_os()) {
        Ok(command) => command,
        Err(error) => {
            logger::fatal(program, &error.error.to_string());
            return ExitCode::FAILURE;
        }
    };
    if let Some(options) = log_options(&command) {
        logger::start(program, options);
    }
    let code = run(command).unwrap_or_else(|error| {
        logger::end_status();
        logger::fatal(program, &error.to_string());
        ExitCode::FAILURE
    });
    logger::end();
    code
}

/// Returns how a command logs, or `None` if it has no log. A probe has none: log lines of its trial loops would
/// be noise between its results.
fn log_options(command: &Command) -> Option<LogOptions> {
    match command {
        Command::Serve(options) | Command::Attach(options) => Some(options.log),
        Command::StorageDaemon(options) => Some(options.log),
        Command::TakeOver => Some(take_over::log_options()),
        Command::Check(_) => Some(LogOptions::default()),
        Command::Img(command) => img::log_options(command),
        Command::Ctl(_)
        | Command::Detach(_)
        | Command::List(_)
        | Command::Top(_)
        | Command::Journals(_)
        | Command::Probe(_)
        | Command::Upgrade(_)
        | Command::Print(_) => None,
    }
}

fn run(command: Command) -> Result<ExitCode, DaemonError> {
    match command {
        Command::Print(text) => Ok(print(&text)),
        Command::Top(options) => top::run(&options).map(|()| ExitCode::SUCCESS),
        Command::Probe(options) => probe::run(&options).map(|text| print(&text)),
        Command::Img(command) => img::run(*command),
        Command::Check(options) => check::run(&options),
        Command::Journals(options) => journals::run(&options),
        Command::Ctl(options) => ctl::run(&options).map(|()| ExitCode::SUCCESS),
        Command::Serve(options) => serve::run(&options)
            .map(|()| ExitCode::SUCCESS)
            .map_err(DaemonError::with_options_of_serve),
        Command::Attach(options) => {
            attach::run(&options).map_err(DaemonError::with_options_of_serve)
        }
        Command::Detach(options) => detach::run(&options),
        Command::List(options) => list::run(&options).map(|()| ExitCode::SUCCESS),
        Command::StorageDaemon(options) => storage_daemon::run(options),
        Command::TakeOver => take_over::run(),
        Command::Upgrade(options) => upgrade::run(&options).map(|text| print(&text)),
    }
}

/// Prints the output of a command. A closed pipe, as after `head`, is no failure.
fn print(text: &str) -> ExitCode {
    match writeln!(io::stdout(), "{}", text.trim_end()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => ExitCode::FAILURE,
        _ => ExitCode::SUCCESS,
    }
}

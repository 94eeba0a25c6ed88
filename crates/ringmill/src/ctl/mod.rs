//! `ringmill ctl`: a client of a daemon's monitor.

pub(crate) mod client;
pub(crate) mod table;
mod views;

use std::io::{self, Write};

use control::{CtlOptions, CtlRequest};
use serde_json::{Map, Value as Json};

use client::{Client, ClientError};
use daemon::DaemonError;
pub(crate) use table::printable;

/// The command that runs if the command line names none.
const COMMANDS: &str = "query-commands";

/// Carries out the command line and prints the results.
pub(crate) fn run(options: &CtlOptions) -> Result<(), DaemonError> {
    let of = |error: ClientError| DaemonError::new(error.to_string());
    let mut client = Client::connect(&options.socket).map_err(of)?;
    match &options.request {
        CtlRequest::Commands => {
            let commands = client.execute(COMMANDS, Map::new()).map_err(of)?;
            let text =
                if options.json { pretty(&commands) } else { views::show(COMMANDS, &commands) };
            print(&text)
        }
        CtlRequest::Events => {
            while let Some(event) = client.next_event().map_err(of)? {
                let text = if options.json { event.to_string() } else { views::event(&event) };
                print(&format!("{text}\n"))?;
            }
            Ok(())
        }
        CtlRequest::Execute(command) => {
            if client.is_this_version() {
                command.check().map_err(DaemonError::new)?;
            }
            let arguments = command.arguments.clone();
            let answer = client.execute(&command.name, arguments).map_err(of)?;
            let text =
                if options.json { pretty(&answer) } else { views::show(&command.name, &answer) };
            print(&text)
        }
    }
}

fn pretty(answer: &Json) -> String {
    format!("{answer:#}\n")
}

/// Prints at once. A closed pipe, as after `head`, is no error.
fn print(text: &str) -> Result<(), DaemonError> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => std::process::exit(0),
        Err(error) => Err(DaemonError::new(format!("writing failed: {error}"))),
        Ok(()) => Ok(()),
    }
}

//! `ringmill ctl`: a daemon's monitor, for people.

pub(crate) mod client;
mod table;
mod views;

use std::io::{self, Write};

use control::{CtlOptions, CtlRequest, command_help};
use serde_json::{Map, Value as Json};

use crate::daemon::DaemonError;
use client::{Client, ClientError};
use table::{Cell, Table};

/// Does what the command line asks for, and prints what comes of it.
pub(crate) fn run(options: &CtlOptions) -> Result<(), DaemonError> {
    let of = |error: ClientError| DaemonError::new(error.to_string());
    let mut client = Client::connect(&options.socket).map_err(of)?;
    match &options.request {
        CtlRequest::Commands => {
            let commands = client.execute("query-commands", Map::new()).map_err(of)?;
            let text = if options.json { pretty(&commands) } else { list(&commands) };
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
            if client.is_ringmill() {
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

/// What `query-commands` has answered, with what is known of each.
fn list(commands: &Json) -> String {
    let names = commands.as_array().into_iter().flatten();
    let mut names: Vec<&str> = names.filter_map(|command| command["name"].as_str()).collect();
    names.sort_unstable();
    let mut table = Table::plain();
    for name in names {
        table.row(vec![Cell::text(name), Cell::text(command_help(name).unwrap_or_default())]);
    }
    table.render()
}

/// Prints, at once. A reader that has gone away, as `head` does, has read enough.
fn print(text: &str) -> Result<(), DaemonError> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => std::process::exit(0),
        Err(error) => Err(DaemonError::new(format!("writing failed: {error}"))),
        Ok(()) => Ok(()),
    }
}

//! `storage-daemon`: QSD's command line.

use std::path::PathBuf;

use block::options::BlockdevOptions;

use crate::chardev::{self, ChardevOptions, MonitorOptions};
use crate::error::OptionError;
use crate::export::ExportOptions;
use crate::help;
use crate::nbd_server::NbdServerOptions;
use crate::object::ObjectOptions;
use crate::table::{self, Context, Field, Kind, Need};
use crate::trace::{self, TraceOptions};
use crate::value::{Dialect, Object};
use crate::{blockdev, export, json, keyval, nbd_server, object};

/// A QSD command line: steps to carry out in order, and how to run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StorageDaemonOptions {
    /// What to create, in the order of the command line. Checked: each step refers only to what a
    /// step before it defines.
    pub steps: Vec<Step>,
    /// `--pidfile`: where to write the process's id once everything is ready.
    pub pidfile: Option<PathBuf>,
    /// `--daemonize`: go to the background once everything is ready.
    pub daemonize: bool,
    /// `--trace`.
    pub trace: TraceOptions,
}

/// One thing to create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// The option as it was written, for errors: `--blockdev null-co,node-name=n`.
    pub origin: String,
    /// What it says.
    pub action: Action,
}

/// What a step creates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// `--object`.
    Object(ObjectOptions),
    /// `--blockdev`.
    Blockdev(BlockdevOptions),
    /// `--export`.
    Export(ExportOptions),
    /// `--chardev`.
    Chardev(ChardevOptions),
    /// `--monitor`.
    Monitor(MonitorOptions),
    /// `--nbd-server`.
    NbdServer(NbdServerOptions),
}

/// The command line while it is read.
#[derive(Default)]
pub(crate) struct Draft {
    pub(crate) options: StorageDaemonOptions,
    /// The option being read, as it was written.
    pub(crate) origin: String,
    /// Help that was asked for inside an option: `--object iothread,help`.
    pub(crate) help: Option<String>,
}

/// The options of the command line.
pub(crate) static OPTIONS: &[Field<Draft>] = &[
    Field {
        name: "blockdev",
        kind: Kind::Text {
            meta: "[driver=]<driver>,node-name=<node-name>[,<option>=<value>...]",
            set: |draft, text| {
                let wanted = structure(&text, "driver")?;
                if wanted.help {
                    return draft.help(help::blockdev(wanted.member("driver")));
                }
                let node = blockdev::read(wanted.object, &wanted.at)?;
                draft.step(Action::Blockdev(node))
            },
        },
        need: Need::Optional("none"),
        help: "open a block node",
    },
    Field {
        name: "chardev",
        kind: Kind::Text {
            meta: "[backend=]<backend>,id=<id>[,<option>=<value>...]",
            set: |draft, text| {
                let parsed = chardev::parse(&text)?;
                let wanted = Structure {
                    object: parsed.object,
                    at: Context::new(Dialect::Keyval),
                    help: parsed.help,
                };
                if wanted.help {
                    return draft.help(help::chardev(wanted.member("backend")));
                }
                let chardev = chardev::read(wanted.object, &wanted.at)?;
                draft.step(Action::Chardev(chardev))
            },
        },
        need: Need::Optional("none"),
        help: "make a character device, for a monitor to be on",
    },
    Field {
        name: "daemonize",
        kind: Kind::Flag(|draft| draft.options.daemonize = true),
        need: Need::Optional("stay in the foreground"),
        help: "go to the background once everything is ready",
    },
    Field {
        name: "export",
        kind: Kind::Text {
            meta: "[type=]<type>,id=<id>,node-name=<node-name>[,<option>=<value>...]",
            set: |draft, text| {
                let wanted = structure(&text, "type")?;
                if wanted.help {
                    return draft.help(help::export(wanted.member("type")));
                }
                let export = export::read(wanted.object, &wanted.at)?;
                draft.step(Action::Export(export))
            },
        },
        need: Need::Optional("none"),
        help: "offer a block node to another program",
    },
    Field {
        name: "monitor",
        kind: Kind::Text {
            meta: "[chardev=]<id>[,<option>=<value>...]",
            set: |draft, text| {
                let wanted = structure(&text, "chardev")?;
                if wanted.help {
                    return draft.help(help::monitor());
                }
                let monitor = chardev::read_monitor(wanted.object, &wanted.at)?;
                draft.step(Action::Monitor(monitor))
            },
        },
        need: Need::Optional("none"),
        help: "take commands by QMP on a character device",
    },
    Field {
        name: "nbd-server",
        kind: Kind::Text {
            meta: "addr.type=inet|unix|fd[,<option>=<value>...]",
            set: |draft, text| {
                if text == "help" {
                    return draft.help(help::nbd_server());
                }
                let wanted = structure(&text, None)?;
                let server = nbd_server::read(wanted.object, &wanted.at)?;
                draft.step(Action::NbdServer(server))
            },
        },
        need: Need::Optional("none"),
        help: "start the NBD server, for exports of type nbd",
    },
    Field {
        name: "object",
        kind: Kind::Text {
            meta: "[qom-type=]<type>,id=<id>[,<property>=<value>...]",
            set: |draft, text| {
                let wanted = structure(&text, "qom-type")?;
                if wanted.help {
                    return draft.help(help::object(wanted.member("qom-type")));
                }
                let object = object::read(wanted.object, &wanted.at)?;
                draft.step(Action::Object(object))
            },
        },
        need: Need::Optional("none"),
        help: "create an object; exports refer to it by its id",
    },
    Field {
        name: "pidfile",
        kind: Kind::Path(|draft, path| {
            draft.options.pidfile = Some(path);
            Ok(())
        }),
        need: Need::Optional("none"),
        help: "write the process's id to this file once everything is ready",
    },
    Field {
        name: "trace",
        kind: Kind::Text {
            meta: trace::META,
            set: |draft, text| trace::read(&text, &mut draft.options.trace),
        },
        need: Need::Optional("none"),
        help: trace::HELP,
    },
];

impl Draft {
    fn step(&mut self, action: Action) -> table::Set {
        self.options.steps.push(Step { origin: self.origin.clone(), action });
        Ok(())
    }

    fn help(&mut self, text: String) -> table::Set {
        self.help.get_or_insert(text);
        Ok(())
    }
}

/// The value of an option, taken apart.
struct Structure {
    object: Object,
    at: Context,
    help: bool,
}

impl Structure {
    fn member(&self, name: &str) -> Option<&str> {
        self.object.iter().find(|(member, _)| member == name).and_then(|(_, value)| value.as_text())
    }
}

fn structure<'a>(
    text: &str,
    implied: impl Into<Option<&'a str>>,
) -> Result<Structure, OptionError> {
    if text.starts_with('{') {
        let object = json::parse(text)?;
        return Ok(Structure { object, at: Context::new(Dialect::Json), help: false });
    }
    let keyval::Parsed { object, help } = keyval::parse(text, implied.into())?;
    Ok(Structure { object, at: Context::new(Dialect::Keyval), help })
}

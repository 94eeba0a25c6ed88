//! `storage-daemon`: QSD's command line.

use std::path::PathBuf;

use block::options::{BlockdevOptions, blockdev_option, node_options, read_blockdev};

use crate::chardev::{self, ChardevOptions, MonitorOptions};
use crate::export::ExportOptions;
use crate::logging::{LogDraft, LogOptions};
use crate::masked::masked;
use crate::metrics::MetricsOptions;
use crate::nbd_server::NbdServerOptions;
use crate::object::ObjectOptions;
use crate::sandbox::{SandboxDraft, SandboxOptions};
use crate::shape::Shape;
use crate::stopping::{StopDraft, StopTimeout};
use crate::table::{self, Field, Kind, Row, Syntax, put};
use crate::trace::{self, TraceOptions};
use crate::{export, metrics, nbd_server, object};

/// Of the option `pidfile`.
pub(crate) const PIDFILE_HELP: &str =
    "write the process's id to this file once everything is ready";

/// A QSD command line: steps to carry out in order, and how to run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StorageDaemonOptions {
    /// What to create, in the order of the command line. Checked: each step refers only to what a
    /// step before it defines.
    pub steps: Vec<Step>,
    /// `--pidfile`: where to write the process's id once everything is ready.
    pub pidfile: Option<PathBuf>,
    /// `--state`: file that keeps the configuration.
    pub state: Option<PathBuf>,
    /// `--check`: report what is wrong, and serve nothing.
    pub check: bool,
    /// With `--check`: options that cannot be read, and steps that do not fit, one message each.
    pub problems: Vec<String>,
    /// `--daemonize`: go to the background once everything is ready.
    pub daemonize: bool,
    /// `--trace`.
    pub trace: TraceOptions,
    /// `--sandbox` and `--user`.
    pub sandbox: SandboxOptions,
    /// `--log-level` and `--log-format`.
    pub log: LogOptions,
    /// `--stop-timeout`.
    pub stop_timeout: StopTimeout,
}

/// One thing to create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// The option as it was written: `--blockdev null-co,node-name=n`. May have a secret: messages have
    /// [`shown`](Self::shown).
    pub origin: String,
    /// What it says.
    pub action: Action,
}

impl Step {
    /// Returns the option for messages, without secrets.
    pub fn shown(&self) -> String {
        masked(&self.origin)
    }

    /// The step that opens a node.
    pub fn of_node(options: BlockdevOptions) -> Step {
        Step { origin: blockdev_option(&options), action: Action::Blockdev(options) }
    }
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
    /// `--metrics`.
    Metrics(MetricsOptions),
}

/// The command line while it is read.
#[derive(Default)]
pub(crate) struct Draft {
    pub(crate) options: StorageDaemonOptions,
    /// The option being read, as it was written.
    pub(crate) origin: String,
}

/// The options of the command line.
pub(crate) static OPTIONS: &[Field<Draft>] = &[
    Row::optional("blockdev", "", "open a block node").of(Kind::Structure {
        meta: "[driver=]<driver>,node-name=<node-name>[,<option>=<value>...]",
        syntax: Syntax::KeyvalOrJson,
        implied: Some("driver"),
        shape: || Shape::Union(node_options()),
        read: |draft, given, at| draft.step(Action::Blockdev(read_blockdev(given, at)?)),
    }),
    Row::optional(
        "check",
        "",
        "report everything that is wrong with the other options, the state file and the images, and exit",
    )
    .flag(|draft| draft.options.check = true),
    Row::optional("chardev", "", "make a character device, for a monitor to be on").of(
        Kind::Structure {
            meta: "[backend=]<backend>,id=<id>[,<option>=<value>...]",
            syntax: Syntax::Opts,
            implied: Some("backend"),
            shape: || Shape::Union(chardev::options()),
            read: |draft, given, at| draft.step(Action::Chardev(chardev::read(given, at)?)),
        },
    ),
    Row::optional("daemonize", "", "go to the background once everything is ready")
        .flag(|draft| draft.options.daemonize = true),
    Row::optional("export", "", "offer a block node to another program").of(Kind::Structure {
        meta: "[type=]<type>,id=<id>,node-name=<node-name>[,<option>=<value>...]",
        syntax: Syntax::KeyvalOrJson,
        implied: Some("type"),
        shape: || Shape::Union(export::options()),
        read: |draft, given, at| draft.step(Action::Export(export::read(given, at)?)),
    }),
    Draft::LOG_FORMAT,
    Draft::LOG_LEVEL,
    Row::optional("metrics", "", "serve metrics for Prometheus over HTTP at the path /metrics").of(
        Kind::Structure {
            meta: "addr.type=inet|unix|fd[,<option>=<value>...]",
            syntax: Syntax::KeyvalOrJson,
            implied: None,
            shape: || Shape::Object(metrics::members()),
            read: |draft, given, at| draft.step(Action::Metrics(metrics::read(given, at)?)),
        },
    ),
    Row::optional("monitor", "", "accept QMP commands on a character device").of(Kind::Structure {
        meta: "[chardev=]<id>[,<option>=<value>...]",
        syntax: Syntax::KeyvalOrJson,
        implied: Some("chardev"),
        shape: || Shape::Object(chardev::monitor_members()),
        read: |draft, given, at| draft.step(Action::Monitor(chardev::read_monitor(given, at)?)),
    }),
    Row::optional("nbd-server", "", "start the NBD server, for exports of type nbd").of(
        Kind::Structure {
            meta: "addr.type=inet|unix|fd[,<option>=<value>...]",
            syntax: Syntax::KeyvalOrJson,
            implied: None,
            shape: || Shape::Object(nbd_server::members()),
            read: |draft, given, at| draft.step(Action::NbdServer(nbd_server::read(given, at)?)),
        },
    ),
    Row::optional("object", "", "create an object; exports refer to it by its id").of(
        Kind::Structure {
            meta: "[qom-type=]<type>,id=<id>[,<property>=<value>...]",
            syntax: Syntax::KeyvalOrJson,
            implied: Some("qom-type"),
            shape: || Shape::Union(object::options()),
            read: |draft, given, at| draft.step(Action::Object(object::read(given, at)?)),
        },
    ),
    Row::optional("pidfile", "", PIDFILE_HELP)
        .path(|draft, path| put(&mut draft.options.pidfile, Some(path))),
    Draft::SANDBOX,
    Row::optional(
        "state",
        "",
        "keep nodes, exports, objects and the NBD server in this file as commands of \
         monitors leave them, and start with them next time",
    )
    .path(|draft, path| put(&mut draft.options.state, Some(path))),
    Draft::STOP_TIMEOUT,
    Row::optional("trace", "", trace::HELP)
        .text(trace::META, |draft, text| trace::read(&text, &mut draft.options.trace)),
    Draft::USER,
];

impl SandboxDraft for Draft {
    fn sandbox(&mut self) -> &mut SandboxOptions {
        &mut self.options.sandbox
    }
}

impl LogDraft for Draft {
    fn log(&mut self) -> &mut LogOptions {
        &mut self.options.log
    }
}

impl StopDraft for Draft {
    fn stop_timeout(&mut self) -> &mut StopTimeout {
        &mut self.options.stop_timeout
    }
}

impl Draft {
    fn step(&mut self, action: Action) -> table::Set {
        self.options.steps.push(Step { origin: self.origin.clone(), action });
        Ok(())
    }
}

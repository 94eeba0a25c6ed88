//! `--sandbox` and `--user`: the daemon's privileges after the start.

use std::path::PathBuf;

use crate::error::OptionError;
use crate::place::OneOf;
use crate::shape::{Member, Shape};
use crate::table::{self, Context, Field, Kind, Row, Syntax, put};
use crate::value::Object;

/// `--sandbox` and `--user`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SandboxOptions {
    /// `mode`.
    pub mode: SandboxMode,
    /// `paths`: folders and files that can be accessed in addition to those on the command line. `None`: all if the daemon
    /// has a monitor, else none.
    pub paths: Option<Vec<PathBuf>>,
    /// `drivers`: drivers whose libraries are loaded for nodes that are added later.
    pub drivers: Vec<String>,
    /// `upgrade=off`: no process is kept to start a new version.
    pub no_upgrade: bool,
    /// `--user`: the user that the process changes to.
    pub user: Option<UserOptions>,
}

/// How strict the sandbox is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SandboxMode {
    /// Unneeded system calls and paths are refused.
    #[default]
    On,
    /// No sandbox.
    Off,
    /// Unneeded system calls are permitted, and logged by the kernel.
    Log,
}

/// A user, and optionally a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserOptions {
    /// A name or a number.
    pub user: String,
    /// A name or a number; `None`: the user's own groups.
    pub group: Option<String>,
}

static FIELDS: &[Field<SandboxOptions>] = &[
    Row::default("mode", "on", "how strict").at(&OneOf {
        at: |sandbox: &mut SandboxOptions| &mut sandbox.mode,
        words: &[
            ("on", SandboxMode::On, "what is not needed is refused"),
            ("off", SandboxMode::Off, "there is no sandbox"),
            (
                "log",
                SandboxMode::Log,
                "system calls that would be refused are carried out and logged by the kernel",
            ),
        ],
    }),
    Row::optional(
        "paths",
        "with a monitor any, without one none",
        "folders and files that commands of monitors can use, beside what the command line \
         names",
    )
    .text("<path>[:<path>...]", |sandbox, text| {
        let paths: Vec<_> = text.split(':').map(PathBuf::from).collect();
        if paths.iter().any(|path| !path.is_absolute()) {
            return Err(OptionError::new("expected absolute paths, with colons between them"));
        }
        put(&mut sandbox.paths, Some(paths))
    }),
    Row::optional(
        "drivers",
        "those of the command line's nodes",
        "drivers whose libraries are loaded at the start, for nodes that a monitor adds: rbd",
    )
    .text("<name>[:<name>...]", |sandbox, text| {
        put(&mut sandbox.drivers, text.split(':').map(str::to_owned).collect())
    }),
    Row::default(
        "upgrade",
        "on",
        "keep a process outside of the sandbox, which starts the program that takes over in \
         a live upgrade",
    )
    .bool(|sandbox, on| put(&mut sandbox.no_upgrade, !on)),
];

/// The target of parsing `--sandbox` and `--user`.
pub(crate) trait SandboxDraft: Sized + 'static {
    fn sandbox(&mut self) -> &mut SandboxOptions;

    const SANDBOX: Field<Self> = Row::optional(
        "sandbox",
        "on, as far as the kernel allows it",
        "limit what the daemon's threads can do, against attackers that take over a thread",
    )
    .of(Kind::Structure {
        meta: "[mode=]on|off|log[,paths=<paths>][,drivers=<names>][,upgrade=on|off]",
        syntax: Syntax::KeyvalOrJson,
        implied: Some("mode"),
        shape: || Shape::Object(members()),
        read: |draft, given, at| read(draft.sandbox(), given, at),
    });

    const USER: Field<Self> = Row::optional(
        "user",
        "the user that starts the daemon",
        "become this user, by name or number, once everything is ready: what the command \
         line names is opened before",
    )
    .text("<user>[:<group>]", |draft, text| {
        let (user, group) = match text.split_once(':') {
            Some((user, group)) => (user, Some(group)),
            None => (text.as_str(), None),
        };
        if user.is_empty() || group == Some("") {
            return Err(OptionError::new("expected a user, or a user:group"));
        }
        let (user, group) = (user.to_owned(), group.map(str::to_owned));
        put(&mut draft.sandbox().user, Some(UserOptions { user, group }))
    });
}

/// The members of `--sandbox`.
fn members() -> Vec<Member> {
    table::members(FIELDS)
}

fn read(sandbox: &mut SandboxOptions, mut object: Object, at: &Context) -> table::Set {
    table::read(FIELDS, sandbox, &mut object, at)?;
    let known = table::names(FIELDS);
    table::refuse_rest(&object, at, "--sandbox", known)
}

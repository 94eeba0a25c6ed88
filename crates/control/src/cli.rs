//! Command lines: which command, which options, which values.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use crate::error::{OptionError, UsageError};
use crate::graph::Graph;
use crate::help;
use crate::probe::{self, ProbeOptions};
use crate::serve::{self, ServeOptions};
use crate::storage_daemon::{self, StorageDaemonOptions};
use crate::table::{Context, Field, Kind};
use crate::value::{Dialect, Value};

/// The program's own name, in front of its messages.
const RINGMILL: &str = "ringmill";
/// The name that makes it QSD.
const QSD: &str = "qemu-storage-daemon";

/// What a command line asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// `ringmill serve IMAGE`.
    Serve(ServeOptions),
    /// `ringmill storage-daemon`, or the program called `qemu-storage-daemon`.
    StorageDaemon(StorageDaemonOptions),
    /// `ringmill probe [FILE]`.
    Probe(ProbeOptions),
    /// Help or version: print it on standard output, with a line end, and exit with 0.
    Print(String),
}

/// The commands, with what they are for.
pub(crate) static COMMANDS: &[(&str, &str)] = &[
    ("serve", "serve one disk image to a virtual machine"),
    ("storage-daemon", "take the options of qemu-storage-daemon"),
    ("probe", "show what this machine offers and what ringmill would choose"),
];

/// The name in front of messages, from `argv[0]`: `ringmill`, or `qemu-storage-daemon` when the
/// program is called by that name.
pub fn program_name(argv0: &OsStr) -> &'static str {
    let name = Path::new(argv0).file_name();
    if name == Some(OsStr::new(QSD)) { QSD } else { RINGMILL }
}

/// Reads a whole command line, program name included.
///
/// # Errors
///
/// The first thing that is wrong, and what would be right.
pub fn parse_args(argv: impl IntoIterator<Item = OsString>) -> Result<Command, UsageError> {
    let mut argv = argv.into_iter();
    let argv0 = argv.next().unwrap_or_default();
    let program = program_name(&argv0);
    let mut parser = lexopt::Parser::from_args(argv);
    let command = match program {
        QSD => storage_daemon(program, &mut parser),
        _ => ringmill(program, &mut parser),
    };
    command.map_err(|error| UsageError { program, error })
}

fn ringmill(program: &str, parser: &mut lexopt::Parser) -> Result<Command, OptionError> {
    let known = || {
        let names: Vec<&str> = COMMANDS.iter().map(|(name, _)| *name).collect();
        format!("Known commands: {}. See 'ringmill --help'.", names.join(", "))
    };
    match parser.next().map_err(unexpected)? {
        Some(lexopt::Arg::Value(command)) => match command.to_str() {
            Some("serve") => serve(parser),
            Some("storage-daemon") => storage_daemon(program, parser),
            Some("probe") => probe(parser),
            _ => Err(OptionError::new(format!("unknown command '{}'", command.to_string_lossy()))
                .hint(known())),
        },
        Some(lexopt::Arg::Long("help") | lexopt::Arg::Short('h')) => {
            Ok(Command::Print(help::ringmill()))
        }
        Some(lexopt::Arg::Long("version") | lexopt::Arg::Short('V')) => {
            Ok(Command::Print(help::version(program)))
        }
        Some(lexopt::Arg::Long(name)) => {
            Err(OptionError::new(format!("unrecognized option '--{name}'")).hint(known()))
        }
        Some(lexopt::Arg::Short(name)) => {
            Err(OptionError::new(format!("invalid option -- '{name}'")).hint(known()))
        }
        None => Err(OptionError::new("a command is missing").hint(known())),
    }
}

fn storage_daemon(program: &str, parser: &mut lexopt::Parser) -> Result<Command, OptionError> {
    let (given, arguments) = match scan(storage_daemon::OPTIONS, Names::Abbreviated, parser)? {
        Scanned::Help => return Ok(Command::Print(help::storage_daemon(program))),
        Scanned::Version => return Ok(Command::Print(help::version(program))),
        Scanned::Options(given, arguments) => (given, arguments),
    };
    if let Some(extra) = arguments.first() {
        let extra = extra.to_string_lossy();
        return Err(OptionError::new(format!("{extra}: Unexpected argument")));
    }
    let mut draft = storage_daemon::Draft::default();
    for given in given {
        draft.origin.clone_from(&given.origin);
        given.apply(&mut draft)?;
        if draft.options.trace.help {
            return Ok(Command::Print(help::trace()));
        }
        if let Some(text) = draft.help.take() {
            return Ok(Command::Print(text));
        }
    }
    Graph::check(&draft.options.steps)?;
    Ok(Command::StorageDaemon(draft.options))
}

fn serve(parser: &mut lexopt::Parser) -> Result<Command, OptionError> {
    match scan(serve::OPTIONS, Names::Exact, parser)? {
        Scanned::Help => Ok(Command::Print(help::serve())),
        Scanned::Version => Ok(Command::Print(help::version(RINGMILL))),
        Scanned::Options(given, arguments) => {
            let mut options = serve::start(arguments)?;
            given.into_iter().try_for_each(|given| given.apply(&mut options))?;
            if options.trace.help {
                return Ok(Command::Print(help::trace()));
            }
            serve::finish(options).map(Command::Serve)
        }
    }
}

fn probe(parser: &mut lexopt::Parser) -> Result<Command, OptionError> {
    match scan(probe::OPTIONS, Names::Exact, parser)? {
        Scanned::Help => Ok(Command::Print(help::probe())),
        Scanned::Version => Ok(Command::Print(help::version(RINGMILL))),
        Scanned::Options(given, arguments) => {
            let mut options = probe::start(arguments)?;
            given.into_iter().try_for_each(|given| given.apply(&mut options))?;
            Ok(Command::Probe(options))
        }
    }
}

/// Whether long options may be shortened as far as they stay unambiguous. QSD's may; ringmill's own
/// may not, so that a new option never changes the meaning of an old command line.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Names {
    Exact,
    Abbreviated,
}

/// An option on the command line, its value not looked at yet.
struct Given<T: 'static> {
    field: &'static Field<T>,
    /// As it was written, with its value.
    origin: String,
    value: Option<OsString>,
}

impl<T> Given<T> {
    fn apply(self, into: &mut T) -> Result<(), OptionError> {
        let at = Context::new(Dialect::Keyval);
        let set = match (self.value, &self.field.kind) {
            (Some(path), Kind::Path(set)) => set(into, path.into()),
            (Some(value), _) => match value.into_string() {
                Ok(text) => self.field.set(into, Value::Text(text), &at),
                Err(_) => Err(OptionError::new("the value is not valid UTF-8")),
            },
            (None, _) => self.field.set(into, Value::Null, &at),
        };
        set.map_err(|error| error.of(&self.origin))
    }
}

enum Scanned<T: 'static> {
    Help,
    Version,
    Options(Vec<Given<T>>, Vec<OsString>),
}

/// The options every command has.
const HELP: &str = "help";
const VERSION: &str = "version";

/// Splits a command line into options and other arguments. Help and version count wherever they
/// stand, before any value is looked at; an unknown option in front of them counts first.
fn scan<T>(
    table: &'static [Field<T>],
    names: Names,
    parser: &mut lexopt::Parser,
) -> Result<Scanned<T>, OptionError> {
    let mut given = Vec::new();
    let mut arguments = Vec::new();
    while let Some(argument) = parser.next().map_err(unexpected)? {
        let name = match argument {
            lexopt::Arg::Value(value) => {
                arguments.push(value);
                continue;
            }
            lexopt::Arg::Short('h') => return Ok(Scanned::Help),
            lexopt::Arg::Short('V') => return Ok(Scanned::Version),
            lexopt::Arg::Short(letter) => match short(letter, table) {
                Some(name) => name.to_owned(),
                None => {
                    return Err(OptionError::new(format!("invalid option -- '{letter}'"))
                        .hint(known_options(table)));
                }
            },
            lexopt::Arg::Long(name) => name.to_owned(),
        };
        let attached = parser.optional_value();
        let written = name;
        let name = resolve(table, names, &written, attached.as_deref())?;
        let field = table.iter().find(|field| field.name == name);
        let takes_value = field.is_some_and(|field| !matches!(field.kind, Kind::Flag(_)));
        if !takes_value && attached.is_some() {
            return Err(OptionError::new(format!("option '--{name}' doesn't allow an argument")));
        }
        let Some(field) = field else {
            return Ok(if name == HELP { Scanned::Help } else { Scanned::Version });
        };
        let (value, origin) = match attached {
            Some(value) => {
                let origin = format!("--{written}={}", value.to_string_lossy());
                (Some(value), origin)
            }
            None if takes_value => {
                let value = parser.value().map_err(|_| {
                    OptionError::new(format!("option '--{name}' requires an argument"))
                        .hint(format!("Usage: --{name} {}", field.kind.shape().meta()))
                })?;
                let origin = format!("--{written} {}", value.to_string_lossy());
                (Some(value), origin)
            }
            None => (None, format!("--{written}")),
        };
        given.push(Given { field, origin, value });
    }
    Ok(Scanned::Options(given, arguments))
}

/// The option of the table that has a letter, too, as in QSD.
fn short<T>(letter: char, table: &[Field<T>]) -> Option<&'static str> {
    let name = if letter == 'T' { "trace" } else { return None };
    table.iter().map(|field| field.name).find(|known| *known == name)
}

/// The full name of the option that `name` means.
fn resolve<T>(
    table: &'static [Field<T>],
    names: Names,
    name: &str,
    attached: Option<&OsStr>,
) -> Result<&'static str, OptionError> {
    let all = || table.iter().map(|field| field.name).chain([HELP, VERSION]);
    if let Some(exact) = all().find(|known| *known == name) {
        return Ok(exact);
    }
    let matching: Vec<&str> = match names {
        Names::Abbreviated => all().filter(|known| known.starts_with(name)).collect(),
        Names::Exact => Vec::new(),
    };
    match matching.as_slice() {
        [only] => Ok(only),
        [] => {
            let value = attached.map(|value| format!("={}", value.to_string_lossy()));
            let value = value.unwrap_or_default();
            Err(OptionError::new(format!("unrecognized option '--{name}{value}'"))
                .hint(known_options(table)))
        }
        several => {
            let several: Vec<String> = several.iter().map(|name| format!("'--{name}'")).collect();
            Err(OptionError::new(format!(
                "option '--{name}' is ambiguous; possibilities: {}",
                several.join(" ")
            )))
        }
    }
}

fn known_options<T>(table: &[Field<T>]) -> String {
    let names = table.iter().map(|field| field.name).chain([HELP, VERSION]);
    let names: Vec<String> = names.map(|name| format!("--{name}")).collect();
    format!("Known options: {}", names.join(", "))
}

fn unexpected(error: lexopt::Error) -> OptionError {
    OptionError::new(error.to_string())
}

//! Command lines: commands, options, values.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use crate::attach::{self, DetachOptions};
use crate::check::{self, CheckOptions};
use crate::complete;
use crate::ctl::{self, CtlOptions};
use crate::error::{OptionError, UsageError};
use crate::help;
use crate::img::{self, IMG, ImgCommand};
use crate::inventory::Inventory;
use crate::journals::{self, JournalsOptions};
use crate::json;
use crate::keyval;
use crate::list::{self, ListOptions};
use crate::masked;
use crate::probe::{self, ProbeOptions};
use crate::reference::GENERATED;
use crate::serve::{self, ServeOptions};
use crate::shape::{Member, Row, Shape};
use crate::storage_daemon::{self, Step, StorageDaemonOptions};
use crate::table::{self, Context, Field, Kind, Syntax};
use crate::top::{self, TopOptions};
use crate::upgrade::{self, UpgradeOptions};
use crate::value::{Dialect, Value};

/// The program's name in messages.
const RINGMILL: &str = "ringmill";
/// The name under which the program acts as QSD.
const QSD: &str = "qemu-storage-daemon";
/// The name under which the program acts as qemu-img.
pub(crate) const QEMU_IMG: &str = "qemu-img";

/// The first argument with which shells request completions.
const COMPLETE: &str = "--complete";

/// The command with which a daemon starts its successor.
pub const TAKE_OVER: &str = "take-over";

/// A parsed command line.
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    /// `ringmill serve IMAGE`.
    Serve(ServeOptions),
    /// `ringmill attach IMAGE`.
    Attach(ServeOptions),
    /// `ringmill detach DEVICE|IMAGE`.
    Detach(DetachOptions),
    /// `ringmill list`.
    List(ListOptions),
    /// `ringmill storage-daemon`, or the program called `qemu-storage-daemon`.
    StorageDaemon(StorageDaemonOptions),
    /// `ringmill ctl SOCKET [COMMAND [ARGUMENT…]]`.
    Ctl(CtlOptions),
    /// `ringmill top SOCKET`.
    Top(TopOptions),
    /// `ringmill probe [FILE]`.
    Probe(ProbeOptions),
    /// `ringmill img COMMAND …`, or the program called `qemu-img`.
    Img(Box<ImgCommand>),
    /// `ringmill check IMAGE`.
    Check(CheckOptions),
    /// `ringmill journals [JOURNAL|IMAGE…]`.
    Journals(JournalsOptions),
    /// `ringmill upgrade`.
    Upgrade(UpgradeOptions),
    /// `ringmill take-over`: started by a daemon during an upgrade. Not for people.
    TakeOver,
    /// Help or version: print it on standard output, with a line end, and exit with 0.
    Print(String),
}

/// A command of the program: a row of the table.
pub(crate) struct Subcommand {
    /// Its name.
    pub(crate) name: &'static str,
    /// The words after it.
    pub(crate) usage: &'static str,
    /// What it does, in half a sentence.
    pub(crate) help: &'static str,
    /// A description before the options.
    pub(crate) about: &'static str,
    /// Its options.
    pub(crate) options: fn() -> Vec<CliOption>,
    /// Letters of options, beside those of all commands.
    pub(crate) letters: &'static [(char, &'static str)],
    /// The commands within it.
    pub(crate) commands: &'static [&'static Subcommand],
    /// Command lines, and what each is for.
    pub(crate) examples: &'static [(&'static str, &'static str)],
    pub(crate) read: fn(&'static str, &mut lexopt::Parser) -> Result<Command, OptionError>,
}

impl Subcommand {
    /// Returns the rows of the options, whose descriptions begin with their letters.
    pub(crate) fn rows(&self) -> Vec<Row> {
        let letter = |name: &str| self.letters.iter().find(|(_, of)| *of == name);
        let options = (self.options)().into_iter();
        options
            .flat_map(|option| option.member.rows())
            .map(|row| match letter(&row.name) {
                Some((letter, _)) => Row { help: format!("-{letter}: {}", row.help), ..row },
                None => row,
            })
            .collect()
    }

    /// Returns all commands: this one, and those within it.
    #[cfg(test)]
    pub(crate) fn with_commands(&self) -> impl Iterator<Item = &Subcommand> {
        [self].into_iter().chain(self.commands.iter().copied())
    }
}

/// An option of a command, with its types erased.
pub(crate) struct CliOption {
    /// The option. If it has a structure, with the text for help.
    pub(crate) member: Member,
    /// The structure of its value.
    pub(crate) structure: Option<Shape>,
    /// The key of the first pair if it is given without a key.
    pub(crate) implied: Option<&'static str>,
}

/// All commands.
pub(crate) static COMMANDS: &[&Subcommand] = &[
    &SERVE,
    &MOUNT,
    &ATTACH,
    &DETACH,
    &LIST,
    &STORAGE_DAEMON,
    &UPGRADE,
    &CTL,
    &TOP,
    &IMG,
    &CHECK,
    &JOURNALS,
    &PROBE,
];

static SERVE: Subcommand = Subcommand {
    name: "serve",
    usage: "<image> [options]",
    help: "serve one disk image to a virtual machine",
    about: "Serves a disk image, a file, a block device or a URL, over vhost-user-blk.",
    options: || erased(serve::OPTIONS),
    letters: &[],
    commands: &[],
    examples: &[
        ("ringmill serve disk.img --size 10G", "a disk of 10 GiB, made when it is missing"),
        (
            "ringmill serve disk.qcow2 --size 10G",
            "the same as a qcow2 image, which grows as it is written to",
        ),
        (
            "ringmill serve /dev/vg/disk --socket /run/disk.sock --queues 4 --iothreads 2",
            "a block device, to a guest with 4 vCPUs, by two threads",
        ),
        (
            "ringmill serve https://example.org/disk.qcow2 --overlay vm1.qcow2",
            "an image on a web server; writes and what is read go to vm1.qcow2",
        ),
    ],
    read: |_, parser| serve(parser),
};

static MOUNT: Subcommand = Subcommand {
    name: "mount",
    usage: "<image> <file> [options]",
    help: "show one disk image as a file",
    about: "Mounts a disk image, a file or a block device, on a regular file, whatever the image's format. \
            SIGTERM or Ctrl-C unmounts it.",
    options: || erased(serve::MOUNT),
    letters: &[],
    commands: &[],
    examples: &[
        (
            "ringmill mount disk.qcow2 disk.raw",
            "a qcow2 image as a raw file, for tools that know no other",
        ),
        ("ringmill mount disk.qcow2 disk.raw --read-only", "the same, to look at"),
    ],
    read: |_, parser| mount(parser),
};

static ATTACH: Subcommand = Subcommand {
    name: "attach",
    usage: "<image> [options]",
    help: "make one disk image a block device of this host",
    about: "Makes a disk image, a file, a block device or a URL, the block device /dev/ublkb<n>, whatever the image's \
            format, and prints the device. The command returns once the device and its partitions can be used, and the \
            image is served in the background until 'ringmill detach'. If that process is killed, the device waits: the \
            same command again continues with it, and no request is lost. Needs root, and Linux 6.5 or later with the module \
            ublk_drv. Without it, the device is /dev/nbd<n>, of the kernel's NBD client (module nbd).",
    options: || erased(attach::ATTACH),
    letters: &[('f', "foreground")],
    commands: &[],
    examples: &[
        ("ringmill attach disk.qcow2", "prints the device, such as /dev/ublkb0"),
        ("ringmill attach disk.qcow2 --read-only", "a device to look at"),
        ("ringmill attach disk.qcow2 --snapshot", "a device to try things on"),
    ],
    read: |_, parser| attach(parser),
};

static DETACH: Subcommand = Subcommand {
    name: "detach",
    usage: "<device>|<image> [options]",
    help: "remove a block device that attach has made",
    about: "Removes a block device of 'ringmill attach', named by the device or its image. The command returns once \
            everything is written, and the image is closed. A device in use is refused, and stays.",
    options: || erased(attach::DETACH),
    letters: &[],
    commands: &[],
    examples: &[
        ("ringmill detach /dev/ublkb0", "by the device"),
        ("ringmill detach disk.qcow2 --lazy", "by the image, once its file systems are unmounted"),
    ],
    read: |_, parser| detach(parser),
};

static LIST: Subcommand = Subcommand {
    name: "list",
    usage: "[options]",
    help: "list what is served and attached on this host",
    about: "Lists each export of the daemons on this host: the process, the type, the image, and where it is served. Daemons \
            are found by their command lines. One with a monitor is asked for its exports, if this user may connect; of the \
            others, the command line counts. Images of 'ringmill attach' are listed for root. 'killed': the device waits for \
            its daemon.",
    options: || erased(list::OPTIONS),
    letters: &[],
    commands: &[],
    examples: &[
        ("ringmill list", "a table"),
        ("ringmill list --output json", "the same for programs"),
    ],
    read: |_, parser| list(parser),
};

pub(crate) static STORAGE_DAEMON: Subcommand = Subcommand {
    name: "storage-daemon",
    usage: "[options]",
    help: "take the options of qemu-storage-daemon",
    about: "Serves block nodes, by the options of qemu-storage-daemon. They are carried out in the \
            order in which they are given; what a name refers to comes before it.",
    options: || erased(storage_daemon::OPTIONS),
    letters: &[],
    commands: &[],
    examples: &[
        (
            "ringmill storage-daemon --blockdev file,node-name=disk0,filename=disk0.img \
             --export vhost-user-blk,id=e0,node-name=disk0,addr.type=unix,addr.path=disk0.sock,writable=on",
            "a disk for one virtual machine",
        ),
        (
            "ringmill storage-daemon --object iothread,id=io0 --object iothread,id=io1 \
             --blockdev host_device,node-name=disk0,filename=/dev/vg/disk0,cache.direct=on \
             --export vhost-user-blk,id=e0,node-name=disk0,addr.type=unix,addr.path=disk0.sock,\
             writable=on,num-queues=4,iothread.0=io0,iothread.1=io1",
            "a block device with four queues, which two threads serve",
        ),
        (
            "ringmill storage-daemon --blockdev file,node-name=disk0,filename=disk0.img \
             --nbd-server addr.type=inet,addr.host=127.0.0.1,addr.port=10809 \
             --export nbd,id=e0,node-name=disk0,writable=on",
            "a disk over NBD, on TCP",
        ),
        (
            "ringmill storage-daemon --daemonize --pidfile /run/ringmill.pid \
             --trace poll_*,file=/var/log/ringmill.trace \
             --metrics addr.type=inet,addr.host=127.0.0.1,addr.port=9840 \
             --log-level info --log-format json --state /var/lib/ringmill/state --stop-timeout 30 \
             --chardev socket,id=m,path=/run/ringmill.qmp,server=on,wait=off --monitor m",
            "nothing yet: all comes by QMP, and is there again after a restart; Prometheus reads the counters",
        ),
        (
            "ringmill storage-daemon --user ringmill:kvm --sandbox on,paths=/var/lib/images \
             --chardev socket,id=m,path=/run/ringmill.qmp,server=on,wait=off --monitor m",
            "the same as another user, with access to images in one folder only",
        ),
        (
            "ringmill storage-daemon --check --state /var/lib/ringmill/state \
             --blockdev file,node-name=disk0,filename=/srv/disk0.img",
            "what is wrong with this configuration, beside the daemon that serves",
        ),
    ],
    read: storage_daemon,
};

static UPGRADE: Subcommand = Subcommand {
    name: "upgrade",
    usage: "<pid>|<pidfile>|<socket>",
    help: "replace a running daemon by the program that is installed now",
    about: "Replaces a running daemon. The daemon starts the program at its own path, which may be another \
            version, and hands over sockets, connections, guests' memory and open images. Guests see a \
            short pause and no error. If the new program does not take over, the old one continues to \
            serve. <pid>, <pidfile> or <socket>, the daemon's QMP monitor, identifies the daemon. By the \
            monitor, the command prints why an upgrade failed; the daemon's log always has the reason. \
            SIGUSR2 starts the same upgrade.",
    options: || erased(upgrade::OPTIONS),
    letters: &[],
    commands: &[],
    examples: &[
        (
            "ringmill upgrade /run/ringmill.qmp",
            "by the monitor; prints how long guests had to wait",
        ),
        ("ringmill upgrade /run/ringmill.pid", "by the pid file"),
    ],
    read: |_, parser| upgrade(parser),
};

static CTL: Subcommand = Subcommand {
    name: "ctl",
    usage: "<socket> [<command> [<argument>...]]",
    help: "send a QMP command to a running daemon",
    about: "Sends a command to the QMP monitor on <socket>, a path or <host>:<port>, and prints the answer as \
            a table. Without a command, the daemon's commands are listed; \
            'ringmill ctl <socket> <command> help' lists the arguments of a command. Arguments are \
            <name>=<value>, with dotted keys (cache.direct=on, iothread.0=io0) and doubled commas, or \
            JSON; a whole command may be QMP's '{\"execute\": ...}'. 'events' follows the daemon's events.",
    options: || erased(ctl::OPTIONS),
    letters: &[],
    commands: &[],
    examples: &[
        ("ringmill ctl /run/ringmill.qmp query-block-exports", "a table of the exports"),
        (
            "ringmill ctl /run/ringmill.qmp blockdev-add file node-name=disk1 filename=disk1.img",
            "another image",
        ),
        (
            "ringmill ctl /run/ringmill.qmp qom-set path=io0 property=poll-max-ns value=0",
            "no polling in a thread, from now on",
        ),
        ("ringmill ctl --json /run/ringmill.qmp events", "events, for a program to read"),
    ],
    read: |_, parser| ctl(parser),
};

static TOP: Subcommand = Subcommand {
    name: "top",
    usage: "<socket> [options]",
    help: "show the activity of a running daemon",
    about: "Shows the activity of the daemon with the QMP monitor on <socket>, a path or <host>:<port>. \
            Exports: requests, throughput, latency percentiles, mean and present depth, answers per batch. \
            I/O threads: CPU time, polling, wake-ups. On a terminal the view is updated and can be \
            scrolled; its last line lists the keys. A narrow terminal has fewer columns.",
    options: || erased(top::OPTIONS),
    letters: &[],
    commands: &[],
    examples: &[
        ("ringmill top /run/ringmill.qmp", "a live view"),
        (
            "ringmill top /run/ringmill.qmp --batch --count 1 --interval-ms 5000 --sort requests",
            "the activity of five seconds, the busiest export first",
        ),
    ],
    read: |_, parser| top(parser),
};

static CHECK: Subcommand = Subcommand {
    name: "check",
    usage: "<image> [options]",
    help: "check and repair the metadata of a qcow2 image",
    about: "Checks the metadata of a qcow2 image that is not in use, and repairs it, as 'qemu-img check' does. \
            Each finding is a line on the standard error output. Exit code: 0 if all is well, 2 for corruptions that \
            are left, 3 for leaked clusters that are left, 63 for a format without checks, 1 if the check failed. \
            What a killed daemon has left in its journal belongs to the image; --repair writes it first.",
    options: || erased(check::OPTIONS),
    letters: &[],
    commands: &[],
    examples: &[
        ("ringmill check disk.qcow2", "what is wrong with an image"),
        ("ringmill check disk.qcow2 --repair all", "repair everything that can be repaired"),
    ],
    read: |_, parser| check(parser),
};

static JOURNALS: Subcommand = Subcommand {
    name: "journals",
    usage: "[<journal>|<image>...] [options]",
    help: "list and remove what killed daemons have left of qcow2 images",
    about: "Lists the journals of qcow2 images in the folders of this host's daemons. A journal is in memory. It has what a \
            daemon has answered and not yet written to the image. After a kill it stays until a daemon opens the image \
            again. States: 'in use' by a process; 'needed' by the image; 'unknown', with the reason; 'superseded', if the \
            image was changed without it; 'image replaced'; 'image missing', also if the image was moved to another \
            folder; 'earlier boot'. --clear removes those in the last four states. Exit code: 0, or 1 if a journal \
            that was named was not found or not removed.",
    options: || erased(journals::OPTIONS),
    letters: &[],
    commands: &[],
    examples: &[
        ("ringmill journals", "all journals that this user may read"),
        ("ringmill journals --clear", "remove those that no image needs"),
        (
            "ringmill journals --clear --force disk.qcow2",
            "remove the journal of an image that is to do without",
        ),
    ],
    read: |_, parser| journals(parser),
};

static PROBE: Subcommand = Subcommand {
    name: "probe",
    usage: "[<file>]",
    help: "show what this machine offers and what ringmill would choose",
    about: "Shows what this machine offers: io_uring, limits and, of a file or block device, the \
            alignment of direct I/O; and what ringmill would choose, and why.",
    options: || erased(probe::OPTIONS),
    letters: &[],
    commands: &[],
    examples: &[("ringmill probe disk.img", "what would be chosen for this image")],
    read: |_, parser| probe(parser),
};

pub(crate) fn erased<T>(fields: &[Field<T>]) -> Vec<CliOption> {
    let option = |field: &Field<T>| {
        let (structure, implied) = match field.kind {
            Kind::Structure { shape, implied, .. } => (Some(shape()), implied),
            _ => (None, None),
        };
        CliOption { member: field.member(), structure, implied }
    };
    let is_offered = |field: &&Field<T>| !matches!(field.kind, Kind::Unoffered(_));
    fields.iter().filter(is_offered).map(option).collect()
}

/// Returns the program's name in messages, from `argv[0]`.
///
/// It is `ringmill`, or `qemu-storage-daemon` or `qemu-img` if the program is called by that name.
pub fn program_name(argv0: &OsStr) -> &'static str {
    let name = Path::new(argv0).file_name();
    [QSD, QEMU_IMG].into_iter().find(|known| name == Some(OsStr::new(known))).unwrap_or(RINGMILL)
}

/// Reads a whole command line, program name included.
///
/// # Errors
///
/// The first error, with what would be right.
pub fn parse_args(argv: impl IntoIterator<Item = OsString>) -> Result<Command, UsageError> {
    let mut argv = argv.into_iter();
    let argv0 = argv.next().unwrap_or_default();
    let program = program_name(&argv0);
    let mut argv = argv.peekable();
    if argv.next_if(|first| first == COMPLETE).is_some() {
        let words: Vec<String> = argv.map(|word| word.to_string_lossy().into_owned()).collect();
        return Ok(Command::Print(complete::complete(&words).text()));
    }
    // Started by a daemon during an upgrade, under any program name. The hand-over is on standard input.
    if argv.next_if(|first| first == TAKE_OVER).is_some() {
        return Ok(Command::TakeOver);
    }
    let mut parser = lexopt::Parser::from_args(argv);
    let command = match program {
        QSD => storage_daemon(program, &mut parser),
        QEMU_IMG => img::read(program, &mut parser),
        _ => ringmill(program, &mut parser),
    };
    command.map_err(|error| UsageError { program, error })
}

fn ringmill(program: &'static str, parser: &mut lexopt::Parser) -> Result<Command, OptionError> {
    let known = || {
        let names: Vec<&str> = COMMANDS.iter().map(|command| command.name).collect();
        format!("Known commands: {}. See 'ringmill --help'.", names.join(", "))
    };
    let named = |name: &OsStr| {
        COMMANDS.iter().find(|command| name == command.name).ok_or_else(|| {
            let message = format!("unknown command '{}'", name.to_string_lossy());
            OptionError::new(message).hint(known())
        })
    };
    match parser.next().map_err(unexpected)? {
        Some(lexopt::Arg::Value(name)) if name == HELP => {
            match parser.next().map_err(unexpected)? {
                Some(lexopt::Arg::Value(name)) => {
                    named(&name).map(|command| Command::Print(help::command(command, program)))
                }
                _ => Ok(Command::Print(help::ringmill())),
            }
        }
        Some(lexopt::Arg::Value(name)) => (named(&name)?.read)(program, parser),
        Some(lexopt::Arg::Long("help") | lexopt::Arg::Short('h')) => {
            Ok(Command::Print(help::ringmill()))
        }
        Some(lexopt::Arg::Long("generate")) => generate(parser),
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

/// `--generate`.
fn generate(parser: &mut lexopt::Parser) -> Result<Command, OptionError> {
    let names: Vec<&str> = GENERATED.iter().map(|known| known.name).collect();
    let hint = || format!("Known texts: {}", names.join(", "));
    let what = parser
        .value()
        .map_err(|_| OptionError::new("option '--generate' requires an argument").hint(hint()))?;
    match GENERATED.iter().find(|known| what == known.name) {
        Some(known) => Ok(Command::Print((known.text)())),
        None => {
            let message = format!("--generate {}: unknown text", what.to_string_lossy());
            Err(OptionError::new(message).hint(hint()))
        }
    }
}

fn storage_daemon(
    program: &'static str,
    parser: &mut lexopt::Parser,
) -> Result<Command, OptionError> {
    let (given, arguments) = match scan(storage_daemon::OPTIONS, &[], Names::Abbreviated, parser)? {
        Scanned::Help => return Ok(Command::Print(help::command(&STORAGE_DAEMON, program))),
        Scanned::Version => return Ok(Command::Print(help::version(program))),
        Scanned::Options(given, arguments) => (given, arguments),
    };
    if let Some(extra) = arguments.first() {
        let extra = masked::masked(&extra.to_string_lossy());
        return Err(OptionError::new(format!("{extra}: Unexpected argument")));
    }
    let mut draft = storage_daemon::Draft::default();
    let checks = given.iter().any(|given| given.field.name == "check");
    for given in given {
        draft.origin.clone_from(&given.origin);
        match given.apply(&mut draft) {
            Ok(Some(text)) => return Ok(Command::Print(text)),
            Ok(None) => {}
            Err(error) if checks => draft.options.problems.push(error.to_string()),
            Err(error) => return Err(error),
        }
        if draft.options.trace.help {
            return Ok(Command::Print(help::trace()));
        }
    }
    if checks {
        fitting(&mut draft.options);
    } else {
        Inventory::check(&draft.options.steps)?;
    }
    Ok(Command::StorageDaemon(draft.options))
}

/// `--check`: leaves the steps that fit together, and reports the others.
fn fitting(options: &mut StorageDaemonOptions) {
    let mut inventory = Inventory::default();
    let problems = &mut options.problems;
    options.steps.retain(|step| match inventory.with(step) {
        Ok(with) => {
            inventory = with;
            true
        }
        Err(error) => {
            problems.push(masked::of(error, &step.origin).to_string());
            false
        }
    });
}

/// Splits an option of the command line into its words.
///
/// `--name=value` is one word, `--name value` two.
pub fn option_words(option: &str) -> Vec<String> {
    match option.find([' ', '=']).and_then(|end| option.split_at_checked(end)) {
        Some((name, value)) if value.starts_with(' ') => {
            vec![name.to_owned(), value[1..].to_owned()]
        }
        _ => vec![option.to_owned()],
    }
}

/// Reads options of `storage-daemon` that define something. Does not check whether the options are consistent.
pub(crate) fn read_options(options: &[String]) -> Result<Vec<Step>, OptionError> {
    let words = options.iter().flat_map(|option| option_words(option));
    let mut parser = lexopt::Parser::from_args(words);
    let strange = || OptionError::new("not an option that makes something");
    let Scanned::Options(given, rest) =
        scan(storage_daemon::OPTIONS, &[], Names::Abbreviated, &mut parser)?
    else {
        return Err(strange());
    };
    if !rest.is_empty() || given.len() != options.len() {
        return Err(strange());
    }
    let mut draft = storage_daemon::Draft::default();
    for (given, option) in given.into_iter().zip(options) {
        let before = draft.options.steps.len();
        draft.origin.clone_from(&given.origin);
        let help = given.apply(&mut draft)?;
        if help.is_some() || draft.options.steps.len() != before + 1 || draft.origin != *option {
            return Err(masked::of(strange(), option));
        }
    }
    Ok(draft.options.steps)
}

fn serve(parser: &mut lexopt::Parser) -> Result<Command, OptionError> {
    command(&SERVE, serve::OPTIONS, parser, serve::start, served)
}

fn mount(parser: &mut lexopt::Parser) -> Result<Command, OptionError> {
    command(&MOUNT, serve::MOUNT, parser, serve::start_mount, served)
}

fn attach(parser: &mut lexopt::Parser) -> Result<Command, OptionError> {
    command(&ATTACH, attach::ATTACH, parser, attach::start, served)
}

fn served(options: ServeOptions) -> Result<Command, OptionError> {
    if options.trace.help {
        return Ok(Command::Print(help::trace()));
    }
    let options = serve::finish(options)?;
    Ok(match options.attach {
        Some(_) => Command::Attach(options),
        None => Command::Serve(options),
    })
}

fn detach(parser: &mut lexopt::Parser) -> Result<Command, OptionError> {
    let finish = |options| attach::finish_detach(options).map(Command::Detach);
    command(&DETACH, attach::DETACH, parser, attach::start_detach, finish)
}

fn list(parser: &mut lexopt::Parser) -> Result<Command, OptionError> {
    command(&LIST, list::OPTIONS, parser, list::start, |options| Ok(Command::List(options)))
}

fn ctl(parser: &mut lexopt::Parser) -> Result<Command, OptionError> {
    let start = |arguments| Ok(ctl::start(arguments));
    command(&CTL, ctl::OPTIONS, parser, start, |draft| {
        Ok(match ctl::finish(draft)? {
            ctl::Finished::Options(options) => Command::Ctl(options),
            ctl::Finished::Help(text) => Command::Print(text),
        })
    })
}

fn top(parser: &mut lexopt::Parser) -> Result<Command, OptionError> {
    let start = |arguments| Ok(top::start(arguments));
    command(&TOP, top::OPTIONS, parser, start, |draft| top::finish(draft).map(Command::Top))
}

fn upgrade(parser: &mut lexopt::Parser) -> Result<Command, OptionError> {
    let finish = |options| Ok(Command::Upgrade(options));
    command(&UPGRADE, upgrade::OPTIONS, parser, upgrade::start, finish)
}

fn check(parser: &mut lexopt::Parser) -> Result<Command, OptionError> {
    command(&CHECK, check::OPTIONS, parser, check::start, |options| Ok(Command::Check(options)))
}

fn journals(parser: &mut lexopt::Parser) -> Result<Command, OptionError> {
    let start = |arguments| Ok(journals::start(arguments));
    let finish = |options| journals::finish(options).map(Command::Journals);
    command(&JOURNALS, journals::OPTIONS, parser, start, finish)
}

fn probe(parser: &mut lexopt::Parser) -> Result<Command, OptionError> {
    command(&PROBE, probe::OPTIONS, parser, probe::start, |options| Ok(Command::Probe(options)))
}

/// Reads the rest of a command line of `ringmill`: what the positional arguments `start` with, then the options.
fn command<T>(
    command: &'static Subcommand,
    options: &'static [Field<T>],
    parser: &mut lexopt::Parser,
    start: impl FnOnce(Vec<OsString>) -> Result<T, OptionError>,
    finish: impl FnOnce(T) -> Result<Command, OptionError>,
) -> Result<Command, OptionError> {
    command_of(RINGMILL, Names::Exact, command, options, parser, start, finish)
}

/// The same, of a program by that name.
pub(crate) fn command_of<T>(
    program: &'static str,
    names: Names,
    command: &'static Subcommand,
    options: &'static [Field<T>],
    parser: &mut lexopt::Parser,
    start: impl FnOnce(Vec<OsString>) -> Result<T, OptionError>,
    finish: impl FnOnce(T) -> Result<Command, OptionError>,
) -> Result<Command, OptionError> {
    match scan(options, command.letters, names, parser)? {
        Scanned::Help => Ok(Command::Print(help::command(command, program))),
        Scanned::Version => Ok(Command::Print(help::version(program))),
        Scanned::Options(given, arguments) => {
            let mut draft = start(arguments)?;
            given.into_iter().try_for_each(|given| given.apply(&mut draft).map(drop))?;
            finish(draft)
        }
    }
}

/// Whether long options may be abbreviated. QSD's may. Ringmill's own may not, so that a new option never changes the
/// meaning of an old command line.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Names {
    Exact,
    Abbreviated,
}

/// An option on the command line before its value is parsed.
struct Given<T: 'static> {
    field: &'static Field<T>,
    /// As it was written, with its value.
    origin: String,
    value: Option<OsString>,
}

impl<T> Given<T> {
    /// Parses the value into `into`, or returns the help that was requested.
    fn apply(self, into: &mut T) -> Result<Option<String>, OptionError> {
        let field = self.field;
        let text = match (self.value, &field.kind) {
            (Some(path), Kind::Path(set)) => return origin(set(into, path.into()), &self.origin),
            (Some(value), _) => match value.into_string() {
                Ok(text) => Value::Text(text),
                Err(_) => {
                    let error = OptionError::new("the value is not valid UTF-8");
                    return origin(Err(error), &self.origin);
                }
            },
            (None, _) => Value::Null,
        };
        let at = Context::new(Dialect::Keyval);
        let (Kind::Structure { syntax, implied, shape, read, .. }, Value::Text(text)) =
            (&field.kind, &text)
        else {
            return origin(field.set(into, text, &at), &self.origin);
        };
        match structure(text, *syntax, *implied, shape) {
            Ok((parsed, at)) => match parsed.help {
                false => origin(read(into, parsed.object, &at), &self.origin),
                true => {
                    let tag = implied.and_then(|tag| table::look(&parsed.object, tag));
                    Ok(Some(help::structure(field.name, &shape(), tag.and_then(Value::as_text))))
                }
            },
            Err(error) => Err(masked::of(error, &self.origin)),
        }
    }
}

/// Adds the option as written to an error.
fn origin(set: table::Set, origin: &str) -> Result<Option<String>, OptionError> {
    set.map(|()| None).map_err(|error| masked::of(error, origin))
}

/// Parses the text of an object.
fn structure(
    text: &str,
    syntax: Syntax,
    implied: Option<&str>,
    shape: &fn() -> Shape,
) -> Result<(keyval::Parsed, Context), OptionError> {
    let (parsed, dialect) = match syntax {
        Syntax::KeyvalOrJson if text.starts_with('{') => {
            (keyval::Parsed { object: json::parse(text)?, help: false }, Dialect::Json)
        }
        Syntax::KeyvalOrJson => (keyval::parse(text, implied)?, Dialect::Keyval),
        Syntax::Opts => {
            let shape = shape();
            let known = |name: &str| shape.has(name);
            (keyval::parse_opts(text, implied, known)?, Dialect::Keyval)
        }
    };
    Ok((parsed, Context::new(dialect)))
}

enum Scanned<T: 'static> {
    Help,
    Version,
    Options(Vec<Given<T>>, Vec<OsString>),
}

/// An option of every command.
const HELP: &str = "help";
const VERSION: &str = "version";

/// Splits a command line into options and other arguments. Help and version apply at any position, before any value is
/// parsed. An unknown option before them is an error.
fn scan<T>(
    table: &'static [Field<T>],
    letters: &[(char, &'static str)],
    names: Names,
    parser: &mut lexopt::Parser,
) -> Result<Scanned<T>, OptionError> {
    let mut given = Vec::new();
    let mut arguments = Vec::new();
    while let Some(argument) = parser.next().map_err(unexpected)? {
        let mut is_letter = false;
        let name = match argument {
            lexopt::Arg::Value(value) => {
                arguments.push(value);
                continue;
            }
            lexopt::Arg::Short('h') => return Ok(Scanned::Help),
            lexopt::Arg::Short('V') => return Ok(Scanned::Version),
            lexopt::Arg::Short(letter) => match short(letter, letters, table) {
                Some(name) => {
                    is_letter = true;
                    name.to_owned()
                }
                None => {
                    return Err(OptionError::new(format!("invalid option -- '{letter}'"))
                        .hint(known_options(table)));
                }
            },
            lexopt::Arg::Long(name) => name.to_owned(),
        };
        let written = name;
        let takes_value = |name: &str| {
            let field = table.iter().find(|field| field.name == name);
            field.is_some_and(|field| !matches!(field.kind, Kind::Flag(_)))
        };
        // What follows the letter of a flag is another letter.
        let attached = match is_letter && !takes_value(&written) {
            true => None,
            false => parser.optional_value(),
        };
        let name = resolve(table, names, &written, attached.as_deref())?;
        let field = table.iter().find(|field| field.name == name);
        let takes_value = takes_value(name);
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

/// The option for a letter: one of the command's `letters`, or as in QSD.
fn short<T>(
    letter: char,
    letters: &[(char, &'static str)],
    table: &[Field<T>],
) -> Option<&'static str> {
    let own = letters.iter().find(|(known, _)| *known == letter).map(|(_, name)| *name);
    let name = own.or((letter == 'T').then_some("trace"))?;
    table.iter().map(|field| field.name).find(|known| *known == name)
}

/// The full name of the option that `name` stands for.
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
            let value =
                attached.map(|value| format!("={}", masked::masked(&value.to_string_lossy())));
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

pub(crate) fn unexpected(error: lexopt::Error) -> OptionError {
    OptionError::new(error.to_string())
}

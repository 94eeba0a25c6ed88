//! Help texts, made from the tables.

use crate::cli::COMMANDS;
use crate::shape::{self, Member, Row, Union};
use crate::table::{self, Field, Need};
use crate::{blockdev, chardev, export, nbd_server, object, probe, serve, storage_daemon};

/// The width of a terminal.
const WIDTH: usize = 80;
/// Where descriptions begin.
const COLUMN: usize = 32;

/// `ringmill --version`.
pub(crate) fn version(program: &str) -> String {
    let version = env!("CARGO_PKG_VERSION");
    match program {
        "ringmill" => format!("ringmill {version}"),
        // Scripts look for the program's name in the first word.
        other => format!("{other} (ringmill {version})"),
    }
}

/// `ringmill --help`.
pub(crate) fn ringmill() -> String {
    let mut text = Text::new("Usage: ringmill <command> [options]");
    text.line("Serves virtual machines' disks.");
    text.heading("Commands:");
    for (name, help) in COMMANDS {
        text.entry(name, help);
    }
    text.heading("Options:");
    text.common();
    text.line("");
    text.line("'ringmill <command> --help' tells more of a command. Called by the name");
    text.line("qemu-storage-daemon, the program is 'ringmill storage-daemon'.");
    text.done()
}

/// `ringmill serve --help`.
pub(crate) fn serve() -> String {
    let mut text = Text::new("Usage: ringmill serve <image> [options]");
    text.line("Serves a disk image, a file or a block device, over vhost-user-blk.");
    text.heading("Options:");
    text.options(serve::OPTIONS);
    text.common();
    text.done()
}

/// `ringmill probe --help`.
pub(crate) fn probe() -> String {
    let mut text = Text::new("Usage: ringmill probe [<file>]");
    text.line("Shows what this machine offers: io_uring, limits and, of a file or block");
    text.line("device, the alignment of direct I/O; and what ringmill would choose, and why.");
    text.heading("Options:");
    text.options(probe::OPTIONS);
    text.common();
    text.done()
}

/// `ringmill storage-daemon --help`.
pub(crate) fn storage_daemon(program: &str) -> String {
    let command = if program == "ringmill" { "ringmill storage-daemon" } else { program };
    let mut text = Text::new(&format!("Usage: {command} [options]"));
    text.line("Serves block nodes, by the options of qemu-storage-daemon. They are carried out");
    text.line("in the order in which they are given; what a name refers to comes before it.");
    text.heading("Options:");
    text.options(storage_daemon::OPTIONS);
    text.common();
    text.line("");
    text.line("Values are written key=value,... with dotted keys (cache.direct=on,");
    text.line("iothread.0=io0) and commas doubled, or as JSON. '--blockdev <driver>,help' tells");
    text.line("of all options of a driver, and so on for --object, --export and --chardev.");
    for (heading, options) in [
        ("Drivers of --blockdev:", blockdev::options()),
        ("Types of --object:", object::options()),
        ("Types of --export:", export::options()),
        ("Backends of --chardev:", chardev::options()),
    ] {
        text.heading(heading);
        text.variants(&options);
    }
    text.done()
}

/// `--nbd-server help`.
pub(crate) fn nbd_server() -> String {
    members("nbd-server", &nbd_server::members())
}

/// `--monitor help`.
pub(crate) fn monitor() -> String {
    members("monitor", &chardev::monitor_members())
}

/// `--blockdev help`, `--blockdev <driver>,help`.
pub(crate) fn blockdev(driver: Option<&str>) -> String {
    union("Block drivers:", &blockdev::options(), driver)
}

/// `--object help`, `--object <type>,help`.
pub(crate) fn object(kind: Option<&str>) -> String {
    union("List of user creatable objects:", &object::options(), kind)
}

/// `--export help`, `--export <type>,help`.
pub(crate) fn export(kind: Option<&str>) -> String {
    union("Export types:", &export::options(), kind)
}

/// `--chardev help`, `--chardev <backend>,help`.
pub(crate) fn chardev(kind: Option<&str>) -> String {
    union("Available chardev backend types:", &chardev::options(), kind)
}

/// The members of an option's value.
fn members(option: &str, members: &[Member]) -> String {
    let mut text = Text::default();
    text.line(&format!("{option} options:"));
    text.rows(&shape::rows(members));
    text.done()
}

/// What there is, or one of it in full.
fn union(heading: &str, union: &Union, wanted: Option<&str>) -> String {
    let mut text = Text::default();
    match union.variants.iter().find(|variant| Some(variant.name) == wanted) {
        Some(variant) => {
            text.line(&format!("{} options:", variant.name));
            text.rows(&shape::rows(&union.common));
            text.rows(&shape::rows(&variant.members));
        }
        None => {
            text.line(heading);
            text.variants(union);
        }
    }
    text.done()
}

/// `--trace help`: the names alone, one per line, as scripts expect them of QSD.
pub(crate) fn trace() -> String {
    let mut text = Text::default();
    event_loop::trace::EVENTS.iter().for_each(|event| text.line(event.name));
    text.done()
}

/// A text under construction.
#[derive(Default)]
struct Text(String);

impl Text {
    fn new(usage: &str) -> Self {
        let mut text = Self::default();
        text.line(usage);
        text
    }

    fn done(self) -> String {
        self.0.trim_end().to_owned()
    }

    fn line(&mut self, line: &str) {
        self.0.push_str(line);
        self.0.push('\n');
    }

    fn heading(&mut self, heading: &str) {
        self.line("");
        self.line(heading);
    }

    fn common(&mut self) {
        self.entry("-h, --help", "print this help and exit");
        self.entry("-V, --version", "print the version and exit");
    }

    /// What a tag may say.
    fn variants(&mut self, union: &Union) {
        for variant in &union.variants {
            self.entry(variant.name, variant.help);
        }
    }

    /// Members, as `name=value`.
    fn rows(&mut self, rows: &[Row]) {
        for row in rows {
            self.entry(&format!("{}={}", row.name, row.value), &description(row));
        }
    }

    /// Options of a command line, as `--name value`.
    fn options<T>(&mut self, fields: &[Field<T>]) {
        for row in shape::rows(&table::members(fields)) {
            let usage = format!("--{} {}", row.name, row.value);
            self.entry(usage.trim_end(), &description(&row));
        }
    }

    /// A name and its description, the latter wrapped.
    fn entry(&mut self, name: &str, description: &str) {
        let mut line = format!("  {name}");
        if line.len() + 2 > COLUMN {
            self.line(&line);
            line.clear();
        }
        for word in description.split_whitespace() {
            if line.chars().count() + 1 + word.chars().count() > WIDTH {
                self.line(&line);
                line.clear();
            }
            let column = line.chars().count();
            match column {
                column if column < COLUMN => line.push_str(&" ".repeat(COLUMN - column)),
                _ => line.push(' '),
            }
            line.push_str(word);
        }
        self.line(&line);
    }
}

fn description(row: &Row) -> String {
    match row.need {
        Need::Required => format!("{} (required)", row.help),
        Need::Default(value) => format!("{} (default: {value})", row.help),
        Need::Optional("") => row.help.clone(),
        Need::Optional(what) => format!("{} (default: {what})", row.help),
    }
}

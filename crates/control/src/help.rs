//! Help texts, made from the tables.

use crate::blockdev::{self, DRIVERS};
use crate::cli::COMMANDS;
use crate::table::{Field, Need, Row};
use crate::{chardev, export, nbd_server, object, probe, serve, storage_daemon};

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
    text.line("iothread.0=io0) and commas doubled, or as JSON. 'help' for a value, or");
    text.line("'<type>,help', tells more of --blockdev, --chardev, --export and --object.");
    text.objects();
    text.drivers(None);
    text.exports();
    text.chardevs();
    text.heading("--nbd-server options:");
    text.rows(&nbd_server::rows());
    text.done()
}

/// `--nbd-server help`.
pub(crate) fn nbd_server() -> String {
    let mut text = Text::default();
    text.line("--nbd-server options:");
    text.rows(&nbd_server::rows());
    text.done()
}

/// `--blockdev help`, `--blockdev <driver>,help`.
pub(crate) fn blockdev(driver: Option<&str>) -> String {
    let mut text = Text::default();
    text.drivers(driver);
    text.done().trim_start().to_owned()
}

/// `--object help`, `--object <type>,help`.
pub(crate) fn object(kind: Option<&str>) -> String {
    let mut text = Text::default();
    match object::TYPES.iter().find(|known| Some(known.name) == kind) {
        Some(kind) => {
            text.line(&format!("{} options:", kind.name));
            text.rows(&kind.table.rows());
        }
        None => {
            text.line("List of user creatable objects:");
            for kind in object::TYPES {
                text.entry(kind.name, kind.help);
            }
        }
    }
    text.done()
}

/// `--export help`, `--export <type>,help`.
pub(crate) fn export(kind: Option<&str>) -> String {
    let mut text = Text::default();
    match export::TYPES.iter().find(|known| Some(known.name) == kind) {
        Some(kind) => {
            text.line(&format!("{} options:", kind.name));
            text.rows(&export::rows(kind));
        }
        None => {
            text.line("List of export types:");
            for kind in export::TYPES {
                text.entry(kind.name, kind.help);
            }
        }
    }
    text.done()
}

/// `--chardev help`, `--chardev <backend>,help`.
pub(crate) fn chardev(kind: Option<&str>) -> String {
    let mut text = Text::default();
    match chardev::TYPES.iter().find(|(name, ..)| Some(*name) == kind) {
        Some((name, _, fields)) => {
            text.line(&format!("{name} options:"));
            text.rows(&chardev::rows(fields));
        }
        None => {
            text.line("Available chardev backend types:");
            for (name, help, _) in chardev::TYPES {
                text.entry(name, help);
            }
        }
    }
    text.done()
}

/// `--monitor help`.
pub(crate) fn monitor() -> String {
    let mut text = Text::default();
    text.line("monitor options:");
    text.rows(&chardev::monitor_rows());
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

    fn objects(&mut self) {
        for kind in object::TYPES {
            self.heading(&format!("--object {}: {}", kind.name, kind.help));
            self.rows(&kind.table.rows());
        }
    }

    fn exports(&mut self) {
        for kind in export::TYPES {
            self.heading(&format!("--export {}: {}", kind.name, kind.help));
            self.rows(&export::rows(kind));
        }
    }

    fn chardevs(&mut self) {
        for (name, help, fields) in chardev::TYPES {
            self.heading(&format!("--chardev {name}: {help}"));
            self.rows(&chardev::rows(fields));
        }
        self.heading("--monitor options:");
        self.rows(&chardev::monitor_rows());
    }

    /// One driver in full, or all: what they share first, then what each adds.
    fn drivers(&mut self, driver: Option<&str>) {
        if let Some(driver) = DRIVERS.iter().find(|known| Some(known.name) == driver) {
            self.line(&format!("{} options:", driver.name));
            self.rows(&blockdev::rows(driver));
            return;
        }
        self.heading("--blockdev drivers:");
        for driver in DRIVERS {
            self.entry(driver.name, driver.help);
        }
        self.heading("--blockdev options of all drivers:");
        self.rows(&blockdev::common_rows());
        let mut told: Vec<&str> = Vec::new();
        for driver in DRIVERS {
            if told.contains(&driver.name) {
                continue;
            }
            let rows = driver.own.rows();
            let same = DRIVERS.iter().filter(|other| other.own.rows() == rows);
            let same: Vec<&str> = same.map(|driver| driver.name).collect();
            self.heading(&format!("--blockdev options of {}:", same.join(" and ")));
            self.rows(&rows);
            told.extend(same);
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
        for row in fields.iter().flat_map(Field::rows) {
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
        Need::Optional(what) => format!("{} (default: {what})", row.help),
    }
}

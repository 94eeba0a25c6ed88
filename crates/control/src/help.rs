//! Help texts, made from the tables.

use crate::QSD_RELEASE;
use crate::cli::{COMMANDS, QEMU_IMG, Subcommand};
use crate::qmp::{QmpCommand, command};
use crate::reference::GENERATED;
use crate::shape::{self, Row, Shape, Union};
use crate::table::Need;

/// The width of a terminal.
const WIDTH: usize = 80;
/// Where descriptions begin.
const COLUMN: usize = 32;

/// `ringmill --version`.
pub(crate) fn version(program: &str) -> String {
    let version = env!("CARGO_PKG_VERSION");
    let [major, minor, micro] = QSD_RELEASE;
    let release = format!("{major}.{minor}.{micro}");
    match program {
        "ringmill" => format!("ringmill {version} (interface of qemu-storage-daemon {release})"),
        // Like QSD's line, from which scripts read the release.
        other => format!("{other} version {release} (ringmill {version})"),
    }
}

/// `ringmill --help`.
pub(crate) fn ringmill() -> String {
    let mut text = Text::new("Usage: ringmill <command> [options]");
    text.line("Serves virtual machines' disks.");
    text.heading("Commands:");
    for command in COMMANDS {
        text.entry(command.name, command.help);
    }
    text.heading("Options:");
    text.common();
    let generated: Vec<&str> = GENERATED.iter().map(|known| known.name).collect();
    text.entry("--generate <what>", &format!("print a generated text: {}", generated.join(", ")));
    text.line("");
    text.line("'ringmill <command> --help' or 'ringmill help <command>' describes a command.");
    text.line("Called by the name qemu-storage-daemon, it is 'ringmill storage-daemon'; by the");
    text.line("name qemu-img, 'ringmill img'.");
    text.done()
}

/// `--help` of a command.
pub(crate) fn command(command: &Subcommand, program: &str) -> String {
    let Subcommand { name, usage, about, options, commands, .. } = command;
    let called = match program {
        "ringmill" => format!("ringmill {name}"),
        // The program is `img`.
        QEMU_IMG => name.replacen("img", QEMU_IMG, 1),
        _ => program.to_owned(),
    };
    let mut text = Text::new(&format!("Usage: {called} {usage}"));
    text.paragraph(about);
    if !commands.is_empty() {
        text.heading("Commands:");
        for command in *commands {
            text.entry(last_word(command.name), command.help);
        }
    }
    text.heading("Options:");
    let options = options();
    for row in command.rows() {
        let usage = format!("--{} {}", row.name, row.value);
        text.entry(usage.trim_end(), &description(&row));
    }
    text.common();
    if options.iter().any(|option| option.structure.is_some()) {
        text.line("");
        text.paragraph(SYNTAX);
    }
    for option in options {
        if let Some(Shape::Union(union)) = option.structure {
            let name = option.member.name;
            text.heading(&format!(
                "--{name}, of which '--{name} <{}>,help' tells more:",
                union.tag
            ));
            text.variants(&union);
        }
    }
    text.done()
}

/// The word by which a command within another one is called.
pub(crate) fn last_word(name: &str) -> &str {
    name.rsplit(' ').next().unwrap_or(name)
}

/// How the values of options with a structure are written.
const SYNTAX: &str = "Values are written key=value,... with dotted keys (cache.direct=on, \
                      iothread.0=io0) and commas doubled, or as JSON.";

/// `--blockdev help`, `--blockdev <driver>,help` and so on: `option` without its dashes, what its value
/// may be and, where that goes by a tag, what was said for it.
pub(crate) fn structure(option: &str, shape: &Shape, tag: Option<&str>) -> String {
    let mut text = Text::default();
    match shape {
        Shape::Union(union) => match union.variants.iter().find(|known| Some(known.name) == tag) {
            Some(variant) => {
                text.line(&format!("{} options:", variant.name));
                text.rows(&shape::rows(&union.common));
                text.rows(&shape::rows(&variant.members));
            }
            None => {
                text.line(match option {
                    "blockdev" => "Block drivers:",
                    "export" => "Export types:",
                    // QSD's headings, which scripts skip.
                    "chardev" => "Available chardev backend types:",
                    _ => "List of user creatable objects:",
                });
                text.variants(union);
            }
        },
        Shape::Object(members) => {
            text.line(&format!("{option} options:"));
            text.rows(&shape::rows(members));
        }
        _ => {}
    }
    text.done()
}

/// Returns the text of `ctl SOCKET COMMAND help`. `tag`: the value that was given for the
/// arguments' tag, if any.
pub(crate) fn qmp_command(row: &dyn QmpCommand, shape: &Shape, tag: Option<&str>) -> String {
    let mut text = Text::default();
    text.paragraph(&format!("{}: {}.", row.name(), row.help()));
    if matches!(shape, Shape::Object(members) if members.is_empty()) {
        text.line("The command has no arguments.");
        return text.done();
    }
    let option = row.option().trim_start_matches("--");
    let arguments = if option.is_empty() { row.name() } else { option };
    text.line("");
    text.line(&structure(arguments, shape, tag));
    if let Shape::Union(union) = shape
        && !union.variants.iter().any(|known| Some(known.name) == tag)
    {
        text.line("");
        text.paragraph(&format!(
            "'ringmill ctl <socket> {} <{}> help' lists the options of one.",
            row.name(),
            union.tag
        ));
    }
    text.done()
}

/// Returns a list of commands of a monitor, with a description of each known command.
pub(crate) fn qmp_commands<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let mut text = Text::default();
    for name in names {
        text.entry(name, command::find(name).map_or("", |command| command.help()));
    }
    text.line("");
    text.paragraph("'ringmill ctl <socket> <command> help' lists a command's arguments.");
    text.done()
}

/// `--trace help`: the names alone, one per line, as scripts expect them of QSD.
pub(crate) fn trace() -> String {
    let mut text = Text::default();
    trace::events().iter().for_each(|event| text.line(event.name));
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

    /// Text, wrapped.
    fn paragraph(&mut self, text: &str) {
        let mut line = String::new();
        for word in text.split_whitespace() {
            if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > WIDTH {
                self.line(&line);
                line.clear();
            }
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
        self.line(&line);
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
        self.line(line.trim_end());
    }
}

fn description(row: &Row) -> String {
    match row.need {
        Need::Required => format!("{} ({})", row.help, row.required().replace('`', "")),
        Need::Default(value) => format!("{} (default: {value})", row.help),
        Need::Optional("") => row.help.clone(),
        Need::Optional(what) => format!("{} (default: {what})", row.help),
    }
}

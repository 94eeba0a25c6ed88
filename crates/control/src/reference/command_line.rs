//! The reference of command lines.

use super::document::{Document, Written, sentence};
use crate::cli::{COMMANDS, CliOption, STORAGE_DAEMON, Subcommand};
use crate::shape::{self, Shape, Union};
use crate::trace;

/// The program and all its commands, except the one with a page of its own.
pub(super) fn ringmill() -> Document {
    let mut page = Document::default();
    page.text(
        "Serves virtual machines' disks. Called by the name qemu-storage-daemon, the program is \
         `ringmill storage-daemon`; by the name qemu-img, `ringmill img`.",
    );
    page.terms([
        ("-h, --help".to_owned(), "print help and exit; of a command, after it".to_owned()),
        ("-V, --version".to_owned(), "print the version and exit".to_owned()),
        ("--generate <what>".to_owned(), "print a generated text".to_owned()),
    ]);
    page.text("What `--generate` prints:");
    let generated = super::GENERATED.iter();
    page.terms(generated.map(|known| (known.name.to_owned(), known.help.to_owned())));
    for command in COMMANDS {
        page.title(2, &format!("ringmill {}", command.name));
        if command.name == STORAGE_DAEMON.name {
            page.text("Takes the options of qemu-storage-daemon: see ringmill-storage-daemon(1).");
        } else {
            page.append(one(command), 1);
        }
        for inner in command.commands {
            page.title(3, &format!("ringmill {}", inner.name));
            page.append(one(inner), 2);
        }
    }
    page
}

/// `ringmill storage-daemon`.
pub(super) fn storage_daemon() -> Document {
    let mut page = one(&STORAGE_DAEMON);
    page.title(2, "How values are written");
    page.text(
        "Options with several members take them as `key=value` pairs with commas between; a comma in \
         a value is written twice. A dot leads into a member, `cache.direct=on`, a number into a \
         list, `iothread.0=io0,iothread.1=io1`. The first pair may leave out its key where the option \
         says so: `--blockdev file` is `--blockdev driver=file`. Text that begins with a brace is \
         JSON with the same names, except for `--chardev`, in which a name alone stands for on, and \
         with no in front for off: `server,nowait`.",
    );
    page.terms(
        [
            ("on|off", "also `yes`, `true`, `y` and `no`, `false`, `n`; in JSON true and false"),
            ("<int>", "decimal, hexadecimal after `0x`, octal after `0`"),
            (
                "<size>",
                "bytes; with suffix K, M, G, T, P or E times 1024 to the power of 1 to 6, also of a \
                 fraction: `1.5G`; in JSON a number of bytes",
            ),
            ("<id>, <node-name>", "a letter, then letters, digits, `-`, `.` and `_`"),
        ]
        .map(|(name, text)| (name.to_owned(), text.to_owned())),
    );
    for CliOption { member, structure, .. } in (STORAGE_DAEMON.options)() {
        match structure {
            Some(Shape::Union(union)) => self::union(&mut page, member.name, &union),
            Some(Shape::Object(members)) => {
                page.title(2, &format!("--{}", member.name));
                page.text(&sentence(member.help));
                page.rows(shape::rows(&members), Written::Pairs);
            }
            _ => {}
        }
    }
    page.title(2, "--trace");
    page.text(&sentence(trace::HELP));
    page.rows(shape::rows(&trace::members()), Written::Pairs);
    page
}

/// An option whose members depend on a tag.
fn union(page: &mut Document, option: &str, union: &Union) {
    page.title(2, &format!("--{option}"));
    page.text(&format!("`{}`, {}, is one of:", union.tag, union.help));
    let variants = union.variants.iter();
    page.terms(variants.map(|known| (known.name.to_owned(), known.help.to_owned())));
    if !union.common.is_empty() {
        page.text("All of them have:");
        page.rows(shape::rows(&union.common), Written::Pairs);
    }
    for variant in &union.variants {
        page.title(3, &format!("--{option} {}", variant.name));
        page.text(&sentence(variant.help));
        page.rows(shape::rows(&variant.members), Written::Pairs);
        page.code(&format!("--{option} {}", variant.example));
    }
}

/// A command: description, options, examples.
fn one(command: &Subcommand) -> Document {
    let mut page = Document::default();
    page.code(&format!("ringmill {} {}", command.name, command.usage));
    page.text(command.about);
    if !command.commands.is_empty() {
        let commands = command.commands.iter();
        page.terms(commands.map(|inner| (inner.name.to_owned(), inner.help.to_owned())));
    }
    page.rows(command.rows(), Written::Options);
    for (line, what) in command.examples {
        page.text(&format!("{}:", sentence(what).trim_end_matches('.')));
        page.code(&folded(line));
    }
    page
}

/// Splits a long command line into a line per option.
fn folded(line: &str) -> String {
    if line.len() <= 80 { line.to_owned() } else { line.replace(" --", " \\\n    --") }
}

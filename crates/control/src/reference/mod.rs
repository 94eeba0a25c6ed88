//! The reference, man pages and shell completions: what `ringmill --generate` prints, made of the tables
//! that options and commands are read by.

mod command_line;
mod document;
mod markdown;
mod qmp;
mod roff;

use document::Document;

/// Something that can be printed: a row of the table.
pub(crate) struct Generated {
    /// What `--generate` calls it.
    pub(crate) name: &'static str,
    /// What it is, and where it goes.
    pub(crate) help: &'static str,
    /// Makes it.
    pub(crate) text: fn() -> String,
}

/// All of it.
pub(crate) static GENERATED: &[Generated] = &[
    Generated {
        name: "reference",
        help: "all commands, options, QMP commands and events, in Markdown",
        text: || markdown::write(&reference()),
    },
    Generated {
        name: "man-ringmill",
        help: "the man page ringmill(1)",
        text: || roff::write(&RINGMILL, &command_line::ringmill()),
    },
    Generated {
        name: "man-storage-daemon",
        help: "the man page ringmill-storage-daemon(1)",
        text: || roff::write(&STORAGE_DAEMON, &command_line::storage_daemon()),
    },
    Generated {
        name: "man-qmp",
        help: "the man page ringmill-qmp(7)",
        text: || roff::write(&QMP, &qmp::all()),
    },
    Generated {
        name: "complete-bash",
        help: "completion of command lines, for bash",
        text: || include_str!("shells/bash").to_owned(),
    },
    Generated {
        name: "complete-zsh",
        help: "the same, for zsh",
        text: || include_str!("shells/zsh").to_owned(),
    },
    Generated {
        name: "complete-fish",
        help: "the same, for fish",
        text: || include_str!("shells/fish").to_owned(),
    },
];

static RINGMILL: roff::Page = roff::Page {
    name: "ringmill",
    section: 1,
    about: "serve virtual machines' disks",
    synopsis: "ringmill <command> [options]",
    see_also: "ringmill-storage-daemon(1), ringmill-qmp(7), qemu-img(1), qemu-system(1)",
};

static STORAGE_DAEMON: roff::Page = roff::Page {
    name: "ringmill-storage-daemon",
    section: 1,
    about: "serve block nodes, by the options of qemu-storage-daemon",
    synopsis: "ringmill storage-daemon [options]",
    see_also: "ringmill(1), ringmill-qmp(7), qemu-storage-daemon(1), qemu-img(1)",
};

static QMP: roff::Page = roff::Page {
    name: "ringmill-qmp",
    section: 7,
    about: "commands and events of ringmill's monitors",
    synopsis: "",
    see_also: "ringmill(1), ringmill-storage-daemon(1), qemu-storage-daemon-qmp-ref(7)",
};

/// `docs/REFERENCE.md`.
fn reference() -> Document {
    let mut all = Document::default();
    all.title(1, "Reference");
    all.text(
        "Every command, option, QMP command and event. `ringmill --generate reference` prints this page \
         from the tables that the parsers use. `man-ringmill`, `man-storage-daemon` and `man-qmp` are the \
         same as man pages; `complete-bash`, `complete-zsh` and `complete-fish` complete command lines. \
         A test fails if this page is out of date.",
    );
    all.contents();
    all.title(2, "The program: ringmill");
    all.append(command_line::ringmill(), 1);
    all.title(2, "The storage daemon: ringmill storage-daemon");
    all.append(command_line::storage_daemon(), 1);
    all.title(2, "QMP");
    all.append(qmp::all(), 1);
    all
}

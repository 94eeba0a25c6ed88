//! `img commit`.

use super::common::{Cache, Common, CommonDraft, cache, one};
use super::{ImgCommand, read_with};
use crate::cli::{Subcommand, erased};
use crate::table::{Field, Row, put};

/// Options of `img commit`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CommitOptions {
    /// Options that several commands have.
    pub common: Common,
    /// The image.
    pub image: String,
    /// `-b`: the image of the chain that gets the data. `None`: the one right behind.
    pub base: Option<String>,
    /// `-t`.
    pub cache: Cache,
}

impl CommonDraft for CommitOptions {
    fn common(&mut self) -> &mut Common {
        &mut self.common
    }
}

pub(super) static COMMIT: Subcommand = Subcommand {
    name: "img commit",
    usage: "[options] <image>",
    help: "write what an overlay has into the image behind",
    about: "Writes what an overlay has stored into its backing file, which is made longer if necessary. The overlay keeps what it \
            has, as with -d of qemu-img: delete it, or go on with it. Other overlays of the backing file become useless.",
    options: || erased(OPTIONS),
    letters: &[
        ('b', "base"),
        ('d', "drop"),
        ('f', "format"),
        ('t', "cache"),
        ('p', "progress"),
        ('q', "quiet"),
    ],
    commands: &[],
    examples: &[("ringmill img commit vm1.qcow2", "the base gets what the overlay has")],
    read: |program, parser| {
        let start = |arguments| {
            let image = one(arguments, "one image file name")?;
            Ok(CommitOptions { image, ..CommitOptions::default() })
        };
        read_with(program, &COMMIT, OPTIONS, parser, start, |options| {
            Ok(ImgCommand::Commit(options))
        })
    },
};

static OPTIONS: &[Field<CommitOptions>] = &[
    CommitOptions::QUIET,
    CommitOptions::PROGRESS,
    CommitOptions::FORMAT,
    CommitOptions::IMAGE_OPTS,
    cache!(
        Row::default("cache", "writeback", "how the backing file uses the host's page cache"),
        cache
    ),
    Row::optional("base", "the one right behind", "the image of the chain that gets the data")
        .text("<image>", |to, image| put(&mut to.base, Some(image))),
    Row::optional("drop", "", "keep the data in the overlay; always so").flag(|_| {}),
    CommitOptions::OBJECT,
];

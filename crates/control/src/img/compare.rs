//! `img compare`.

use super::common::{Cache, Common, CommonDraft, cache, exactly};
use super::{ImgCommand, read_with};
use crate::cli::{Subcommand, erased};
use crate::table::{Field, Row, put};

/// Options of `img compare`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CompareOptions {
    /// Options that several commands have. `format` is that of the first image.
    pub common: Common,
    /// The images.
    pub images: [String; 2],
    /// `-F`: the format of the second image.
    pub other_format: Option<String>,
    /// `-s`.
    pub strict: bool,
    /// `-T`.
    pub cache: Cache,
}

impl CommonDraft for CompareOptions {
    fn common(&mut self) -> &mut Common {
        &mut self.common
    }
}

pub(super) static COMPARE: Subcommand = Subcommand {
    name: "img compare",
    usage: "[options] <image> <image>",
    help: "compare the contents of two images",
    about: "Compares the contents of two images, whatever their formats. Exit code: 0 if they are the same, 1 if they differ, 2 \
            if an image cannot be opened, 3 or 4 if it cannot be read. A longer image is the same if its rest reads as zeroes.",
    options: || erased(OPTIONS),
    letters: &[
        ('f', "a-format"),
        ('F', "b-format"),
        ('s', "strict"),
        ('p', "progress"),
        ('q', "quiet"),
        ('T', "cache"),
        ('U', "force-share"),
    ],
    commands: &[],
    examples: &[("ringmill img compare disk.raw disk.qcow2", "whether a copy is complete")],
    read: |program, parser| {
        let start = |arguments| {
            let images = exactly(arguments, "two image file names")?;
            Ok(CompareOptions { images, ..CompareOptions::default() })
        };
        read_with(program, &COMPARE, OPTIONS, parser, start, |options| {
            Ok(ImgCommand::Compare(options))
        })
    },
};

static OPTIONS: &[Field<CompareOptions>] = &[
    CompareOptions::QUIET,
    CompareOptions::PROGRESS,
    Row::optional("a-format", "detected by the header", "format of the first image")
        .text("<format>", |to, format| put(&mut to.common.format, Some(format))),
    Row::optional("b-format", "detected by the header", "format of the second image")
        .text("<format>", |to, format| put(&mut to.other_format, Some(format))),
    CompareOptions::IMAGE_OPTS,
    Row::optional("strict", "", "the sizes have to be the same, too, and what is stored")
        .flag(|to| to.strict = true),
    cache!(Row::default("cache", "writeback", "how the images use the host's page cache"), cache),
    CompareOptions::FORCE_SHARE,
    CompareOptions::OBJECT,
];

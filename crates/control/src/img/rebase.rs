//! `img rebase`.

use super::common::{Cache, Common, CommonDraft, cache, one};
use super::{ImgCommand, read_with};
use crate::cli::{Subcommand, erased};
use crate::error::OptionError;
use crate::table::{Field, Row, put};

/// Options of `img rebase`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RebaseOptions {
    /// Options that several commands have.
    pub common: Common,
    /// The image.
    pub image: String,
    /// `-b`. Empty: no image. `None`, of `-u` only: the same.
    pub backing: Option<String>,
    /// `-F`.
    pub backing_format: Option<String>,
    /// `-u`: only the header changes.
    pub is_unsafe: bool,
    /// `-t`.
    pub cache: Cache,
    /// `-T`.
    pub backing_cache: Cache,
}

impl CommonDraft for RebaseOptions {
    fn common(&mut self) -> &mut Common {
        &mut self.common
    }
}

pub(super) static REBASE: Subcommand = Subcommand {
    name: "img rebase",
    usage: "[options] <image>",
    help: "give an overlay another backing file",
    about: "Gives an overlay another backing file, or none. Its contents stay the same: what the new file lacks goes into the \
            overlay first. With -u, only the name in the header changes.",
    options: || erased(OPTIONS),
    letters: &[
        ('b', "backing"),
        ('F', "backing-format"),
        ('u', "backing-unsafe"),
        ('f', "format"),
        ('t', "cache"),
        ('T', "backing-cache"),
        ('p', "progress"),
        ('q', "quiet"),
    ],
    commands: &[],
    examples: &[
        ("ringmill img rebase -b base2.qcow2 -F qcow2 vm1.qcow2", "another base"),
        ("ringmill img rebase -u -b moved/base.qcow2 -F qcow2 vm1.qcow2", "the base was moved"),
    ],
    read: |program, parser| {
        let start = |arguments| {
            let image = one(arguments, "one image file name")?;
            Ok(RebaseOptions { image, ..RebaseOptions::default() })
        };
        read_with(program, &REBASE, OPTIONS, parser, start, |options| {
            match options.backing.is_none() && !options.is_unsafe {
                true => {
                    Err(OptionError::new("Must specify backing file (-b) or use unsafe mode (-u)"))
                }
                false => Ok(ImgCommand::Rebase(options)),
            }
        })
    },
};

static OPTIONS: &[Field<RebaseOptions>] = &[
    RebaseOptions::QUIET,
    RebaseOptions::PROGRESS,
    Row::optional("backing", "none, with -u", "the new backing file; empty for none")
        .text("<image>", |to, image| put(&mut to.backing, Some(image))),
    Row::optional("backing-format", "", "the format of that file")
        .text("<format>", |to, format| put(&mut to.backing_format, Some(format))),
    Row::optional("backing-unsafe", "", "change the header alone, and open neither file")
        .flag(|to| to.is_unsafe = true),
    RebaseOptions::FORMAT,
    RebaseOptions::IMAGE_OPTS,
    cache!(Row::default("cache", "writeback", "how the image uses the host's page cache"), cache),
    cache!(
        Row::default("backing-cache", "writeback", "the same of both backing files"),
        backing_cache
    ),
    RebaseOptions::OBJECT,
];

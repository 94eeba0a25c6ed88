//! `img measure`.

use std::ffi::OsString;

use super::common::{Common, CommonDraft, texts};
use super::{ImgCommand, read_with, size_argument};
use crate::cli::{Subcommand, erased};
use crate::error::OptionError;
use crate::table::{Field, Row, put};

/// Options of `img measure`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MeasureOptions {
    /// Options that several commands have. `format` is that of the image.
    pub common: Common,
    /// The image.
    pub image: Option<String>,
    /// `--size`.
    pub size: Option<u64>,
    /// `-O`.
    pub target_format: Option<String>,
    /// `-o`, several times.
    pub options: Vec<String>,
}

impl CommonDraft for MeasureOptions {
    fn common(&mut self) -> &mut Common {
        &mut self.common
    }
}

pub(super) static MEASURE: Subcommand = Subcommand {
    name: "img measure",
    usage: "[options] <image>",
    help: "tell how long the file of a new image will be",
    about: "Tells how many bytes a new image takes, with the contents of <image> or, with --size, without contents; and how many \
            once all of its disk is written.",
    options: || erased(OPTIONS),
    letters: &[
        ('f', "format"),
        ('O', "target-format"),
        ('o', "options"),
        ('s', "size"),
        ('U', "force-share"),
    ],
    commands: &[],
    examples: &[("ringmill img measure -O qcow2 disk.raw", "the size of a device for a copy")],
    read: |program, parser| {
        read_with(program, &MEASURE, OPTIONS, parser, start, |options| {
            match (&options.image, options.size) {
                (None, None) => {
                    Err(OptionError::new("Either --size N or one filename must be specified"))
                }
                (Some(_), Some(_)) => {
                    Err(OptionError::new("--size N cannot be used together with a filename"))
                }
                _ => Ok(ImgCommand::Measure(options)),
            }
        })
    },
};

fn start(arguments: Vec<OsString>) -> Result<MeasureOptions, OptionError> {
    let mut arguments = texts(arguments)?.into_iter();
    let image = arguments.next();
    match arguments.next() {
        Some(_) => Err(OptionError::new("At most one filename argument is allowed.")),
        None => Ok(MeasureOptions { image, ..MeasureOptions::default() }),
    }
}

static OPTIONS: &[Field<MeasureOptions>] = &[
    Row::default("target-format", "raw", "format of the new image: raw or qcow2")
        .text("<format>", |to, format| put(&mut to.target_format, Some(format))),
    Row::optional("options", "none", "options of the new image").text(
        "<name>=<value>[,...]",
        |to, options| {
            to.options.push(options);
            Ok(())
        },
    ),
    Row::optional("size", "that of the image", "bytes of the new image's disk")
        .text("<size>", |to, text| put(&mut to.size, Some(size_argument(&text)?))),
    MeasureOptions::FORMAT,
    MeasureOptions::IMAGE_OPTS,
    MeasureOptions::OUTPUT,
    MeasureOptions::FORCE_SHARE,
    MeasureOptions::OBJECT,
];

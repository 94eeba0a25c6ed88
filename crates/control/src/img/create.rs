//! `img create`.

use super::common::{Common, CommonDraft, texts};
use super::{ImgCommand, asks_for_help, read_with, size_argument};
use crate::cli::{Subcommand, erased};
use crate::error::OptionError;
use crate::table::{Field, Row, put};

/// Options of `img create`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CreateOptions {
    /// Options that several commands have. `format` is that of the new image.
    pub common: Common,
    /// The new image.
    pub image: String,
    /// Bytes of the disk. `None`: that of the backing file.
    pub size: Option<u64>,
    /// `-o`, several times.
    pub options: Vec<String>,
    /// `-b`.
    pub backing: Option<String>,
    /// `-F`.
    pub backing_format: Option<String>,
    /// `-u`: the backing file is not looked at.
    pub is_unsafe: bool,
}

impl CommonDraft for CreateOptions {
    fn common(&mut self) -> &mut Common {
        &mut self.common
    }
}

pub(super) static CREATE: Subcommand = Subcommand {
    name: "img create",
    usage: "[options] <image> [<size>]",
    help: "make an image",
    about: "Makes an image, raw, qcow2 or luks. A file that is there is emptied. <size> takes the suffixes k, M, G, T, P and E.",
    options: || erased(OPTIONS),
    letters: &[
        ('q', "quiet"),
        ('f', "format"),
        ('o', "options"),
        ('b', "backing"),
        ('F', "backing-format"),
        ('u', "backing-unsafe"),
    ],
    commands: &[],
    examples: &[
        ("ringmill img create -f qcow2 disk.qcow2 10G", "a disk of 10 GiB that grows"),
        (
            "ringmill img create -f qcow2 -b base.qcow2 -F qcow2 vm1.qcow2",
            "an overlay, which has the writes above another image",
        ),
    ],
    read: |program, parser| {
        read_with(program, &CREATE, OPTIONS, parser, start, |options| {
            match options.image.is_empty() && !asks_for_help(&options.options) {
                true => Err(OptionError::new("Expecting image file name")),
                false => Ok(ImgCommand::Create(options)),
            }
        })
    },
};

fn start(arguments: Vec<std::ffi::OsString>) -> Result<CreateOptions, OptionError> {
    let mut arguments = texts(arguments)?.into_iter();
    let image = arguments.next().unwrap_or_default();
    let size = arguments.next().map(|size| size_argument(&size)).transpose()?;
    match arguments.next() {
        Some(extra) => Err(OptionError::new(format!("Unexpected argument: {extra}"))),
        None => Ok(CreateOptions { image, size, ..CreateOptions::default() }),
    }
}

static OPTIONS: &[Field<CreateOptions>] = &[
    CreateOptions::QUIET,
    Row::default("format", "raw", "format of the new image: raw, qcow2 or luks")
        .text("<format>", |create, format| put(&mut create.common.format, Some(format))),
    Row::optional("options", "none", "options of the format; 'help' lists them").text(
        "<name>=<value>[,...]",
        |create, options| {
            create.options.push(options);
            Ok(())
        },
    ),
    Row::optional("backing", "none", "the image that the new one is above")
        .text("<image>", |create, image| put(&mut create.backing, Some(image))),
    Row::optional("backing-format", "", "the format of that image")
        .text("<format>", |create, format| put(&mut create.backing_format, Some(format))),
    Row::optional("backing-unsafe", "", "do not open that image: the size has to be given")
        .flag(|create| create.is_unsafe = true),
    CreateOptions::OBJECT,
];

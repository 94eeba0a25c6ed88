//! `img map`.

use super::common::{Common, CommonDraft, one};
use super::{ImgCommand, read_with, size_argument};
use crate::cli::{Subcommand, erased};
use crate::table::{Field, Row, put};

/// Options of `img map`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MapOptions {
    /// Options that several commands have.
    pub common: Common,
    /// The image.
    pub image: String,
    /// `--start-offset`, bytes.
    pub start: u64,
    /// `--max-length`, bytes. `None`: to the end.
    pub len: Option<u64>,
}

impl CommonDraft for MapOptions {
    fn common(&mut self) -> &mut Common {
        &mut self.common
    }
}

pub(super) static MAP: Subcommand = Subcommand {
    name: "img map",
    usage: "[options] <image>",
    help: "tell which image of a chain stores each part, and where",
    about: "Tells which image of a chain stores each part of a disk, and where in the image's file. For people, only parts with \
            data are listed.",
    options: || erased(OPTIONS),
    letters: &[('f', "format"), ('s', "start-offset"), ('l', "max-length"), ('U', "force-share")],
    commands: &[],
    examples: &[("ringmill img map --output=json disk.qcow2", "what is data, and what are holes")],
    read: |program, parser| {
        let start = |arguments| {
            let image = one(arguments, "one image file name")?;
            Ok(MapOptions { image, ..MapOptions::default() })
        };
        read_with(program, &MAP, OPTIONS, parser, start, |options| Ok(ImgCommand::Map(options)))
    },
};

static OPTIONS: &[Field<MapOptions>] = &[
    MapOptions::FORMAT,
    MapOptions::IMAGE_OPTS,
    Row::default("start-offset", "0", "the first byte")
        .text("<size>", |to, text| put(&mut to.start, size_argument(&text)?)),
    Row::optional("max-length", "to the end", "the number of bytes")
        .text("<size>", |to, text| put(&mut to.len, Some(size_argument(&text)?))),
    MapOptions::OUTPUT,
    MapOptions::FORCE_SHARE,
    MapOptions::OBJECT,
];

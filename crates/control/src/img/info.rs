//! `img info`.

use super::common::{Common, CommonDraft, one};
use super::{ImgCommand, read_with};
use crate::cli::{Subcommand, erased};
use crate::table::{Field, Row};

/// Options of `img info`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct InfoOptions {
    /// Options that several commands have.
    pub common: Common,
    /// The image.
    pub image: String,
    /// `--backing-chain`.
    pub backing_chain: bool,
}

impl CommonDraft for InfoOptions {
    fn common(&mut self) -> &mut Common {
        &mut self.common
    }
}

pub(super) static INFO: Subcommand = Subcommand {
    name: "img info",
    usage: "[options] <image>",
    help: "describe an image by its header",
    about: "Describes an image by its header, as 'qemu-img info' does, within a sandbox: a damaged or hostile image reaches \
            no other file and no network. Neither backing files nor the guest's data are opened, and no password is needed.",
    options: || erased(OPTIONS),
    letters: &[('f', "format"), ('U', "force-share"), ('b', "backing-chain")],
    commands: &[],
    examples: &[
        ("ringmill img info disk.qcow2", "a description for people"),
        ("ringmill img info -U --output=json disk.qcow2", "one for programs, of an image in use"),
    ],
    read: |program, parser| {
        let start = |arguments| {
            let image = one(arguments, "one image file name")?;
            Ok(InfoOptions { image, ..InfoOptions::default() })
        };
        read_with(program, &INFO, OPTIONS, parser, start, |options| Ok(ImgCommand::Info(options)))
    },
};

static OPTIONS: &[Field<InfoOptions>] = &[
    InfoOptions::FORMAT,
    InfoOptions::IMAGE_OPTS,
    Row::optional(
        "backing-chain",
        "",
        "the images behind the image, too, as their headers name them",
    )
    .flag(|info| info.backing_chain = true),
    InfoOptions::FORCE_SHARE,
    InfoOptions::OBJECT,
    InfoOptions::OUTPUT,
];

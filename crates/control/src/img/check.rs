//! `img check`.

use block::Repair;

use super::common::{Common, CommonDraft, one};
use super::{ImgCommand, read_with};
use crate::cli::{Subcommand, erased};
use crate::table::{Choice, Field, Row, put};

/// Options of `img check`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImgCheckOptions {
    /// Options that several commands have.
    pub common: Common,
    /// The image: a file or a device.
    pub image: String,
    /// `-r`.
    pub repair: Repair,
}

impl CommonDraft for ImgCheckOptions {
    fn common(&mut self) -> &mut Common {
        &mut self.common
    }
}

pub(super) static CHECK: Subcommand = Subcommand {
    name: "img check",
    usage: "[options] <image>",
    help: "check and repair the metadata of a qcow2 image",
    about: "Checks the metadata of a qcow2 image that is not in use, and repairs it. 'ringmill check' is the same. Exit code: 0 \
            if all is well, 2 for corruptions that are left, 3 for leaked clusters that are left, 63 for a format without \
            checks, 1 if the check failed.",
    options: || erased(OPTIONS),
    letters: &[('f', "format"), ('r', "repair"), ('q', "quiet")],
    commands: &[],
    examples: &[("ringmill img check -r all disk.qcow2", "repair what can be repaired")],
    read: |program, parser| {
        let start = |arguments| {
            let image = one(arguments, "one image file name")?;
            Ok(ImgCheckOptions { common: Common::default(), image, repair: Repair::None })
        };
        read_with(program, &CHECK, OPTIONS, parser, start, |options| Ok(ImgCommand::Check(options)))
    },
};

static OPTIONS: &[Field<ImgCheckOptions>] = &[
    ImgCheckOptions::QUIET,
    ImgCheckOptions::FORMAT,
    Row::optional("repair", "only checks", "what is repaired").choice(&[
        Choice::new(
            "leaks",
            "clusters that are counted and not used",
            |check: &mut ImgCheckOptions| put(&mut check.repair, Repair::Leaks),
        ),
        Choice::new("all", "all that can be repaired", |check: &mut ImgCheckOptions| {
            put(&mut check.repair, Repair::All)
        }),
    ]),
    ImgCheckOptions::OUTPUT,
];

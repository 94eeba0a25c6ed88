//! `img dd`.

use std::ffi::OsString;

use super::common::{Common, CommonDraft, texts};
use super::{ImgCommand, read_with};
use crate::cli::{Subcommand, erased};
use crate::error::OptionError;
use crate::scalar;
use crate::table::{Field, Row, put};

/// Options of `img dd`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DdOptions {
    /// Options that several commands have. `format` is that of the input.
    pub common: Common,
    /// `if=`.
    pub input: String,
    /// `of=`.
    pub output: String,
    /// `-O`.
    pub target_format: Option<String>,
    /// `bs=`, bytes.
    pub block: u64,
    /// `count=`, blocks.
    pub count: Option<u64>,
    /// `skip=`, blocks of the input.
    pub skip: u64,
}

impl CommonDraft for DdOptions {
    fn common(&mut self) -> &mut Common {
        &mut self.common
    }
}

pub(super) static DD: Subcommand = Subcommand {
    name: "img dd",
    usage: "[options] if=<image> of=<image> [<operand>...]",
    help: "copy a part of an image to a new one",
    about: "Copies blocks of an image to a new one: all of them, or the first count=, without the first skip= of those. A block has bs= bytes, 512 by default.",
    options: || erased(OPTIONS),
    letters: &[('f', "format"), ('O', "output-format"), ('U', "force-share")],
    commands: &[],
    examples: &[("ringmill img dd if=disk.qcow2 of=start.raw bs=1M count=1", "the first MiB")],
    read: |program, parser| {
        read_with(program, &DD, OPTIONS, parser, start, |options| Ok(ImgCommand::Dd(options)))
    },
};

fn start(arguments: Vec<OsString>) -> Result<DdOptions, OptionError> {
    let mut dd = DdOptions { block: 512, ..DdOptions::default() };
    for argument in texts(arguments)? {
        let (name, value) = argument.split_once('=').unwrap_or((&argument, ""));
        let number = || {
            scalar::size(value)
                .ok_or_else(|| OptionError::new(format!("invalid number: '{value}'")))
        };
        match name {
            "if" => value.clone_into(&mut dd.input),
            "of" => value.clone_into(&mut dd.output),
            "bs" => dd.block = number()?,
            "count" => dd.count = Some(number()?),
            "skip" => dd.skip = number()?,
            _ => return Err(OptionError::new(format!("unrecognized operand {argument}"))),
        }
    }
    match () {
        () if dd.input.is_empty() || dd.output.is_empty() => {
            Err(OptionError::new("Must specify both input and output files"))
        }
        () if dd.block == 0 || dd.block > i32::MAX as u64 => {
            Err(OptionError::new("invalid number: bs is from 1 to 2147483647"))
        }
        () => Ok(dd),
    }
}

static OPTIONS: &[Field<DdOptions>] = &[
    DdOptions::FORMAT,
    DdOptions::IMAGE_OPTS,
    Row::default("output-format", "raw", "format of the new image: raw, qcow2 or luks")
        .text("<format>", |to, format| put(&mut to.target_format, Some(format))),
    DdOptions::FORCE_SHARE,
    DdOptions::OBJECT,
];

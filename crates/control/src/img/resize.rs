//! `img resize`.

use std::ffi::OsString;

use super::common::{Common, CommonDraft, exactly};
use super::{ImgCommand, read_with};
use crate::cli::{Subcommand, erased, unexpected};
use crate::error::OptionError;
use crate::scalar;
use crate::table::{Field, Row};

/// Options of `img resize`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResizeOptions {
    /// Options that several commands have.
    pub common: Common,
    /// The image.
    pub image: String,
    /// The new size.
    pub size: NewSize,
    /// `--shrink`.
    pub shrink: bool,
}

/// A new size, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NewSize {
    /// This one.
    To(u64),
    /// So much more.
    More(u64),
    /// So much less.
    Less(u64),
}

impl CommonDraft for ResizeOptions {
    fn common(&mut self) -> &mut Common {
        &mut self.common
    }
}

pub(super) static RESIZE: Subcommand = Subcommand {
    name: "img resize",
    usage: "[options] <image> [+|-]<size>",
    help: "give an image another size",
    about: "Gives the disk of an image that is not in use another size, or makes it so much larger or smaller. What is cut off \
            is lost: --shrink permits it.",
    options: || erased(OPTIONS),
    letters: &[('f', "format"), ('q', "quiet")],
    commands: &[],
    examples: &[("ringmill img resize disk.qcow2 +10G", "10 GiB more")],
    read: |program, parser| {
        let mut words: Vec<OsString> = parser.raw_args().map_err(unexpected)?.collect();
        // The size may begin with a minus sign.
        let is_less = |word: &OsString| {
            let digits = word.to_str().and_then(|word| word.strip_prefix('-'));
            digits.is_some_and(|digits| digits.starts_with(|c: char| c.is_ascii_digit()))
        };
        if words.last().is_some_and(is_less) && !words.iter().any(|word| word == "--") {
            words.insert(words.len() - 1, "--".into());
        }
        let parser = &mut lexopt::Parser::from_args(words);
        read_with(program, &RESIZE, OPTIONS, parser, start, |options| {
            Ok(ImgCommand::Resize(options))
        })
    },
};

fn start(arguments: Vec<OsString>) -> Result<ResizeOptions, OptionError> {
    let [image, text] = exactly(arguments, "image file name and size")?;
    let number = text.strip_prefix(['+', '-']).unwrap_or(&text);
    let bytes = scalar::size(number).filter(|_| !number.starts_with(['+', '-']));
    let bytes = bytes.ok_or_else(|| OptionError::new(format!("Invalid image size: '{text}'")))?;
    let size = match text.as_bytes().first() {
        Some(b'+') => NewSize::More(bytes),
        Some(b'-') => NewSize::Less(bytes),
        _ => NewSize::To(bytes),
    };
    Ok(ResizeOptions { common: Common::default(), image, size, shrink: false })
}

static OPTIONS: &[Field<ResizeOptions>] = &[
    ResizeOptions::QUIET,
    ResizeOptions::FORMAT,
    ResizeOptions::IMAGE_OPTS,
    Row::optional("shrink", "", "cut off what lies beyond the new end")
        .flag(|resize| resize.shrink = true),
    ResizeOptions::OBJECT,
];

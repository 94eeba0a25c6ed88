//! `img bitmap`.

use super::common::{Common, CommonDraft, exactly};
use super::{ImgCommand, read_with, size_argument};
use crate::cli::{Subcommand, erased};
use crate::error::OptionError;
use crate::table::{Field, Row, put};

/// Options of `img bitmap`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImgBitmapOptions {
    /// Options that several commands have.
    pub common: Common,
    /// The image.
    pub image: String,
    /// The bitmap.
    pub bitmap: String,
    /// What is done, in this order.
    pub actions: Vec<BitmapAction>,
    /// `-g`, bytes.
    pub granularity: Option<u64>,
    /// `-b`: the image that has the bitmaps of `--merge`.
    pub source: Option<String>,
    /// `-F`.
    pub source_format: Option<String>,
}

/// A change of a bitmap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BitmapAction {
    /// `--add`.
    Add,
    /// `--remove`.
    Remove,
    /// `--clear`.
    Clear,
    /// `--enable`.
    Enable,
    /// `--disable`.
    Disable,
    /// `--merge`: the bitmap of that name.
    Merge(String),
}

impl CommonDraft for ImgBitmapOptions {
    fn common(&mut self) -> &mut Common {
        &mut self.common
    }
}

pub(super) static BITMAP: Subcommand = Subcommand {
    name: "img bitmap",
    usage: "[options] <image> <bitmap>",
    help: "change a dirty bitmap within an image",
    about: "Changes a dirty bitmap within a qcow2 image that is not in use, by one or more changes in the order of the options.",
    options: || erased(OPTIONS),
    letters: &[('b', "source-file"), ('F', "source-format"), ('f', "format"), ('g', "granularity")],
    commands: &[],
    examples: &[("ringmill img bitmap --add disk.qcow2 backup", "a bitmap that records writes")],
    read: |program, parser| {
        let start = |arguments| {
            let [image, bitmap] = exactly(arguments, "image and bitmap names")?;
            Ok(ImgBitmapOptions { image, bitmap, ..ImgBitmapOptions::default() })
        };
        read_with(program, &BITMAP, OPTIONS, parser, start, |options| {
            let is_added = options.actions.contains(&BitmapAction::Add);
            let merges =
                options.actions.iter().any(|action| matches!(action, BitmapAction::Merge(_)));
            match () {
                () if options.actions.is_empty() => Err(OptionError::new(
                    "Need at least one of --add, --remove, --clear, --enable, --disable, or --merge",
                )),
                () if options.granularity.is_some() && !is_added => {
                    Err(OptionError::new("granularity only supported with --add"))
                }
                () if options.source.is_some() && !merges => {
                    Err(OptionError::new("Merge bitmap source file only supported with --merge"))
                }
                () => Ok(ImgCommand::Bitmap(options)),
            }
        })
    },
};

const fn action(
    name: &'static str,
    help: &'static str,
    push: fn(&mut ImgBitmapOptions),
) -> Field<ImgBitmapOptions> {
    Row::optional(name, "", help).flag(push)
}

static OPTIONS: &[Field<ImgBitmapOptions>] = &[
    action("add", "make it; it records writes", |to| to.actions.push(BitmapAction::Add)),
    action("remove", "remove it", |to| to.actions.push(BitmapAction::Remove)),
    action("clear", "clear its bits", |to| to.actions.push(BitmapAction::Clear)),
    action("enable", "let it record writes", |to| to.actions.push(BitmapAction::Enable)),
    action("disable", "do not", |to| to.actions.push(BitmapAction::Disable)),
    Row::optional("merge", "", "add the bits of another bitmap").text("<bitmap>", |to, name| {
        to.actions.push(BitmapAction::Merge(name));
        Ok(())
    }),
    Row::optional("source-file", "the image itself", "the image that has the other bitmap")
        .text("<image>", |to, image| put(&mut to.source, Some(image))),
    Row::optional("source-format", "detected by the header", "the format of that image")
        .text("<format>", |to, format| put(&mut to.source_format, Some(format))),
    Row::optional(
        "granularity",
        "that of clusters, 4096 to 65536",
        "bytes for each bit, with --add",
    )
    .text("<size>", |to, text| put(&mut to.granularity, Some(size_argument(&text)?))),
    ImgBitmapOptions::FORMAT,
    ImgBitmapOptions::IMAGE_OPTS,
    ImgBitmapOptions::OBJECT,
];

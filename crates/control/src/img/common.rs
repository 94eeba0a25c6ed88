//! What several commands on images have.

use std::ffi::OsString;

use crate::error::OptionError;
use crate::object::{self, ObjectOptions};
use crate::shape::Shape;
use crate::table::{Choice, Field, Kind, Row, Syntax, put};

/// Options that several commands have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Common {
    /// `-f`. `None`: detected by the image's header.
    pub format: Option<String>,
    /// `--image-opts`: images are named by options.
    pub image_opts: bool,
    /// `-U`.
    pub force_share: bool,
    /// `--object`.
    pub objects: Vec<ObjectOptions>,
    /// `-q`.
    pub quiet: bool,
    /// `-p`.
    pub progress: bool,
    /// `--output`: as JSON.
    pub json: bool,
}

/// A draft of options with those of [`Common`].
pub(super) trait CommonDraft: Sized + 'static {
    fn common(&mut self) -> &mut Common;

    const FORMAT: Field<Self> =
        Row::optional("format", "detected by the header", "format of the image")
            .text("<format>", |draft, format| put(&mut draft.common().format, Some(format)));

    const IMAGE_OPTS: Field<Self> = Row::optional(
        "image-opts",
        "",
        "the image is named by options: driver=qcow2,file.filename=disk.qcow2",
    )
    .flag(|draft| draft.common().image_opts = true);

    const FORCE_SHARE: Field<Self> =
        Row::optional("force-share", "", "read an image that others may write to meanwhile")
            .flag(|draft| draft.common().force_share = true);

    const OBJECT: Field<Self> =
        Row::optional("object", "", "a secret or TLS credentials, which options refer to by id")
            .of(Kind::Structure {
                meta: "[qom-type=]<type>,id=<id>[,<property>=<value>...]",
                syntax: Syntax::KeyvalOrJson,
                implied: Some("qom-type"),
                shape: || Shape::Union(object::options()),
                read: |draft, given, at| {
                    draft.common().objects.push(object::read(given, at)?);
                    Ok(())
                },
            });

    const QUIET: Field<Self> =
        Row::optional("quiet", "", "print errors only").flag(|draft| draft.common().quiet = true);

    const PROGRESS: Field<Self> = Row::optional("progress", "", "print how far it is")
        .flag(|draft| draft.common().progress = true);

    const OUTPUT: Field<Self> = Row::default("output", "human", "form of the result").choice(&[
        Choice::new("human", "for people", |draft: &mut Self| put(&mut draft.common().json, false)),
        Choice::new("json", "for programs", |draft: &mut Self| put(&mut draft.common().json, true)),
    ]);
}

/// How an image uses the host's page cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Cache {
    /// Past the cache; the end is flushed.
    None,
    /// Through the cache; the end is flushed.
    #[default]
    Writeback,
    /// The same: nobody sees a write before the end.
    Writethrough,
    /// Past the cache, as with `none`.
    Directsync,
    /// Through the cache, and nothing is flushed.
    Unsafe,
}

impl Cache {
    /// Returns whether the cache is bypassed.
    pub fn is_direct(self) -> bool {
        matches!(self, Cache::None | Cache::Directsync)
    }

    /// Returns whether flushes are ignored.
    pub fn is_unsafe(self) -> bool {
        self == Cache::Unsafe
    }
}

/// The words of a cache mode, for the place of one.
macro_rules! cache {
    ($row:expr, $field:ident) => {
        $row.choice(&[
            $crate::table::Choice::new("none", "past the cache", |to| {
                $crate::table::put(&mut to.$field, $crate::img::Cache::None)
            }),
            $crate::table::Choice::new(
                "writeback",
                "through the cache, flushed at the end",
                |to| $crate::table::put(&mut to.$field, $crate::img::Cache::Writeback),
            ),
            $crate::table::Choice::new("writethrough", "the same", |to| {
                $crate::table::put(&mut to.$field, $crate::img::Cache::Writethrough)
            }),
            $crate::table::Choice::new("directsync", "past the cache", |to| {
                $crate::table::put(&mut to.$field, $crate::img::Cache::Directsync)
            }),
            $crate::table::Choice::new("unsafe", "through the cache, not flushed", |to| {
                $crate::table::put(&mut to.$field, $crate::img::Cache::Unsafe)
            }),
        ])
    };
}
pub(super) use cache;

/// Takes the only image from the positional arguments. `what` is expected there, in qemu-img's words.
pub(super) fn one(arguments: Vec<OsString>, what: &str) -> Result<String, OptionError> {
    let [image] = exactly(arguments, what)?;
    Ok(image)
}

/// Takes so many arguments.
pub(super) fn exactly<const N: usize>(
    arguments: Vec<OsString>,
    what: &str,
) -> Result<[String; N], OptionError> {
    let arguments = texts(arguments)?;
    arguments.try_into().map_err(|_| OptionError::new(format!("Expecting {what}")))
}

/// Takes arguments as text.
pub(super) fn texts(arguments: Vec<OsString>) -> Result<Vec<String>, OptionError> {
    let text = |argument: OsString| {
        argument.into_string().map_err(|argument| {
            OptionError::new(format!("{}: the name is not valid UTF-8", argument.display()))
        })
    };
    arguments.into_iter().map(text).collect()
}

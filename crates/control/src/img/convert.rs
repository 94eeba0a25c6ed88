//! `img convert`.

use std::ffi::OsString;

use super::common::{Cache, Common, CommonDraft, cache, texts};
use super::{ImgCommand, asks_for_help, read_with};
use crate::cli::{Subcommand, erased};
use crate::error::OptionError;
use crate::scalar;
use crate::table::{Field, Row, put};

/// Options of `img convert`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConvertOptions {
    /// Options that several commands have. `format` is that of the sources.
    pub common: Common,
    /// The images whose contents are copied, one after the other.
    pub sources: Vec<String>,
    /// The new image.
    pub target: String,
    /// `-O`.
    pub target_format: Option<String>,
    /// `--target-image-opts`.
    pub target_image_opts: bool,
    /// `-o`, several times.
    pub options: Vec<String>,
    /// `-B`.
    pub backing: Option<String>,
    /// `-F`.
    pub backing_format: Option<String>,
    /// `-c`.
    pub compress: bool,
    /// `-n`: the target is there.
    pub no_create: bool,
    /// `--target-is-zero`.
    pub target_is_zero: bool,
    /// `-S`, bytes.
    pub sparse: u64,
    /// `-m`.
    pub parallel: u16,
    /// `-t`.
    pub target_cache: Cache,
    /// `-T`.
    pub source_cache: Cache,
    /// `-l`: an internal snapshot of the source.
    pub snapshot: Option<SnapshotName>,
    /// `--bitmaps`.
    pub bitmaps: bool,
    /// `--skip-broken-bitmaps`: those that cannot be copied are left out.
    pub skip_broken_bitmaps: bool,
    /// `--salvage`.
    pub salvage: bool,
}

/// How an internal snapshot is named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SnapshotName {
    /// Its id, or else its name.
    Any(String),
    /// What is not `None` has to be the snapshot's.
    Exact {
        /// `snapshot.id=`.
        id: Option<String>,
        /// `snapshot.name=`.
        name: Option<String>,
    },
}

impl CommonDraft for ConvertOptions {
    fn common(&mut self) -> &mut Common {
        &mut self.common
    }
}

pub(super) static CONVERT: Subcommand = Subcommand {
    name: "img convert",
    usage: "[options] <image>... <target>",
    help: "copy the contents of images to a new one",
    about: "Copies the contents of one or more images to a new image. Holes and zeroes are neither read nor written. Parts are \
            copied in parallel, in any order. A target that is not there yet gets its name at the end: a conversion that fails, \
            or is killed, leaves no file.",
    options: || erased(OPTIONS),
    letters: &[
        ('f', "source-format"),
        ('O', "target-format"),
        ('o', "target-options"),
        ('c', "compress"),
        ('p', "progress"),
        ('q', "quiet"),
        ('n', "no-create"),
        ('S', "sparse-size"),
        ('B', "backing"),
        ('F', "backing-format"),
        ('m', "parallel"),
        ('W', "oob-writes"),
        ('t', "target-cache"),
        ('T', "source-cache"),
        ('U', "force-share"),
        ('l', "snapshot"),
    ],
    commands: &[],
    examples: &[
        ("ringmill img convert -p -O qcow2 disk.raw disk.qcow2", "a raw image as qcow2"),
        (
            "ringmill img convert -c -O qcow2 -o compression_type=zstd disk.qcow2 small.qcow2",
            "a compressed copy",
        ),
        (
            "ringmill img convert -O qcow2 nbd://127.0.0.1:10809/disk disk.qcow2",
            "what an NBD server has",
        ),
    ],
    read: |program, parser| {
        read_with(program, &CONVERT, OPTIONS, parser, start, |options| {
            Ok(ImgCommand::Convert(finish(options)?))
        })
    },
};

/// Most copies in flight, as in qemu-img.
const MAX_PARALLEL: i64 = 16;

fn start(arguments: Vec<OsString>) -> Result<ConvertOptions, OptionError> {
    let mut sources = texts(arguments)?;
    let target = sources.pop().unwrap_or_default();
    Ok(ConvertOptions {
        common: Common::default(),
        sources,
        target,
        target_format: None,
        target_image_opts: false,
        options: Vec::new(),
        backing: None,
        backing_format: None,
        compress: false,
        no_create: false,
        target_is_zero: false,
        sparse: 4096,
        parallel: 8,
        target_cache: Cache::Unsafe,
        source_cache: Cache::Writeback,
        snapshot: None,
        bitmaps: false,
        skip_broken_bitmaps: false,
        salvage: false,
    })
}

fn finish(options: ConvertOptions) -> Result<ConvertOptions, OptionError> {
    let ConvertOptions { no_create, target_is_zero, target_image_opts, .. } = options;
    let why = match () {
        () if asks_for_help(&options.options) => return Ok(options),
        () if options.sources.is_empty() => "Must specify image file name",
        () if options.compress && options.sparse == 0 => {
            "-c (compress) and -S 0 (preallocate all) cannot be used together"
        }
        () if no_create && !options.options.is_empty() => {
            "-o has no effect when skipping image creation"
        }
        () if target_is_zero && !no_create => "--target-is-zero requires use of -n flag",
        () if target_image_opts && !no_create => "--target-image-opts requires use of -n flag",
        () if options.snapshot.is_some() && options.sources.len() > 1 => {
            "No support for concatenating multiple snapshot"
        }
        () if options.skip_broken_bitmaps && !options.bitmaps => {
            "Use of --skip-broken-bitmaps requires --bitmaps"
        }
        () if options.bitmaps && options.sources.len() > 1 => {
            "Copying bitmaps only possible with single source"
        }
        // They tell what has changed since a backup of the disk as it is.
        () if options.bitmaps && options.snapshot.is_some() => {
            "--bitmaps and -l (snapshot) cannot be used together"
        }
        () => return Ok(options),
    };
    Err(OptionError::new(why))
}

/// `-l`.
fn snapshot_name(text: &str) -> Result<SnapshotName, OptionError> {
    if !text.starts_with("snapshot.") {
        return Ok(SnapshotName::Any(text.to_owned()));
    }
    let (mut id, mut name) = (None, None);
    for part in text.split(',') {
        match part.split_once('=') {
            Some(("snapshot.id", value)) => id = Some(value.to_owned()),
            Some(("snapshot.name", value)) => name = Some(value.to_owned()),
            Some(_) | None => {
                return Err(OptionError::new(format!("Failed in parsing snapshot param '{text}'")));
            }
        }
    }
    Ok(SnapshotName::Exact { id, name })
}

/// `-S`: whole sectors.
fn sparse_size(text: &str) -> Result<u64, OptionError> {
    match scalar::size(text) {
        Some(size) if size.is_multiple_of(512) && size <= 1 << 30 => Ok(size),
        _ => Err(OptionError::new(
            "Invalid buffer size for sparse output specified. Valid sizes are multiples of 512 up to 1073741824. Select 0 to \
             disable sparse detection (fully allocates output).",
        )),
    }
}

static OPTIONS: &[Field<ConvertOptions>] = &[
    ConvertOptions::QUIET,
    ConvertOptions::PROGRESS,
    Row::optional("source-format", "detected by the header", "format of the sources")
        .text("<format>", |to, format| put(&mut to.common.format, Some(format))),
    ConvertOptions::IMAGE_OPTS,
    Row::optional("source-image-opts", "", "the same as --image-opts")
        .flag(|to| to.common.image_opts = true),
    Row::default("target-format", "raw", "format of the target: raw, qcow2 or luks")
        .text("<format>", |to, format| put(&mut to.target_format, Some(format))),
    Row::optional("target-image-opts", "", "the target is named by options; with -n")
        .flag(|to| to.target_image_opts = true),
    Row::optional("target-options", "none", "options of the format; 'help' lists them").text(
        "<name>=<value>[,...]",
        |to, options| {
            to.options.push(options);
            Ok(())
        },
    ),
    Row::optional("compress", "", "compress clusters of a qcow2 target, on all CPUs")
        .flag(|to| to.compress = true),
    Row::optional(
        "backing",
        "none",
        "copy only what the source has above this image, which becomes the target's backing file",
    )
    .text("<image>", |to, image| put(&mut to.backing, Some(image))),
    Row::optional("backing-format", "", "the format of that image")
        .text("<format>", |to, format| put(&mut to.backing_format, Some(format))),
    Row::optional("no-create", "", "write to a target that is there")
        .flag(|to| to.no_create = true),
    Row::optional("target-is-zero", "", "the target of -n reads as zeroes")
        .flag(|to| to.target_is_zero = true),
    Row::default("sparse-size", "4k", "runs of zeroes that become holes; 0 allocates all")
        .text("<size>", |to, text| put(&mut to.sparse, sparse_size(&text)?)),
    Row::default("parallel", "8", "parts of up to 1 MiB that are copied at once")
        .int(1..=MAX_PARALLEL, |to, number| put(&mut to.parallel, number as u16)),
    Row::optional("oob-writes", "", "write in any order; always so").flag(|_| {}),
    cache!(
        Row::default("target-cache", "unsafe", "how the target uses the host's page cache"),
        target_cache
    ),
    cache!(Row::default("source-cache", "writeback", "the same of the sources"), source_cache),
    Row::optional(
        "snapshot",
        "the disk as it is",
        "copy the disk at a snapshot inside the source: snapshot.id=<id>, snapshot.name=<name>, or one of both alone",
    )
    .text("<snapshot>", |to, text| put(&mut to.snapshot, Some(snapshot_name(&text)?))),
    Row::optional("bitmaps", "", "copy the persistent dirty bitmaps, too").flag(|to| to.bitmaps = true),
    Row::optional("skip-broken-bitmaps", "", "leave out bitmaps that are inconsistent; with --bitmaps")
        .flag(|to| to.skip_broken_bitmaps = true),
    Row::optional("salvage", "", "write zeroes, and a warning, where a source cannot be read")
        .flag(|to| to.salvage = true),
    ConvertOptions::FORCE_SHARE,
    ConvertOptions::OBJECT,
];

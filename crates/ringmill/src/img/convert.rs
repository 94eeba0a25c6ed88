//! `img convert`.

use std::io::{self, Write};
use std::process::ExitCode;

use control::{ConvertOptions, SnapshotName, asks_for_help};
use daemon::DaemonError;
use img::{Access, CopyOptions, Image, Images, NewImage, Source, Target, list_options};

use super::confine::{Files, names_more};
use super::{failed, images, print, source};

/// Copies images to a new one.
pub(super) fn run(options: &ConvertOptions) -> Result<ExitCode, DaemonError> {
    let format = options.target_format.as_deref().unwrap_or("raw");
    let known = list_options(format);
    if asks_for_help(&options.options) {
        print(&known.map_err(failed)?);
        return Ok(ExitCode::SUCCESS);
    }
    let others = options.backing.iter().chain([&options.target]);
    let named: Vec<&str> = options.sources.iter().chain(others).map(String::as_str).collect();
    let mut images = images(&options.common, files(options, &named))?;
    let access = Access {
        force_share: options.common.force_share,
        direct: options.source_cache.is_direct(),
        ..Access::READ
    };
    let mut sources = Vec::new();
    for name in &options.sources {
        let source = source(name, &options.common);
        let opened = match &options.snapshot {
            Some(wanted) => open_snapshot(&mut images, &source, &access, wanted)?,
            None => images.open(&source, &access).map_err(failed)?,
        };
        sources.push(opened);
    }
    known.map_err(failed)?;
    check_bitmaps(&images, &sources, options, format)?;
    let size = sources.iter().map(Image::size).sum();
    if options.no_create {
        let source = Source {
            name: options.target.clone(),
            format: (!options.target_image_opts).then(|| format.to_owned()),
            is_options: options.target_image_opts,
        };
        let target = open_target(&mut images, source, None, options, format)?;
        if target.size() < size {
            return Err(DaemonError::new(format!(
                "output file is smaller than input file: {} bytes, and {size} are needed",
                target.size()
            )));
        }
        copy(&mut images, &sources, &target, options, options.target_is_zero)?;
        sources.push(target);
        sources.into_iter().try_for_each(|image| images.close(image)).map_err(failed)?;
        return Ok(ExitCode::SUCCESS);
    }
    let place = Target::new(&options.target).map_err(failed)?;
    let mut extra = options.options.clone();
    // The size of the sources counts, whatever the options say.
    extra.retain(|text| !text.is_empty());
    let new = NewImage {
        name: options.target.clone(),
        format: format.to_owned(),
        size: Some(size),
        options: extra,
        backing: options.backing.clone(),
        backing_format: options.backing_format.clone(),
        trusts_backing: false,
    };
    let converting = |error: img::Error| {
        let error = place.named(error);
        let why = error.message().replacen(&format!("{}: ", options.target), "", 1);
        DaemonError::new(format!("{}: error while converting {format}: {why}", options.target))
    };
    let plan = images.plan(&new).map_err(converting)?.in_place(place.name());
    let reads_zero = plan.reads_as_zeroes() && !is_device(&options.target);
    images.make(&plan).map_err(converting)?;
    let secret = plan.opened_with();
    let source = Source {
        name: match secret.is_empty() {
            true => place.name(),
            false => format!("{secret},file.filename={}", place.name().replace(',', ",,")),
        },
        format: secret.is_empty().then(|| format.to_owned()),
        is_options: !secret.is_empty(),
    };
    let behind = options.backing.as_ref().map(|name| {
        let behind = Source::beside(&options.target, name, options.backing_format.clone());
        images.open(&behind, &Access { force_share: options.common.force_share, ..Access::READ })
    });
    let behind = behind.transpose().map_err(failed)?;
    let target = open_target(&mut images, source, behind.as_ref(), options, format);
    let target = target.map_err(|error| renamed(error, &place))?;
    let copied = copy(&mut images, &sources, &target, options, reads_zero);
    copied.map_err(|error| renamed(error, &place))?;
    images.close(target).map_err(failed)?;
    sources.into_iter().chain(behind).try_for_each(|image| images.close(image)).map_err(failed)?;
    place.complete().map_err(failed)?;
    Ok(ExitCode::SUCCESS)
}

/// The files of a conversion, of images with these names.
fn files<'a>(options: &'a ConvertOptions, named: &'a [&'a str]) -> Files<'a> {
    match options.target_image_opts || names_more(&options.options) {
        true => Files::Any,
        // The header of a target that is there names another file, too.
        false if options.no_create => Files::Change(named),
        false => Files::Copy { from: named, to: &options.target },
    }
}

fn renamed(error: DaemonError, place: &Target) -> DaemonError {
    failed(place.named(img::Error::new(error)))
}

/// Whether the target is a device, which has what it had.
fn is_device(name: &str) -> bool {
    use std::os::unix::fs::FileTypeExt;
    let metadata = std::fs::metadata(name);
    metadata.is_ok_and(|metadata| metadata.file_type().is_block_device())
}

fn open_target(
    images: &mut Images,
    source: Source,
    behind: Option<&Image>,
    options: &ConvertOptions,
    format: &str,
) -> Result<Image, DaemonError> {
    if options.compress && format != "qcow2" {
        return Err(DaemonError::new("Compression not supported for this file format"));
    }
    let access = Access {
        direct: options.target_cache.is_direct(),
        no_flush: options.target_cache.is_unsafe(),
        compress: options.compress,
        ..Access::WRITE
    };
    images.open_above(&source, &access, behind).map_err(failed)
}

fn copy(
    images: &mut Images,
    sources: &[Image],
    target: &Image,
    options: &ConvertOptions,
    target_is_zero: bool,
) -> Result<(), DaemonError> {
    let how = CopyOptions {
        parallel: options.parallel.into(),
        sparse: options.sparse,
        target_is_zero,
        above: options.backing.as_ref().map(|_| 2),
        salvage: options.salvage,
    };
    let total = sources.iter().map(Image::size).sum();
    let mut progress = Progress::new(options.common.progress && !options.common.quiet, total);
    let copied = images.copy(sources, target, &how, move |done| progress.tell(done));
    if options.common.progress && !options.common.quiet {
        print("\n");
    }
    copied.map_err(failed)?;
    match sources {
        [source] if options.bitmaps => images.copy_bitmaps(source, target).map_err(failed),
        _ => Ok(()),
    }
}

/// Opens the source at one of its snapshots.
fn open_snapshot(
    images: &mut Images,
    source: &Source,
    access: &Access,
    wanted: &SnapshotName,
) -> Result<Image, DaemonError> {
    let of = |error: DaemonError| DaemonError::new(format!("Failed to load snapshot: {error}"));
    let info = images.info(source, access).map_err(failed)?;
    let has = |id: Option<&str>, name: Option<&str>| {
        info.snapshots.iter().find(|snapshot| {
            id.is_none_or(|id| snapshot.id == id) && name.is_none_or(|name| snapshot.name == name)
        })
    };
    let found = match wanted {
        SnapshotName::Any(text) => has(Some(text), None).or_else(|| has(None, Some(text))),
        SnapshotName::Exact { id, name } => has(id.as_deref(), name.as_deref()),
    };
    let id = match found {
        Some(snapshot) => &snapshot.id,
        None if info.format == "qcow2" => return Err(of(DaemonError::new("Can't find snapshot"))),
        None => "",
    };
    images.open_snapshot(source, access, id).map_err(|error| of(failed(error)))
}

/// Checks, before anything is copied, that the bitmaps can be.
fn check_bitmaps(
    images: &Images,
    sources: &[Image],
    options: &ConvertOptions,
    format: &str,
) -> Result<(), DaemonError> {
    let ([source], true) = (sources, options.bitmaps) else { return Ok(()) };
    if format != "qcow2" {
        return Err(DaemonError::new(format!("Format driver '{format}' does not support bitmaps")));
    }
    let broken = images.check_bitmaps(source, options.skip_broken_bitmaps).map_err(failed)?;
    for name in broken {
        log::warn!("Skipping inconsistent bitmap '{name}'");
    }
    Ok(())
}

/// How far a command is, as qemu-img prints it.
pub(super) struct Progress {
    is_on: bool,
    total: u64,
    /// Hundredths of a percent that were printed last.
    printed: Option<u64>,
}

impl Progress {
    pub(super) fn new(is_on: bool, total: u64) -> Progress {
        let mut progress = Progress { is_on, total, printed: None };
        progress.tell(0);
        progress
    }

    /// Prints a change of at least 0.01 percent.
    pub(super) fn tell(&mut self, done: u64) {
        if !self.is_on {
            return;
        }
        let part = u128::from(done) * 10_000 / u128::from(self.total.max(1));
        let part = if self.total == 0 { 10_000 } else { part as u64 };
        if self.printed == Some(part) {
            return;
        }
        self.printed = Some(part);
        let mut out = io::stdout();
        let _ = write!(out, "    ({:.2}/100%)\r", part as f64 / 100.0);
        let _ = out.flush();
    }
}

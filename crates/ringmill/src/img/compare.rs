//! `img compare`.

use std::process::ExitCode;

use control::CompareOptions;
use daemon::{DaemonError, logger};
use img::{Access, Compared, Source, Unreadable};

use super::confine::Files;
use super::convert::Progress;
use super::{failed, images, print, program, source};

/// Exit codes. 0: the contents are the same.
const DIFFERENT: u8 = 1;
const NOT_OPENED: u8 = 2;
const NOT_READ: u8 = 4;

/// Compares two images.
pub(super) fn run(options: &CompareOptions) -> Result<ExitCode, DaemonError> {
    let CompareOptions { common, images: [one, other], other_format, strict, cache } = options;
    let mut images = images(common, Files::Follow(&[one, other]))?;
    let access =
        Access { force_share: common.force_share, direct: cache.is_direct(), ..Access::READ };
    let second = Source { format: other_format.clone(), ..source(other, common) };
    let mut opened = Vec::new();
    for source in [source(one, common), second] {
        match images.open(&source, &access) {
            Ok(image) => opened.push(image),
            Err(error) => return Ok(ended(&failed(error), NOT_OPENED)),
        }
    }
    let [first, second] = opened.as_slice() else { return Ok(ExitCode::from(NOT_OPENED)) };
    let tell = |text: &str| {
        if !common.quiet {
            print(text);
        }
    };
    if *strict && first.size() != second.size() {
        tell("Strict mode: Image size mismatch!\n");
        return Ok(ExitCode::from(DIFFERENT));
    }
    let total = first.size().max(second.size());
    let mut progress = Progress::new(common.progress && !common.quiet, total);
    let compared = images.compare(first, second, *strict, move |done| progress.tell(done));
    if common.progress && !common.quiet {
        print("\n");
    }
    let code = match compared {
        Ok(Compared::Differ(at)) => {
            tell(&format!("Content mismatch at offset {at}!\n"));
            DIFFERENT
        }
        Ok(Compared::StoredOtherwise(at)) => {
            tell(&format!("Strict mode: Offset {at} block status mismatch!\n"));
            DIFFERENT
        }
        Ok(Compared::Same { is_longer }) => {
            if is_longer {
                tell("Warning: Image size mismatch!\n");
            }
            tell("Images are identical.\n");
            0
        }
        Err(Unreadable(error)) => return Ok(ended(&failed(error), NOT_READ)),
    };
    Ok(ExitCode::from(code))
}

/// Prints an error that has an exit code of its own.
fn ended(error: &DaemonError, code: u8) -> ExitCode {
    logger::fatal(program(), &error.to_string());
    ExitCode::from(code)
}

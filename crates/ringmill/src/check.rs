//! `ringmill check`: checks and repairs an image, and prints what was found as `qemu-img check` does.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use block::{CheckFailure, Checked, LEFT_LOCKED, Repair, check_qcow2};
use control::{CheckOptions, ImgCommon, program_name};
use daemon::DaemonError;
use options::Value;

use crate::img::confine::{Files, confine};

/// Exit codes of `qemu-img check`. 1 is also that of an image that cannot be opened.
const CHECK_FAILED: u8 = 1;
const CORRUPTIONS: u8 = 2;
const LEAKS: u8 = 3;
const NO_CHECKS: u8 = 63;

/// How often an image is tried that a killed process has left locked.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Says that the image's format has no checks.
pub(crate) fn no_checks() -> ExitCode {
    let _ = writeln!(io::stderr(), "{}: This image format does not support checks", program());
    NO_CHECKS.into()
}

fn program() -> &'static str {
    program_name(&std::env::args_os().next().unwrap_or_default())
}

/// Checks the image, as [`run_quietly`] does, and prints the result.
pub(crate) fn run(options: &CheckOptions) -> Result<ExitCode, DaemonError> {
    run_quietly(options, false)
}

/// Checks the image. Findings go to the standard error output, the result to the standard output.
///
/// `is_quiet`: errors and findings alone are printed.
pub(crate) fn run_quietly(options: &CheckOptions, is_quiet: bool) -> Result<ExitCode, DaemonError> {
    let files = match options.repair {
        Repair::None => Files::Check(&options.image),
        Repair::Leaks | Repair::All => Files::Repair(&options.image),
    };
    confine(&ImgCommon::default(), files)?;
    let print = |text: &str| {
        if !is_quiet {
            print(text);
        }
    };
    let check = |repair| {
        let (folder, user) = daemon::journal_folder();
        let tell = |finding: std::fmt::Arguments<'_>| {
            // A closed pipe does not end a repair.
            let _ = writeln!(io::stderr(), "{finding}");
        };
        let begun = Instant::now();
        loop {
            match check_qcow2(&options.image, repair, Some((&folder, user)), tell) {
                // No event announces the end of the lock.
                Err(CheckFailure::Open(error))
                    if error.may_be_left_locked() && begun.elapsed() < LEFT_LOCKED =>
                {
                    thread::sleep(LOOK_AGAIN);
                }
                checked => return checked,
            }
        }
    };
    let mut text = String::new();
    let mut checked = check(options.repair);
    let (mut corruptions_fixed, mut leaks_fixed) = (0, 0);
    if let Ok(found) = &checked
        && found.corruptions_fixed + found.leaks_fixed > 0
    {
        (corruptions_fixed, leaks_fixed) = (found.corruptions_fixed, found.leaks_fixed);
        if !options.json {
            print(&format!(
                "The following inconsistencies were found and repaired:\n\n    {leaks_fixed} leaked clusters\n    \
                 {corruptions_fixed} corruptions\n\nDouble checking the fixed image now...\n"
            ));
        }
        checked = check(Repair::None);
    }
    let found = match checked {
        Ok(found) => Checked { corruptions_fixed, leaks_fixed, ..found },
        Err(CheckFailure::NoChecks) => {
            return Ok(no_checks());
        }
        Err(CheckFailure::Open(error)) => {
            let what = format!("Could not open '{}'", options.image.display());
            return Err(DaemonError::from(error).of(&what));
        }
        Err(CheckFailure::Io(error)) => {
            return Err(DaemonError::new(format!("Check failed: {error}")));
        }
    };
    // Writing to a string does not fail.
    let _ = match options.json {
        true => json(&mut text, options, &found),
        false => human(&mut text, &found),
    };
    print(&text);
    Ok(ExitCode::from(match () {
        () if found.check_errors > 0 => {
            let _ = writeln!(io::stderr(), "{}: Check failed", program());
            CHECK_FAILED
        }
        () if found.corruptions > 0 => CORRUPTIONS,
        () if found.leaks > 0 => LEAKS,
        () => 0,
    }))
}

/// A closed pipe, as after `head`, does not change the exit code.
pub(crate) fn print(text: &str) {
    let _ = io::stdout().write_all(text.as_bytes());
}

fn human(text: &mut String, found: &Checked) -> std::fmt::Result {
    if found.corruptions + found.leaks + found.check_errors == 0 {
        writeln!(text, "No errors were found on the image.")?;
    }
    if found.corruptions > 0 {
        writeln!(
            text,
            "\n{} errors were found on the image.\nData may be corrupted, or further writes to the image may corrupt it.",
            found.corruptions
        )?;
    }
    if found.leaks > 0 {
        writeln!(
            text,
            "\n{} leaked clusters were found on the image.\nThis means waste of disk space, but no harm to data.",
            found.leaks
        )?;
    }
    if found.check_errors > 0 {
        writeln!(text, "\n{} internal errors have occurred during the check.", found.check_errors)?;
    }
    let Checked { total, allocated, fragmented, compressed, .. } = *found;
    let percent = |part: u64, whole: u64| part as f64 * 100.0 / whole as f64;
    if total > 0 && allocated > 0 {
        writeln!(
            text,
            "{allocated}/{total} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed clusters",
            percent(allocated, total),
            percent(fragmented, allocated),
            percent(compressed, allocated)
        )?;
    }
    if found.image_end > 0 {
        writeln!(text, "Image end offset: {}", found.image_end)?;
    }
    Ok(())
}

/// QAPI's type `ImageCheck`, in QEMU's order. Numbers that are 0 are left out, as by `qemu-img`.
fn json(text: &mut String, options: &CheckOptions, found: &Checked) -> std::fmt::Result {
    let numbers = [
        ("image-end-offset", found.image_end),
        ("total-clusters", found.total),
        ("corruptions-fixed", found.corruptions_fixed),
        ("corruptions", found.corruptions),
        ("leaks-fixed", found.leaks_fixed),
        ("leaks", found.leaks),
        ("fragmented-clusters", found.fragmented),
        ("allocated-clusters", found.allocated),
        ("compressed-clusters", found.compressed),
    ];
    let numbers = numbers.into_iter().filter(|(_, number)| *number > 0);
    let numbers = numbers.map(|(name, number)| (name.to_owned(), Value::from(number)));
    let errors = ("check-errors".to_owned(), found.check_errors.into());
    let name = options.image.to_string_lossy().into_owned();
    let of_image = [("filename".to_owned(), name.into()), ("format".to_owned(), "qcow2".into())];
    let members = numbers.chain([errors]).chain(of_image).collect();
    writeln!(text, "{}", img::json::pretty(&Value::Object(members)))
}

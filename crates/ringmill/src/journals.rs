//! `ringmill journals`: lists and removes what killed daemons have left of qcow2 images.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use block::{JournalState, LeftJournal, left_journals, remove_left_journal};
use control::JournalsOptions;
use daemon::DaemonError;
use serde_json::json;

use crate::check::print;
use crate::ctl::printable;
use crate::probe::bytes;

/// The first letters of a journal's name, which may be left out.
const PREFIX: &str = "qcow2-";

/// A journal and its folder.
type Listed = (PathBuf, LeftJournal);

/// Lists the chosen journals, or removes them.
pub(crate) fn run(options: &JournalsOptions) -> Result<ExitCode, DaemonError> {
    let all = listed(options)?;
    let is_found = |name: &OsStr| all.iter().any(|listed| is_named(listed, name));
    let missing = options.chosen.iter().filter(|name| !is_found(name));
    let mut failures = 0;
    for name in missing {
        complain(&format!("{}: no journal has that name or that image", shown(Path::new(name))));
        failures += 1;
    }
    let is_chosen = |listed: &&Listed| {
        let chosen = &options.chosen;
        match chosen.is_empty() {
            // Journals that are needed are no failure of `--clear` alone.
            true => !options.clear || !listed.1.may_be_needed(),
            false => chosen.iter().any(|name| is_named(listed, name)),
        }
    };
    let chosen = all.iter().filter(is_chosen);
    if options.clear {
        for (folder, journal) in chosen {
            match remove_left_journal(folder, &journal.name, options.force) {
                Ok(()) => print(&format!("removed {}\n", shown(&folder.join(&journal.name)))),
                Err(error) => {
                    complain(&refusal(folder, journal, &error));
                    failures += 1;
                }
            }
        }
    } else {
        let chosen: Vec<&Listed> = chosen.collect();
        print(&if options.json { in_json(&chosen) } else { table(&chosen) });
    }
    Ok(if failures > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The journals in the folders that are looked at.
fn listed(options: &JournalsOptions) -> Result<Vec<Listed>, DaemonError> {
    let (folders, is_given) = match &options.folder {
        Some(folder) => (vec![folder.clone()], true),
        None => (daemon::journal_folders(), false),
    };
    let mut all = Vec::new();
    for folder in folders {
        match left_journals(&folder) {
            Ok(journals) => all.extend(journals.into_iter().map(|found| (folder.clone(), found))),
            Err(error) if !is_given && error.kind() == ErrorKind::NotFound => {}
            // Other users' folders.
            Err(error) if !is_given && error.kind() == ErrorKind::PermissionDenied => {}
            Err(error) if is_given => {
                return Err(DaemonError::new(format!("{}: {error}", shown(&folder))));
            }
            Err(error) => complain(&format!("{}: {error}", shown(&folder))),
        }
    }
    Ok(all)
}

/// Whether a journal is chosen by this name: its own, or that of its image.
fn is_named((folder, journal): &Listed, name: &OsStr) -> bool {
    let own = &journal.name;
    if name == own.as_str() || own.strip_prefix(PREFIX).is_some_and(|own| name == own) {
        return true;
    }
    let path = Path::new(name);
    let absolute = std::path::absolute(path).ok();
    let real = std::fs::canonicalize(path).ok();
    let is_image = |path: &Option<PathBuf>| path.is_some() && *path == journal.image;
    absolute.as_ref().is_some_and(|path| *path == folder.join(own))
        || is_image(&absolute)
        || is_image(&real)
}

/// Why a journal was not removed, and what to do.
fn refusal(folder: &Path, journal: &LeftJournal, error: &io::Error) -> String {
    let image = journal
        .image
        .as_deref()
        .map_or("of an unknown image".to_owned(), |image| format!("of '{}'", shown(image)));
    let what = format!("{} {image} stays", shown(&folder.join(&journal.name)));
    match (&journal.state, error.kind()) {
        (JournalState::InUse, ErrorKind::ResourceBusy) => {
            format!("{what}: a process has the image open")
        }
        (JournalState::Unknown(why), ErrorKind::ResourceBusy) => {
            format!("{what}: the image may need it: {why}; --force removes it all the same")
        }
        (JournalState::Missing | JournalState::Replaced, ErrorKind::ResourceBusy) => format!(
            "{what}: if the image is in another folder now, it lacks what the journal has: open it there first; --force \
             removes the journal all the same"
        ),
        (_, ErrorKind::ResourceBusy) => format!(
            "{what}: the image lacks what the journal has; 'ringmill check --repair all' as the daemon's user writes \
             that to the image; --force has the image do without"
        ),
        _ => format!("{what}: {error}"),
    }
}

fn word(state: &JournalState) -> &'static str {
    match state {
        JournalState::InUse => "in use",
        JournalState::Needed => "needed",
        JournalState::Unknown(_) => "unknown",
        JournalState::Superseded => "superseded",
        JournalState::Replaced => "image replaced",
        JournalState::Missing => "image missing",
        JournalState::EarlierBoot => "earlier boot",
    }
}

fn age(journal: &LeftJournal) -> Duration {
    SystemTime::now().duration_since(journal.changed).unwrap_or_default()
}

/// A time in its largest unit.
fn rounded(age: Duration) -> String {
    let seconds = age.as_secs();
    let units = [(86_400, "d"), (3600, "h"), (60, "min")];
    match units.into_iter().find(|(len, _)| seconds >= *len) {
        Some((len, unit)) => format!("{} {unit}", seconds / len),
        None => format!("{seconds} s"),
    }
}

/// A path for a terminal.
fn shown(path: &Path) -> String {
    printable(&path.to_string_lossy())
}

fn table(journals: &[&Listed]) -> String {
    let mut text = String::new();
    let mut last = None;
    for (folder, journal) in journals {
        // Writing to a string does not fail.
        if last != Some(folder) {
            let begin = if last.is_some() { "\n" } else { "" };
            let _ = writeln!(text, "{begin}{}:", shown(folder));
            let _ = writeln!(
                text,
                "{:<40} {:>10} {:>7}  {:<14}  IMAGE",
                "JOURNAL", "SIZE", "AGE", "STATE"
            );
            last = Some(folder);
        }
        let image = journal.image.as_deref().map_or("-".to_owned(), shown);
        let (size, age) = (bytes(journal.size), rounded(age(journal)));
        let state = word(&journal.state);
        let _ = writeln!(text, "{:<40} {size:>10} {age:>7}  {state:<14}  {image}", journal.name);
    }
    text
}

fn in_json(journals: &[&Listed]) -> String {
    let one = |(folder, journal): &&Listed| {
        let reason = match &journal.state {
            JournalState::Unknown(why) => Some(why),
            _ => None,
        };
        json!({
            "journal": journal.name,
            "folder": folder.to_string_lossy(),
            "image": journal.image.as_ref().map(|image| image.to_string_lossy()),
            "size": journal.size,
            "age-seconds": age(journal).as_secs(),
            "state": word(&journal.state).replace(' ', "-"),
            "reason": reason,
        })
    };
    let all: Vec<_> = journals.iter().map(one).collect();
    format!("{:#}\n", serde_json::Value::from(all))
}

fn complain(text: &str) {
    let _ = writeln!(io::stderr(), "ringmill: {text}");
}

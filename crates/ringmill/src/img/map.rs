//! `img map`.

use std::io::{self, Write};
use std::ops::ControlFlow;
use std::process::ExitCode;

use control::MapOptions;
use daemon::DaemonError;
use img::{Access, Mapped};

use super::confine::Files;
use super::{failed, images, print, source};

/// Prints where the parts of a disk are.
pub(super) fn run(options: &MapOptions) -> Result<ExitCode, DaemonError> {
    let MapOptions { common, image, start, len } = options;
    let mut images = images(common, Files::Follow(&[image]))?;
    let access = Access { force_share: common.force_share, ..Access::READ };
    let opened = images.open(&source(image, common), &access).map_err(failed)?;
    let end = len.map_or(u64::MAX, |len| start.saturating_add(len));
    let is_json = common.json;
    let mut unlisted = false;
    let mut is_first = true;
    if !is_json {
        print(&format!("{:<16}{:<16}{:<16}File\n", "Offset", "Length", "Mapped to"));
    }
    let mapped = images.map(&opened, *start..end, |part| {
        let line = if is_json {
            let separator = if std::mem::take(&mut is_first) { "[" } else { ",\n" };
            format!("{separator}{}", json(part))
        } else if part.is_data && !part.is_zero {
            let (Some(file), Some(offset)) = (&part.file, part.offset) else {
                unlisted = true;
                return ControlFlow::Continue(());
            };
            let [start, len, offset] = [part.start, part.len, offset].map(hex);
            format!("{start:<16}{len:<16}{offset:<16}{file}\n")
        } else {
            return ControlFlow::Continue(());
        };
        // The list of a hostile image is endless, and `head` reads its first lines.
        match io::stdout().write_all(line.as_bytes()) {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        }
    });
    if is_json {
        print(if is_first { "[]\n" } else { "]\n" });
    }
    mapped.map_err(failed)?;
    match unlisted {
        true => {
            let why = "File contains external, encrypted or compressed clusters.";
            Err(DaemonError::new(why))
        }
        false => Ok(ExitCode::SUCCESS),
    }
}

/// A number as C's `%#x` prints it.
fn hex(number: u64) -> String {
    if number == 0 { "0".to_owned() } else { format!("{number:#x}") }
}

fn json(part: &Mapped) -> String {
    let Mapped { start, len, depth, is_present, is_zero, is_data, is_compressed, offset, .. } =
        part;
    let offset = offset.map(|offset| format!(", \"offset\": {offset}")).unwrap_or_default();
    format!(
        "{{ \"start\": {start}, \"length\": {len}, \"depth\": {depth}, \"present\": {is_present}, \"zero\": {is_zero}, \
         \"data\": {is_data}, \"compressed\": {is_compressed}{offset}}}"
    )
}

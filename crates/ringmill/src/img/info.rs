//! `img info`.

use std::fmt::Write as _;
use std::process::ExitCode;

use control::InfoOptions;
use daemon::DaemonError;
use img::json::{ordered, pretty};
use img::{Access, ImageInfo};
use options::Value;

use super::confine::Files;
use super::text::{date, human, table};
use super::{failed, images, print, source};

/// Prints what the header of an image tells.
pub(super) fn run(options: &InfoOptions) -> Result<ExitCode, DaemonError> {
    let InfoOptions { common, image, backing_chain } = options;
    let name = [image.as_str()];
    let files = if *backing_chain { Files::Follow(&name) } else { Files::Read(image) };
    let mut images = images(common, files)?;
    let access = Access { force_share: common.force_share, ..Access::READ };
    let source = source(image, common);
    let chain = match backing_chain {
        true => images.chain_info(&source, &access),
        false => images.info(&source, &access).map(|info| vec![info]),
    };
    let chain = chain.map_err(failed)?;
    let mut text = String::new();
    if common.json {
        let told: Vec<Value> = chain.iter().map(ImageInfo::to_json).collect();
        text = match (backing_chain, <[Value; 1]>::try_from(told)) {
            (false, Ok([only])) => pretty(&only),
            (_, Ok(list)) => pretty(&Value::List(list.into())),
            (_, Err(list)) => pretty(&Value::List(list)),
        };
        text.push('\n');
    } else {
        for (place, info) in chain.iter().enumerate() {
            if place > 0 {
                text.push('\n');
            }
            // Writing to a string does not fail.
            let _ = write(&mut text, info, None, 0);
        }
    }
    print(&text);
    Ok(ExitCode::SUCCESS)
}

/// Writes a description. `path`: that of a child node.
fn write(
    text: &mut String,
    info: &ImageInfo,
    path: Option<&str>,
    depth: usize,
) -> std::fmt::Result {
    let indent = "    ".repeat(depth);
    let is_protocol = path.is_some() && info.children.is_empty();
    let (name, format, size) = match is_protocol {
        true => ("filename", "protocol type", "file length"),
        false => ("image", "file format", "virtual size"),
    };
    writeln!(text, "{indent}{name}: {}", info.filename)?;
    writeln!(text, "{indent}{format}: {}", info.format)?;
    let bytes = info.virtual_size;
    writeln!(text, "{indent}{size}: {} ({bytes} bytes)", human(bytes))?;
    let disk = info.actual_size.map_or_else(|| "unavailable".to_owned(), human);
    writeln!(text, "{indent}disk size: {disk}")?;
    if info.is_encrypted {
        writeln!(text, "{indent}encrypted: yes")?;
    }
    if let Some(bytes) = info.cluster_size {
        writeln!(text, "{indent}cluster_size: {bytes}")?;
    }
    if info.is_dirty {
        writeln!(text, "{indent}cleanly shut down: no")?;
    }
    if let Some(backing) = &info.backing {
        write!(text, "{indent}backing file: {}", backing.filename)?;
        match &info.full_backing {
            None => write!(text, " (cannot determine actual path)")?,
            Some(full) if *full != backing.filename => write!(text, " (actual path: {full})")?,
            Some(_) => {}
        }
        text.push('\n');
        if let Some(format) = &backing.format {
            writeln!(text, "{indent}backing file format: {format}")?;
        }
    }
    if !info.snapshots.is_empty() {
        writeln!(text, "{indent}Snapshot list:")?;
        for line in table(&info.snapshots, date) {
            writeln!(text, "{indent}{line}")?;
        }
    }
    let data = info.specific.iter().flatten().find(|(name, _)| name == "data");
    if let Some((_, Value::Object(data))) = data
        && !data.is_empty()
    {
        writeln!(text, "{indent}Format specific information:")?;
        write_object(text, data, depth + 1)?;
    }
    for (role, child) in &info.children {
        let path = format!("{}/{role}", path.unwrap_or_default());
        writeln!(text, "{indent}Child node '{path}':")?;
        write(text, child, Some(&path), depth + 1)?;
    }
    Ok(())
}

fn write_object(text: &mut String, object: &[(String, Value)], depth: usize) -> std::fmt::Result {
    for (name, value) in ordered(object) {
        write_member(text, &name.replace('-', " "), value, depth)?;
    }
    Ok(())
}

fn write_member(text: &mut String, name: &str, value: &Value, depth: usize) -> std::fmt::Result {
    let indent = "    ".repeat(depth);
    match value {
        Value::Object(members) => {
            writeln!(text, "{indent}{name}:")?;
            write_object(text, members, depth + 1)
        }
        Value::List(items) => {
            writeln!(text, "{indent}{name}:")?;
            let mut items = items.iter().enumerate();
            items.try_for_each(|(n, item)| write_member(text, &format!("[{n}]"), item, depth + 1))
        }
        Value::Text(value) => writeln!(text, "{indent}{name}: {value}"),
        Value::Null | Value::Bool(_) | Value::Integer(_) | Value::Number(_) => {
            writeln!(text, "{indent}{name}: {value}")
        }
    }
}

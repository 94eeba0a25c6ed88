//! `config`: rules in a file, in QEMU's format (docs/devel/testing/blkdebug): sections `[inject-error]`
//! and `[set-state]`, and in them lines `key = "value"`. A `#` begins a comment.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use nix::errno::Errno;

use crate::error::OpenError;
use crate::options::{Effect, Event, InjectError, IoType, SetState, errno_from_number};

/// Longest file, bytes.
const LONGEST: u64 = 1 << 20;

/// Reads a file's rules.
pub(super) fn read(path: &Path) -> Result<(Vec<InjectError>, Vec<SetState>), OpenError> {
    let failed = |error: std::io::Error| {
        let errno = error.raw_os_error().map_or(Errno::EINVAL, Errno::from_raw);
        OpenError::os(format!("Could not open '{}'", path.display()), errno)
    };
    let mut text = String::new();
    let file = File::open(path).map_err(failed)?;
    file.take(LONGEST + 1).read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > LONGEST {
        let message = format!("'{}' has more than {LONGEST} bytes", path.display());
        return Err(OpenError::new(message));
    }
    parse(&text).map_err(|(line, why)| OpenError::new(format!("{}:{line}: {why}", path.display())))
}

/// A section, with the number of its line.
struct Section<'a> {
    line: usize,
    name: &'a str,
    members: Vec<(&'a str, &'a str)>,
}

fn quoted(value: &str) -> Option<&str> {
    value.trim().strip_prefix('"')?.strip_suffix('"')
}

/// Why a text is wrong, and in which line.
type Wrong = (usize, String);

fn parse(text: &str) -> Result<(Vec<InjectError>, Vec<SetState>), Wrong> {
    let mut sections: Vec<Section<'_>> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            sections.push(Section { line: number, name, members: Vec::new() });
            continue;
        }
        let pair = line.split_once('=').and_then(|(key, value)| Some((key.trim(), quoted(value)?)));
        match (pair, sections.last_mut()) {
            (Some(pair), Some(section)) => section.members.push(pair),
            (Some(_), None) => return Err((number, "no section has begun".to_owned())),
            (None, _) => return Err((number, "expected [section] or key = \"value\"".to_owned())),
        }
    }
    let (mut inject_error, mut set_state) = (Vec::new(), Vec::new());
    for section in sections {
        let at = |why| (section.line, why);
        match section.name {
            "inject-error" => inject_error.push(inject(&section).map_err(at)?),
            "set-state" => set_state.push(transition(&section).map_err(at)?),
            name => {
                let why = format!("unknown section '{name}'; known: inject-error, set-state");
                return Err(at(why));
            }
        }
    }
    Ok((inject_error, set_state))
}

fn inject(section: &Section<'_>) -> Result<InjectError, String> {
    let mut rule = InjectError::new(event(section)?);
    let mut errno = None;
    for &(key, value) in &section.members {
        match key {
            "event" => {}
            "state" => rule.state = number(key, value)?,
            "iotype" => {
                let unknown = || unknown(key, value, IoType::ALL.iter().map(|t| t.name()));
                rule.iotype = Some(IoType::from_name(value).ok_or_else(unknown)?);
            }
            "errno" => errno = Some(errno_from_number(number(key, value)?)?),
            "sector" => rule.sectors = Some((number(key, value)?, 1)),
            "delay-ns" => rule.delay_ns = number(key, value)?,
            "once" => rule.once = on(key, value)?,
            "immediately" => rule.immediately = on(key, value)?,
            _ => return Err(format!("unknown key '{key}' of [{}]", section.name)),
        }
    }
    rule.errno = errno.unwrap_or(Effect::Error.default_errno());
    Ok(rule)
}

fn transition(section: &Section<'_>) -> Result<SetState, String> {
    let mut rule = SetState { event: event(section)?, state: 0, new_state: 0 };
    let mut is_complete = false;
    for &(key, value) in &section.members {
        match key {
            "event" => {}
            "state" => rule.state = number(key, value)?,
            "new_state" => {
                rule.new_state = number(key, value)?;
                is_complete = true;
            }
            _ => return Err(format!("unknown key '{key}' of [{}]", section.name)),
        }
    }
    if is_complete { Ok(rule) } else { Err("'new_state' is missing".to_owned()) }
}

fn event(section: &Section<'_>) -> Result<Event, String> {
    let found = section.members.iter().rev().find(|(key, _)| *key == "event");
    let (key, value) = found.ok_or("'event' is missing")?;
    Event::from_name(value).ok_or_else(|| unknown(key, value, Event::ALL.iter().map(|e| e.name())))
}

fn number<N: std::str::FromStr>(key: &str, value: &str) -> Result<N, String> {
    value.parse().map_err(|_| format!("'{key}' is no number that it may be: '{value}'"))
}

fn on(key: &str, value: &str) -> Result<bool, String> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(format!("'{key}' is on or off, not '{value}'")),
    }
}

fn unknown<'a>(key: &str, value: &str, known: impl Iterator<Item = &'a str>) -> String {
    let known: Vec<_> = known.collect();
    format!("'{key}' does not accept '{value}'; known: {}", known.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_of_qemu_is_read() {
        let text = "[set-state]\nevent = \"write_aio\"\nstate = \"1\"\nnew_state = \"2\"\n\n\
                    # then\n[inject-error]\nevent = \"write_aio\"\nstate = \"2\"\nerrno = \"28\"\n";
        let (inject_error, set_state) = parse(text).unwrap();
        let expected = SetState { event: Event::WriteAio, state: 1, new_state: 2 };
        assert_eq!(set_state, [expected]);
        let expected = InjectError {
            state: 2,
            errno: Some(Errno::ENOSPC),
            ..InjectError::new(Event::WriteAio)
        };
        assert_eq!(inject_error, [expected]);
    }

    #[test]
    fn errors_name_their_line() {
        for (text, line, why) in [
            ("event = \"none\"\n", 1, "no section"),
            ("[foo]\n", 1, "inject-error, set-state"),
            ("\n[inject-error]\nevent = none\n", 3, "key = \"value\""),
            ("[inject-error]\n", 1, "'event' is missing"),
            ("[inject-error]\nevent = \"cluster_alloc\"\n", 1, "read_aio"),
            ("[inject-error]\nevent = \"none\"\nerrno = \"99999\"\n", 1, "no errno 99999"),
            ("[inject-error]\nevent = \"none\"\nonce = \"1\"\n", 1, "on or off"),
            ("[inject-error]\nevent = \"none\"\nfoo = \"1\"\n", 1, "'foo'"),
            ("[set-state]\nevent = \"none\"\n", 1, "'new_state' is missing"),
        ] {
            let (at, told) = parse(text).unwrap_err();
            assert!(at == line && told.contains(why), "{text:?}: {at}: {told}");
        }
    }
}

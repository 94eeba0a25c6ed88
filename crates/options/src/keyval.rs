//! QSD's `key=value,…` syntax.
//!
//! - Pairs are separated by commas; a comma in a value is written twice.
//! - A key is a path: `cache.direct=on` is member `direct` of object `cache`, `iothread.0=io0` is
//!   the first element of list `iothread`.
//! - The first pair may leave out its key where the option has an implied one:
//!   `null-co,node-name=n` is `driver=null-co,node-name=n`.
//! - A key given twice: the last one counts.
//! - A bare `help` or `?` asks for help.

use std::collections::BTreeMap;

use crate::error::OptionError;
use crate::value::{Object, Value};

/// The longest a part of a key between two dots may be, in bytes. QSD's limit.
const MAX_FRAGMENT: usize = 127;

/// The deepest nesting of objects and lists. Nothing ringmill knows nests without end except nodes
/// in nodes; the limit keeps hostile text from exhausting the stack.
const MAX_DEPTH: usize = crate::json::MAX_DEPTH;

/// Text taken apart.
#[derive(Debug, Clone, PartialEq)]
pub struct Parsed {
    /// The values, nested as the keys say.
    pub object: Object,
    /// Whether `help` was among them.
    pub help: bool,
}

/// Takes `text` apart. `implied` is the key of a first pair without one.
///
/// # Errors
///
/// A key that is not well formed, a pair without `=`, a key used both as a value and as an object
/// or list, a list with holes.
pub fn parse(text: &str, implied: Option<&str>) -> Result<Parsed, OptionError> {
    let mut tree = Vec::new();
    let mut help = false;
    let mut rest = text;
    if let Some(key) = implied {
        let first = rest.split_once(',').map_or(rest, |(first, _)| first);
        if !first.is_empty() && !first.contains('=') && !is_help(first) {
            insert(&mut tree, &[key], first.to_owned(), key)?;
            rest = rest.get(first.len()..).unwrap_or_default();
            rest = rest.strip_prefix(',').unwrap_or(rest);
        }
    }
    while !rest.is_empty() {
        let end = rest.find([',', '=']).unwrap_or(rest.len());
        let (key, after) = rest.split_at(end);
        if is_help(key) && !after.starts_with('=') {
            help = true;
            rest = after.strip_prefix(',').unwrap_or(after);
            continue;
        }
        let path = path(key)?;
        let Some(after) = after.strip_prefix('=') else {
            return Err(OptionError::new(format!("Expected '=' after parameter '{key}'")));
        };
        let (value, remaining) = value(after);
        insert(&mut tree, &path, value, key)?;
        rest = remaining;
    }
    Ok(Parsed { object: settle(tree, "")?, help })
}

/// Splits `text` into options, as QEMU's older options are written.
///
/// `key` alone is `key=on` and `nokey` is `key=off`, for the keys that `is_known`.
///
/// # Errors
///
/// As those of [`parse`].
pub fn parse_opts(
    text: &str,
    implied: Option<&str>,
    is_known: impl Fn(&str) -> bool,
) -> Result<Parsed, OptionError> {
    let mut full = String::with_capacity(text.len());
    for (place, item) in split(text).enumerate() {
        if place > 0 {
            full.push(',');
        }
        let is_first = place == 0 && implied.is_some();
        let bare = !is_first && !item.contains('=') && !is_help(item);
        let off = item.strip_prefix("no").filter(|key| is_known(key) && !is_known(item));
        match off {
            _ if !bare || item.is_empty() => full.push_str(item),
            Some(key) => full.extend([key, "=off"]),
            None => full.extend([item, "=on"]),
        }
    }
    parse(&full, implied)
}

/// Cuts at commas, but not at doubled ones.
pub fn split(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let text = rest?;
        let mut at = 0;
        let end = loop {
            let Some(comma) = text.get(at..)?.find(',').map(|found| at + found) else {
                break None;
            };
            if !text.get(comma + 1..).is_some_and(|after| after.starts_with(',')) {
                break Some(comma);
            }
            at = comma + 2;
        };
        let Some(end) = end else { return rest.take() };
        rest = text.get(end + 1..);
        text.get(..end)
    })
}

/// Returns whether a word, where a value or a key could be, asks for help.
pub fn is_help(token: &str) -> bool {
    token == "help" || token == "?"
}

/// Splits off the value at the start of `text`; a doubled comma is a comma.
fn value(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(',') {
        value.push_str(before);
        match after.strip_prefix(',') {
            Some(after) => {
                value.push(',');
                rest = after;
            }
            None => return (value, after),
        }
    }
    value.push_str(rest);
    (value, "")
}

/// Splits a key at its dots and checks each part: a name, or, except for the first, a number.
fn path(key: &str) -> Result<Vec<&str>, OptionError> {
    let parts: Vec<&str> = key.split('.').collect();
    for (place, part) in parts.iter().enumerate() {
        let number = place > 0 && is_index(part);
        if !number && !is_name(part) {
            return Err(OptionError::new(format!("Invalid parameter '{key}'")));
        }
        if part.len() > MAX_FRAGMENT {
            return Err(OptionError::new(format!("Parameter '{part}' is too long")));
        }
    }
    if parts.len() > MAX_DEPTH {
        return Err(OptionError::new(format!("Parameter '{key}' is nested too deeply"))
            .hint(format!("At most {MAX_DEPTH} levels are allowed.")));
    }
    Ok(parts)
}

fn is_name(part: &str) -> bool {
    part.starts_with(|c: char| c.is_ascii_alphabetic())
        && part.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
}

fn is_index(part: &str) -> bool {
    !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit())
}

/// A value, or what lies below a key, before it is known whether that is a list or an object.
enum Branch {
    Value(String),
    Below(Vec<(String, Branch)>),
}

fn insert(
    tree: &mut Vec<(String, Branch)>,
    path: &[&str],
    value: String,
    key: &str,
) -> Result<(), OptionError> {
    let Some((first, below)) = path.split_first() else { return Ok(()) };
    let inconsistent = || {
        let depth = key.split('.').count() - below.len();
        let prefix: Vec<&str> = key.split('.').take(depth).collect();
        OptionError::new(format!("Parameters '{}.*' used inconsistently", prefix.join(".")))
    };
    let place = match tree.iter().position(|(name, _)| name == first) {
        Some(place) => place,
        None => {
            let branch =
                if below.is_empty() { Branch::Value(String::new()) } else { Branch::Below(vec![]) };
            tree.push(((*first).to_owned(), branch));
            tree.len() - 1
        }
    };
    match tree.get_mut(place).map(|(_, branch)| branch) {
        Some(Branch::Value(old)) if below.is_empty() => {
            *old = value;
            Ok(())
        }
        Some(Branch::Below(tree)) if !below.is_empty() => insert(tree, below, value, key),
        _ => Err(inconsistent()),
    }
}

/// Turns a tree into values: branches with numbers for keys become lists.
fn settle(tree: Vec<(String, Branch)>, prefix: &str) -> Result<Object, OptionError> {
    tree.into_iter()
        .map(|(name, branch)| {
            let value = match branch {
                Branch::Value(text) => Value::Text(text),
                Branch::Below(tree) => {
                    let prefix = format!("{prefix}{name}.");
                    match tree.iter().filter(|(name, _)| is_index(name)).count() {
                        0 => Value::Object(settle(tree, &prefix)?),
                        indices if indices == tree.len() => Value::List(list(tree, &prefix)?),
                        _ => {
                            return Err(OptionError::new(format!(
                                "Parameters '{prefix}*' used inconsistently"
                            )));
                        }
                    }
                }
            };
            Ok((name, value))
        })
        .collect()
}

/// The elements of a list in the order of their numbers, which must be all from 0 up. A number
/// written in two ways (`0` and `00`) counts once, the last.
fn list(tree: Vec<(String, Branch)>, prefix: &str) -> Result<Vec<Value>, OptionError> {
    let elements: BTreeMap<usize, Value> = settle(tree, prefix)?
        .into_iter()
        .map(|(name, value)| (name.parse().unwrap_or(usize::MAX), value))
        .collect();
    match elements.keys().enumerate().find(|(expected, index)| expected != *index) {
        Some((hole, _)) => Err(OptionError::new(format!("Parameter '{prefix}{hole}' missing"))),
        None => Ok(elements.into_values().collect()),
    }
}

/// Writes values as the text that [`parse`] reads back as the same values.
///
/// # Errors
///
/// What the syntax cannot say: empty lists and objects, keys that are not well formed, and JSON's
/// typed values.
pub fn format(object: &Object) -> Result<String, OptionError> {
    let mut pairs = Vec::new();
    for (key, value) in object {
        flatten(key.clone(), value, &mut pairs)?;
    }
    Ok(pairs.join(","))
}

fn flatten(key: String, value: &Value, pairs: &mut Vec<String>) -> Result<(), OptionError> {
    match value {
        Value::Text(text) => {
            path(&key)?;
            pairs.push(format!("{key}={}", text.replace(',', ",,")));
            Ok(())
        }
        Value::List(elements) if !elements.is_empty() => elements
            .iter()
            .enumerate()
            .try_for_each(|(index, element)| flatten(format!("{key}.{index}"), element, pairs)),
        Value::Object(members) if !members.is_empty() => members
            .iter()
            .try_for_each(|(name, member)| flatten(format!("{key}.{name}"), member, pairs)),
        _ => Err(OptionError::new(format!("'{key}' cannot be written as key=value"))),
    }
}

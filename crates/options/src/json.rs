//! QSD's `{…}` form: JSON, with strings in single or double quotes.

use serde::de::{
    Deserialize, DeserializeOwned, Deserializer, Error, MapAccess, SeqAccess, Visitor,
};
use std::fmt;

use crate::error::OptionError;
use crate::value::{Object, Value};

/// Maximum nesting of lists and objects. Reading takes stack for each level: less than 2 MiB for all, also
/// in a debug build.
pub const MAX_DEPTH: usize = 512;

/// Reads a value from JSON text.
///
/// # Errors
///
/// Text that is no JSON value of type `T`, or has more than [`MAX_DEPTH`] levels.
pub fn from_slice<T: DeserializeOwned>(text: &[u8]) -> serde_json::Result<T> {
    let mut nesting = Nesting::default();
    if text.iter().any(|byte| nesting.step(*byte) > MAX_DEPTH) {
        return Err(Error::custom(format_args!("more than {MAX_DEPTH} nested levels")));
    }
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    // That limit is 128.
    deserializer.disable_recursion_limit();
    let value = T::deserialize(&mut deserializer)?;
    deserializer.end()?;
    Ok(value)
}

/// Counts the nesting of lists and objects in JSON text, as far as the text is valid.
#[derive(Debug, Default)]
pub struct Nesting {
    depth: usize,
    within: Within,
}

#[derive(Debug, Default, Clone, Copy)]
enum Within {
    #[default]
    Nothing,
    Text,
    Escape,
}

impl Nesting {
    /// Takes the next byte. Returns the number of levels that are open after it.
    pub fn step(&mut self, byte: u8) -> usize {
        self.within = match (self.within, byte) {
            (Within::Nothing, b'"') | (Within::Escape, _) => Within::Text,
            (Within::Text, b'"') => Within::Nothing,
            (Within::Text, b'\\') => Within::Escape,
            (within, _) => within,
        };
        match (self.within, byte) {
            (Within::Nothing, b'{' | b'[') => self.depth += 1,
            (Within::Nothing, b'}' | b']') => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        self.depth
    }
}

/// Reads an object.
///
/// # Errors
///
/// Text that is not one JSON object, a key given twice, nesting deeper than [`MAX_DEPTH`] levels.
pub fn parse(text: &str) -> Result<Object, OptionError> {
    match from_slice(double_quotes(text).as_bytes()) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(OptionError::new("JSON parse error, expected an object")),
        Err(error) => Err(OptionError::new(format!("JSON parse error, {error}"))),
    }
}

/// QEMU's JSON allows `'text'` for `"text"`, which saves quoting in shells. Rewrites it.
fn double_quotes(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut quote = None;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (None, '\'' | '"') => {
                quote = Some(c);
                out.push('"');
            }
            (Some(open), c) if c == open => {
                quote = None;
                out.push('"');
            }
            (Some('\''), '"') => out.push_str("\\\""),
            (Some(_), '\\') => match chars.next() {
                Some('\'') => out.push('\''),
                Some(escaped) => out.extend(['\\', escaped]),
                None => out.push('\\'),
            },
            _ => out.push(c),
        }
    }
    out
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor)
    }
}

/// Builds a [`Value`]; unlike `serde_json::Value` it refuses a key given twice.
struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Integer(value))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(i64::try_from(value).map_or(Value::Number(value as f64), Value::Integer))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Ok(Value::Number(value))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        Ok(Value::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut elements = Vec::new();
        while let Some(element) = seq.next_element()? {
            elements.push(element);
        }
        Ok(Value::List(elements))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut object = Object::new();
        while let Some((key, value)) = map.next_entry::<String, Value>()? {
            if object.iter().any(|(name, _)| *name == key) {
                return Err(A::Error::custom(format_args!("duplicate key '{key}'")));
            }
            object.push((key, value));
        }
        Ok(Value::Object(object))
    }
}

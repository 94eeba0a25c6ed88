//! Option values before they have a meaning: text, numbers, lists, objects.

use std::fmt;

/// The members of an object, in the order in which they were written.
pub type Object = Vec<(String, Value)>;

/// A value as it was written.
///
/// `key=value` text yields only [`Value::Text`], [`Value::List`] and [`Value::Object`]; its text
/// becomes a number or a boolean where the option asks for one. JSON says what each value is, and
/// is held to it.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// JSON's `null`.
    Null,
    /// JSON's `true` and `false`.
    Bool(bool),
    /// A JSON number without fraction or exponent that fits 64 bits signed.
    Integer(i64),
    /// Any other JSON number.
    Number(f64),
    /// A string, or the text after `=`.
    Text(String),
    /// An array, or `key.0=…,key.1=…`.
    List(Vec<Value>),
    /// An object, or `key.member=…`.
    Object(Object),
}

/// Splits an object into scalars, each under its dotted key, as in `key=value` text.
///
/// Empty objects and lists have none.
pub fn scalars(object: Object) -> Vec<(String, Value)> {
    let mut found = Vec::new();
    object.into_iter().for_each(|(name, value)| flatten(name, value, &mut found));
    found
}

fn flatten(key: String, value: Value, found: &mut Vec<(String, Value)>) {
    match value {
        Value::Object(members) => members
            .into_iter()
            .for_each(|(name, value)| flatten(format!("{key}.{name}"), value, found)),
        Value::List(values) => (0..).zip(values).for_each(|(number, value): (usize, _)| {
            flatten(format!("{key}.{number}"), value, found)
        }),
        scalar @ (Value::Null
        | Value::Bool(_)
        | Value::Integer(_)
        | Value::Number(_)
        | Value::Text(_)) => found.push((key, scalar)),
    }
}

/// How a value was written.
///
/// This decides how far text may stand for numbers and booleans.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// `key=value,…`
    Keyval,
    /// `{"key": value, …}`
    Json,
}

impl Value {
    /// Returns the text of a [`Value::Text`].
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }
}

impl fmt::Display for Value {
    /// Writes JSON.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        serde_json::Value::from(self.clone()).fmt(f)
    }
}

impl From<bool> for Value {
    fn from(on: bool) -> Self {
        Self::Bool(on)
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        i64::try_from(number).map_or(Self::Number(number as f64), Self::Integer)
    }
}

impl From<u32> for Value {
    fn from(number: u32) -> Self {
        Self::Integer(number.into())
    }
}

impl From<i32> for Value {
    fn from(number: i32) -> Self {
        Self::Integer(number.into())
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<serde_json::Value> for Value {
    fn from(json: serde_json::Value) -> Self {
        match json {
            serde_json::Value::Null => Self::Null,
            serde_json::Value::Bool(value) => Self::Bool(value),
            serde_json::Value::Number(number) => match (number.as_i64(), number.as_f64()) {
                (Some(integer), _) => Self::Integer(integer),
                (None, other) => Self::Number(other.unwrap_or(f64::INFINITY)),
            },
            serde_json::Value::String(text) => Self::Text(text),
            serde_json::Value::Array(list) => {
                Self::List(list.into_iter().map(Self::from).collect())
            }
            serde_json::Value::Object(members) => Self::Object(
                members.into_iter().map(|(name, value)| (name, Self::from(value))).collect(),
            ),
        }
    }
}

impl From<Value> for serde_json::Value {
    fn from(value: Value) -> Self {
        match value {
            Value::Null => Self::Null,
            Value::Bool(value) => value.into(),
            Value::Integer(number) => number.into(),
            Value::Number(number) => number.into(),
            Value::Text(text) => text.into(),
            Value::List(list) => list.into_iter().map(Self::from).collect(),
            Value::Object(members) => {
                members.into_iter().map(|(name, value)| (name, Self::from(value))).collect()
            }
        }
    }
}

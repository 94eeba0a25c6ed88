//! Option values before they have a meaning: text, numbers, lists, objects.

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

/// How a value was written, which decides how far text may stand for numbers and booleans.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// `key=value,…`
    Keyval,
    /// `{"key": value, …}`
    Json,
}

impl Value {
    /// The text of a [`Value::Text`].
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }
}

//! Tables that describe options, and the reader that uses them.
//!
//! A [`Field`] is one row, made by [`Row`]: everything about one option, stated once. The reader takes values
//! out of an object row by row, converts each according to its [`Kind`], and gives it to the row's
//! setter. The kind decides the type of the setter's argument. Values that are left over are unknown options. A
//! [`Member`] is the same row without Rust types.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use crate::error::OptionError;
use crate::place::Place;
pub use crate::row::Row;
use crate::scalar;
use crate::shape::{Member, Shape, Word};
use crate::value::{Dialect, Object, Value};

/// One option of a `T`: a row of its table.
pub struct Field<T: 'static> {
    /// The name as written.
    pub name: &'static str,
    /// Its type and setter.
    pub kind: Kind<T>,
    /// Whether it is required, and the default.
    pub need: Need,
    /// Its meaning in one sentence.
    pub help: &'static str,
}

/// Whether an option must be given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// Required.
    Required,
    /// Optional, with this default.
    Default(&'static str),
    /// Optional; the text is the effect of leaving it out.
    Optional(&'static str),
}

/// The result of a setter.
pub type Set = Result<(), OptionError>;

/// The type of an option, with the setter that receives its value.
pub enum Kind<T: 'static> {
    /// No value: only the name is given. For command lines only.
    Flag(fn(&mut T)),
    /// `on` or `off`.
    Bool(fn(&mut T, bool) -> Set),
    /// An integer in `range`.
    Int {
        /// The allowed range.
        range: RangeInclusive<i64>,
        /// The setter.
        set: fn(&mut T, i64) -> Set,
    },
    /// A number of bytes, with or without a suffix (`4k`): QAPI's type `size`. Many sizes of QSD are of
    /// type `int`, without suffixes.
    Bytes(fn(&mut T, u64) -> Set),
    /// Text.
    Text {
        /// The placeholder in help texts: `<id>`.
        meta: &'static str,
        /// The setter.
        set: fn(&mut T, String) -> Set,
    },
    /// A path, passed on as it is.
    Path(fn(&mut T, PathBuf) -> Set),
    /// One of some words.
    Choice(&'static [Choice<T>]),
    /// Members of the same `T` under a common name: `cache.direct`.
    Group(&'static [Field<T>]),
    /// An object written as text: `file,node-name=n,…`. For command lines only.
    Structure {
        /// The placeholder in help texts.
        meta: &'static str,
        /// Its syntax.
        syntax: Syntax,
        /// The key of a first pair without one.
        implied: Option<&'static str>,
        /// Its possible values.
        shape: fn() -> Shape,
        /// The setter, which parses the object.
        read: fn(&mut T, Object, &Context) -> Set,
    },
    /// A value with its own structure, or of several shapes.
    Nested {
        /// Its possible values.
        shape: fn() -> Shape,
        /// The setter, which parses the value.
        read: fn(&mut T, Value, &Context) -> Set,
    },
    /// A value whose place is known, so that it is also [written](write()) back.
    At(&'static dyn Place<T>),
    /// An option of QSD that ringmill does not support, or not with every value. It is parsed for a
    /// clear error, or because a value has no effect. It is in no schema, help text or list.
    Unoffered(fn(&mut T, Value, &str, &Context) -> Set),
}

/// The syntax of an object as text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Syntax {
    /// `key=value,…`, or JSON.
    KeyvalOrJson,
    /// `key=value,…` in which `key` alone stands for `key=on` and `nokey` for `key=off`: QEMU's older
    /// syntax.
    Opts,
}

/// One of the words that a [`Kind::Choice`] takes.
pub struct Choice<T: 'static> {
    /// The word.
    pub name: &'static str,
    /// Its meaning.
    pub help: &'static str,
    /// The setter; it may refuse.
    pub set: fn(&mut T) -> Set,
}

impl<T> Choice<T> {
    /// Creates a word.
    pub const fn new(name: &'static str, help: &'static str, set: fn(&mut T) -> Set) -> Self {
        Choice { name, help, set }
    }

    /// Creates a word that QSD accepts, and ringmill refuses at least in some cases.
    ///
    /// It is in no schema, help text or list, as with [`Kind::Unoffered`].
    pub const fn unoffered(name: &'static str, set: fn(&mut T) -> Set) -> Self {
        Choice { name, help: UNOFFERED, set }
    }

    fn is_offered(&self) -> bool {
        self.help != UNOFFERED
    }
}

/// Help text that marks a word as not offered.
const UNOFFERED: &str = "";

/// The reader's position.
#[derive(Debug, Clone)]
pub struct Context {
    /// How the value was written.
    pub dialect: Dialect,
    /// The names of the surrounding objects, each with its dot: `cache.`.
    pub prefix: String,
    /// The number of surrounding objects.
    pub depth: usize,
}

impl Context {
    /// Returns the position at the top of a value written in `dialect`.
    pub fn new(dialect: Dialect) -> Self {
        Self { dialect, prefix: String::new(), depth: 0 }
    }

    /// Returns the position inside member `name`.
    pub fn below(&self, name: &str) -> Self {
        let prefix = format!("{}{name}.", self.prefix);
        Self { dialect: self.dialect, prefix, depth: self.depth + 1 }
    }

    /// Returns the position inside item `n` of the list that is here.
    #[must_use]
    pub fn item(&self, n: usize) -> Self {
        let list = self.whole();
        let prefix = match self.dialect {
            Dialect::Keyval => format!("{list}.{n}."),
            Dialect::Json => format!("{list}[{n}]."),
        };
        Self { dialect: self.dialect, prefix, depth: self.depth + 1 }
    }

    /// Returns the full name of member `name`.
    pub fn full(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Returns the name of the object itself, without the dot.
    pub fn whole(&self) -> &str {
        self.prefix.strip_suffix('.').unwrap_or(&self.prefix)
    }
}

/// Takes the options of `fields` out of `object`, and leaves all others.
///
/// # Errors
///
/// An option is missing or has a wrong value, in QSD's words.
pub fn read<T>(fields: &[Field<T>], into: &mut T, object: &mut Object, at: &Context) -> Set {
    for field in fields {
        match take(object, field.name) {
            Some(value) => field.set(into, value, at)?,
            None => field.missing(at)?,
        }
    }
    Ok(())
}

/// Writes the options of `fields`, as [`read`] reads them.
///
/// Rows without a known [place](Kind::At) are left out.
pub fn write<T>(fields: &[Field<T>], from: &mut T) -> Object {
    let mut object = Object::new();
    for field in fields {
        let value = match &field.kind {
            Kind::At(place) => place.write(from),
            Kind::Group(fields) => Some(Value::Object(write(fields, from))),
            Kind::Flag(_)
            | Kind::Bool(_)
            | Kind::Int { .. }
            | Kind::Bytes(_)
            | Kind::Text { .. }
            | Kind::Path(_)
            | Kind::Choice(_)
            | Kind::Structure { .. }
            | Kind::Nested { .. }
            | Kind::Unoffered(_) => None,
        };
        object.extend(value.map(|value| (field.name.to_owned(), value)));
    }
    object
}

/// A table with `T` erased: an object's members, and the value built from them.
pub trait Reads<Out>: Sync {
    /// Reads an object.
    ///
    /// `beside` are the members that were taken out of it before; `owner` names the object in errors.
    ///
    /// # Errors
    ///
    /// An option is unknown, missing or wrong, or two contradict each other; in QSD's words.
    fn read(
        &self,
        object: Object,
        at: &Context,
        beside: &[&str],
        owner: &str,
    ) -> Result<Out, OptionError>;

    /// Returns the possible members of the object.
    fn members(&self) -> Vec<Member>;
}

/// A table, and the function that builds a value from its options.
pub struct Table<T: 'static, Out> {
    /// The options.
    pub fields: &'static [Field<T>],
    /// Builds the value, or refuses options that contradict each other.
    pub build: fn(T) -> Result<Out, OptionError>,
}

impl<T: Default, Out> Reads<Out> for Table<T, Out> {
    fn read(
        &self,
        mut object: Object,
        at: &Context,
        beside: &[&str],
        owner: &str,
    ) -> Result<Out, OptionError> {
        let mut draft = T::default();
        read(self.fields, &mut draft, &mut object, at)?;
        let known = names(self.fields);
        refuse_rest(&object, at, owner, beside.iter().copied().chain(known))?;
        (self.build)(draft)
    }

    fn members(&self) -> Vec<Member> {
        members(self.fields)
    }
}

/// Removes a member from an object.
pub fn take(object: &mut Object, name: &str) -> Option<Value> {
    let place = object.iter().position(|(member, _)| member == name)?;
    Some(object.remove(place).1)
}

/// Returns a member of an object, which stays in it.
pub fn look<'a>(object: &'a Object, name: &str) -> Option<&'a Value> {
    object.iter().find(|(member, _)| member == name).map(|(_, value)| value)
}

/// Refuses the members that [`read`] left over.
///
/// `known` are the possible names of `owner`.
///
/// # Errors
///
/// There is such a member.
pub fn refuse_rest<'a>(
    object: &Object,
    at: &Context,
    owner: &str,
    known: impl Iterator<Item = &'a str>,
) -> Set {
    let Some((name, _)) = object.first() else { return Ok(()) };
    let known: Vec<&str> = known.collect();
    let hint = match known.as_slice() {
        [] => format!("{owner} has no parameters."),
        known => format!("Known parameters of {owner}: {}", known.join(", ")),
    };
    Err(OptionError::new(format!("Parameter '{}' is unexpected", at.full(name))).hint(hint))
}

/// Takes the member `type` out of a value. The other members depend on it.
///
/// The caller checks whether the type is one of `types`.
///
/// # Errors
///
/// The value is no object, `type` is missing (the error lists `types`), or `type` is not a text.
pub fn take_type(
    value: Value,
    at: &Context,
    types: &[&str],
) -> Result<(String, Object), OptionError> {
    let Value::Object(mut object) = value else {
        return Err(wrong_type(at.whole(), "object"));
    };
    match take(&mut object, "type") {
        Some(kind) => Ok((text(kind, &at.full("type"), at)?, object)),
        None => {
            let hint = format!("Known values: {}", types.join(", "));
            Err(missing(&at.full("type")).hint(hint))
        }
    }
}

/// Reads the other members of such a value of type `kind`.
///
/// # Errors
///
/// A member is missing, wrong or unknown.
pub fn read_typed<T: Default>(
    fields: &[Field<T>],
    mut object: Object,
    at: &Context,
    kind: &str,
) -> Result<T, OptionError> {
    let mut draft = T::default();
    read(fields, &mut draft, &mut object, at)?;
    let known = ["type"].into_iter().chain(names(fields));
    refuse_rest(&object, at, &format!("'{}' of type '{kind}'", at.whole()), known)?;
    Ok(draft)
}

/// Reads a list of objects with such members. `start` creates each item.
///
/// # Errors
///
/// The value is no list of objects, or a member of an object is missing, wrong or unknown.
pub fn read_list<T>(
    fields: &[Field<T>],
    value: Value,
    at: &Context,
    start: fn() -> T,
) -> Result<Vec<T>, OptionError> {
    let Value::List(items) = value else { return Err(wrong_type(at.whole(), "array")) };
    let read = |(n, item)| {
        let at = at.item(n);
        let Value::Object(mut object) = item else { return Err(wrong_type(at.whole(), "object")) };
        let mut draft = start();
        read(fields, &mut draft, &mut object, &at)?;
        let known = names(fields);
        refuse_rest(&object, &at, &format!("'{}'", at.whole()), known)?;
        Ok(draft)
    };
    items.into_iter().enumerate().map(read).collect()
}

/// Converts a number of QAPI's type `uint32`.
///
/// # Errors
///
/// The number is below 0 or above 4294967295.
pub fn uint32(name: &str, number: i64) -> Result<u32, OptionError> {
    u32::try_from(number)
        .map_err(|_| OptionError::new(format!("Parameter '{name}' expects uint32_t")))
}

/// Returns the error for a missing required parameter.
pub fn missing(full_name: &str) -> OptionError {
    OptionError::new(format!("Parameter '{full_name}' is missing"))
}

/// Returns the error for an unknown word.
///
/// QSD names the parameter without the surrounding objects; the hint has its full name.
pub fn not_accepted<'a>(
    name: &str,
    at: &Context,
    value: &str,
    known: impl Iterator<Item = &'a str>,
) -> OptionError {
    let known: Vec<&str> = known.collect();
    OptionError::new(format!("Parameter '{name}' does not accept value '{value}'")).hint(format!(
        "Known values of '{}': {}",
        at.full(name),
        known.join(", ")
    ))
}

/// Returns the members of a table without Rust types.
pub fn members<T>(fields: &[Field<T>]) -> Vec<Member> {
    offered(fields).map(Field::member).collect()
}

/// Returns the names of the options that a table offers.
pub fn names<T>(fields: &[Field<T>]) -> impl Iterator<Item = &str> {
    offered(fields).map(|field| field.name)
}

fn offered<T>(fields: &[Field<T>]) -> impl Iterator<Item = &Field<T>> {
    fields.iter().filter(|field| !matches!(field.kind, Kind::Unoffered(_)))
}

/// Stores a value, for setters without checks.
///
/// # Errors
///
/// None.
pub fn put<V>(into: &mut V, value: V) -> Set {
    *into = value;
    Ok(())
}

/// Accepts a switch only if it is off, for [`Kind::Unoffered`].
///
/// # Errors
///
/// The switch is on, or the value is no switch.
pub fn only_off<T>(_: &mut T, value: Value, name: &str, at: &Context) -> Set {
    match boolean(value, name, at)? {
        true => Err(OptionError::not_yet(format!("Parameter '{name}' with value 'on'"))),
        false => Ok(()),
    }
}

/// Refuses every value, for [`Kind::Unoffered`].
///
/// # Errors
///
/// Always: ringmill lacks the option.
pub fn not_yet<T>(_: &mut T, _: Value, name: &str, _: &Context) -> Set {
    Err(OptionError::not_yet(format!("Parameter '{name}'")))
}

/// Reads `on` or `off`; in JSON, `true` or `false`.
///
/// # Errors
///
/// Any other value.
pub fn boolean(value: Value, name: &str, at: &Context) -> Result<bool, OptionError> {
    match value {
        Value::Bool(on) => Ok(on),
        Value::Text(text) if at.dialect == Dialect::Keyval => scalar::boolean(&text)
            .ok_or_else(|| OptionError::new(format!("Parameter '{name}' expects 'on' or 'off'"))),
        other => Err(mismatch(other, name, "boolean", at)),
    }
}

/// Returns the error for a value of the wrong type.
pub fn wrong_type(full_name: &str, expected: &str) -> OptionError {
    OptionError::new(format!("Invalid parameter type for '{full_name}', expected: {expected}"))
}

/// Returns the text of a scalar.
///
/// # Errors
///
/// The value is a list or an object; in JSON, anything but a string.
pub fn text(value: Value, full_name: &str, at: &Context) -> Result<String, OptionError> {
    match (value, at.dialect) {
        (Value::Text(text), _) => Ok(text),
        (_, Dialect::Keyval) => {
            Err(OptionError::new(format!("Parameters '{full_name}.*' are unexpected")))
        }
        (_, Dialect::Json) => Err(wrong_type(full_name, "string")),
    }
}

impl<T> Field<T> {
    fn missing(&self, at: &Context) -> Set {
        match &self.kind {
            Kind::Group(fields) => {
                let at = at.below(self.name);
                fields.iter().try_for_each(|field| field.missing(&at))
            }
            _ if self.need == Need::Required => Err(missing(&at.full(self.name))),
            _ => Ok(()),
        }
    }

    /// Converts `value` and calls the setter.
    ///
    /// # Errors
    ///
    /// The value has the wrong type or is out of range, or the setter refuses it.
    pub fn set(&self, into: &mut T, value: Value, at: &Context) -> Set {
        let name = at.full(self.name);
        match &self.kind {
            Kind::Flag(set) => {
                set(into);
                Ok(())
            }
            Kind::Bool(set) => set(into, boolean(value, &name, at)?),
            Kind::Int { range, set } => set(into, integer(value, &name, at, range)?),
            Kind::Bytes(set) => set(into, size(value, &name, at)?),
            Kind::Text { set, .. } => set(into, text(value, &name, at)?),
            Kind::Path(set) => set(into, PathBuf::from(text(value, &name, at)?)),
            Kind::Choice(choices) => {
                let word = text(value, &name, at)?;
                match choices.iter().find(|choice| choice.name == word) {
                    Some(choice) => (choice.set)(into),
                    None => {
                        let offered = choices.iter().filter(|choice| choice.is_offered());
                        let known = offered.map(|choice| choice.name);
                        Err(not_accepted(self.name, at, &word, known))
                    }
                }
            }
            Kind::Group(fields) => {
                let Value::Object(mut object) = value else {
                    return Err(wrong_type(&name, "object"));
                };
                let below = at.below(self.name);
                read(fields, into, &mut object, &below)?;
                let known = names(fields);
                refuse_rest(&object, &below, &format!("'{name}'"), known)
            }
            // Only command lines have text to parse.
            Kind::Structure { .. } => Err(wrong_type(&name, "text")),
            Kind::Nested { read, .. } => read(into, value, &at.below(self.name)),
            Kind::At(place) => place.read(into, value, self.name, at),
            Kind::Unoffered(read) => read(into, value, &name, at),
        }
    }

    /// Creates an option that is read but not offered.
    pub const fn unoffered(
        name: &'static str,
        read: fn(&mut T, Value, &str, &Context) -> Set,
    ) -> Self {
        Field { name, kind: Kind::Unoffered(read), need: Need::Optional(""), help: "" }
    }

    /// Returns this row without Rust types.
    pub fn member(&self) -> Member {
        Member { name: self.name, shape: self.kind.shape(), need: self.need, help: self.help }
    }
}

/// Reads an integer in `range`.
///
/// # Errors
///
/// The value is no integer, or out of range.
pub fn integer(
    value: Value,
    name: &str,
    at: &Context,
    range: &RangeInclusive<i64>,
) -> Result<i64, OptionError> {
    let number = match value {
        Value::Integer(number) => number,
        Value::Text(text) if at.dialect == Dialect::Keyval => {
            scalar::integer(&text).ok_or_else(|| {
                let error = OptionError::new(format!("Parameter '{name}' expects integer"));
                // Without a suffix, the number is too large.
                let has_suffix = text.ends_with(|last: char| last.is_ascii_alphabetic());
                match scalar::size(&text)
                    .filter(|&bytes| has_suffix && i64::try_from(bytes).is_ok())
                {
                    Some(bytes) => error.hint(format!("It takes no suffix: write {name}={bytes}.")),
                    None => error,
                }
            })?
        }
        other => return Err(mismatch(other, name, "integer", at)),
    };
    if range.contains(&number) { Ok(number) } else { Err(out_of_range(name, range)) }
}

/// Reads a number of bytes, from 0 to 2^63 - 1.
///
/// # Errors
///
/// The value is no number of bytes.
pub fn size(value: Value, name: &str, at: &Context) -> Result<u64, OptionError> {
    let number = match value {
        Value::Integer(number) => number,
        Value::Text(text) if at.dialect == Dialect::Keyval => bytes(&text).ok_or_else(|| {
            OptionError::new(format!("Parameter '{name}' expects size")).hint(
                "A size is a number of bytes, or a number with suffix \
                 K, M, G, T, P or E for powers of 1024.",
            )
        })?,
        other => return Err(mismatch(other, name, "integer", at)),
    };
    u64::try_from(number).map_err(|_| negative(name, number))
}

/// Returns the error for a negative number where QSD takes a size.
pub(crate) fn negative(name: &str, number: i64) -> OptionError {
    OptionError::new(format!("Value '{number}' is out of range for parameter '{name}'"))
}

/// A size with a suffix, or an integer in any of QSD's other notations.
fn bytes(text: &str) -> Option<i64> {
    scalar::integer(text).or_else(|| scalar::size(text).and_then(|size| i64::try_from(size).ok()))
}

fn mismatch(value: Value, full_name: &str, expected: &str, at: &Context) -> OptionError {
    match (at.dialect, value) {
        (Dialect::Keyval, Value::List(_) | Value::Object(_)) => {
            OptionError::new(format!("Parameters '{full_name}.*' are unexpected"))
        }
        _ => wrong_type(full_name, expected),
    }
}

/// Returns the error for a number out of range.
pub fn out_of_range(name: &str, range: &RangeInclusive<i64>) -> OptionError {
    OptionError::new(format!("{name} value must be in range [{}, {}]", range.start(), range.end()))
}

impl<T> Kind<T> {
    /// Returns the possible values of the option.
    pub fn shape(&self) -> Shape {
        match self {
            Self::Flag(_) => Shape::Flag,
            Self::Bool(_) => Shape::Bool,
            Self::Int { range, .. } => Shape::Int(range.clone()),
            Self::Bytes(_) => Shape::Size,
            Self::Text { meta, .. } | Self::Structure { meta, .. } => Shape::Text(meta),
            Self::Path(_) => Shape::Path,
            Self::Choice(choices) => {
                let word = |choice: &Choice<T>| Word { name: choice.name, help: choice.help };
                Shape::Words(
                    choices.iter().filter(|choice| choice.is_offered()).map(word).collect(),
                )
            }
            Self::Group(fields) => Shape::Object(members(fields)),
            Self::Nested { shape, .. } => shape(),
            Self::At(place) => place.shape(),
            Self::Unoffered(_) => Shape::Any,
        }
    }
}

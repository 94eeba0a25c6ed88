//! How a table's rows are written: the option's name, whether it is required, its meaning, and then its kind.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use crate::place::Place;
use crate::shape::Shape;
use crate::table::{Choice, Context, Field, Kind, Need, Set};
use crate::value::Value;

/// An option without its kind. A method for the kind makes the [`Field`].
///
/// ```
/// use options::table::{Field, Row, put};
///
/// static OPTIONS: &[Field<(String, bool)>] = &[
///     Row::required("id", "the object's name").text("<id>", |to, id| put(&mut to.0, id)),
///     Row::default("force", "off", "also when in use").bool(|to, on| put(&mut to.1, on)),
/// ];
/// ```
pub struct Row {
    name: &'static str,
    need: Need,
    help: &'static str,
}

impl Row {
    /// Returns an option that must be given.
    pub const fn required(name: &'static str, help: &'static str) -> Row {
        Row { name, need: Need::Required, help }
    }

    /// Returns an option with a default.
    pub const fn default(name: &'static str, default: &'static str, help: &'static str) -> Row {
        Row { name, need: Need::Default(default), help }
    }

    /// Returns an option that may be left out. `without` is the effect of that.
    pub const fn optional(name: &'static str, without: &'static str, help: &'static str) -> Row {
        Row { name, need: Need::Optional(without), help }
    }

    /// Returns the option with any kind.
    pub const fn of<T>(self, kind: Kind<T>) -> Field<T> {
        Field { name: self.name, kind, need: self.need, help: self.help }
    }

    /// Returns a [`Kind::Flag`].
    pub const fn flag<T>(self, set: fn(&mut T)) -> Field<T> {
        self.of(Kind::Flag(set))
    }

    /// Returns a [`Kind::Bool`].
    pub const fn bool<T>(self, set: fn(&mut T, bool) -> Set) -> Field<T> {
        self.of(Kind::Bool(set))
    }

    /// Returns a [`Kind::Int`].
    pub const fn int<T>(self, range: RangeInclusive<i64>, set: fn(&mut T, i64) -> Set) -> Field<T> {
        self.of(Kind::Int { range, set })
    }

    /// Returns a [`Kind::Bytes`].
    pub const fn bytes<T>(self, set: fn(&mut T, u64) -> Set) -> Field<T> {
        self.of(Kind::Bytes(set))
    }

    /// Returns a [`Kind::Text`].
    pub const fn text<T>(self, meta: &'static str, set: fn(&mut T, String) -> Set) -> Field<T> {
        self.of(Kind::Text { meta, set })
    }

    /// Returns a [`Kind::Path`].
    pub const fn path<T>(self, set: fn(&mut T, PathBuf) -> Set) -> Field<T> {
        self.of(Kind::Path(set))
    }

    /// Returns a [`Kind::Choice`].
    pub const fn choice<T>(self, choices: &'static [Choice<T>]) -> Field<T> {
        self.of(Kind::Choice(choices))
    }

    /// Returns a [`Kind::Group`].
    pub const fn group<T>(self, fields: &'static [Field<T>]) -> Field<T> {
        self.of(Kind::Group(fields))
    }

    /// Returns a [`Kind::Nested`].
    pub const fn nested<T>(
        self,
        shape: fn() -> Shape,
        read: fn(&mut T, Value, &Context) -> Set,
    ) -> Field<T> {
        self.of(Kind::Nested { shape, read })
    }

    /// Returns a [`Kind::At`].
    pub const fn at<T>(self, place: &'static dyn Place<T>) -> Field<T> {
        self.of(Kind::At(place))
    }
}

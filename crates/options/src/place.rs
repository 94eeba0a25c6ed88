//! Options that are read and written back by one definition: the place of the value.
//!
//! A [`Place`] is the [`Kind::At`](crate::table::Kind::At) of a row. The reader stores the value there;
//! [`write`](crate::table::write) makes the option of the value that is there.

use std::path::{Path, PathBuf};

use crate::error::OptionError;
use crate::shape::{Shape, Word};
use crate::table::{self, Context, Field, Set};
use crate::value::{Object, Value};

/// Where the value of an option is in a `T`.
pub trait Place<T>: Sync {
    /// Returns the possible values of the option.
    fn shape(&self) -> Shape;

    /// Reads the option `name`, whose surrounding objects `at` names.
    ///
    /// # Errors
    ///
    /// In QSD's words.
    fn read(&self, into: &mut T, value: Value, name: &str, at: &Context) -> Set;

    /// Returns the value as the option gives it. `None`: the option is not given.
    fn write(&self, from: &mut T) -> Option<Value>;
}

/// A type whose values have one form in options.
pub trait OptionValue: Sized {
    /// Returns the possible values. `meta` is the placeholder of a text.
    fn shape(meta: &'static str) -> Shape;

    /// Reads a value of the option `full_name`.
    ///
    /// # Errors
    ///
    /// The value has the wrong type.
    fn read(value: Value, full_name: &str, at: &Context) -> Result<Self, OptionError>;

    /// Returns the value as options give it. `None`: no option is given.
    fn write(&self) -> Option<Value>;
}

impl OptionValue for bool {
    fn shape(_: &'static str) -> Shape {
        Shape::Bool
    }

    fn read(value: Value, full_name: &str, at: &Context) -> Result<Self, OptionError> {
        table::boolean(value, full_name, at)
    }

    fn write(&self) -> Option<Value> {
        Some((*self).into())
    }
}

/// From 0 to the largest signed number.
impl OptionValue for u64 {
    fn shape(_: &'static str) -> Shape {
        Shape::Int(0..=i64::MAX)
    }

    fn read(value: Value, full_name: &str, at: &Context) -> Result<Self, OptionError> {
        let number = table::integer(value, full_name, at, &(i64::MIN..=i64::MAX))?;
        u64::try_from(number).map_err(|_| table::negative(full_name, number))
    }

    fn write(&self) -> Option<Value> {
        Some((*self).into())
    }
}

/// QAPI's `uint32`.
impl OptionValue for u32 {
    fn shape(_: &'static str) -> Shape {
        Shape::Int(i64::MIN..=i64::MAX)
    }

    fn read(value: Value, full_name: &str, at: &Context) -> Result<Self, OptionError> {
        let number = table::integer(value, full_name, at, &(i64::MIN..=i64::MAX))?;
        table::uint32(full_name, number)
    }

    fn write(&self) -> Option<Value> {
        Some((*self).into())
    }
}

impl OptionValue for String {
    fn shape(meta: &'static str) -> Shape {
        Shape::Text(meta)
    }

    fn read(value: Value, full_name: &str, at: &Context) -> Result<Self, OptionError> {
        table::text(value, full_name, at)
    }

    fn write(&self) -> Option<Value> {
        Some(self.as_str().into())
    }
}

impl OptionValue for PathBuf {
    fn shape(_: &'static str) -> Shape {
        Shape::Path
    }

    fn read(value: Value, full_name: &str, at: &Context) -> Result<Self, OptionError> {
        table::text(value, full_name, at).map(PathBuf::from)
    }

    fn write(&self) -> Option<Value> {
        Some(write_path(self))
    }
}

impl<V: OptionValue> OptionValue for Option<V> {
    fn shape(meta: &'static str) -> Shape {
        V::shape(meta)
    }

    fn read(value: Value, full_name: &str, at: &Context) -> Result<Self, OptionError> {
        V::read(value, full_name, at).map(Some)
    }

    fn write(&self) -> Option<Value> {
        self.as_ref()?.write()
    }
}

/// Returns a path as text.
///
/// A path that is not UTF-8 shows by a [replacement character](char::REPLACEMENT_CHARACTER).
pub fn write_path(path: &Path) -> Value {
    path.to_string_lossy().into_owned().into()
}

/// The place of a value.
pub struct Of<T: 'static, V: 'static>(pub fn(&mut T) -> &mut V);

impl<T, V: OptionValue> Place<T> for Of<T, V> {
    fn shape(&self) -> Shape {
        V::shape("")
    }

    fn read(&self, into: &mut T, value: Value, name: &str, at: &Context) -> Set {
        *(self.0)(into) = V::read(value, &at.full(name), at)?;
        Ok(())
    }

    fn write(&self, from: &mut T) -> Option<Value> {
        (self.0)(from).write()
    }
}

/// The place of a text, after its placeholder in help texts.
pub struct Text<T: 'static, V: 'static>(pub &'static str, pub fn(&mut T) -> &mut V);

impl<T, V: OptionValue> Place<T> for Text<T, V> {
    fn shape(&self) -> Shape {
        V::shape(self.0)
    }

    fn read(&self, into: &mut T, value: Value, name: &str, at: &Context) -> Set {
        Of(self.1).read(into, value, name, at)
    }

    fn write(&self, from: &mut T) -> Option<Value> {
        Of(self.1).write(from)
    }
}

/// The place of a value that is checked.
pub struct Checked<T: 'static, V: 'static> {
    /// The placeholder in help texts, of a text.
    pub meta: &'static str,
    /// Refuses values.
    pub check: fn(&V) -> Set,
    /// The place.
    pub at: fn(&mut T) -> &mut V,
}

impl<T, V: OptionValue> Place<T> for Checked<T, V> {
    fn shape(&self) -> Shape {
        V::shape(self.meta)
    }

    fn read(&self, into: &mut T, value: Value, name: &str, at: &Context) -> Set {
        let value = V::read(value, &at.full(name), at)?;
        (self.check)(&value)?;
        *(self.at)(into) = value;
        Ok(())
    }

    fn write(&self, from: &mut T) -> Option<Value> {
        Of(self.at).write(from)
    }
}

/// The place of a number of bytes, with or without a suffix.
pub struct Size<T: 'static>(pub fn(&mut T) -> &mut u64);

impl<T> Place<T> for Size<T> {
    fn shape(&self) -> Shape {
        Shape::Size
    }

    fn read(&self, into: &mut T, value: Value, name: &str, at: &Context) -> Set {
        *(self.0)(into) = table::size(value, &at.full(name), at)?;
        Ok(())
    }

    fn write(&self, from: &mut T) -> Option<Value> {
        Some((*(self.0)(from)).into())
    }
}

/// The place of an integer from `min` to `max`.
pub struct Int<T: 'static, V: 'static> {
    /// The smallest value, in the unit of the option.
    pub min: i64,
    /// The largest value, in the unit of the option.
    pub max: i64,
    /// The place.
    pub at: fn(&mut T) -> &mut V,
}

impl<T, V: Copy + TryFrom<i64> + TryInto<i64>> Place<T> for Int<T, V> {
    fn shape(&self) -> Shape {
        Shape::Int(self.min..=self.max)
    }

    fn read(&self, into: &mut T, value: Value, name: &str, at: &Context) -> Set {
        let (name, range) = (at.full(name), self.min..=self.max);
        let number = table::integer(value, &name, at, &range)?;
        let out_of_range = |_| table::out_of_range(&name, &range);
        *(self.at)(into) = V::try_from(number).map_err(out_of_range)?;
        Ok(())
    }

    fn write(&self, from: &mut T) -> Option<Value> {
        (*(self.at)(from)).try_into().ok().map(Value::Integer)
    }
}

/// The place of one of some words.
pub struct OneOf<T: 'static, V: 'static, W: 'static> {
    /// The place.
    pub at: fn(&mut T) -> &mut V,
    /// The words: name, value, meaning.
    pub words: &'static [(&'static str, W, &'static str)],
}

impl<T, V: From<W> + PartialEq, W: Copy + Sync> Place<T> for OneOf<T, V, W> {
    fn shape(&self) -> Shape {
        Shape::Words(self.words.iter().map(|&(name, _, help)| Word { name, help }).collect())
    }

    fn read(&self, into: &mut T, value: Value, name: &str, at: &Context) -> Set {
        let word = table::text(value, &at.full(name), at)?;
        let known = || self.words.iter().map(|(name, ..)| *name);
        let Some((_, value, _)) = self.words.iter().find(|(name, ..)| *name == word) else {
            return Err(table::not_accepted(name, at, &word, known()));
        };
        *(self.at)(into) = V::from(*value);
        Ok(())
    }

    fn write(&self, from: &mut T) -> Option<Value> {
        let value = (self.at)(from);
        let (name, ..) = self.words.iter().find(|(_, word, _)| V::from(*word) == *value)?;
        Some((*name).into())
    }
}

/// The place of an object with these members.
pub struct Members<T: 'static, V: 'static> {
    /// The place.
    pub at: fn(&mut T) -> &mut Option<V>,
    /// The members.
    pub fields: &'static [Field<V>],
    /// Names the object in errors.
    pub whom: &'static str,
}

impl<T, V: Default + Clone> Place<T> for Members<T, V> {
    fn shape(&self) -> Shape {
        Shape::Object(table::members(self.fields))
    }

    fn read(&self, into: &mut T, value: Value, name: &str, at: &Context) -> Set {
        let at = at.below(name);
        let Value::Object(mut object) = value else {
            return Err(table::wrong_type(at.whole(), "object"));
        };
        let mut value = V::default();
        table::read(self.fields, &mut value, &mut object, &at)?;
        table::refuse_rest(&object, &at, self.whom, table::names(self.fields))?;
        *(self.at)(into) = Some(value);
        Ok(())
    }

    fn write(&self, from: &mut T) -> Option<Value> {
        (self.at)(from).as_mut().map(|value| Value::Object(table::write(self.fields, value)))
    }
}

/// A value with a structure of its own.
pub struct Custom<T: 'static> {
    /// The possible values.
    pub shape: fn() -> Shape,
    /// Reads the value.
    pub read: fn(&mut T, Value, &Context) -> Set,
    /// Writes the value back.
    pub write: fn(&mut T) -> Option<Value>,
}

impl<T> Place<T> for Custom<T> {
    fn shape(&self) -> Shape {
        (self.shape)()
    }

    fn read(&self, into: &mut T, value: Value, name: &str, at: &Context) -> Set {
        (self.read)(into, value, &at.below(name))
    }

    fn write(&self, from: &mut T) -> Option<Value> {
        (self.write)(from)
    }
}

/// Returns the list that [`table::read_list`] reads as these items.
pub fn write_list<T>(fields: &[Field<T>], items: impl IntoIterator<Item = T>) -> Value {
    let item = |mut item| Value::Object(table::write(fields, &mut item));
    Value::List(items.into_iter().map(item).collect())
}

/// Returns an object with a union's tag before the members of `fields`.
pub fn write_tagged<T>(tag: &str, name: &str, fields: &[Field<T>], mut of: T) -> Value {
    let mut object: Object = vec![(tag.to_owned(), name.into())];
    object.extend(table::write(fields, &mut of));
    Value::Object(object)
}

//! What the rest of the program asks of a type of objects.

use std::path::Path;

/// The options of a type of objects.
///
/// No method has a default: a path that is left out would make the state file depend on the working
/// directory.
pub trait ObjectType {
    /// Returns `id`: the object's name, which no other object has.
    fn id(&self) -> &str;

    /// Returns the value of `qom-type`.
    fn type_name(&self) -> &'static str;

    /// Returns the file or folder that the options name.
    fn path(&self) -> Option<&Path>;
}

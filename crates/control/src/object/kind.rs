//! What the rest of the program asks of a type of objects.

use std::path::Path;

/// The options of a type of objects. No method has a default: a path that is left out would make the state file depend on
/// the working directory.
pub trait ObjectType {
    /// `id`: the object's name, which no two objects have in common.
    fn id(&self) -> &str;

    /// `qom-type`.
    fn type_name(&self) -> &'static str;

    /// The file or folder that the options name.
    fn path(&self) -> Option<&Path>;
}

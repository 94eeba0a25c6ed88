//! The tree of objects, as the commands `qom-*` see it.

use std::rc::Rc;

use control::qmp::QmpError;
use control::{Property, Value};
use options::shape::Shape;
use options::table::{Field, Row, put};

use crate::Daemon;
use crate::monitor::Outcome;
use crate::objects::Object;

/// The arguments of the commands: which property, and its new value.
pub(super) struct QomArguments {
    pub(super) path: String,
    pub(super) property: String,
    pub(super) value: Value,
}

impl Default for QomArguments {
    fn default() -> Self {
        QomArguments { path: String::new(), property: String::new(), value: Value::Null }
    }
}

pub(super) const PATH: Field<QomArguments> =
    Row::required("path", "the object: /objects/<id>, or <id> alone")
        .text("<path>", |to, path| put(&mut to.path, path));

pub(super) const PROPERTY: Field<QomArguments> = Row::required("property", "the property's name")
    .text("<name>", |to, name| put(&mut to.property, name));

pub(super) const VALUE: Field<QomArguments> = Row::required("value", "what the property is set to")
    .nested(|| Shape::Any, |to, value, _| put(&mut to.value, value));

/// The target of a path.
pub(super) enum Place {
    /// `/`.
    Root,
    /// `/objects`.
    Objects,
    Object(Rc<Object>),
}

impl Place {
    /// Returns the target of `path`.
    pub(super) fn find(daemon: &Daemon, path: &str) -> Result<Self, QmpError> {
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        let place = match (path.starts_with('/'), parts.as_slice()) {
            (true, []) => Some(Place::Root),
            // An empty path matches every object.
            (false, []) => {
                return Err(QmpError::generic(format!("Path '{path}' is ambiguous")));
            }
            (_, ["objects"]) => Some(Place::Objects),
            (_, ["objects", id]) | (false, [id]) => daemon.objects.get(id).map(Place::Object),
            _ => None,
        };
        place.ok_or_else(|| QmpError::device_not_found(path))
    }

    /// Returns the type.
    pub(super) fn type_name(&self) -> &'static str {
        match self {
            Place::Root | Place::Objects => "container",
            Place::Object(object) => object.type_name,
        }
    }

    /// Returns the properties, without the type and the children.
    pub(super) fn properties(&self, daemon: &Daemon) -> Vec<Property> {
        match self {
            Place::Root | Place::Objects => Vec::new(),
            Place::Object(object) => object.made.properties(daemon),
        }
    }

    /// Returns the value of a property.
    pub(super) fn get(&self, daemon: &Daemon, name: &str) -> Outcome {
        let found = match (self, name) {
            (_, "type") => Some(self.type_name().into()),
            (Place::Root, "objects") => Some("/objects".into()),
            (Place::Root, _) => None,
            (Place::Objects, id) => daemon.objects.get(id).map(|_| format!("/objects/{id}").into()),
            (Place::Object(_), name) => {
                let mut own = self.properties(daemon).into_iter();
                own.find(|own| own.name == name).map(|own| own.value.into())
            }
        };
        found.ok_or_else(|| {
            QmpError::generic(format!("Property '{}.{name}' not found", self.type_name()))
        })
    }
}

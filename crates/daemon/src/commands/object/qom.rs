//! The tree of objects, as the commands `qom-*` see it.

use control::qmp::QmpError;
use control::{ThrottleGroupOptions, Value};
use options::shape::Shape;
use options::table::{Field, Kind, Need, put};

use crate::Daemon;
use crate::monitor::Outcome;
use crate::threads::Thread;

/// The arguments of the commands: which property, and its new value.
pub(super) struct Property {
    pub(super) path: String,
    pub(super) property: String,
    pub(super) value: Value,
}

impl Default for Property {
    fn default() -> Self {
        Property { path: String::new(), property: String::new(), value: Value::Null }
    }
}

pub(super) const PATH: Field<Property> = Field {
    name: "path",
    kind: Kind::Text { meta: "<path>", set: |to, path| put(&mut to.path, path) },
    need: Need::Required,
    help: "the object: /objects/<id>, or <id> alone",
};

pub(super) const PROPERTY: Field<Property> = Field {
    name: "property",
    kind: Kind::Text { meta: "<name>", set: |to, name| put(&mut to.property, name) },
    need: Need::Required,
    help: "the property's name",
};

pub(super) const VALUE: Field<Property> = Field {
    name: "value",
    kind: Kind::Nested { shape: || Shape::Any, read: |to, value, _| put(&mut to.value, value) },
    need: Need::Required,
    help: "what the property is set to",
};

/// What a path leads to.
pub(super) enum Place<'a> {
    /// `/`.
    Root,
    /// `/objects`.
    Objects,
    Thread(&'a Thread),
    Throttle(ThrottleGroupOptions),
    /// An object without properties, by its type.
    Object(&'static str),
}

impl<'a> Place<'a> {
    /// Returns what `path` leads to.
    pub(super) fn find(daemon: &'a Daemon, path: &str) -> Result<Self, QmpError> {
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        let place = match (path.starts_with('/'), parts.as_slice()) {
            (true, []) => Some(Place::Root),
            // An empty path is the end of each path.
            (false, []) => {
                return Err(QmpError::generic(format!("Path '{path}' is ambiguous")));
            }
            (_, ["objects"]) => Some(Place::Objects),
            (_, ["objects", id]) | (false, [id]) => Place::of_object(daemon, id),
            _ => None,
        };
        place.ok_or_else(|| QmpError::device_not_found(path))
    }

    /// Returns an object by its name.
    pub(super) fn of_object(daemon: &'a Daemon, id: &str) -> Option<Self> {
        let group = |id: &str| {
            let limits = daemon.nodes.throttle_group(id)?.limits();
            Some(Place::Throttle(ThrottleGroupOptions { id: id.to_owned(), limits }))
        };
        let other = |id: &str| daemon.objects.kind(id).map(Place::Object);
        daemon.threads.get(id).map(Place::Thread).or_else(|| group(id)).or_else(|| other(id))
    }

    /// Returns the type.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Place::Root | Place::Objects => "container",
            Place::Thread(_) => "iothread",
            Place::Object(kind) => kind,
            Place::Throttle(_) => "throttle-group",
        }
    }

    /// Returns the properties, but for the type and for children.
    pub(super) fn properties(&self) -> Vec<control::Property> {
        match self {
            Place::Root | Place::Objects | Place::Object(_) => Vec::new(),
            Place::Thread(thread) => thread.options.properties(thread.poll_max_ns()),
            Place::Throttle(group) => group.properties(),
        }
    }

    /// Returns the value of a property.
    pub(super) fn get(&self, daemon: &Daemon, name: &str) -> Outcome {
        let found = match (self, name) {
            (_, "type") => Some(self.kind().into()),
            (Place::Root, "objects") => Some("/objects".into()),
            (Place::Root | Place::Object(_), _) => None,
            (Place::Objects, id) => {
                Place::of_object(daemon, id).map(|_| format!("/objects/{id}").into())
            }
            (Place::Thread(_) | Place::Throttle(_), name) => {
                let mut own = self.properties().into_iter();
                own.find(|own| own.name == name).map(|own| own.value.into())
            }
        };
        found.ok_or_else(|| {
            QmpError::generic(format!("Property '{}.{name}' not found", self.kind()))
        })
    }
}

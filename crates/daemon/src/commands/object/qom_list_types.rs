//! `qom-list-types`.

use control::qmp::{Member, Reply, Returns};
use options::table::{Field, Row, put};
use serde_json::{Value as Json, json};

use super::super::Command;

pub(super) static COMMAND: Command<Arguments, Json> = Command {
    name: "qom-list-types",
    help: "list the types of objects",
    example: r#"{"implements": "user-creatable"}"#,
    arguments: ARGUMENTS,
    returns: Returns::Data("one for each type", Reply::List(&Reply::Object(TYPE_INFO))),
    records: false,
    run: |_, Arguments { implements, with_abstract }| {
        Box::pin(async move {
            let wanted = |kind: &Type| {
                let is_it = implements.as_deref().is_none_or(|name| kind.implements(name));
                is_it && (with_abstract || !kind.is_abstract)
            };
            let all = types().filter(wanted).map(|kind| {
                let mut info = json!({"name": kind.name});
                if let Some(parent) = kind.parent {
                    info["parent"] = parent.into();
                }
                if kind.is_abstract {
                    info["abstract"] = true.into();
                }
                info
            });
            Ok(all.collect())
        })
    },
};

#[derive(Default)]
pub(super) struct Arguments {
    implements: Option<String>,
    with_abstract: bool,
}

static ARGUMENTS: &[Field<Arguments>] = &[
    Row::optional(
        "implements",
        "all types",
        "only types that are this type, or are derived from it",
    )
    .text("<type>", |to, name| put(&mut to.implements, Some(name))),
    Row::default("abstract", "off", "also list types of which there are no objects")
        .bool(|to, on| put(&mut to.with_abstract, on)),
];

static TYPE_INFO: &[Member] = &[
    Member::new("name", Reply::Text, "the type's name"),
    Member::optional("abstract", Reply::Bool, "there are no objects of this type alone"),
    Member::optional("parent", Reply::Text, "the type that it is derived from"),
];

/// A type of objects.
struct Type {
    name: &'static str,
    parent: Option<&'static str>,
    is_abstract: bool,
}

/// The interface of all types that `object-add` can create.
const USER_CREATABLE: &str = "user-creatable";

/// QEMU's types from which the daemon's object types derive.
static ABSTRACT: &[Type] = &[
    Type { name: "object", parent: None, is_abstract: true },
    Type { name: "event-loop-base", parent: Some("object"), is_abstract: true },
    Type { name: "tls-creds", parent: Some("object"), is_abstract: true },
    Type { name: "authz", parent: Some("object"), is_abstract: true },
    Type { name: "secret_common", parent: Some("object"), is_abstract: true },
];

/// The type of `/` and of `/objects`.
static CONTAINER: Type = Type { name: "container", parent: Some("object"), is_abstract: false };

impl Type {
    fn implements(&self, name: &str) -> bool {
        if name == USER_CREATABLE {
            return control::object_types().any(|(own, _)| own == self.name);
        }
        let parent =
            self.parent.and_then(|parent| ABSTRACT.iter().find(|kind| kind.name == parent));
        self.name == name || parent.is_some_and(|parent| parent.implements(name))
    }
}

fn types() -> impl Iterator<Item = Type> {
    let fixed = ABSTRACT.iter().chain([&CONTAINER]);
    let fixed = fixed.map(|kind| Type { name: kind.name, ..*kind });
    let own = control::object_types();
    fixed.chain(own.map(|(name, parent)| Type { name, parent: Some(parent), is_abstract: false }))
}

//! `qom-list`.

use control::qmp::{Member, Reply, Returns};
use serde_json::{Value as Json, json};

use super::super::Command;
use super::qom::{PATH, Place, QomArguments};
use crate::Daemon;

pub(super) static COMMAND: Command<QomArguments, Json> = Command {
    name: "qom-list",
    help: "list the properties of an object, or the objects below /objects",
    example: r#"{"path": "/objects"}"#,
    arguments: &[PATH],
    returns: Returns::Data("one for each property", Reply::List(&Reply::Object(PROPERTY_INFO))),
    records: false,
    run: |daemon, QomArguments { path, .. }| {
        Box::pin(async move { Ok(list(daemon, &Place::find(daemon, &path)?)) })
    },
};

static PROPERTY_INFO: &[Member] = &[
    Member::new("name", Reply::Text, "the property's name"),
    Member::new("type", Reply::Text, "what it is; child<type> for an object below this one"),
];

fn list(daemon: &Daemon, place: &Place) -> Json {
    let property = |name: &str, kind: &str| json!({"name": name, "type": kind});
    let mut list = vec![property("type", "string")];
    match place {
        Place::Root => list.push(property("objects", "child<container>")),
        Place::Objects => {
            let objects = daemon.inventory.objects();
            list.extend(objects.map(|(id, kind)| property(id, &format!("child<{kind}>"))));
        }
        Place::Object(_) => {}
    }
    list.extend(place.properties(daemon).iter().map(|own| property(own.name, own.kind)));
    list.into()
}

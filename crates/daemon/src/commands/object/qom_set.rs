//! `qom-set`.

use control::Value;
use control::qmp::{QmpError, Returns};

use super::super::Command;
use super::qom::{PATH, PROPERTY, Place, QomArguments, VALUE};
use crate::Daemon;

pub(super) static COMMAND: Command<QomArguments> = Command {
    name: "qom-set",
    help: "change a property of an object in use",
    example: r#"{"path": "/objects/io0", "property": "poll-max-ns", "value": 50000}"#,
    arguments: &[PATH, PROPERTY, VALUE],
    returns: Returns::Nothing,
    records: true,
    run: |daemon, QomArguments { path, property, value }| {
        Box::pin(async move {
            set(daemon, &path, &property, value)?;
            Ok(())
        })
    },
};

fn set(daemon: &mut Daemon, path: &str, name: &str, value: Value) -> Result<(), QmpError> {
    let place = Place::find(daemon, path)?;
    // A property that does not exist is reported before one that is not writable.
    place.get(daemon, name)?;
    let object = match &place {
        Place::Object(object) if name != "type" => object,
        // Types and children are read-only.
        Place::Root | Place::Objects | Place::Object(_) => {
            let type_name = place.type_name();
            let desc = format!("Property '{type_name}.{name}' is not writable");
            return Err(QmpError::generic(desc));
        }
    };
    object.made.set(daemon, name, value)?;
    let now = object.made.properties(daemon).into_iter().find(|own| own.name == name);
    if let Some(now) = now {
        daemon.inventory.set_property(&object.id, name, now.value);
    }
    Ok(())
}

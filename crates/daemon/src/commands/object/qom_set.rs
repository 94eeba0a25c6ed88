//! `qom-set`.

use control::Value;
use control::qmp::{QmpError, Returns};
use serde_json::json;

use super::super::Command;
use super::qom::{PATH, PROPERTY, Place, Property, VALUE};
use crate::{Daemon, DaemonError};

pub(super) static COMMAND: Command<Property> = Command {
    name: "qom-set",
    help: "change a property of an object in use",
    example: r#"{"path": "/objects/io0", "property": "poll-max-ns", "value": 50000}"#,
    arguments: &[PATH, PROPERTY, VALUE],
    returns: Returns::Nothing,
    records: true,
    run: |daemon, Property { path, property, value }| {
        Box::pin(async move {
            set(daemon, &path, &property, value)?;
            Ok(json!({}))
        })
    },
};

fn set(daemon: &mut Daemon, path: &str, name: &str, value: Value) -> Result<(), QmpError> {
    let place = Place::find(daemon, path)?;
    // A property that does not exist is reported before one that is not writable.
    place.get(daemon, name)?;
    let id = match place {
        Place::Thread(thread) if name != "type" => {
            let id = thread.options.id.clone();
            daemon.threads.set(&id, name, value)?;
            id
        }
        Place::Throttle(group) if name != "type" => {
            let changed = group.with_property(name, value).map_err(DaemonError::from)?;
            let limited = daemon.nodes.throttle_group(&group.id);
            let limited = limited.ok_or_else(|| QmpError::device_not_found(path))?;
            limited.set_limits(changed.limits).map_err(DaemonError::new)?;
            group.id
        }
        // Children cannot be exchanged.
        Place::Root | Place::Objects | Place::Object(_) | Place::Thread(_) | Place::Throttle(_) => {
            let desc = format!("Property '{}.{name}' is not writable", place.kind());
            return Err(QmpError::generic(desc));
        }
    };
    let now = Place::of_object(daemon, &id).map(|place| place.properties()).unwrap_or_default();
    if let Some(now) = now.into_iter().find(|own| own.name == name) {
        daemon.definitions.set_property(&id, name, now.value);
    }
    Ok(())
}

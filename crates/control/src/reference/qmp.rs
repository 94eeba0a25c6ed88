//! What monitors take and tell.

use super::document::{Document, Written, sentence};
use crate::qmp::{EVENTS, QmpCommand, Returns, commands};
use crate::shape::{self, Shape};

/// All of it.
pub(super) fn all() -> Document {
    let mut page = Document::default();
    page.text(
        "A monitor (`--chardev` and `--monitor`) takes commands and sends events: JSON objects, one per \
         line, as in QEMU's QMP. The monitor greets a client, and the client's first command is \
         `qmp_capabilities`. A command may have an `id`, any JSON value; the answer has the same `id`. \
         The error class of an unknown command is `CommandNotFound`. `query-qmp-schema` has the \
         contents of this page for programs.",
    );
    page.code(
        "-> {\"execute\": \"qmp_capabilities\"}\n<- {\"return\": {}}\n-> {\"execute\": \"object-del\", \
         \"arguments\": {\"id\": \"io0\"}, \"id\": 1}\n<- {\"id\": 1, \"error\": {\"class\": \
         \"GenericError\", \"desc\": \"object 'io0' not found\"}}",
    );
    page.title(2, "Commands");
    let mut all: Vec<_> = commands().collect();
    all.sort_by_key(|command| command.name());
    for row in all {
        command(&mut page, row);
    }
    page.title(2, "Events");
    page.text(
        "An event has its time, in seconds and microseconds since 1970, its name and its data:",
    );
    for row in EVENTS {
        page.title(3, row.name);
        page.text(&sentence(row.help));
        page.rows(members(&row.shape()), Written::Reply);
        page.code(&format!(
            "<- {{\"timestamp\": {{\"seconds\": 1, \"microseconds\": 0}}, \"event\": \"{}\", \"data\": {}}}",
            row.name, row.example
        ));
    }
    page
}

fn command(page: &mut Document, row: &dyn QmpCommand) {
    page.title(3, row.name());
    page.text(&sentence(row.help()));
    match row.arguments() {
        Shape::Object(members) => page.rows(shape::rows(&members), Written::Json),
        _ => page.text(&format!("The arguments are those of `{}`, in JSON.", row.option())),
    }
    let arguments = match row.example() {
        "" => String::new(),
        example => format!(", \"arguments\": {example}"),
    };
    page.code(&format!("-> {{\"execute\": \"{}\"{arguments}}}", row.name()));
    match row.returns() {
        Returns::Nothing => page.text("Returns nothing: an empty object."),
        Returns::Data(what, reply) => {
            page.text(&format!("Returns {what}."));
            page.rows(members(&reply.shape()), Written::Reply);
        }
    }
}

/// The members of what is returned, or of each of it.
fn members(shape: &Shape) -> Vec<shape::Row> {
    match shape {
        Shape::Object(members) => shape::rows(members),
        Shape::List(item, _) => members(item),
        _ => Vec::new(),
    }
}

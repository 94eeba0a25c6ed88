//! What the daemon's parts were made by, as options of the command line: by these another process makes
//! them again.

use control::{Action, Step};

/// What an option has made.
#[derive(Debug, PartialEq, Eq)]
enum Made {
    Object(String),
    Node(String),
    Export(String),
    NbdServer,
    /// It stays for as long as the daemon does.
    Fixed,
}

/// The options that make what there is now, in their order.
#[derive(Debug, Default)]
pub(in crate::daemon) struct Definitions {
    options: Vec<(Made, String)>,
    /// Something has changed that no option tells of: what it was.
    changed: Option<String>,
    /// The daemon was not made by options, but by this command line.
    whole: Option<Vec<String>>,
}

impl Definitions {
    /// The daemon is made by a command line of which its options do not show: `serve`.
    pub(in crate::daemon) fn of_command_line(&mut self, arguments: Vec<String>) {
        self.whole = Some(arguments);
    }

    /// Something was made.
    pub(in crate::daemon) fn add(&mut self, step: &Step) {
        let made = match &step.action {
            Action::Object(object) => Made::Object(object.id().to_owned()),
            Action::Blockdev(node) => Made::Node(node.node_name.clone().unwrap_or_default()),
            Action::Export(export) => Made::Export(export.id.clone()),
            Action::NbdServer(_) => Made::NbdServer,
            Action::Chardev(_) | Action::Monitor(_) | Action::Metrics(_) => Made::Fixed,
        };
        self.options.push((made, step.origin.clone()));
    }

    fn remove(&mut self, gone: &Made) {
        self.options.retain(|(made, _)| made != gone);
    }

    pub(in crate::daemon) fn remove_object(&mut self, id: &str) {
        self.remove(&Made::Object(id.to_owned()));
    }

    pub(in crate::daemon) fn remove_node(&mut self, name: &str) {
        self.remove(&Made::Node(name.to_owned()));
    }

    pub(in crate::daemon) fn remove_export(&mut self, id: &str) {
        self.remove(&Made::Export(id.to_owned()));
    }

    pub(in crate::daemon) fn remove_nbd_server(&mut self) {
        self.remove(&Made::NbdServer);
    }

    /// `what` has changed something that no option says.
    pub(in crate::daemon) fn changed_by(&mut self, what: &str) {
        self.changed = Some(what.to_owned());
    }

    /// The command line, without the program's name, that makes what there is.
    ///
    /// # Errors
    ///
    /// Why there is none.
    pub(super) fn arguments(&self) -> Result<Vec<String>, String> {
        if let Some(what) = &self.changed {
            return Err(format!("{what} has changed what the daemon was made with"));
        }
        if let Some(arguments) = &self.whole {
            return Ok(arguments.clone());
        }
        let mut arguments = vec!["storage-daemon".to_owned()];
        for (_, option) in &self.options {
            // `--name=value` is one word, `--name value` two.
            let end = option.find([' ', '=']).unwrap_or(option.len());
            match option.split_at_checked(end) {
                _ if option.contains(char::REPLACEMENT_CHARACTER) => {
                    return Err(format!("{option}: a name in it is not in UTF-8"));
                }
                Some((name, value)) if value.starts_with(' ') => {
                    arguments.extend([name.to_owned(), value[1..].to_owned()]);
                }
                _ => arguments.push(option.clone()),
            }
        }
        Ok(arguments)
    }
}

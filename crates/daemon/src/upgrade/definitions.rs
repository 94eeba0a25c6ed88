//! The current configuration as command-line options, from which another process can reconstruct it.

use block::NodeRegistry;
use control::{Action, Object, Step, Value, amend, blockdev_option, option_words, put_member};

/// One configured item, made by an option or a monitor command, and the option that makes it again.
#[derive(Debug)]
enum Definition {
    Object {
        id: String,
        option: String,
        /// Properties that were set after the object was made.
        properties: Vec<(String, Value)>,
    },
    /// A node's name. The registry holds the node's current options.
    Node(String),
    Export {
        id: String,
        option: String,
        /// The nodes that the option names.
        nodes: Vec<String>,
        named_by_node: Option<&'static str>,
    },
    NbdServer(String),
    /// An item that cannot be removed while the daemon runs.
    Fixed(String),
}

/// The definitions of all current items, in the order of their creation.
#[derive(Debug, Default)]
pub struct Definitions {
    definitions: Vec<Definition>,
    /// The command line of a daemon without a monitor whose configuration its options do not show.
    whole: Option<Vec<String>>,
}

impl Definitions {
    /// Records a command line that replaces all definitions (`serve`).
    pub(crate) fn of_command_line(&mut self, arguments: Vec<String>) {
        self.whole = Some(arguments);
    }

    /// Records the item that `step` made.
    pub fn add(&mut self, step: &Step) {
        let option = step.origin.clone();
        self.definitions.push(match &step.action {
            Action::Object(object) => {
                let (id, properties) = (object.id().to_owned(), Vec::new());
                Definition::Object { id, option, properties }
            }
            Action::Blockdev(node) => Definition::Node(node.node_name.clone().unwrap_or_default()),
            Action::Export(export) => Definition::Export {
                id: export.id.clone(),
                option,
                nodes: export.nodes().cloned().collect(),
                named_by_node: export.kind.named_by_node(),
            },
            Action::NbdServer(_) => Definition::NbdServer(option),
            Action::Chardev(_) | Action::Monitor(_) | Action::Metrics(_) => {
                Definition::Fixed(option)
            }
        });
    }

    /// Records a node that was made without an option.
    pub(crate) fn add_node(&mut self, name: &str) {
        self.definitions.push(Definition::Node(name.to_owned()));
    }

    /// Records the new value of an object's property.
    pub(crate) fn set_property(&mut self, of: &str, name: &str, value: Value) {
        for definition in &mut self.definitions {
            if let Definition::Object { id, properties, .. } = definition
                && id == of
            {
                properties.retain(|(other, _)| other != name);
                properties.push((name.to_owned(), value.clone()));
            }
        }
    }

    pub(crate) fn remove_object(&mut self, gone: &str) {
        self.definitions
            .retain(|made| !matches!(made, Definition::Object { id, .. } if id == gone));
    }

    pub(crate) fn remove_node(&mut self, gone: &str) {
        self.definitions.retain(|made| !matches!(made, Definition::Node(name) if name == gone));
    }

    pub(crate) fn remove_export(&mut self, gone: &str) {
        self.definitions
            .retain(|made| !matches!(made, Definition::Export { id, .. } if id == gone));
    }

    pub(crate) fn remove_nbd_server(&mut self) {
        self.definitions.retain(|made| !matches!(made, Definition::NbdServer(_)));
    }

    /// Returns the command line of the current configuration.
    ///
    /// The program's name is left out.
    ///
    /// `offered` returns the nodes that an export offers now.
    ///
    /// # Errors
    ///
    /// Why there is none.
    pub fn arguments(
        &self,
        nodes: &NodeRegistry,
        offered: impl Fn(&str) -> Option<Vec<String>>,
    ) -> Result<Vec<String>, String> {
        if let Some(arguments) = &self.whole {
            return Ok(arguments.clone());
        }
        let fixed = self.definitions.iter().filter_map(|definition| match definition {
            Definition::Fixed(option) => Some(option.clone()),
            Definition::Object { .. }
            | Definition::Node(_)
            | Definition::Export { .. }
            | Definition::NbdServer(_) => None,
        });
        let options: Vec<_> = fixed.chain(self.configuration(nodes, offered)?).collect();
        words(&options)
    }

    /// Returns the options for the current objects, NBD server, nodes and exports.
    ///
    /// `offered` returns the nodes that an export offers now, or `None` to leave the export out.
    ///
    /// # Errors
    ///
    /// The reason why no options describe the current configuration.
    pub(crate) fn configuration(
        &self,
        nodes: &NodeRegistry,
        offered: impl Fn(&str) -> Option<Vec<String>>,
    ) -> Result<Vec<String>, String> {
        let (mut options, mut names, mut exports) = (Vec::new(), Vec::new(), Vec::new());
        for definition in &self.definitions {
            match definition {
                Definition::Object { option, properties, .. } => {
                    options.push(with_properties(option, properties)?);
                }
                Definition::Node(name) => names.push(name.as_str()),
                Definition::Export { id, option, nodes: before, named_by_node } => {
                    let Some(now) = offered(id) else { continue };
                    let is_active = now.iter().all(|node| nodes.is_active(node));
                    exports.push(match is_active && now == *before {
                        true => option.clone(),
                        false => with_nodes(option, before, now, is_active, *named_by_node)?,
                    });
                }
                Definition::NbdServer(option) => options.push(option.clone()),
                Definition::Fixed(_) => {}
            }
        }
        // An image that came above a node is newer than what uses it now.
        options.extend(nodes.describe(names.into_iter()).iter().map(blockdev_option));
        options.extend(exports);
        Ok(options)
    }
}

fn with_properties(option: &str, properties: &[(String, Value)]) -> Result<String, String> {
    if properties.is_empty() {
        return Ok(option.to_owned());
    }
    let set = |object: &mut Object| {
        properties.iter().for_each(|(name, value)| put_member(object, name, value.clone()));
    };
    amend(option, "qom-type", set).map_err(|error| error.to_string())
}

/// An export's option, for what it offers now.
fn with_nodes(
    option: &str,
    before: &[String],
    now: Vec<String>,
    is_active: bool,
    named_by_node: Option<&'static str>,
) -> Result<String, String> {
    let change = |object: &mut Object| {
        let has = |object: &Object, name: &str| object.iter().any(|(other, _)| other == name);
        if let (Some(name), [node]) = (named_by_node, before)
            && !has(object, name)
        {
            // Clients go on calling it by the name of the node that it had.
            put_member(object, name, Value::Text(node.clone()));
        }
        let mut now = now.into_iter().map(Value::Text);
        let list = ["drives", "luns", "namespaces"].into_iter().find(|list| has(object, list));
        if let Some(list) = list {
            put_member(object, list, Value::List(now.collect()));
        } else if let Some(node) = now.next() {
            put_member(object, "node-name", node);
        }
        if !is_active {
            // Else making it would make its node active.
            put_member(object, "allow-inactive", Value::Bool(true));
        }
    };
    amend(option, "type", change).map_err(|error| error.to_string())
}

/// The command line of these options.
pub(crate) fn words(options: &[String]) -> Result<Vec<String>, String> {
    if let Some(option) = options.iter().find(|option| option.contains(char::REPLACEMENT_CHARACTER))
    {
        return Err(format!("{option}: a name in it is not in UTF-8"));
    }
    let arguments = options.iter().flat_map(|option| option_words(option));
    let arguments: Vec<_> = ["storage-daemon".to_owned()].into_iter().chain(arguments).collect();
    // The other process would find the error as well, but here no guest waits meanwhile.
    let parsed = ["ringmill".to_owned()].into_iter().chain(arguments.iter().cloned());
    match control::parse_args(parsed.map(Into::into)) {
        Ok(_) => Ok(arguments),
        Err(error) => Err(format!("the present objects cannot be made again: {error}")),
    }
}

//! The present configuration as command-line options, from which another process can make it again.

use block::options::{BlockdevOptions, blockdev_option};

use super::{Export, Inventory, Node, Object};
use crate::amend::{amend, put_member};
use crate::cli::{option_words, parse_args};
use crate::error::OptionError;
use crate::masked;
use crate::value::{self, Value};

impl Inventory {
    /// Records the new value of an object's property.
    pub fn set_property(&mut self, id: &str, name: &str, value: Value) {
        let Some(object) = self.objects.get_mut(id) else { return };
        object.properties.retain(|(other, _)| other != name);
        object.properties.push((name.to_owned(), value));
    }

    /// Returns the command line, without the program's name, of the present configuration.
    ///
    /// `describe` returns the options of nodes as they are now, in an order in which they can be made.
    ///
    /// # Errors
    ///
    /// The reason why no command line makes this configuration.
    pub fn command_line(
        &self,
        describe: impl Fn(Vec<&str>) -> Vec<BlockdevOptions>,
    ) -> Result<Vec<String>, OptionError> {
        let mut options = self.fixed.clone();
        options.extend(self.configuration(describe, |_| true)?);
        words(&options)
    }

    /// Returns the options for the present objects, NBD server, nodes, and exports for which `stays` is true.
    ///
    /// `describe` returns the options of nodes as they are now, in an order in which they can be made.
    /// [`check_configuration`] says whether they can be made again.
    ///
    /// # Errors
    ///
    /// The reason why no options make this configuration.
    pub fn configuration(
        &self,
        describe: impl Fn(Vec<&str>) -> Vec<BlockdevOptions>,
        stays: impl Fn(&str) -> bool,
    ) -> Result<Vec<String>, OptionError> {
        let objects = self.objects.values().map(|object| (object.serial, object.amended()));
        let server =
            self.nbd_server.iter().map(|server| (server.serial, Ok(server.option.clone())));
        let mut options = in_order(objects.chain(server))?;
        let is_made = |node: &Node| !node.nested && node.filter_of.is_none();
        let nodes = self.nodes.iter().filter(|(_, node)| is_made(node));
        let mut nodes: Vec<_> = nodes.map(|(name, node)| (node.serial, name.as_str())).collect();
        nodes.sort_unstable();
        // An image that came above a node is newer than what uses it now.
        let nodes = describe(nodes.into_iter().map(|(_, name)| name).collect());
        options.extend(nodes.iter().map(blockdev_option));
        let exports = self.exports.iter().filter(|(id, _)| stays(id));
        let exports = exports.map(|(_, export)| (export.serial, self.amended(export)));
        options.extend(in_order(exports)?);
        Ok(options)
    }

    /// The option of an export, for what it offers now.
    fn amended(&self, export: &Export) -> Result<String, OptionError> {
        let Export { options, option, nodes, .. } = export;
        let before: Vec<_> = options.nodes().collect();
        // The next process has no job.
        let now: Vec<_> = nodes.iter().map(|node| self.below_filter(node)).collect();
        let is_active = now.iter().all(|node| self.is_active(node).is_ok());
        if is_active && before.iter().copied().eq(now.iter().copied()) {
            return Ok(option.clone());
        }
        amend(option, "type", |object| {
            let has =
                |object: &value::Object, name: &str| object.iter().any(|(other, _)| other == name);
            if let (Some(name), [node]) = (options.kind.named_by_node(), &before[..])
                && !has(object, name)
            {
                // Clients go on calling it by the name of the node that it had.
                put_member(object, name, Value::Text((*node).clone()));
            }
            let mut now = now.iter().copied().map(|node| Value::Text(node.to_owned()));
            let list = options.kind.more_nodes().map(|more| more.list);
            if let Some(list) = list.filter(|list| has(object, list)) {
                put_member(object, list, Value::List(now.collect()));
            } else if let Some(node) = now.next() {
                put_member(object, "node-name", node);
            }
            if !is_active {
                // Else making it would make its node active.
                put_member(object, "allow-inactive", Value::Bool(true));
            }
        })
    }
}

impl Object {
    /// The option, with the properties that were set since.
    fn amended(&self) -> Result<String, OptionError> {
        if self.properties.is_empty() {
            return Ok(self.option.clone());
        }
        amend(&self.option, "qom-type", |object| {
            let properties = self.properties.iter();
            properties.for_each(|(name, value)| put_member(object, name, value.clone()));
        })
    }
}

/// Sorts options by their serial numbers.
fn in_order(
    options: impl Iterator<Item = (u64, Result<String, OptionError>)>,
) -> Result<Vec<String>, OptionError> {
    let mut options: Vec<_> = options.collect();
    options.sort_by_key(|(serial, _)| *serial);
    options.into_iter().map(|(_, option)| option).collect()
}

/// Checks that a process can be started with these options.
///
/// Takes a time in proportion to all of them.
///
/// # Errors
///
/// The reason why no process can.
pub fn check_configuration(options: &[String]) -> Result<(), OptionError> {
    words(options).map(drop)
}

/// Returns the command line with these options. Checks it: the next process would find an error as well, but here no
/// guest waits meanwhile.
fn words(options: &[String]) -> Result<Vec<String>, OptionError> {
    if let Some(option) = options.iter().find(|option| option.contains(char::REPLACEMENT_CHARACTER))
    {
        return Err(masked::of(OptionError::new("a name in it is not in UTF-8"), option));
    }
    let given = options.iter().flat_map(|option| option_words(option));
    let words: Vec<_> = ["storage-daemon".to_owned()].into_iter().chain(given).collect();
    let all = ["ringmill".to_owned()].into_iter().chain(words.iter().cloned());
    match parse_args(all.map(Into::into)) {
        Ok(_) => Ok(words),
        Err(error) => {
            let message = format!("the present objects cannot be made again: {error}");
            Err(OptionError::new(message))
        }
    }
}

//! `query-qmp-schema`: what may be said and what is answered, for programs, in the form of QEMU's
//! `qapi/introspect.json`. Made of the tables that commands are read by.

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json, json};

use super::command::commands;
use super::events::EVENTS;
use crate::shape::{Member, Shape, Union};
use crate::table::Need;

/// Returns the whole schema: commands, events, and the types that they refer to.
///
/// As with QEMU, types that only this program has names for are numbered; the numbers mean nothing.
pub fn schema() -> Json {
    let mut types = Types::default();
    let mut entries = Vec::new();
    for row in commands() {
        let (arguments, returned) = (types.of(&row.arguments()), types.of(&row.returns().shape()));
        entries.push(json!({
            "name": row.name(),
            "meta-type": "command",
            "arg-type": arguments,
            "ret-type": returned,
        }));
    }
    for row in EVENTS {
        let data = types.of(&row.shape());
        entries.push(json!({"name": row.name, "meta-type": "event", "arg-type": data}));
    }
    entries.append(&mut types.entries);
    Json::Array(entries)
}

/// The types that were referred to so far.
#[derive(Default)]
struct Types {
    entries: Vec<Json>,
    /// Their names, by what they are without a name: what is the same has one name.
    names: BTreeMap<String, String>,
    /// Those that can lie in themselves.
    named: BTreeMap<&'static str, String>,
    /// How many were given a number.
    numbered: usize,
}

impl Types {
    /// The name of a type, which from now on is among the entries.
    fn of(&mut self, shape: &Shape) -> String {
        match shape {
            Shape::Flag => self.builtin("null", "null"),
            Shape::Bool => self.builtin("bool", "boolean"),
            Shape::Int(_) | Shape::Size => self.builtin("int", "int"),
            Shape::Text(_) | Shape::Path => self.builtin("str", "string"),
            Shape::Any => self.builtin("any", "value"),
            Shape::Words(words) => {
                let names: Vec<&str> = words.iter().map(|word| word.name).collect();
                self.enumeration(&names)
            }
            Shape::List(item, _) => {
                let item = self.of(item);
                let name = format!("[{item}]");
                self.add(json!({"meta-type": "array", "element-type": item}), Some(name))
            }
            Shape::Object(members) => self.object(members),
            Shape::Union(union) => self.union(union),
            Shape::Either(shapes) => {
                let members: Vec<Json> =
                    shapes.iter().map(|shape| json!({"type": self.of(shape)})).collect();
                self.add(json!({"meta-type": "alternate", "members": members}), None)
            }
            Shape::Named(name, union) => match self.named.get(name) {
                Some(known) => known.clone(),
                None => {
                    let number = self.number();
                    self.named.insert(name, number.clone());
                    let definition = self.define(&union());
                    self.add(definition, Some(number))
                }
            },
        }
    }

    fn builtin(&mut self, name: &str, json_type: &str) -> String {
        let definition = json!({"meta-type": "builtin", "json-type": json_type});
        self.add(definition, Some(name.to_owned()))
    }

    fn enumeration(&mut self, names: &[&str]) -> String {
        let members: Vec<Json> = names.iter().map(|name| json!({"name": name})).collect();
        self.add(json!({"meta-type": "enum", "members": members, "values": names}), None)
    }

    fn object(&mut self, members: &[Member]) -> String {
        let members: Vec<Json> = members.iter().map(|member| self.member(member)).collect();
        self.add(json!({"meta-type": "object", "members": members}), None)
    }

    fn union(&mut self, union: &Union) -> String {
        let definition = self.define(union);
        self.add(definition, None)
    }

    fn define(&mut self, union: &Union) -> Json {
        let tag = self.member(&union.tag());
        let common = union.common.iter().map(|member| self.member(member));
        let members: Vec<Json> = std::iter::once(tag).chain(common).collect();
        let variants = union.variants.iter();
        let variants: Vec<Json> = variants
            .map(|variant| json!({"case": variant.name, "type": self.object(&variant.members)}))
            .collect();
        json!({"meta-type": "object", "members": members, "tag": union.tag, "variants": variants})
    }

    fn member(&mut self, member: &Member) -> Json {
        let mut entry = Map::new();
        entry.insert("name".into(), member.name.into());
        entry.insert("type".into(), self.of(&member.shape).into());
        if member.need != Need::Required {
            entry.insert("default".into(), Json::Null);
        }
        Json::Object(entry)
    }

    fn number(&mut self) -> String {
        self.numbered += 1;
        (self.numbered - 1).to_string()
    }

    /// Adds a type, with that name or a number, unless it is there.
    fn add(&mut self, mut definition: Json, name: Option<String>) -> String {
        let key = definition.to_string();
        if let Some(known) = self.names.get(&key) {
            return known.clone();
        }
        let name = name.unwrap_or_else(|| self.number());
        self.names.insert(key, name.clone());
        definition["name"] = name.clone().into();
        self.entries.push(definition);
        name
    }
}

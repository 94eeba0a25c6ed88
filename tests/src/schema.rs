//! The schema that a QMP server reports, for checks of its answers.

use std::collections::BTreeMap;

use serde_json::Value;

/// The answer to `query-qmp-schema`, by names.
#[derive(Debug, Default)]
pub struct Schema(BTreeMap<String, Value>);

impl Schema {
    /// Indexes the entries of that answer.
    pub fn new(entries: &Value) -> Self {
        let entries = entries.as_array().expect("a list").iter().cloned();
        Self(entries.map(|entry| (text(&entry, "name").to_owned(), entry)).collect())
    }

    /// Returns the entry with that name.
    ///
    /// # Panics
    ///
    /// If no entry has the name.
    pub fn get(&self, name: &str) -> &Value {
        self.0.get(name).unwrap_or_else(|| panic!("{name} is not in the schema"))
    }

    /// The names of all commands.
    pub fn commands(&self) -> impl Iterator<Item = &str> {
        let commands = self.0.values().filter(|entry| entry["meta-type"] == "command");
        commands.map(|entry| text(entry, "name"))
    }

    /// Lists the differences of a command's answer, or of an event, from the schema.
    pub fn wrong(&self, name: &str, value: &Value) -> Vec<String> {
        let entry = self.get(name);
        let what = if entry["meta-type"] == "event" { "arg-type" } else { "ret-type" };
        let mut found = Vec::new();
        self.check(text(entry, what), value, name, &mut found);
        found
    }

    fn check(&self, name: &str, value: &Value, at: &str, found: &mut Vec<String>) {
        let entry = self.get(name);
        let fits = match text(entry, "meta-type") {
            "builtin" => match text(entry, "json-type") {
                "string" => value.is_string(),
                "int" => value.is_i64() || value.is_u64(),
                "number" => value.is_number(),
                "boolean" => value.is_boolean(),
                "null" => value.is_null(),
                _ => true,
            },
            "enum" => list(entry, "values").any(|known| known == value),
            "array" => match value.as_array() {
                Some(values) => {
                    let element = text(entry, "element-type");
                    values.iter().for_each(|value| {
                        self.check(element, value, &format!("{at}[]"), found);
                    });
                    true
                }
                None => false,
            },
            "alternate" => list(entry, "members").any(|branch| {
                let mut wrong = Vec::new();
                self.check(text(branch, "type"), value, at, &mut wrong);
                wrong.is_empty()
            }),
            _ => match value.as_object() {
                Some(members) => {
                    let known = self.members(entry, value);
                    for member in &known {
                        let name = text(member, "name");
                        match members.get(name) {
                            Some(value) => {
                                let at = format!("{at}/{name}");
                                self.check(text(member, "type"), value, &at, found);
                            }
                            None if member.get("default").is_some() => {}
                            None => found.push(format!("{at} lacks {name}")),
                        }
                    }
                    let unknown = members
                        .keys()
                        .filter(|name| !known.iter().any(|member| member["name"] == name.as_str()));
                    found.extend(unknown.map(|name| format!("{at}/{name} is not described")));
                    true
                }
                None => false,
            },
        };
        if !fits {
            found.push(format!("{at}: {value} is no {name}"));
        }
    }

    /// The permitted members of an object with this value.
    fn members<'a>(&'a self, entry: &'a Value, value: &Value) -> Vec<&'a Value> {
        let tag = entry["tag"].as_str().map(|tag| &value[tag]);
        let variant = list(entry, "variants").find(|variant| Some(&variant["case"]) == tag);
        let own = variant.map(|variant| self.get(text(variant, "type")));
        let own = own.into_iter().flat_map(|own| list(own, "members"));
        list(entry, "members").chain(own).collect()
    }
}

/// Returns a member that is text.
///
/// # Panics
///
/// If the member is missing or has another type.
pub fn text<'a>(entry: &'a Value, member: &str) -> &'a str {
    entry[member].as_str().unwrap_or_else(|| panic!("{entry} has no {member}"))
}

/// Returns the elements of a member, or none if it is missing.
pub fn list<'a>(entry: &'a Value, member: &str) -> impl Iterator<Item = &'a Value> {
    entry[member].as_array().into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn undescribed_members_are_found() {
        let schema = Schema::new(&json!([
            {"name": "q", "meta-type": "command", "ret-type": "[0]"},
            {"name": "[0]", "meta-type": "array", "element-type": "0"},
            {"name": "0", "meta-type": "object", "members": [
                {"name": "a", "type": "int"}, {"name": "b", "type": "1", "default": null}]},
            {"name": "1", "meta-type": "enum", "values": ["x"]},
            {"name": "int", "meta-type": "builtin", "json-type": "int"},
        ]));
        assert!(schema.wrong("q", &json!([{"a": 1}, {"a": 2, "b": "x"}])).is_empty());
        for wrong in [json!({}), json!([{}]), json!([{"a": "1"}]), json!([{"a": 1, "c": 1}])] {
            assert_eq!(schema.wrong("q", &wrong).len(), 1, "{wrong}");
        }
        assert_eq!(schema.wrong("q", &json!([{"a": 1.5, "b": "y"}])).len(), 2);
    }
}

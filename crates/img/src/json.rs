//! JSON as QEMU prints it: members in the order of QEMU's tables, four blanks per level.

use std::fmt::Write as _;

use options::Value;

/// Members in the order in which QEMU prints them, whatever object they are in. Others follow.
static ORDER: &[&str] = &[
    "image-end-offset",
    "compressed-clusters",
    "total-clusters",
    "corruptions-fixed",
    "corruptions",
    "check-errors",
    "leaks-fixed",
    "leaks",
    "allocated-clusters",
    "children",
    "backing-filename-format",
    "snapshots",
    "virtual-size",
    "filename",
    "cluster-size",
    "ivgen-alg",
    "detached-header",
    "hash-alg",
    "cipher-alg",
    "uuid",
    "format",
    "fragmented-clusters",
    "cipher-mode",
    "slots",
    "payload-offset",
    "master-key-iters",
    "actual-size",
    "format-specific",
    "encrypted",
    "full-backing-filename",
    "backing-filename",
    "dirty-flag",
    "flags",
    "icount",
    "vm-clock-nsec",
    "name",
    "info",
    "granularity",
    "date-sec",
    "date-nsec",
    "vm-clock-sec",
    "id",
    "vm-state-size",
    "compat",
    "compression-type",
    "lazy-refcounts",
    "bitmaps",
    "refcount-bits",
    "data-file",
    "data-file-raw",
    "encrypt",
    "corrupt",
    "extended-l2",
    "active",
    "iters",
    "key-offset",
    "stripes",
    "type",
    "data",
];

/// Returns the members of an object in QEMU's order.
pub fn ordered(object: &[(String, Value)]) -> Vec<&(String, Value)> {
    let place = |name: &str| ORDER.iter().position(|known| *known == name).unwrap_or(ORDER.len());
    let mut members: Vec<_> = object.iter().collect();
    members.sort_by_key(|(name, _)| place(name));
    members
}

/// Returns a value as text of several lines, without an end of line at its end.
pub fn pretty(value: &Value) -> String {
    let mut text = String::new();
    write_value(&mut text, value, 0);
    text
}

/// Returns a value as text of one line.
pub fn in_line(value: &Value) -> String {
    let list = |items: Vec<String>, open, close| format!("{open}{}{close}", items.join(", "));
    match value {
        Value::List(items) => list(items.iter().map(in_line).collect(), '[', ']'),
        Value::Object(members) => {
            let member = |(name, value): &(String, Value)| {
                format!("{}: {}", Value::from(name.as_str()), in_line(value))
            };
            list(members.iter().map(member).collect(), '{', '}')
        }
        Value::Null | Value::Bool(_) | Value::Integer(_) | Value::Number(_) | Value::Text(_) => {
            value.to_string()
        }
    }
}

fn write_value(text: &mut String, value: &Value, depth: usize) {
    let indent = |text: &mut String, depth: usize| text.push_str(&"    ".repeat(depth));
    match value {
        Value::List(items) => {
            text.push_str("[\n");
            for (place, item) in items.iter().enumerate() {
                indent(text, depth + 1);
                write_value(text, item, depth + 1);
                text.push_str(if place + 1 < items.len() { ",\n" } else { "\n" });
            }
            indent(text, depth);
            text.push(']');
        }
        Value::Object(members) => {
            text.push_str("{\n");
            let members = ordered(members);
            for (place, (name, value)) in members.iter().enumerate() {
                indent(text, depth + 1);
                // Writing to a string does not fail.
                let _ = write!(text, "{}: ", Value::from(name.as_str()));
                write_value(text, value, depth + 1);
                text.push_str(if place + 1 < members.len() { ",\n" } else { "\n" });
            }
            indent(text, depth);
            text.push('}');
        }
        Value::Null | Value::Bool(_) | Value::Integer(_) | Value::Number(_) | Value::Text(_) => {
            let _ = write!(text, "{value}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_have_the_order_of_qemu() {
        let empty = Value::Object(Vec::new());
        let of = |members: Vec<(&str, Value)>| {
            let members = members.into_iter().map(|(name, value)| (name.to_owned(), value));
            Value::Object(members.collect())
        };
        let value = of(vec![
            ("x-more", 1_u32.into()),
            ("data", empty),
            ("name", "a\"b".into()),
            ("children", Value::List(vec![true.into(), Value::Null])),
        ]);
        let expected = "{\n    \"children\": [\n        true,\n        null\n    ],\n    \"name\": \"a\\\"b\",\n    \
                        \"data\": {\n    },\n    \"x-more\": 1\n}";
        assert_eq!(pretty(&value), expected);
        assert_eq!(in_line(&of(vec![("a", Value::List(vec![]))])), "{\"a\": []}");
    }
}

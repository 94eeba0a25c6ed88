//! JSON as QEMU writes it: ASCII only, a line to a value, or many when they are to be pretty.

use std::fmt::Write;

use serde_json::Value;

/// Writes a value, with the line end that QMP has after it.
pub(super) fn line(value: &Value, pretty: bool) -> String {
    let mut out = String::new();
    put(&mut out, value, pretty.then_some(0));
    out.push_str("\r\n");
    out
}

/// `indent`: how deep, when it is to be pretty.
fn put(out: &mut String, value: &Value, indent: Option<usize>) {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
        Value::Number(number) => {
            // Writing into a string does not fail.
            let _ = write!(out, "{number}");
        }
        Value::String(text) => string(out, text),
        Value::Array(elements) => {
            out.push('[');
            for (place, element) in elements.iter().enumerate() {
                begin(out, place, indent);
                put(out, element, indent.map(|depth| depth + 1));
            }
            end(out, indent);
            out.push(']');
        }
        Value::Object(members) => {
            out.push('{');
            for (place, (key, value)) in members.iter().enumerate() {
                begin(out, place, indent);
                string(out, key);
                out.push_str(": ");
                put(out, value, indent.map(|depth| depth + 1));
            }
            end(out, indent);
            out.push('}');
        }
    }
}

fn begin(out: &mut String, place: usize, indent: Option<usize>) {
    match (place, indent) {
        (0, None) => {}
        (_, None) => out.push_str(", "),
        (0, Some(depth)) => new_line(out, depth + 1),
        (_, Some(depth)) => {
            out.push(',');
            new_line(out, depth + 1);
        }
    }
}

fn end(out: &mut String, indent: Option<usize>) {
    if let Some(depth) = indent {
        new_line(out, depth);
    }
}

fn new_line(out: &mut String, depth: usize) {
    out.push_str("\r\n");
    for _ in 0..depth {
        out.push_str("    ");
    }
}

fn string(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            ' '..='~' => out.push(c),
            _ => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    // Writing into a string does not fail.
                    let _ = write!(out, "\\u{unit:04X}");
                }
            }
        }
    }
    out.push('"');
}

//! Replaces values of a command line option.

use crate::error::OptionError;
use crate::value::{Object, Value, scalars};
use crate::{json, keyval};

/// Returns an option with `change` applied to its value.
///
/// The option is `--name value` or `--name=value`, and keeps the form. The value is an object in either form:
/// `key=value,…`, whose first key may be the `implied` one, or JSON.
///
/// # Errors
///
/// The value cannot be parsed.
pub fn amend(
    option: &str,
    implied: &str,
    change: impl FnOnce(&mut Object),
) -> Result<String, OptionError> {
    let Some(end) = option.find([' ', '=']) else {
        return Err(OptionError::new(format!("{option}: without a value")));
    };
    let (name, text) = option.split_at(end + 1);
    if text.starts_with('{') {
        let mut object = json::parse(text)?;
        change(&mut object);
        return Ok(format!("{name}{}", serde_json::Value::from(Value::Object(object))));
    }
    let mut object = keyval::parse(text, Some(implied))?.object;
    change(&mut object);
    let pairs =
        scalars(object).into_iter().map(|(key, value)| format!("{key}={}", scalar_text(value)));
    Ok(format!("{name}{}", pairs.collect::<Vec<_>>().join(",")))
}

/// Sets a member of an object.
///
/// If the member is an object, only the members named by `value` are set.
pub fn put_member(object: &mut Object, name: &str, value: Value) {
    match (object.iter_mut().find(|(other, _)| other == name), value) {
        (Some((_, Value::Object(before))), Value::Object(members)) => {
            members.into_iter().for_each(|(name, value)| put_member(before, &name, value));
        }
        (Some((_, before)), value) => *before = value,
        (None, value) => object.push((name.to_owned(), value)),
    }
}

/// Writes a scalar, as in `key=value` text.
fn scalar_text(value: Value) -> String {
    match value {
        Value::Bool(on) => if on { "on" } else { "off" }.to_owned(),
        Value::Integer(number) => number.to_string(),
        Value::Number(number) => number.to_string(),
        Value::Text(text) => text.replace(',', ",,"),
        // Lists and objects were split.
        Value::Null | Value::List(_) | Value::Object(_) => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(option: &str, name: &str, value: Value) -> String {
        amend(option, "qom-type", |object| put_member(object, name, value)).unwrap()
    }

    #[test]
    fn values_are_added_and_replaced_in_both_forms() {
        let five = || Value::Integer(5);
        let option = "--object iothread,id=io0,poll-max-ns=1";
        let changed = "--object qom-type=iothread,id=io0,poll-max-ns=5";
        assert_eq!(with(option, "poll-max-ns", five()), changed);
        assert_eq!(
            with("--obj=iothread,id=io0", "poll-max-ns", five()),
            "--obj=qom-type=iothread,id=io0,poll-max-ns=5"
        );
        assert_eq!(
            with(r#"--object {"qom-type": "iothread", "poll-max-ns": 1}"#, "poll-max-ns", five()),
            r#"--object {"qom-type":"iothread","poll-max-ns":5}"#
        );
        let limits = || Value::Object(vec![("iops-total".into(), five())]);
        assert_eq!(
            with("--object throttle-group,id=a,,b,limits.bps-read=7", "limits", limits()),
            "--object qom-type=throttle-group,id=a,,b,limits.bps-read=7,limits.iops-total=5"
        );
        let list = Value::List(vec![Value::Text("x".into()), Value::Bool(true)]);
        assert_eq!(
            with("--export vhost-user-scsi,luns.0=a", "luns", list),
            "--export qom-type=vhost-user-scsi,luns.0=x,luns.1=on"
        );
    }
}

//! Hides secrets in options that error messages repeat: messages end up in journals and tickets.

use std::ops::Range;

use crate::error::OptionError;

/// Stands for a secret.
const HIDDEN: char = '…';

/// Returns an option without secrets. Hidden are the values of `data`, which only `--object secret` has, of `cookie`, and of
/// `secret-key` and `session-token`, which `s3` does not take; and what follows `?` in a `url`, which may be a signature. A name
/// in upper case, or with more behind a dot, is taken for the same.
pub fn masked(option: &str) -> String {
    split(option).0
}

/// Puts the option in front of an error, and hides secrets in both.
pub(crate) fn of(error: OptionError, option: &str) -> OptionError {
    let (shown, hidden) = split(option);
    // A comma in a secret ends the value. What follows is quoted as the name of a parameter.
    let quoted = |(index, word): (usize, &str)| {
        let is_secret = index % 2 == 1 && hidden.iter().any(|secret| secret.contains(word));
        if is_secret { HIDDEN.to_string() } else { word.to_owned() }
    };
    let words: Vec<_> = error.message.split('\'').enumerate().map(quoted).collect();
    OptionError { message: words.join("'"), ..error }.of(&shown)
}

/// Returns an option without secrets, and the secrets.
fn split(option: &str) -> (String, Vec<&str>) {
    const URL: &str = "url";
    const NAMES: [&str; 5] = ["data", "cookie", "secret-key", "session-token", URL];
    let (mut shown, mut hidden, mut rest) = (String::new(), Vec::new(), option);
    let find = |text: &str| {
        let text = text.to_ascii_lowercase();
        NAMES.into_iter().filter_map(|name| Some((text.find(name)?, name))).min()
    };
    while let Some((at, name)) = find(rest) {
        let is_part = rest[..at].ends_with(is_of_name);
        let (before, after) = rest.split_at(at + name.len());
        let value = value(after).filter(|value| !is_part && !value.is_empty()).unwrap_or(0..0);
        let value = match (name, after[value.clone()].find('?')) {
            (URL, Some(query)) => value.start + query + 1..value.end,
            (URL, None) => 0..0,
            _ => value,
        };
        shown.push_str(before);
        shown.push_str(&after[..value.start]);
        if !value.is_empty() {
            shown.push(HIDDEN);
            hidden.push(&after[value.clone()]);
        }
        rest = &after[value.end..];
    }
    shown.push_str(rest);
    (shown, hidden)
}

fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || "-_.".contains(c)
}

/// Finds the value in the text behind a name, in keyval syntax or, possibly damaged, JSON.
fn value(after: &str) -> Option<Range<usize>> {
    // A name below, such as `data.x`, is a mistake, and its value may be the secret.
    let below = after.starts_with('.').then(|| after.find(|c| !is_of_name(c))).flatten();
    let at = below.unwrap_or(0);
    if let Some(value) = after[at..].strip_prefix('=') {
        return Some(at + 1..at + 1 + keyval_len(value));
    }
    let behind = after.strip_prefix(['"', '\''])?.trim_start().strip_prefix(':')?.trim_start();
    let (value, len) = match behind.chars().next()? {
        '{' | '[' => return None,
        quote @ ('"' | '\'') => (&behind[1..], quoted_len(&behind[1..], quote)),
        _ => (behind, behind.find([',', '}']).unwrap_or(behind.len())),
    };
    let start = after.len() - value.len();
    Some(start..start + len)
}

/// Length of a value up to a comma with another parameter behind it. A forgotten second comma does not show the rest.
fn keyval_len(value: &str) -> usize {
    let is_parameter = |text: &str| {
        text.split_once('=')
            .is_some_and(|(name, _)| !name.is_empty() && name.chars().all(is_of_name))
    };
    let mut from = 0;
    while let Some(comma) = value[from..].find(',').map(|at| from + at) {
        let behind = &value[comma + 1..];
        if is_parameter(behind) {
            return comma;
        }
        from = comma + if behind.starts_with(',') { 2 } else { 1 };
    }
    value.len()
}

/// Length of a string up to its closing quote, or to the end.
fn quoted_len(text: &str, quote: char) -> usize {
    let mut is_escaped = false;
    let end = text.find(|c| {
        let is_end = c == quote && !is_escaped;
        is_escaped = c == '\\' && !is_escaped;
        is_end
    });
    end.unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_way_of_writing_shows_a_secret() {
        for (option, shown) in [
            ("--object secret,id=s,data=geheim", "--object secret,id=s,data=…"),
            ("--object=secret,data=geheim,id=s", "--object=secret,data=…,id=s"),
            ("--object secret,data=a,,geheim=b,,,id=s", "--object secret,data=…,id=s"),
            ("--object secret,data=a,geheim", "--object secret,data=…"),
            ("--object secret,data=,id=s", "--object secret,data=,id=s"),
            (
                r#"--object {"data": "a\"geheim", "id": "s"}"#,
                r#"--object {"data": "…", "id": "s"}"#,
            ),
            ("--object secret,id=s,Data=geheim", "--object secret,id=s,Data=…"),
            ("--object secret,data.x=geheim,id=s", "--object secret,data.x=…,id=s"),
            ("--object {'data':'geheim", "--object {'data':'…"),
            (
                "--blockdev http,url=http://a/b?geheim,cookie=geheim",
                "--blockdev http,url=http://a/b?…,cookie=…",
            ),
            (
                r#"--blockdev {"url": "http://a/b", "cookie-secret": "s", "Cookie": "geheim"}"#,
                r#"--blockdev {"url": "http://a/b", "cookie-secret": "s", "Cookie": "…"}"#,
            ),
            (
                "--blockdev s3,secret-key=geheim,session-token=geheim,secret-key-secret=s",
                "--blockdev s3,secret-key=…,session-token=…,secret-key-secret=s",
            ),
            (r#"--object {"data": 123, "id": "s"}"#, r#"--object {"data": …, "id": "s"}"#),
            ("--blockdev raw,data-file=f,x.data=1", "--blockdev raw,data-file=f,x.data=1"),
            (r#"--x {"data": {"path": "p"}}"#, r#"--x {"data": {"path": "p"}}"#),
        ] {
            assert_eq!(masked(option), shown);
        }
        let error = OptionError::new("Expected '=' after parameter 'geheim'");
        assert_eq!(
            of(error, "--object secret,data=a,geheim").message,
            "--object secret,data=…: Expected '=' after parameter '…'"
        );
    }
}

//! A document in parts, which becomes Markdown or a man page.

use crate::shape::{Row, Shape};

/// A document.
#[derive(Default)]
pub(super) struct Document(pub(super) Vec<Part>);

pub(super) enum Part {
    /// A heading, and its level from 1.
    Title(usize, String),
    /// The list of headings, in formats that have one.
    Contents,
    /// A paragraph. Text between backticks is literal.
    Text(String),
    /// Literal lines, as for a command.
    Code(String),
    /// Options, members, arguments.
    Rows(Vec<Row>, Written),
    /// Names with their descriptions.
    Terms(Vec<(String, String)>),
}

/// The notation of rows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Written {
    /// After two dashes.
    Options,
    /// `key=value`.
    Pairs,
    /// In JSON.
    Json,
    /// In JSON, by the daemon: without defaults.
    Reply,
}

impl Document {
    pub(super) fn title(&mut self, level: usize, text: &str) {
        self.0.push(Part::Title(level, text.to_owned()));
    }

    pub(super) fn contents(&mut self) {
        self.0.push(Part::Contents);
    }

    pub(super) fn text(&mut self, text: &str) {
        self.0.push(Part::Text(text.to_owned()));
    }

    pub(super) fn code(&mut self, text: &str) {
        self.0.push(Part::Code(text.to_owned()));
    }

    pub(super) fn rows(&mut self, rows: Vec<Row>, written: Written) {
        if !rows.is_empty() {
            self.0.push(Part::Rows(rows, written));
        }
    }

    pub(super) fn terms(&mut self, terms: impl IntoIterator<Item = (String, String)>) {
        self.0.push(Part::Terms(terms.into_iter().collect()));
    }

    /// Appends another document, with its headings that many levels lower.
    pub(super) fn append(&mut self, other: Document, levels: usize) {
        self.0.extend(other.0.into_iter().map(|part| match part {
            Part::Title(level, text) => Part::Title(level + levels, text),
            part => part,
        }));
    }
}

/// Makes a sentence of a phrase.
pub(super) fn sentence(text: &str) -> String {
    let mut chars = text.chars();
    let first = chars.next().map(|first| first.to_uppercase().to_string()).unwrap_or_default();
    let end = if text.ends_with(['.', ':']) { "" } else { "." };
    format!("{first}{}{end}", chars.as_str())
}

/// Splits text into pieces: literal (`true`) and ordinary. Literal is text between backticks and, outside of them, words
/// of certain forms: `--option`, `key=value`, `<meta>`.
pub(super) fn pieces(text: &str) -> Vec<(bool, String)> {
    let mut pieces: Vec<(bool, String)> = Vec::new();
    let mut push = |typed: bool, text: &str| match pieces.last_mut() {
        Some((last, piece)) if *last == typed && !typed => piece.push_str(text),
        _ if text.is_empty() => {}
        _ => pieces.push((typed, text.to_owned())),
    };
    for (place, part) in text.split('`').enumerate() {
        if place % 2 == 1 {
            push(true, part);
            continue;
        }
        for word in part.split_inclusive(' ') {
            let bare = word.trim_end();
            let start = bare.len() - bare.trim_start_matches('(').len();
            let core = bare.get(start..).unwrap_or_default();
            let core = core.trim_end_matches([',', '.', ';', ':', ')']);
            let looks_typed = core.starts_with("--")
                || core.contains(['=', '_', '*'])
                || (core.contains('<') && core.contains('>'));
            if looks_typed && core.len() > 1 {
                push(false, word.get(..start).unwrap_or_default());
                push(true, core);
                push(false, word.get(start + core.len()..).unwrap_or_default());
            } else {
                push(false, word);
            }
        }
    }
    pieces
}

/// A row's name and value in its notation.
pub(super) fn usage(row: &Row, written: Written) -> String {
    let Row { name, value, .. } = row;
    match written {
        Written::Options => format!("--{name} {value}").trim_end().to_owned(),
        Written::Pairs => format!("{name}={value}"),
        Written::Json | Written::Reply => {
            let value = match row.shape {
                Shape::Bool => "true|false",
                Shape::Size => "<bytes>",
                _ => value,
            };
            format!("{}: {value}", name.replace(".<n>", "[]"))
        }
    }
}

/// A row's description, with its range.
pub(super) fn help(row: &Row) -> String {
    let range = match &row.shape {
        Shape::Int(range) => (*range.start(), *range.end()),
        _ => (i64::MIN, i64::MAX),
    };
    match range {
        (i64::MIN, i64::MAX) => row.help.clone(),
        (start, i64::MAX) => format!("{} ({start} or more)", row.help),
        (start, end) => format!("{} ({start} to {end})", row.help),
    }
}

/// The words that a row accepts, and their meanings.
pub(super) fn words(row: &Row) -> Vec<String> {
    let Shape::Words(words) = &row.shape else { return Vec::new() };
    let told = words.iter().filter(|word| !word.help.is_empty());
    told.map(|word| format!("`{}`: {}", word.name, word.help)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literal_text_is_found() {
        let typed = |text: &str| -> Vec<String> {
            pieces(text).into_iter().filter(|piece| piece.0).map(|piece| piece.1).collect()
        };
        assert_eq!(
            typed("needs discard=unmap, or (--cache none); number <n>."),
            ["discard=unmap", "--cache", "<n>"]
        );
        assert_eq!(typed("a `b c` d"), ["b c"]);
        let text = "as (x=y), so.";
        let whole: String = pieces(text).into_iter().map(|piece| piece.1).collect();
        assert_eq!(whole, text);
    }
}

//! Documents as Markdown, as GitHub reads it.

use std::fmt::Write;

use super::document::{Document, Part, Written, help, pieces, usage, words};
use crate::shape::Row;
use crate::table::Need;

/// The whole text.
pub(super) fn write(document: &Document) -> String {
    let mut out = String::new();
    for part in &document.0 {
        match part {
            Part::Title(level, text) => line(&mut out, &format!("{} {text}", "#".repeat(*level))),
            Part::Contents => {
                let titles = document.0.iter().filter_map(|part| match part {
                    Part::Title(level @ 2..=3, text) => Some((level, text)),
                    _ => None,
                });
                for (level, text) in titles {
                    let indent = "  ".repeat(level - 2);
                    line(&mut out, &format!("{indent}- [{text}](#{})", anchor(text)));
                }
            }
            Part::Text(text) => line(&mut out, &inline(text)),
            Part::Code(text) => line(&mut out, &format!("```\n{text}\n```")),
            Part::Rows(rows, written) => table(&mut out, rows, *written),
            Part::Terms(terms) => {
                for (name, text) in terms {
                    line(&mut out, &format!("- `{name}`: {}", inline(text)));
                }
            }
        }
        if !matches!(part, Part::Terms(terms) if terms.is_empty()) {
            out.push('\n');
        }
    }
    out.truncate(out.trim_end().len());
    out.push('\n');
    out
}

fn line(out: &mut String, text: &str) {
    out.push_str(text);
    out.push('\n');
}

/// What GitHub makes of a heading, for links to it.
fn anchor(title: &str) -> String {
    let kept = title.to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

fn inline(text: &str) -> String {
    let piece = |(typed, text): (bool, String)| match typed {
        true => format!("`{text}`"),
        false => text.replace('*', "\\*").replace('<', "\\<"),
    };
    pieces(text).into_iter().map(piece).collect()
}

fn table(out: &mut String, rows: &[Row], written: Written) {
    let (head, dashes) = match written {
        Written::Options | Written::Pairs => ("| option | default | |", "|---|---|---|"),
        Written::Json => ("| argument | default | |", "|---|---|---|"),
        Written::Reply => ("| member | |", "|---|---|"),
    };
    line(out, head);
    line(out, dashes);
    for row in rows {
        let _ = write!(out, "| `{}`", usage(row, written).replace('|', "\\|"));
        if written != Written::Reply {
            let _ = write!(out, " | {}", need(row));
        }
        let lines = std::iter::once(help(row)).chain(words(row));
        let lines: Vec<String> = lines.map(|text| inline(&text)).collect();
        let _ = writeln!(out, " | {} |", lines.join("<br>").replace('|', "\\|"));
    }
}

fn need(row: &Row) -> String {
    match row.need {
        Need::Required => inline(&row.required()),
        Need::Default("") | Need::Optional("") => String::new(),
        Need::Default(value) => format!("`{value}`"),
        Need::Optional(what) => inline(what),
    }
}

//! Documents as man pages: roff with the macros of man(7).

use super::document::{Document, Part, help, pieces, usage, words};
use crate::table::Need;

/// A man page.
pub(super) struct Page {
    pub(super) name: &'static str,
    pub(super) section: u8,
    /// Its subject, in a phrase.
    pub(super) about: &'static str,
    /// The synopsis; empty for a page without a program.
    pub(super) synopsis: &'static str,
    /// Other pages, separated by commas.
    pub(super) see_also: &'static str,
}

/// Returns the page's text.
pub(super) fn write(page: &Page, document: &Document) -> String {
    let version = env!("CARGO_PKG_VERSION");
    let mut out = Lines::default();
    let Page { name, section, about, synopsis, see_also } = page;
    out.request(&format!(".TH {} {section} \"\" \"ringmill {version}\"", name.to_uppercase()));
    // Left-adjusted, as literal text has no spaces to stretch.
    out.request(".ad l");
    out.request(".SH NAME");
    out.text(&format!("{} \\- {}", escaped(name), escaped(about)));
    if !synopsis.is_empty() {
        out.request(".SH SYNOPSIS");
        out.wrapped(&inline(&format!("`{synopsis}`")));
    }
    out.request(".SH DESCRIPTION");
    // A section begins with a paragraph by itself.
    let mut begun = true;
    for part in &document.0 {
        let begins = !std::mem::replace(&mut begun, matches!(part, Part::Title(..)));
        match part {
            Part::Title(2, text) if text.starts_with("--") => {
                out.request(&format!(".SH {}", quoted(text)));
            }
            Part::Title(2, text) => out.request(&format!(".SH {}", quoted(&text.to_uppercase()))),
            Part::Title(_, text) => out.request(&format!(".SS {}", quoted(text))),
            Part::Contents => {}
            Part::Text(text) => {
                if begins {
                    out.request(".PP");
                }
                out.wrapped(&inline(text));
            }
            Part::Code(text) => {
                if begins {
                    out.request(".PP");
                }
                out.request(".RS 4");
                out.request(".EX");
                text.lines().for_each(|line| out.text(&escaped(line)));
                out.request(".EE");
                out.request(".RE");
            }
            Part::Rows(rows, written) => {
                for row in rows {
                    out.request(".TP");
                    // A long list of choices may break after each of them.
                    let usage = escaped(&usage(row, *written)).replace('|', "|\\:");
                    out.text(&format!("\\fB{usage}\\fR"));
                    let mut text = help(row);
                    match row.need {
                        Need::Required => text.push_str(&format!(" ({})", row.required())),
                        Need::Default("") | Need::Optional("") => {}
                        Need::Default(what) | Need::Optional(what) => {
                            text.push_str(&format!(" (default: {what})"));
                        }
                    }
                    out.wrapped(&inline(&text));
                    for word in words(row) {
                        out.request(".br");
                        out.wrapped(&inline(&word));
                    }
                }
            }
            Part::Terms(terms) => {
                for (name, text) in terms {
                    out.request(".TP");
                    out.text(&format!("\\fB{}\\fR", escaped(name)));
                    out.wrapped(&inline(text));
                }
            }
        }
    }
    out.request(".SH SEE ALSO");
    out.text(&escaped(see_also));
    out.0
}

#[derive(Default)]
struct Lines(String);

impl Lines {
    fn request(&mut self, line: &str) {
        self.0.push_str(line);
        self.0.push('\n');
    }

    /// Adds text in lines of a moderate length.
    fn wrapped(&mut self, text: &str) {
        let mut line = String::new();
        for word in text.split(' ') {
            if !line.is_empty() && line.len() + 1 + word.len() > 79 {
                self.text(&line);
                line.clear();
            }
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
        self.text(&line);
    }

    /// Adds a line of text, which is never a request, whatever its first character.
    fn text(&mut self, line: &str) {
        if line.starts_with(['.', '\'']) {
            self.0.push_str("\\&");
        }
        self.request(line);
    }
}

fn inline(text: &str) -> String {
    let piece = |(typed, text): (bool, String)| match typed {
        true => format!("\\fB{}\\fR", escaped(&text)),
        false => escaped(&text),
    };
    pieces(text).into_iter().map(piece).collect()
}

/// Escapes text for roff.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\e"),
            '-' => out.push_str("\\-"),
            '\'' => out.push_str("\\(aq"),
            '`' => out.push_str("\\(ga"),
            '^' => out.push_str("\\(ha"),
            '~' => out.push_str("\\(ti"),
            '…' => out.push_str("..."),
            c => out.push(c),
        }
    }
    out
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", escaped(text).replace('"', "\\(dq"))
}

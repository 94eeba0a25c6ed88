//! Reports of figures: tables for the terminal, and as Markdown between marks of a document.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

/// Words and figures in columns.
#[derive(Debug, Clone, Default)]
pub(crate) struct Table {
    /// What the columns are.
    pub(crate) head: Vec<String>,
    /// The lines.
    pub(crate) body: Vec<Vec<String>>,
}

impl Table {
    /// An empty table with these columns.
    pub(crate) fn new(head: &[&str]) -> Self {
        Table { head: head.iter().map(|&cell| cell.into()).collect(), body: Vec::new() }
    }

    /// Adds a line.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.body.push(cells.into_iter().collect());
    }

    /// Aligned text.
    pub(crate) fn text(&self) -> String {
        let lines = || std::iter::once(&self.head).chain(&self.body);
        let width = |column: usize| {
            lines().filter_map(|line| line.get(column)).map(|cell| cell.chars().count()).max()
        };
        let widths: Vec<usize> = (0..self.head.len()).map(|i| width(i).unwrap_or(0)).collect();
        let mut text = String::new();
        for line in lines() {
            let mut cells = String::new();
            for (column, (cell, &width)) in line.iter().zip(&widths).enumerate() {
                match is_figure(column) {
                    true => cells += &format!("{cell:>width$}  "),
                    false => cells += &format!("{cell:<width$}  "),
                }
            }
            text += cells.trim_end();
            text += "\n";
        }
        text
    }

    /// Markdown.
    pub(crate) fn markdown(&self) -> String {
        let line = |cells: &[String]| {
            let mut line = String::from("|");
            for column in 0..self.head.len() {
                line += &format!(" {} |", cells.get(column).map_or("", String::as_str));
            }
            line + "\n"
        };
        let rule: Vec<String> = (0..self.head.len())
            .map(|column| if is_figure(column) { "---:".into() } else { "---".into() })
            .collect();
        let mut text = line(&self.head) + &line(&rule);
        for cells in &self.body {
            text += &line(cells);
        }
        text
    }
}

/// The first column is words in every table, and so is the second where there are servers; numbers
/// are easier to compare flush right, and a word there does no harm.
fn is_figure(column: usize) -> bool {
    column >= 2
}

/// Puts `section` between the marks `<!-- NAME: begin -->` and `<!-- NAME: end -->` of `file`.
pub(crate) fn write_section(file: &Path, name: &str, section: &str) -> Result<()> {
    let text = fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
    let text =
        replace_section(&text, name, section).with_context(|| format!("in {}", file.display()))?;
    fs::write(file, text).with_context(|| format!("writing {}", file.display()))
}

fn replace_section(text: &str, name: &str, section: &str) -> Result<String> {
    let (begin, end) = (format!("<!-- {name}: begin -->"), format!("<!-- {name}: end -->"));
    let (Some(from), Some(to)) = (text.find(&begin), text.find(&end)) else {
        bail!("the marks {begin} and {end} are missing");
    };
    if to < from {
        bail!("{end} comes before {begin}");
    }
    Ok(format!("{}{begin}\n{section}{}", &text[..from], &text[to..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_section_between_the_marks_is_replaced() {
        let (begin, end) = ("<!-- x: begin -->", "<!-- x: end -->");
        let text = format!("# A\n{begin}\nold\n{end}\n# B\n");
        let new = replace_section(&text, "x", "new\n").unwrap();
        assert_eq!(new, format!("# A\n{begin}\nnew\n{end}\n# B\n"));
        assert_eq!(replace_section(&new, "x", "new\n").unwrap(), new);
        assert!(replace_section("# A", "x", "new").is_err());
        assert!(replace_section(&text, "y", "new").is_err());
        assert!(replace_section(&format!("{end}{begin}"), "x", "new").is_err());
    }
}

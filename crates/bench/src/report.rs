//! Reports of figures: tables for the terminal, and JSON to record.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value as Json;

/// Ends the description of a method.
pub const DEBUG: &str =
    if cfg!(debug_assertions) { "; DEBUG BUILD, figures mean nothing" } else { "" };

/// Words and figures in columns.
#[derive(Debug, Clone, Default)]
pub struct Table {
    /// What the columns are.
    pub head: Vec<String>,
    /// The lines.
    pub body: Vec<Vec<String>>,
}

impl Table {
    /// An empty table with these columns.
    pub fn new(head: &[&str]) -> Self {
        Table { head: head.iter().map(|&cell| cell.into()).collect(), body: Vec::new() }
    }

    /// Adds a line.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.body.push(cells.into_iter().collect());
    }

    /// Aligned text.
    pub fn text(&self) -> String {
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
}

/// The first column is words in every table, and so is the second where there are servers; numbers
/// are easier to compare flush right, and a word there does no harm.
fn is_figure(column: usize) -> bool {
    column >= 2
}

/// A part of a report, as it is recorded beside docs/BENCHMARKS.md.
#[derive(Debug, Clone, Default)]
pub struct Section {
    /// Empty, if the report has one section only.
    pub heading: String,
    /// Machine, method, servers with their command lines; a fact each.
    pub text: Vec<String>,
    /// The figures.
    pub tables: Vec<Table>,
}

impl Section {
    /// Aligned text.
    pub fn text(&self) -> String {
        let heading = Some(&self.heading).filter(|heading| !heading.is_empty());
        let lines = heading.into_iter().chain(&self.text).map(|line| format!("{line}\n"));
        self.tables.iter().fold(lines.collect(), |text: String, table| text + "\n" + &table.text())
    }

    /// Prints the report, and writes it into a file if one is given.
    pub fn publish(self, json: Option<&Path>) -> Result<()> {
        print!("{}", self.text());
        json.map_or(Ok(()), |file| write_json(file, &[self]))
    }
}

/// Writes a report into `file`.
pub fn write_json(file: &Path, sections: &[Section]) -> Result<()> {
    fs::write(file, json(sections)).with_context(|| format!("writing {}", file.display()))
}

/// A list of sections, each with its heading, text and tables. A row of a table is a line, for the differences between two
/// recorded runs to be readable.
fn json(sections: &[Section]) -> String {
    let list = |indent: usize, items: Vec<String>| {
        let pad = " ".repeat(indent);
        let items: Vec<String> = items.iter().map(|item| format!("{pad} {item}")).collect();
        if items.is_empty() { "[]".into() } else { format!("[\n{}\n{pad}]", items.join(",\n")) }
    };
    let section = |section: &Section| {
        let text = section.text.iter().map(|line| Json::from(line.as_str()).to_string()).collect();
        let table = |table: &Table| {
            let rows =
                table.body.iter().map(|row| Json::from(row.as_slice()).to_string()).collect();
            let head = Json::from(table.head.as_slice());
            format!("{{\"head\": {head},\n    \"rows\": {}}}", list(4, rows))
        };
        let tables = section.tables.iter().map(table).collect();
        format!(
            "{{\"heading\": {},\n  \"text\": {},\n  \"tables\": {}}}",
            Json::from(section.heading.as_str()),
            list(2, text),
            list(2, tables)
        )
    };
    list(0, sections.iter().map(section).collect()) + "\n"
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_report_is_recorded_as_json() {
        let mut table = Table::new(&["load", "IOPS"]);
        table.row(["a \"b\"".into(), "7".into()]);
        table.row(["c".into(), "8".into()]);
        let one = Section {
            heading: "F1".into(),
            text: vec!["CPU: x".into(), "two\nlines".into()],
            tables: vec![table, Table::new(&["empty"])],
        };
        let text = json(&[one, Section::default()]);
        assert!(text.contains("\n     [\"c\",\"8\"]\n"), "a line for each row: {text}");
        let expected = json!([
            {"heading": "F1", "text": ["CPU: x", "two\nlines"], "tables": [
                {"head": ["load", "IOPS"], "rows": [["a \"b\"", "7"], ["c", "8"]]},
                {"head": ["empty"], "rows": []},
            ]},
            {"heading": "", "text": [], "tables": []},
        ]);
        assert_eq!(serde_json::from_str::<Json>(&text).unwrap(), expected);
    }
}

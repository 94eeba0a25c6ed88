//! Tables of text, aligned.

use serde_json::Value as Json;

/// Rows under a heading.
pub(crate) struct Table {
    rows: Vec<Vec<Cell>>,
}

/// A cell. Numbers are aligned to the right.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Cell {
    text: String,
    number: bool,
}

impl Cell {
    pub(crate) fn text(text: impl Into<String>) -> Cell {
        Cell { text: printable(&text.into()), number: false }
    }

    pub(crate) fn number(text: impl Into<String>) -> Cell {
        Cell { text: text.into(), number: true }
    }

    /// Formats a JSON value for people.
    pub(crate) fn of(value: &Json) -> Cell {
        match value {
            Json::Null => Cell::text("-"),
            Json::Bool(on) => Cell::text(if *on { "yes" } else { "no" }),
            Json::Number(number) => Cell::number(number.to_string()),
            Json::String(text) => Cell::text(text.as_str()),
            Json::Array(list) if list.iter().all(|item| !item.is_object() && !item.is_array()) => {
                let items: Vec<String> = list.iter().map(|item| Cell::of(item).text).collect();
                Cell::text(if items.is_empty() { "-".to_owned() } else { items.join(",") })
            }
            other => Cell::text(other.to_string()),
        }
    }
}

/// Escapes control characters: text of a daemon, or a name of a file, must not control the terminal.
pub(crate) fn printable(text: &str) -> String {
    let escape = |c: char| match c.is_control() {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    };
    text.chars().map(escape).collect()
}

impl Table {
    /// Returns an empty table with these columns.
    pub(crate) fn new(columns: &[&str]) -> Table {
        Table { rows: vec![columns.iter().map(|name| Cell::text(name.to_uppercase())).collect()] }
    }

    /// Returns an empty table without a heading.
    pub(crate) fn plain() -> Table {
        Table { rows: Vec::new() }
    }

    pub(crate) fn row(&mut self, cells: Vec<Cell>) {
        self.rows.push(cells);
    }

    /// The text, with a line end after each row.
    pub(crate) fn render(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let column = |index: usize| self.rows.iter().filter_map(move |row| row.get(index));
        let len = |cell: &Cell| cell.text.chars().count();
        let widths: Vec<usize> =
            (0..columns).map(|index| column(index).map(len).max().unwrap_or(0)).collect();
        // A heading is aligned like the cells below.
        let right: Vec<bool> =
            (0..columns).map(|index| column(index).any(|cell| cell.number)).collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for ((cell, width), right) in row.iter().zip(&widths).zip(&right) {
                let padding = " ".repeat(width - len(cell));
                let parts = if *right { [&padding, &cell.text] } else { [&cell.text, &padding] };
                line.extend(parts.map(String::as_str));
                line.push_str("  ");
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn columns_are_aligned_numbers_to_the_right() {
        let mut table = Table::new(&["name", "size", "on"]);
        table.row(vec![Cell::text("äöü"), Cell::number("5"), Cell::of(&json!(true))]);
        table.row(vec![Cell::text("longer"), Cell::number("12345"), Cell::of(&json!([]))]);
        let expected = "NAME     SIZE  ON\näöü         5  yes\nlonger  12345  -\n";
        assert_eq!(table.render(), expected);
    }

    #[test]
    fn what_a_daemon_says_does_not_reach_the_terminal_as_it_is() {
        assert_eq!(Cell::of(&json!("a\u{1b}[2Jb\n")).text, "a\\u{1b}[2Jb\\n");
    }
}

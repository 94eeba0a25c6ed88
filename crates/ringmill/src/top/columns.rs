//! Choice of the columns that fit a terminal, and shortening of names.

/// A column beside the first one, which has names.
pub(super) struct Column {
    pub(super) heading: &'static str,
    /// Width in characters, without the space in front.
    pub(super) width: u16,
    /// Order of leaving out on a narrow terminal: highest first; 0: never.
    pub(super) spare: u8,
    /// Words are aligned to the left, numbers to the right.
    pub(super) words: bool,
}

/// Returns a column of numbers.
pub(super) const fn numbers(heading: &'static str, width: u16, spare: u8) -> Column {
    Column { heading, width, spare, words: false }
}

/// Returns a column of words.
pub(super) const fn words(heading: &'static str, width: u16, spare: u8) -> Column {
    Column { heading, width, spare, words: true }
}

/// The columns of a table that fit.
pub(super) struct Fitted<'a> {
    pub(super) all: &'a [Column],
    /// Width of the column of names, in characters.
    pub(super) name: u16,
    /// Indexes of the other columns in `all`, in order.
    pub(super) columns: Vec<usize>,
}

/// Names get this many characters, if they have them, before further columns get room.
const READABLE: u16 = 24;

/// Returns the columns that fit into `width` characters. The longest name has `longest` characters.
pub(super) fn fit(all: &[Column], longest: u16, width: u16) -> Fitted<'_> {
    let mut columns: Vec<usize> = (0..all.len()).collect();
    // Plus one: the space in front of a column.
    let taken = |columns: &[usize]| columns.iter().map(|&index| all[index].width + 1).sum::<u16>();
    while taken(&columns) + longest.min(READABLE) > width {
        let spare = columns.iter().copied().enumerate().max_by_key(|(_, index)| all[*index].spare);
        match spare {
            Some((place, index)) if all[index].spare > 0 => columns.remove(place),
            _ => break,
        };
    }
    let name = width.saturating_sub(taken(&columns)).min(longest).max(1);
    Fitted { all, name, columns }
}

/// Returns the width of a table with all columns, in characters.
pub(super) fn full_width(all: &[Column], longest: u16) -> u16 {
    all.iter().map(|column| column.width + 1).sum::<u16>().saturating_add(longest)
}

/// Shortens a text to `width` characters. Leaves out the middle, since names often differ at their ends.
pub(super) fn shortened(text: &str, width: u16) -> String {
    let (len, width) = (text.chars().count(), usize::from(width));
    if len <= width {
        return text.to_owned();
    }
    let kept = width.saturating_sub(1);
    let (begin, end) = (kept - kept / 2, kept / 2);
    let first = text.chars().take(begin);
    let last = text.chars().skip(len - end);
    first.chain(['…']).chain(last).take(width).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_give_way_to_names() {
        let column = |width, spare| numbers("", width, spare);
        let all = [column(9, 0), column(9, 1), column(9, 2)];
        let fit = |longest, width| {
            let Fitted { name, columns, .. } = fit(&all, longest, width);
            (name, columns)
        };
        assert_eq!(fit(10, 40), (10, vec![0, 1, 2]));
        assert_eq!(fit(10, 39), (10, vec![0, 1]));
        assert_eq!(fit(60, 54), (24, vec![0, 1, 2]));
        assert_eq!(fit(60, 50), (30, vec![0, 1]));
        assert_eq!(fit(60, 20), (10, vec![0]));
        assert_eq!(fit(60, 3), (1, vec![0]));
        assert_eq!(full_width(&all, 10), 40);
    }

    #[test]
    fn names_keep_both_ends() {
        assert_eq!(shortened("disk-0", 6), "disk-0");
        assert_eq!(shortened("production-disk-07", 10), "produ…k-07");
        assert_eq!(shortened("äöüäöü", 4), "äö…ü");
        assert_eq!((shortened("ab", 1), shortened("ab", 0)), ("…".into(), String::new()));
    }
}

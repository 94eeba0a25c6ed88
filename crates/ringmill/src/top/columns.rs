//! Which columns a table has on a terminal of some width, and how names are shortened to theirs.

/// A column of numbers, or of words, beside the one of names, which comes first.
pub(super) struct Column {
    pub(super) heading: &'static str,
    /// Characters.
    pub(super) width: u16,
    /// Left out before those with a lower number, where the terminal is too narrow; 0: never.
    pub(super) spare: u8,
    /// Of words, which stand to the left; numbers stand to the right.
    pub(super) words: bool,
}

/// A column of numbers.
pub(super) const fn numbers(heading: &'static str, width: u16, spare: u8) -> Column {
    Column { heading, width, spare, words: false }
}

/// A column of words.
pub(super) const fn words(heading: &'static str, width: u16, spare: u8) -> Column {
    Column { heading, width, spare, words: true }
}

/// The columns that a table has.
pub(super) struct Fitted<'a> {
    pub(super) all: &'a [Column],
    /// Characters for names.
    pub(super) name: u16,
    /// Indexes of the other columns in `all`, in order.
    pub(super) columns: Vec<usize>,
}

/// As many characters of a name are shown, if it has them, before a column is left out for more.
const READABLE: u16 = 24;

/// What fits into `width` characters, where the longest name has `longest`.
pub(super) fn fit(all: &[Column], longest: u16, width: u16) -> Fitted<'_> {
    let mut columns: Vec<usize> = (0..all.len()).collect();
    // A space is between two columns.
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

/// Characters that a table of all columns takes.
pub(super) fn full_width(all: &[Column], longest: u16) -> u16 {
    all.iter().map(|column| column.width + 1).sum::<u16>().saturating_add(longest)
}

/// At most `width` characters of a text. Names often differ at their ends: the middle is left out.
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

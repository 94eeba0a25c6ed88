//! Figures of several rounds.

/// The median: of an even number of values the mean of the middle two; NaN of none.
pub fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let upper = values.len() / 2;
    match values.as_slice() {
        [] => f64::NAN,
        values if values.len() % 2 == 1 => values[upper],
        values => (values[upper - 1] + values[upper]) / 2.0,
    }
}

/// The lower quartile: what a quarter of the values do not exceed; NaN of none.
pub fn lower_quartile(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 4).copied().unwrap_or(f64::NAN)
}

/// The least and the most of several values.
pub fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), value| {
        (least.min(value), most.max(value))
    })
}

/// The median of several rounds, with their minimum and maximum.
#[derive(Debug, Clone, Copy)]
pub struct Rounds {
    /// The median.
    pub median: f64,
    /// The minimum.
    pub least: f64,
    /// The maximum.
    pub most: f64,
}

impl Rounds {
    /// Those of these figures.
    pub fn of(rounds: &[f64]) -> Self {
        let (least, most) = range(rounds.iter().copied());
        Self { median: median(rounds.iter().copied()), least, most }
    }

    /// The minimum and the maximum, with this many digits after the point.
    pub fn range(&self, digits: usize) -> String {
        format!("{:.digits$}..{:.digits$}", self.least, self.most)
    }
}

/// Each contender with its state. Every other round begins with the last one, as conditions such as the clock speed drift
/// during a round.
pub fn turns<'a, C, S>(
    contenders: &'a [C],
    states: &'a mut [S],
    round: usize,
) -> Vec<(&'a C, &'a mut S)> {
    let mut turns: Vec<_> = contenders.iter().zip(states).collect();
    if round % 2 == 1 {
        turns.reverse();
    }
    turns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0].into_iter()), 2.5);
        assert!(median(std::iter::empty()).is_nan());
    }

    #[test]
    fn lower_quartiles() {
        assert_eq!(lower_quartile([4.0, 1.0, 2.0, 3.0].into_iter()), 2.0);
        assert_eq!(lower_quartile([2.0, 1.0, 3.0].into_iter()), 1.0);
        assert!(lower_quartile(std::iter::empty()).is_nan());
    }
}

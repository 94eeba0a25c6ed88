//! Sizes, dates and tables as `qemu-img` prints them.

use std::time::Duration;

use block::node::InternalSnapshot;

/// A number of bytes for people: three digits, and a unit that keeps the number below 1000.
pub(super) fn human(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    let (mut value, mut unit) = (bytes as f64, 0);
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{} {}B", digits(value), UNITS.get(unit).unwrap_or(&""))
}

/// Three significant digits without zeroes at the end: C's `%0.3g`.
fn digits(value: f64) -> String {
    if value >= 999.5 {
        return format!("{}e+03", (value / 1000.0 * 100.0).round() / 100.0);
    }
    let before = match () {
        () if value >= 99.95 => 3,
        () if value >= 9.995 => 2,
        () => 1,
    };
    let text = match value < 0.9995 && value > 0.0 {
        // Digits after leading zeroes count.
        true => format!("{value:.*}", (2 - value.log10().floor() as i32).max(0) as usize),
        false => format!("{value:.*}", 3 - before),
    };
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// The date and time of a moment since 1970, in UTC.
pub(super) fn date(since: Duration) -> String {
    let (date, clock) = daemon::utc(since);
    format!("{date} {clock}")
}

/// The lines of a table of snapshots, the first of which has the headings.
pub(super) fn table(
    snapshots: &[InternalSnapshot],
    date: impl Fn(Duration) -> String,
) -> Vec<String> {
    let heading = format!(
        "{:<7} {:<16} {:>8} {:>19} {:>15} {:>10}",
        "ID", "TAG", "VM_SIZE", "DATE", "VM_CLOCK", "ICOUNT"
    );
    let line = |snapshot: &InternalSnapshot| {
        let InternalSnapshot { id, name, vm_state_size, date: made, vm_clock, icount } = snapshot;
        let seconds = vm_clock.as_secs();
        let clock = format!(
            "{:04}:{:02}:{:02}.{:03}",
            seconds / 3600,
            seconds / 60 % 60,
            seconds % 60,
            vm_clock.subsec_millis()
        );
        let icount = icount.map_or_else(|| "--".to_owned(), |count| count.to_string());
        let size = human(*vm_state_size);
        format!("{id:<7} {name:<16} {size:>8} {:>19} {clock:>15} {icount:>10}", date(*made))
    };
    [heading].into_iter().chain(snapshots.iter().map(line)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_three_digits() {
        for (bytes, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "0.977 KiB"),
            (1024, "1 KiB"),
            (197_120, "192 KiB"),
            (2_293_760, "2.19 MiB"),
            (1023 << 10, "0.999 MiB"),
            (1 << 63, "8 EiB"),
            (10_000_000_000, "9.31 GiB"),
        ] {
            assert_eq!(human(bytes), text, "{bytes}");
        }
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(date(Duration::from_secs(951_868_799)), "2000-02-29 23:59:59");
        assert_eq!(date(Duration::ZERO), "1970-01-01 00:00:00");
    }
}

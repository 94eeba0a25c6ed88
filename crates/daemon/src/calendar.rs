//! Dates for the log and for people.

use std::time::Duration;

/// Returns the date and the time of a moment since 1970, in UTC: `2000-02-29` and `23:59:59`.
pub fn utc(since: Duration) -> (String, String) {
    let (days, second) = (since.as_secs() / 86400, since.as_secs() % 86400);
    // Years begin in March: the leap day is the last day of its year. Day 0 is 1 March of the year 0.
    let day = days + 719_468;
    let (era, day) = (day / 146_097, day % 146_097);
    let year = (day - day / 1460 + day / 36524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (day, month) = (day - (153 * month + 2) / 5 + 1, (month + 2) % 12 + 1);
    let year = 400 * era + year + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    (format!("{year:04}-{month:02}-{day:02}"), format!("{hour:02}:{minute:02}:{second:02}"))
}

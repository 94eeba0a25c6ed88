//! What a test could not try on this machine, as it takes something that not every machine has: a test that did not
//! run must not look like one that passed.

use std::fmt::Display;
use std::io::Write;

/// The variable that says what may be left out, as names with commas between them. Not set: anything, and a line
/// says so.
pub const ALLOWED: &str = "RINGMILL_UNTESTED";

/// Says that the calling test leaves something out, where the tests' results are shown. `what` is a word, of which
/// [`ALLOWED`] may have some; `why` says what it takes and why that is not to be had.
///
/// # Panics
///
/// If this may not be left out.
pub fn untested(what: &str, why: impl Display) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    let allowed = std::env::var(ALLOWED).ok();
    if !may_be_left_out(what, allowed.as_deref()) {
        panic!("not tested: {what}: {why}; {ALLOWED} does not allow that");
    }
    let line = format!("\n*** NOT TESTED: {what} ({test}): {why}. ***\n");
    // The test harness swallows what a passing test prints with the macros.
    let _ = std::io::stderr().lock().write_all(line.as_bytes());
}

fn may_be_left_out(what: &str, allowed: Option<&str>) -> bool {
    allowed.is_none_or(|allowed| allowed.split(',').any(|one| one == what))
}

#[cfg(test)]
mod tests {
    use super::may_be_left_out;

    #[test]
    fn what_is_not_named_is_a_failure_once_there_is_a_list() {
        for (allowed, expected) in
            [(None, true), (Some(""), false), (Some("loop,kvm"), true), (Some("kvm2,loop"), false)]
        {
            assert_eq!(may_be_left_out("kvm", allowed), expected, "{allowed:?}");
        }
    }
}

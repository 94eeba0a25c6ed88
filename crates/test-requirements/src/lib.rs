//! Reports a part of a test that cannot run on this machine, because it needs something that not every machine has.
//! Otherwise a test that did not run would look like one that passed.

use std::ffi::OsStr;
use std::fmt::{self, Display};
use std::fs::File;
use std::io::{self, Write};

/// The variable with the names of parts that may be left out, separated by commas. If it is not set, every part
/// may, and a line reports that.
pub const ALLOWED: &str = "RINGMILL_UNTESTED";

/// The variable that names a file for these lines, for `scripts/test` to show: cargo-nextest shows no output of
/// passing tests.
pub const FILE: &str = "RINGMILL_UNTESTED_FILE";

/// What a part of a test needs that not every machine has. [`ALLOWED`] has these names, in lower case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "CONTRIBUTING.md lists them")]
pub enum Needs {
    Ceph,
    Fuse,
    Immutable,
    Kvm,
    Landlock,
    Loop,
    Root,
    Vsock,
    Zram,
}

impl Display for Needs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

/// Reports that the calling test leaves a part out, which needs `what`. `why` says what is missing.
///
/// # Panics
///
/// If this part may not be left out, or if the report would be lost: under cargo-nextest without either variable.
pub fn untested(what: Needs, why: impl Display) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    let allowed = std::env::var(ALLOWED).ok();
    if !may_be_left_out(what, allowed.as_deref()) {
        panic!("not tested: {what}: {why}; {ALLOWED} does not allow that");
    }
    let file = std::env::var_os(FILE);
    let is_swallowed = std::env::var_os("NEXTEST").is_some() && allowed.is_none() && file.is_none();
    assert!(
        !is_swallowed,
        "not tested: {what}: {why}; cargo-nextest would not show that: set {ALLOWED}={what}, or run scripts/test"
    );
    tell(&format!("\n*** NOT TESTED: {what} ({test}): {why}. ***\n"), file.as_deref());
}

fn tell(line: &str, file: Option<&OsStr>) {
    // The test harness swallows what a passing test prints with the macros.
    let _ = io::stderr().lock().write_all(line.as_bytes());
    if let Some(file) = file {
        let file = File::options().append(true).create(true).open(file);
        // In one call: other tests write to it, too.
        file.and_then(|mut file| file.write_all(line.as_bytes())).expect(FILE);
    }
}

fn may_be_left_out(what: Needs, allowed: Option<&str>) -> bool {
    allowed.is_none_or(|allowed| allowed.split(',').any(|one| one == what.to_string()))
}

#[cfg(test)]
mod tests {
    use super::{Needs, may_be_left_out, tell};

    #[test]
    fn untested_parts_are_recorded_line_by_line() {
        let path = std::env::temp_dir().join(format!("untested-{}", std::process::id()));
        for line in ["one\n", "two\n"] {
            tell(line, Some(path.as_os_str()));
        }
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "one\ntwo\n");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn unlisted_untested_parts_are_failures() {
        for (allowed, expected) in
            [(None, true), (Some(""), false), (Some("loop,kvm"), true), (Some("kvm2,loop"), false)]
        {
            assert_eq!(may_be_left_out(Needs::Kvm, allowed), expected, "{allowed:?}");
        }
    }
}

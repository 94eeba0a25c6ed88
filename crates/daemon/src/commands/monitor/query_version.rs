//! `query-version`.

use control::qmp::{self, Member, Reply, Returns};

use super::super::FixedCommand;

pub(super) static COMMAND: FixedCommand = FixedCommand {
    name: "query-version",
    help: "return the QEMU release with this interface, and the program's version",
    returns: Returns::Data("the version", Reply::Object(VERSION)),
    answer: qmp::version,
};

static VERSION: &[Member] = &[
    Member::new("qemu", Reply::Object(QEMU_VERSION), "the QEMU release with this interface"),
    Member::new("package", Reply::Text, "the program and its version"),
];

static QEMU_VERSION: &[Member] = &[
    Member::new("major", Reply::Int, "the first of the three numbers"),
    Member::new("minor", Reply::Int, "the second"),
    Member::new("micro", Reply::Int, "the third"),
];

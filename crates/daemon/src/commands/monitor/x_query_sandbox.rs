//! `x-query-sandbox`.

use control::qmp::{Member, Reply, Returns};
use serde_json::Value as Json;

use super::super::Command;
use crate::confinement;

pub(super) static COMMAND: Command<(), Json> = Command {
    name: "x-query-sandbox",
    help: "return the sandbox's limits: capabilities, system calls, paths",
    example: "",
    arguments: &[],
    returns: Returns::Data("what is in force", Reply::Object(SANDBOX)),
    records: false,
    run: |daemon, ()| Box::pin(async { Ok(confinement::told(daemon.process.in_force())) }),
};

static SANDBOX: &[Member] = &[
    Member::new(
        "mode",
        Reply::Word(&["on", "log", "off"]),
        "as of --sandbox; off as well if it could not be put in force after an upgrade",
    ),
    Member::new(
        "no-new-privs",
        Reply::Bool,
        "no program that were executed could have more privileges",
    ),
    Member::optional("user", Reply::Int, "the user that the process has become, by --user"),
    Member::optional("group", Reply::Int, "its group"),
    Member::optional(
        "capabilities",
        Reply::List(&Reply::Text),
        "those that the control thread has kept, without CAP_; the others have none",
    ),
    Member::optional(
        "seccomp",
        Reply::Object(CALLS),
        "how many system calls each kind of thread may make; none: no filter",
    ),
    Member::optional("landlock", Reply::Object(LANDLOCK), "what can be opened; none: no Landlock"),
    Member::new(
        "ring-restrictions",
        Reply::Bool,
        "rings can do what they are used for and no more",
    ),
    Member::new(
        "not-in-force",
        Reply::List(&Reply::Text),
        "mechanisms that are not in force, with the reasons",
    ),
];

static CALLS: &[Member] = &[
    Member::new("control", Reply::Int, "of the control thread"),
    Member::new("io", Reply::Int, "of an I/O thread"),
    Member::new("pool", Reply::Int, "of a thread of a pool"),
];

static LANDLOCK: &[Member] = &[
    Member::new("abi", Reply::Int, "its version"),
    Member::optional(
        "paths",
        Reply::List(&Reply::Text),
        "what the control thread can reach, and what is beneath it; none: any path. I/O threads and \
         pools reach nothing",
    ),
    Member::optional(
        "connect",
        Reply::List(&Reply::Int),
        "ports of TCP that the control thread can connect to; none: any",
    ),
];

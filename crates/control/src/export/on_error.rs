//! `rerror` and `werror`: what becomes of a request that fails.

use super::Draft;
use crate::error::OptionError;
use crate::rows::{OnErrorHelp, on_error};
use crate::table::{Choice, Field, Kind, Need};

/// What becomes of the request.
const THEN: OnErrorHelp = OnErrorHelp {
    report: "the guest is told",
    ignore: "the guest is told that it was done; what was to be read is zeroes",
    enospc: "as stop when there is no space left, else as report",
    stop: "requests are held until x-block-export-resume, and then done again",
    auto: "as QEMU's devices do it: report errors of reads, hold writes without space",
};

/// `rerror`.
pub(super) const RERROR: Field<Draft> = on_error!(
    "rerror",
    vhost_user.rerror,
    auto: Report,
    THEN,
    "what happens to a read that fails"
);

/// `werror`.
pub(super) const WERROR: Field<Draft> = on_error!(
    "werror",
    vhost_user.werror,
    auto: Enospc,
    THEN,
    "what happens to another request that fails: a write, discard or flush"
);

/// The same for clients with time-outs of their own, who know what to do about an error.
macro_rules! only_report {
    ($name:literal, $help:literal) => {
        Field {
            name: $name,
            kind: Kind::Choice(&[
                Choice { name: "report", help: "the client is told", set: |_| Ok(()) },
                Choice { name: "auto", help: "as report", set: |_| Ok(()) },
                Choice::unoffered("ignore", |_| refused($name)),
                Choice::unoffered("enospc", |_| refused($name)),
                Choice::unoffered("stop", |_| refused($name)),
            ]),
            need: Need::Default("report"),
            help: $help,
        }
    };
}

/// `rerror` of NBD.
pub(super) const RERROR_NBD: Field<Draft> =
    only_report!("rerror", "what happens to a read that fails");

/// `werror` of NBD.
pub(super) const WERROR_NBD: Field<Draft> =
    only_report!("werror", "what happens to another request that fails");

fn refused(name: &str) -> Result<(), OptionError> {
    let message = format!("Export type 'nbd' supports only '{name}=report'");
    Err(OptionError::new(message).hint("NBD clients have time-outs of their own."))
}

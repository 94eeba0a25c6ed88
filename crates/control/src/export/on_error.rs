//! `rerror` and `werror`: the treatment of failed requests.

use super::Draft;
use crate::error::OptionError;
use crate::rows::{OnErrorHelp, on_error};
use crate::table::{Choice, Field, Row};

/// Descriptions of the policies.
const THEN: OnErrorHelp = OnErrorHelp {
    report: "the guest gets an I/O error",
    ignore: "the guest sees success, and reads zeroes",
    enospc: "as stop if no space is left, else as report",
    stop: "requests are held until x-block-export-resume, and then repeated",
    auto: "as QEMU's devices: report errors of reads, hold writes without space",
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

/// The same for clients that handle errors themselves.
macro_rules! only_report {
    ($name:literal, $help:literal) => {
        Row::default($name, "report", $help).choice(&[
            Choice::new("report", "the client gets the error", |_| Ok(())),
            Choice::new("auto", "as report", |_| Ok(())),
            Choice::unoffered("ignore", |_| refused($name)),
            Choice::unoffered("enospc", |_| refused($name)),
            Choice::unoffered("stop", |_| refused($name)),
        ])
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

//! Rows that more than one table has.

use crate::error::OptionError;
use crate::table::{Field, Row, put};

/// What the options of a thread are read into.
pub(crate) trait ThreadDraft: Sized + 'static {
    /// Where `poll-max-ns` goes.
    fn poll_max_ns(&mut self) -> &mut Option<u64>;

    const POLL_MAX_NS: Field<Self> = Row::optional(
        "poll-max-ns",
        "no longer than a sleep costs, as measured; 32768 with other policies",
        "longest time to busy-poll before sleeping, in nanoseconds; 0 never polls",
    )
    .int(0..=i64::MAX, |thread, ns| put(thread.poll_max_ns(), Some(ns.unsigned_abs())));
}

/// What each word of a policy on errors means.
pub(crate) struct OnErrorHelp {
    pub(crate) report: &'static str,
    pub(crate) ignore: &'static str,
    pub(crate) enospc: &'static str,
    pub(crate) stop: &'static str,
    pub(crate) auto: &'static str,
}

/// A policy on errors: an `OnError` of the draft's. What `auto` stands for is what QEMU's devices do.
macro_rules! on_error {
    ($name:literal, $($field:ident).+, auto: $auto:ident, $then:expr, $help:literal) => {
        $crate::table::Row::default($name, "report", $help).choice(&[
            $crate::rows::on_error!(@ "report", report, Report, $($field).+, $then),
            $crate::rows::on_error!(@ "ignore", ignore, Ignore, $($field).+, $then),
            $crate::rows::on_error!(@ "enospc", enospc, Enospc, $($field).+, $then),
            $crate::rows::on_error!(@ "stop", stop, Stop, $($field).+, $then),
            $crate::rows::on_error!(@ "auto", auto, $auto, $($field).+, $then),
        ])
    };
    (@ $word:literal, $text:ident, $policy:ident, $($field:ident).+, $then:expr) => {
        $crate::table::Choice::new($word, $then.$text, |draft| {
            $crate::table::put(&mut draft.$($field).+, ::block::job::OnError::$policy)
        })
    };
}
pub(crate) use on_error;

/// The size of a disk's blocks, as a parameter of that name.
///
/// # Errors
///
/// It is no size that virtio-blk takes.
pub(crate) fn block_size(name: &str, bytes: u64) -> Result<u32, OptionError> {
    match u32::try_from(bytes) {
        Ok(size @ 512..=2_097_152) if size.is_power_of_two() => Ok(size),
        _ => Err(OptionError::new(format!(
            "parameter {name} must be a power of 2 between 512 and 2097152"
        ))),
    }
}

/// What such a parameter is for.
pub(crate) const BLOCK_SIZE_HELP: &str =
    "unit in which the guest addresses the disk, a power of 2 from 512 to 2M";

/// What `pin-memory` is for.
pub(crate) const PIN_MEMORY_HELP: &str = "register the guest's memory with io_uring: less CPU time \
    per request on images with aio=io_uring. All of it becomes resident and must fit into \
    RLIMIT_MEMLOCK, once per I/O thread; the guest must have no balloon, free page reporting or \
    virtio-mem, which would lose its data";

/// What `max-memory` is without a value.
pub(crate) const MAX_MEMORY_DEFAULT: &str = "four times the machine's memory, from 64G to 4T";

/// What `max-memory` is for.
pub(crate) const MAX_MEMORY_HELP: &str = "memory that a front end may have mapped, with what is plugged in later; what goes beyond is refused";

//! Exports over ublk: a node as a block device of the host.

use block::job::OnError;

use super::{Address, Draft, ExportNeeds, ExportType, MAX_QUEUES, MoreNodes, SizeUse};
use crate::error::OptionError;
use crate::table::{Field, Row};

/// The largest queue, as of ublk.
const MAX_DEPTH: i64 = 4096;
/// The largest number of a device: Linux has 2^20 minor numbers.
const MAX_DEVICE: i64 = (1 << 20) - 1;

/// Options of an export over ublk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UblkOptions {
    /// `num-queues`.
    pub queues: u16,
    /// `queue-size`: requests of a queue that are in flight at once.
    pub depth: u16,
    /// `dev-id`: the number of the device. `None`: the kernel's choice.
    pub dev_id: Option<u32>,
    /// `recovery`: the device outlives the daemon.
    pub recovery: bool,
}

impl ExportType for UblkOptions {
    fn type_name(&self) -> &'static str {
        "ublk"
    }

    fn more_nodes(&self) -> Option<MoreNodes<'_>> {
        None
    }

    fn address(&self) -> Address {
        Address::Ublk(self.dev_id)
    }

    fn needs(&self) -> ExportNeeds<'_> {
        ExportNeeds { ublk: Some(self.dev_id), ..ExportNeeds::default() }
    }

    fn size_use(&self) -> SizeUse {
        SizeUse::Follows
    }

    fn error_policies(&self) -> Option<(OnError, OnError)> {
        None
    }

    fn named_by_node(&self) -> Option<&'static str> {
        None
    }

    fn reads_inactive(&self) -> bool {
        false
    }

    fn shows_bitmaps(&self) -> bool {
        false
    }
}

/// The options while they are read.
#[derive(Default)]
pub(super) struct UblkDraft {
    queues: Option<u16>,
    depth: Option<u16>,
    dev_id: Option<u32>,
    recovery: Option<bool>,
}

/// The rest of what was read.
pub(super) fn finish(draft: &mut Draft) -> Result<UblkOptions, OptionError> {
    let UblkDraft { queues, depth, dev_id, recovery } = std::mem::take(&mut draft.ublk);
    if recovery == Some(true) && dev_id.is_none() {
        let error = OptionError::new("recovery=on needs dev-id");
        return Err(error.hint("The next daemon finds the device by its number: dev-id=0."));
    }
    Ok(UblkOptions {
        queues: queues.unwrap_or(1),
        depth: depth.unwrap_or(64),
        dev_id,
        recovery: recovery.unwrap_or(dev_id.is_some()),
    })
}

/// Options of `ublk`.
pub(super) static UBLK: &[Field<Draft>] = &[
    Row::default("num-queues", "1", "queues of the device, at most one for each CPU").int(
        1..=MAX_QUEUES as i64,
        |export, queues| {
            export.ublk.queues = u16::try_from(queues).ok();
            Ok(())
        },
    ),
    Row::default("queue-size", "64", "requests of a queue that are in flight at once").int(
        1..=MAX_DEPTH,
        |export, depth| {
            export.ublk.depth = u16::try_from(depth).ok();
            Ok(())
        },
    ),
    Row::optional("dev-id", "the lowest free number", "<n> of the device /dev/ublkb<n>").int(
        0..=MAX_DEVICE,
        |export, id| {
            export.ublk.dev_id = u32::try_from(id).ok();
            Ok(())
        },
    ),
    Row::optional(
        "recovery",
        "on with dev-id, else off",
        "keep the device when the daemon ends while it is in use, with its requests waiting for the next \
         daemon with the same id and dev-id",
    )
    .bool(|export, on| {
        export.ublk.recovery = Some(on);
        Ok(())
    }),
];

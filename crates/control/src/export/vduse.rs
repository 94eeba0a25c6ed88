//! Exports over VDUSE: a node as a vDPA device of the host.

use block::job::OnError;

use super::{Address, Draft, ExportNeeds, ExportType, MAX_QUEUES, MoreNodes, SizeUse};
use crate::error::OptionError;
use crate::rows::{BLOCK_SIZE_HELP, block_size};
use crate::table::{Field, Row};

/// The most entries of a queue, as in QSD.
const MAX_QUEUE_SIZE: u16 = 1024;
/// The longest name of a device, bytes: the kernel's field ends with a zero.
const MAX_NAME: usize = 255;

/// Options of an export over VDUSE.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VduseOptions {
    /// `name` of the device.
    pub name: String,
    /// `num-queues`.
    pub queues: u16,
    /// `queue-size`: the most entries of a queue, a power of two.
    pub queue_size: u16,
    /// `logical-block-size` in bytes: a power of two from 512 to 2 MiB.
    pub logical_block_size: u32,
    /// `serial`.
    pub serial: String,
}

impl Default for VduseOptions {
    fn default() -> Self {
        VduseOptions {
            name: String::new(),
            queues: 1,
            queue_size: 256,
            logical_block_size: 512,
            serial: String::new(),
        }
    }
}

impl ExportType for VduseOptions {
    fn type_name(&self) -> &'static str {
        "vduse-blk"
    }

    fn more_nodes(&self) -> Option<MoreNodes<'_>> {
        None
    }

    fn address(&self) -> Address {
        Address::Vduse(self.name.clone())
    }

    fn needs(&self) -> ExportNeeds<'_> {
        ExportNeeds { vduse: true, ..ExportNeeds::default() }
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

/// The rest of what was read.
pub(super) fn finish(draft: &mut Draft) -> VduseOptions {
    let serial = draft.serial.take().unwrap_or_default();
    VduseOptions { serial, ..std::mem::take(&mut draft.vduse) }
}

/// Options of `vduse-blk`.
pub(super) static VDUSE: &[Field<Draft>] =
    &[
        Row::required("name", "name of the device, for: vdpa dev add name <name> mgmtdev vduse")
            .text("<name>", |export, name| {
                let is_file = !name.is_empty() && !name.contains(['/', '\0']) && name != "control";
                if !is_file || name.contains("..") || name == "." || name.len() > MAX_NAME {
                    let hint = "The name is that of a file in /dev/vduse, 1 to 255 bytes.";
                    return Err(
                        OptionError::new(format!("Invalid VDUSE device name '{name}'")).hint(hint)
                    );
                }
                export.vduse.name = name;
                Ok(())
            }),
        Row::default("num-queues", "1", "queues of the device, 1 to 256").int(
            i64::MIN..=i64::MAX,
            |export, queues| match u16::try_from(queues) {
                Ok(0) => Err(OptionError::new("num-queues must be greater than 0")),
                Ok(queues) if queues <= MAX_QUEUES => {
                    export.vduse.queues = queues;
                    Ok(())
                }
                Ok(_) => Err(OptionError::new(format!("num-queues must be at most {MAX_QUEUES}"))),
                Err(_) => Err(OptionError::new("Parameter 'num-queues' expects uint16_t")),
            },
        ),
        Row::default("queue-size", "256", "entries of each queue, a power of 2 from 4 to 1024")
            .int(i64::MIN..=i64::MAX, |export, size| match u16::try_from(size) {
                Ok(size @ 4..=MAX_QUEUE_SIZE) if size.is_power_of_two() => {
                    export.vduse.queue_size = size;
                    Ok(())
                }
                Ok(_) => Err(OptionError::new("queue-size is invalid")
                    .hint("It is a power of 2 from 4 to 1024.")),
                Err(_) => Err(OptionError::new("Parameter 'queue-size' expects uint16_t")),
            }),
        Row::default("logical-block-size", "512", BLOCK_SIZE_HELP).bytes(|export, bytes| {
            // 0 stands for the default, as in QSD.
            let bytes = if bytes == 0 { 512 } else { bytes };
            export.vduse.logical_block_size = block_size("logical-block-size", bytes)?;
            Ok(())
        }),
        Row::optional("serial", "none", "serial number, of which drivers see the first 20 bytes")
            .text("<text>", |export, serial| {
                export.serial = Some(serial);
                Ok(())
            }),
    ];

//! Persistent bitmaps that outlive daemons, each with a full backup of its disk.
//!
//! A bitmap in an image that does not claim to be in use has to cover every sector in which the disk differs from
//! the backup. Another one is inconsistent: no backup may be made by it.

use crate::model::SECTOR;
use crate::oracle::Stored;

/// A persistent bitmap.
pub(crate) struct Lasting {
    /// The node that has the bitmap.
    pub(crate) node: String,
    pub(crate) name: String,
    /// The disk at the moment from which the bitmap has changes. The operator keeps it elsewhere.
    pub(crate) base: Vec<u8>,
    /// A daemon that has ended in order has stored the bitmap.
    pub(crate) stored: bool,
    /// Daemons have ended since the last backup: in order or by a kill, and by a power cut.
    pub(crate) restarted: bool,
    pub(crate) cut: bool,
}

/// What a file has of a bitmap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claim {
    Nothing,
    InUse,
    /// It is right.
    Right,
}

impl Lasting {
    /// Checks the bitmap in an image with these contents.
    pub(crate) fn check(&self, found: &[Stored], contents: &[u8]) -> Result<Claim, String> {
        let Lasting { name, base, .. } = self;
        let Some(stored) = found.iter().find(|stored| stored.name == *name) else {
            return match self.stored {
                true => Err(format!("bitmap {name} was stored, and is gone")),
                false => Ok(Claim::Nothing),
            };
        };
        if stored.in_use {
            return Ok(Claim::InUse);
        }
        let has = |sector: usize| {
            let bit = sector * SECTOR / stored.granularity;
            stored.bits.get(bit / 8).is_some_and(|byte| byte >> (bit % 8) & 1 != 0)
        };
        let missing = contents.chunks(SECTOR).enumerate().position(|(number, found)| {
            let at = number * SECTOR;
            let is_as_before = match base.get(at..at + found.len()) {
                Some(before) => before == found,
                // The disk has grown.
                None => found.iter().all(|byte| *byte == 0),
            };
            !is_as_before && !has(number)
        });
        match missing {
            Some(sector) => {
                Err(format!("bitmap {name} claims to be right, and lacks sector {sector}"))
            }
            None => Ok(Claim::Right),
        }
    }
}

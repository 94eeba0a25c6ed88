//! Encrypted sectors, and the key for them: what drivers of encrypted images share.

mod amend;
mod bounce;
mod channel;
mod describe;
mod new;
mod slots;
mod unlock;
mod volume;

pub(super) use self::amend::AmendLuks;
pub(super) use self::channel::{Encrypted, EncryptedChannel};
pub(super) use self::describe::specific;
pub(super) use self::new::{LuksDraft, NewLuks};
pub use self::slots::KeySlots;
pub(super) use self::unlock::{Unlocked, password, read_slots, unlock};
pub(super) use self::volume::Read;

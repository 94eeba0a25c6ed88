//! Encrypted sectors, and the key for them: what drivers of encrypted images share.

mod bounce;
mod channel;
mod describe;
mod new;
mod unlock;

pub(super) use self::channel::{Encrypted, EncryptedChannel};
pub(super) use self::describe::specific;
pub(super) use self::new::{LuksDraft, NewLuks};
pub(super) use self::unlock::{Read, Unlocked, password, unlock};

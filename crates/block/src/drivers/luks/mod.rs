//! `luks`: an encrypted disk, as cryptsetup and QEMU make it.

mod bounce;
mod channel;
mod driver;
mod node;
mod options;
mod unlock;

pub(super) use self::options::LUKS;

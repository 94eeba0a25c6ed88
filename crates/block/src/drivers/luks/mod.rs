//! `luks`: an encrypted disk, as cryptsetup and QEMU make it.

mod amend;
mod create;
mod driver;
mod node;
mod options;

pub(super) use self::options::LUKS;

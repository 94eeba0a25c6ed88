//! Who sends the load.

use anyhow::{Result, bail};

use super::fio::Fio;

/// What was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// fio where it is there.
    Either,
    /// The load generator of this program.
    Own,
    /// fio.
    Fio,
}

/// A load generator.
#[derive(Debug, Clone)]
pub(crate) enum Client {
    /// The one of this program.
    Own,
    /// fio with its libblkio engine.
    Fio(Fio),
}

impl Client {
    /// The one that is wanted, if it is there.
    pub(crate) fn choose(wanted: Wanted, fio: Option<Fio>) -> Result<Self> {
        match (wanted, fio) {
            (Wanted::Own, _) | (Wanted::Either, None) => Ok(Self::Own),
            (_, Some(fio)) => Ok(Self::Fio(fio)),
            (Wanted::Fio, None) => {
                bail!("there is no fio with libblkio; scripts/setup-peers.sh builds it")
            }
        }
    }
}

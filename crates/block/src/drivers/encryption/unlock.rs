//! Finds a disk's key on a separate thread, because key derivation would block a loop.

use std::sync::Arc;
use std::thread;

use crypto::Secret;
use crypto::cipher::SectorCipher;
use event_loop::oneshot;

use super::slots::KeySlots;
use super::volume::{Read, Volume};

use crate::connections::Credentials;
use crate::error::OpenError;
use crate::node::BlockNode;
use crate::registry::ToRead;

/// A disk with its key.
pub(crate) struct Unlocked {
    pub(crate) cipher: Arc<SectorCipher>,
    /// Where the first encrypted byte is.
    pub(crate) payload: u64,
    pub(crate) slots: Arc<KeySlots>,
}

/// Returns the offset of the LUKS header in a node.
pub(crate) type Locate = fn(Read<'_>) -> Result<u64, OpenError>;

/// Returns the password that a secret object has.
///
/// # Errors
///
/// The option `name` is missing, there is no such secret, or the secret is no text.
pub(crate) fn password(
    credentials: &Credentials,
    id: Option<&str>,
    name: &str,
) -> Result<Arc<Secret>, OpenError> {
    let Some(id) = id else {
        return Err(OpenError::new(format!("Parameter '{name}' is required for cipher")));
    };
    let secret = credentials.secret(id)?;
    // QEMU takes no zero byte, either: a password with one would open the disk here only.
    match std::str::from_utf8(&secret) {
        Ok(text) if !text.contains('\0') => Ok(secret),
        Ok(_) | Err(_) => Err(OpenError::new(format!("Data from secret {id} is not valid UTF-8"))),
    }
}

/// Reads the LUKS header in `volume`, and finds the key with the password.
pub(crate) async fn unlock(
    volume: ToRead,
    locate: Locate,
    password: Arc<Secret>,
) -> Result<Unlocked, OpenError> {
    let failed =
        |why: &dyn std::fmt::Display| OpenError::new(format!("finding the key failed: {why}"));
    let (done, is_done) = oneshot::channel();
    let work = move || done.send(find(volume, locate, &password));
    thread::Builder::new().name("luks".into()).spawn(work).map_err(|error| failed(&error))?;
    is_done.await.map_err(|_| failed(&"its thread has ended"))?
}

/// Reads the LUKS header at byte `start` of a node. Needs no password.
pub(crate) fn read_slots(node: Arc<dyn BlockNode>, start: u64) -> Result<Arc<KeySlots>, OpenError> {
    let mut volume = Volume::new(node)?;
    volume.start = start;
    Ok(KeySlots::new(volume.header()?, start))
}

fn find(volume: ToRead, locate: Locate, password: &[u8]) -> Result<Unlocked, OpenError> {
    let mut volume = Volume::new(volume.open()?)?;
    volume.start = locate(&|at, len| volume.read(at, len))?;
    let header = volume.header()?;
    let key = volume.unlock(&header, password)?;
    let cipher = key.cipher(header.cipher);
    let cipher = cipher.map_err(|_| OpenError::new("the key has a wrong length"))?;
    let (cipher, payload) = (Arc::new(cipher), header.payload());
    Ok(Unlocked { cipher, payload, slots: KeySlots::new(header, volume.start) })
}

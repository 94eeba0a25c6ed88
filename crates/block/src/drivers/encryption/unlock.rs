//! Finds a disk's key on a separate thread, because key derivation would block a loop.

use std::sync::Arc;
use std::thread;

use crypto::Secret;
use crypto::cipher::{SECTOR, SectorCipher};
use crypto::luks::{Header, VolumeKey};
use event_loop::{AlignedBuf, EventLoop, LoopConfig, oneshot};

use crate::connections::Credentials;
use crate::error::OpenError;
use crate::node::BlockNode;
use crate::registry::ToRead;
use crate::request::Op;
use crate::submit::submit;

/// What any disk's requests are aligned to, bytes.
const ALIGN: u64 = 4096;

/// A disk with its key.
pub(crate) struct Unlocked {
    pub(crate) cipher: Arc<SectorCipher>,
    /// Where the first encrypted byte is.
    pub(crate) payload: u64,
    pub(crate) header: Header,
}

/// Reads a part of a node: the offset, and the number of bytes. Fewer at the end of the node.
pub(crate) type Read<'a> = &'a dyn Fn(u64, u64) -> Result<Secret, OpenError>;

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
    match std::str::from_utf8(&secret) {
        Ok(_) => Ok(secret),
        Err(_) => Err(OpenError::new(format!("Data from secret {id} is not valid UTF-8"))),
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

fn find(volume: ToRead, locate: Locate, password: &[u8]) -> Result<Unlocked, OpenError> {
    let node = volume.open()?;
    let config = LoopConfig { name: "luks".into(), entries: 32, ..LoopConfig::default() };
    let event_loop = EventLoop::new(config).map_err(|error| {
        OpenError::io(format!("Could not read node '{}'", node.name()), &error.error)
    })?;
    let read = |at, len| read(&event_loop, &node, at, len);
    let not_valid = |error: &dyn std::fmt::Display| OpenError::new(error.to_string());
    let start = locate(&read)?;
    let header = Header::read(&read(start, ALIGN)?).map_err(|error| not_valid(&error))?;
    for slot in header.slots.iter().filter(|slot| slot.active) {
        let (at, len) = header.stripes(slot);
        let stripes = read(start + at, len as u64)?;
        if stripes.len() < len {
            return Err(not_valid(&"LUKS header is not valid: the disk ends within a key slot"));
        }
        if let Some(key) = VolumeKey::unlock(&header, slot, stripes, password) {
            let cipher = key.cipher(header.cipher);
            let cipher = Arc::new(cipher.map_err(|_| not_valid(&"the key has a wrong length"))?);
            return Ok(Unlocked { cipher, payload: header.payload(), header });
        }
    }
    Err(OpenError::new("Invalid password, cannot unlock any keyslot"))
}

/// Reads `len` bytes, or fewer at the end of the node.
fn read(
    event_loop: &EventLoop,
    node: &Arc<dyn BlockNode>,
    at: u64,
    len: u64,
) -> Result<Secret, OpenError> {
    let failed = |error: &std::io::Error| {
        OpenError::io(format!("Could not read LUKS header of node '{}'", node.name()), error)
    };
    let end = at.saturating_add(len.next_multiple_of(SECTOR as u64)).min(node.geometry().size);
    let len = end.saturating_sub(at);
    let bufs = usize::try_from(len).ok().and_then(|len| AlignedBuf::io_bufs(len, ALIGN as usize));
    let bufs = bufs.ok_or_else(|| {
        OpenError::os("reading the LUKS header failed", nix::errno::Errno::ENOMEM)
    })?;
    if bufs.is_empty() {
        return Ok(Secret::default());
    }
    let channel = node.clone().open_channel(event_loop).map_err(|error| failed(&error))?;
    let (result, bufs) = event_loop
        .block_on(async move { submit(&channel, Op::Read, at, len, bufs).await })
        .map_err(|error| failed(&error))?;
    result.map_err(|errno| failed(&errno.into()))?;
    let mut bytes = Secret::new(vec![0; bufs.len()]);
    bufs.copy_out(0, &mut bytes);
    Ok(bytes)
}

//! Finding a disk's key, on a thread of its own: no loop waits for the derivation of keys.

use std::sync::Arc;
use std::thread;

use crypto::Secret;
use crypto::cipher::{SECTOR, SectorCipher};
use crypto::luks::{Header, VolumeKey};
use event_loop::{AlignedBuf, EventLoop, LoopConfig, oneshot};

use crate::error::OpenError;
use crate::node::BlockNode;
use crate::registry::ToRead;
use crate::request::Op;
use crate::submit::submit;

/// What any disk's requests are aligned to, bytes.
const ALIGN: u64 = 4096;

/// A disk whose key was found.
pub(super) struct Unlocked {
    pub(super) cipher: Arc<SectorCipher>,
    /// Where the first encrypted byte is.
    pub(super) payload: u64,
    pub(super) header: Header,
}

/// Reads the header of `volume`, and finds the key with the password.
pub(super) async fn unlock(volume: ToRead, password: Arc<Secret>) -> Result<Unlocked, OpenError> {
    let failed =
        |why: &dyn std::fmt::Display| OpenError::new(format!("finding the key failed: {why}"));
    let (done, is_done) = oneshot::channel();
    let work = move || done.send(find(volume, &password));
    thread::Builder::new().name("luks".into()).spawn(work).map_err(|error| failed(&error))?;
    is_done.await.map_err(|_| failed(&"its thread has ended"))?
}

fn find(volume: ToRead, password: &[u8]) -> Result<Unlocked, OpenError> {
    let node = volume.open()?;
    let config = LoopConfig { name: "luks".into(), entries: 32, ..LoopConfig::default() };
    let event_loop = EventLoop::new(config).map_err(|error| {
        OpenError::io(format!("Could not read node '{}'", node.name()), &error.error)
    })?;
    let read = |at, len| read(&event_loop, &node, at, len);
    let not_valid = |error: &dyn std::fmt::Display| OpenError::new(error.to_string());
    let header = Header::read(&read(0, ALIGN)?).map_err(|error| not_valid(&error))?;
    for slot in header.slots.iter().filter(|slot| slot.active) {
        let (at, len) = header.stripes(slot);
        let stripes = read(at, len as u64)?;
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

/// Reads `len` bytes, or what is there of them.
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

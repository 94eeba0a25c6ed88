//! Input of the `luks` driver: a volume that a stranger has made, with any header and any stripes.
//!
//! A valid volume is the start of most inputs, and some of its bytes are changed: so inputs reach beyond the
//! first check. No input may end in a panic, or give a key for a password that the volume does not have.

use std::sync::OnceLock;
use std::time::Duration;

use crypto::Secret;
use crypto::cipher::{Algorithm, CipherSpec, IvGenerator, Mode};
use crypto::luks::{HEADER_LEN, Hash, Header, NewVolume, VolumeKey};

use crate::input::Input;

/// Iterations of PBKDF2 that an input may ask for: more takes too long.
const MOST: u32 = 2000;
const PASSWORD: &[u8] = b"letmein";

/// A valid volume.
fn volume() -> &'static Secret {
    static VOLUME: OnceLock<Secret> = OnceLock::new();
    VOLUME.get_or_init(|| {
        let cipher =
            CipherSpec { algorithm: Algorithm::Aes128, mode: Mode::Cbc, iv: IvGenerator::Plain64 };
        let new = NewVolume { cipher, hash: Hash::Sha1, time: Duration::ZERO, detached: false };
        new.make(PASSWORD).expect("random numbers")
    })
}

/// Runs one input. Its first byte says whether the rest is a header, or changes to one.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let is_raw = input.u8().is_multiple_of(4) && !data.is_empty();
    let mut bytes = volume().to_vec();
    if is_raw {
        let rest = &data[1..];
        let len = rest.len().min(bytes.len());
        bytes[..len].copy_from_slice(&rest[..len]);
    } else {
        while !input.is_empty() {
            let at = usize::from(input.u16()) % HEADER_LEN;
            bytes[at] = input.u8();
        }
    }
    let Ok(header) = Header::read(&bytes) else { return };
    assert_eq!(Header::read(&header.write()).as_ref(), Ok(&header));
    if header.digest_iterations > MOST {
        return;
    }
    for slot in header.slots.iter().filter(|slot| slot.active && slot.iterations <= MOST) {
        let (at, len) = header.stripes(slot);
        let at = usize::try_from(at).unwrap_or(usize::MAX).min(bytes.len());
        let end = at.saturating_add(len.next_multiple_of(512)).min(bytes.len());
        let stripes = || Secret::new(bytes[at..end].to_vec());
        assert!(VolumeKey::unlock(&header, slot, stripes(), b"another one").is_none());
        if let Some(key) = VolumeKey::unlock(&header, slot, stripes(), PASSWORD) {
            let cipher = key.cipher(header.cipher).expect("a key of the header's length");
            let mut sector = vec![7; 1024];
            cipher.encrypt(1, &mut sector);
            cipher.decrypt(1, &mut sector);
            assert_eq!(sector, vec![7; 1024]);
        }
    }
}

//! LUKS version 1: a header with up to eight passwords for one key.
//!
//! Source: "LUKS1 On-Disk Format Specification", version 1.2.3.

mod amend;
mod hash;
mod header;
mod keys;
mod stripes;

pub use amend::Step;
pub use hash::Hash;
pub use header::{HEADER_LEN, Header, HeaderError, SLOTS, Slot};
pub use keys::{AddError, NewVolume, VolumeKey, iterations_for};
pub use stripes::STRIPES;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::Secret;
    use crate::cipher::{Algorithm, CipherSpec, IvGenerator, Mode};

    fn volume() -> Secret {
        let cipher =
            CipherSpec { algorithm: Algorithm::Aes256, mode: Mode::Xts, iv: IvGenerator::Plain64 };
        let new = NewVolume { cipher, hash: Hash::Sha256, time: Duration::ZERO, detached: false };
        new.make(b"letmein").unwrap()
    }

    #[test]
    fn a_new_volume_has_one_password() {
        let volume = volume();
        let header = Header::read(&volume).unwrap();
        assert_eq!(header.write(), volume[..HEADER_LEN]);
        assert_eq!(header.payload(), volume.len() as u64);
        let slot = header.slots.iter().find(|slot| slot.active).unwrap();
        let (at, len) = header.stripes(slot);
        let stripes = || Secret::new(volume[at as usize..][..len].to_vec());
        assert!(VolumeKey::unlock(&header, slot, stripes(), b"letmein").is_some());
        assert!(VolumeKey::unlock(&header, slot, stripes(), b"password").is_none());
        assert!(VolumeKey::unlock(&header, slot, Secret::default(), b"letmein").is_none());
    }

    proptest! {
        #[test]
        fn what_is_read_is_valid(changes in prop::collection::vec((0..HEADER_LEN, any::<u8>()), 0..4), len in 0..=HEADER_LEN) {
            let mut bytes = volume()[..HEADER_LEN].to_vec();
            changes.into_iter().for_each(|(at, byte)| bytes[at] = byte);
            prop_assert!(Header::read(&bytes[..len]).is_err() || len == HEADER_LEN);
            if let Ok(header) = Header::read(&bytes) {
                prop_assert_eq!(Header::read(&header.write()), Ok(header));
            }
        }
    }
}

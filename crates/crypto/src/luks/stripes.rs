//! The anti-forensic splitter: a key as many stripes, of which none may be missing.

use super::hash::Hash;
use crate::Secret;

/// Stripes of a key: what everything that makes such headers uses.
pub const STRIPES: usize = 4000;

/// Returns the key that stripes were made of. `len`: bytes of a key.
pub(super) fn merge(hash: Hash, len: usize, stripes: &[u8]) -> Secret {
    let mut all = stripes.chunks_exact(len);
    let last = all.next_back().unwrap_or_default();
    let mut key = before_last(hash, len, all);
    xor(&mut key, last);
    key
}

/// Makes stripes of a key, of random bytes for all but the last stripe. They fill `stripes`.
pub(super) fn split(hash: Hash, key: &[u8], stripes: &mut [u8]) {
    let len = key.len();
    let (random, last) = stripes.split_at_mut(stripes.len().saturating_sub(len));
    let mut end = before_last(hash, len, random.chunks_exact(len));
    xor(&mut end, key);
    last.copy_from_slice(&end);
}

fn before_last<'a>(hash: Hash, len: usize, stripes: impl Iterator<Item = &'a [u8]>) -> Secret {
    let mut block = Secret::new(vec![0; len]);
    for stripe in stripes {
        xor(&mut block, stripe);
        hash.diffuse(&mut block);
    }
    block
}

fn xor(to: &mut [u8], with: &[u8]) {
    to.iter_mut().zip(with).for_each(|(to, with)| *to ^= with);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stripes_give_the_key_and_a_changed_one_another() {
        for hash in Hash::ALL {
            for len in [16, 24, 32, 48, 64] {
                let key: Vec<u8> = (0..len as u8).collect();
                let mut stripes: Vec<u8> = (0..len * STRIPES).map(|n| (n * 7) as u8).collect();
                split(hash, &key, &mut stripes);
                assert_eq!(*merge(hash, len, &stripes), key);
                stripes[len * 17] ^= 1;
                assert_ne!(*merge(hash, len, &stripes), key);
            }
        }
    }
}

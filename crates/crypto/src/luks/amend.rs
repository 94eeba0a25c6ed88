//! Changes of a volume's passwords, as steps to be carried out in order.
//!
//! Between two steps, and within one, each slot that is not changed works. A slot is marked active only after its
//! stripes, salt and iterations are on stable storage. A slot is marked inactive before its stripes are overwritten.

use super::header::{HEADER_LEN, Header, SLOTS};
use super::keys::{AddError, VolumeKey, random};
use crate::Secret;
use crate::cipher::SECTOR;

/// A step of a change.
pub enum Step {
    /// Write these bytes, whole sectors, there: bytes from the beginning of the header.
    Stripes(u64, Secret),
    /// Write this header over the one that is there.
    Header(Box<[u8; HEADER_LEN]>),
    /// Have what was written on stable storage before the next step begins.
    Flush,
}

impl Header {
    /// Puts a password into a slot that is not active. Returns the steps.
    ///
    /// # Errors
    ///
    /// The system gives no random numbers. The header is unchanged.
    pub fn activate(
        &mut self,
        index: usize,
        key: &VolumeKey,
        password: &[u8],
        iterations: u32,
    ) -> Result<Vec<Step>, AddError> {
        let mut after = self.clone();
        let stripes = after.add_password(index, key, password, iterations)?;
        let Some(slot) = after.slots.get(index) else { return Ok(Vec::new()) };
        let (at, _) = after.stripes(slot);
        // Slot 6 lies in two sectors. Its state is alone in a sector that changes.
        let prepared = after.with_state(index, false);
        let steps = vec![
            Step::Stripes(at, stripes),
            prepared,
            Step::Flush,
            after.with_state(index, true),
            Step::Flush,
        ];
        *self = after;
        Ok(steps)
    }

    /// Erases the password in a slot. Returns the steps.
    ///
    /// # Errors
    ///
    /// The system gives no random numbers. The header is unchanged.
    pub fn erase(&mut self, index: usize) -> Result<Vec<Step>, AddError> {
        let Some(slot) = self.slots.get(index) else { return Ok(Vec::new()) };
        let (at, len) = self.stripes(slot);
        let mut noise = Secret::new(vec![0; len.next_multiple_of(SECTOR)]);
        random(&mut noise)?;
        let inactive = self.with_state(index, false);
        if let Some(slot) = self.slots.get_mut(index) {
            (slot.active, slot.iterations, slot.salt) = (false, 0, [0; 32]);
        }
        let empty = Step::Header(Box::new(self.write()));
        Ok(vec![inactive, Step::Flush, Step::Stripes(at, noise), empty, Step::Flush])
    }

    /// Replaces the password in a slot. Returns the steps.
    ///
    /// If no other slot is active, another one has the new password meanwhile.
    ///
    /// # Errors
    ///
    /// The system gives no random numbers. The header is unchanged.
    pub fn replace(
        &mut self,
        index: usize,
        key: &VolumeKey,
        password: &[u8],
        iterations: u32,
    ) -> Result<Vec<Step>, AddError> {
        let mut after = self.clone();
        let is_only = after.active().all(|active| active == index);
        let spare = (0..SLOTS).find(|other| is_only && *other != index);
        let mut steps = Vec::new();
        if let Some(spare) = spare {
            steps.extend(after.activate(spare, key, password, iterations)?);
        }
        steps.extend(after.erase(index)?);
        steps.extend(after.activate(index, key, password, iterations)?);
        if let Some(spare) = spare {
            steps.extend(after.erase(spare)?);
        }
        *self = after;
        Ok(steps)
    }

    /// Returns the slots that have a password.
    pub fn active(&self) -> impl Iterator<Item = usize> + '_ {
        (0..).zip(&self.slots).filter(|(_, slot)| slot.active).map(|(index, _)| index)
    }

    /// Writes the header with a slot in that state.
    fn with_state(&self, index: usize, active: bool) -> Step {
        let mut header = self.clone();
        if let Some(slot) = header.slots.get_mut(index) {
            slot.active = active;
        }
        Step::Header(Box::new(header.write()))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::cipher::{Algorithm, CipherSpec, IvGenerator, Mode};
    use crate::luks::{Hash, NewVolume};

    const ITERATIONS: u32 = 2;

    fn volume() -> Vec<u8> {
        let cipher =
            CipherSpec { algorithm: Algorithm::Aes128, mode: Mode::Cbc, iv: IvGenerator::Plain64 };
        let time = Duration::ZERO;
        let new = NewVolume { cipher, hash: Hash::Sha1, time, detached: false };
        new.make(b"first").unwrap().to_vec()
    }

    fn unlock(volume: &[u8], password: &[u8]) -> Option<(usize, VolumeKey)> {
        let header = Header::read(volume).unwrap();
        header.active().find_map(|index| {
            let slot = &header.slots[index];
            let (at, len) = header.stripes(slot);
            let stripes = Secret::new(volume[at as usize..][..len].to_vec());
            Some((index, VolumeKey::unlock(&header, slot, stripes, password)?))
        })
    }

    fn write(volume: &mut [u8], step: &Step) {
        match step {
            Step::Stripes(at, bytes) => {
                volume[*at as usize..][..bytes.len()].copy_from_slice(bytes)
            }
            Step::Header(bytes) => volume[..HEADER_LEN].copy_from_slice(&bytes[..]),
            Step::Flush => {}
        }
    }

    /// Carries the steps out, and calls `check` with what a crash may leave: all of what was flushed, and of what was
    /// not flushed the first half of the sectors, the second half, or every other sector.
    fn carry_out(volume: &mut [u8], steps: &[Step], mut check: impl FnMut(&[u8])) {
        let mut stable = volume.to_vec();
        check(&stable);
        for step in steps {
            write(volume, step);
            let changed: Vec<usize> = (0..volume.len() / SECTOR)
                .filter(|n| volume[n * SECTOR..][..SECTOR] != stable[n * SECTOR..][..SECTOR])
                .collect();
            let halves = changed.len().div_ceil(2);
            let kept: [&dyn Fn(usize) -> bool; 5] =
                [&|_| true, &|n| n < halves, &|n| n >= halves, &|n| n % 2 == 0, &|n| n % 2 == 1];
            for kept in kept {
                let mut left = stable.clone();
                for (_, n) in (0..).zip(&changed).filter(|(place, _)| kept(*place)) {
                    let sector = n * SECTOR..(n + 1) * SECTOR;
                    left[sector.clone()].copy_from_slice(&volume[sector]);
                }
                check(&left);
            }
            if matches!(step, Step::Flush) {
                stable.copy_from_slice(volume);
            }
        }
    }

    #[test]
    fn a_crash_between_any_steps_leaves_a_password() {
        for index in [1, 6] {
            let mut volume = volume();
            let mut header = Header::read(&volume).unwrap();
            let (_, key) = unlock(&volume, b"first").unwrap();
            let steps = header.activate(index, &key, b"second", ITERATIONS).unwrap();
            carry_out(&mut volume, &steps, |left| {
                assert!(unlock(left, b"first").is_some());
                // A slot that claims to be active is one.
                let active = Header::read(left).unwrap().slots[index].active;
                assert_eq!(unlock(left, b"second").is_some(), active);
            });
            assert_eq!(unlock(&volume, b"second").unwrap().0, index);

            let steps = header.erase(0).unwrap();
            carry_out(&mut volume, &steps, |left| assert!(unlock(left, b"second").is_some()));
            assert!(unlock(&volume, b"first").is_none());
            assert_eq!(Header::read(&volume), Ok(header.clone()));

            // The only password is replaced.
            let steps = header.replace(index, &key, b"third", ITERATIONS).unwrap();
            carry_out(&mut volume, &steps, |left| {
                assert!(unlock(left, b"second").or_else(|| unlock(left, b"third")).is_some());
            });
            assert!(unlock(&volume, b"second").is_none());
            assert_eq!(unlock(&volume, b"third").unwrap().0, index);
            assert_eq!(Header::read(&volume).unwrap().active().collect::<Vec<_>>(), [index]);
        }
    }

    #[test]
    fn erased_stripes_are_overwritten() {
        let mut volume = volume();
        let before = volume.clone();
        let mut header = Header::read(&volume).unwrap();
        let (_, key) = unlock(&volume, b"first").unwrap();
        let mut steps = header.activate(3, &key, b"second", ITERATIONS).unwrap();
        steps.extend(header.erase(0).unwrap());
        carry_out(&mut volume, &steps, |_| {});
        let (at, len) = header.stripes(&header.slots[0]);
        let range = at as usize..at as usize + len;
        let same = before[range.clone()].iter().zip(&volume[range]).filter(|(a, b)| a == b).count();
        assert!(same < len / 64, "{same} of {len} bytes are as before");
        // With its header back, the slot has no password.
        volume[..HEADER_LEN].copy_from_slice(&before[..HEADER_LEN]);
        assert!(unlock(&volume, b"first").is_none());
    }
}

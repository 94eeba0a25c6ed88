//! The bits of a dirty bitmap in a file in memory: they survive a kill of the process.
//!
//! The file is mapped, and the words of the bitmap are in the mapping. So a write sets its bits with a store, as in any
//! bitmap. The file is allocated as a whole beforehand: a full file system cannot fail a store.
//!
//! A word of the header says whether the bits are complete. It changes with a store, too, so a kill leaves the bits from
//! before or from after. A backup or a command that takes bits from the bitmap first copies them behind the words: a kill
//! may come before the backup is complete, or before a client knows that it is. They stay there until a client that knows
//! the result of the first command has bits taken again.
//!
//! While an image goes to the next process of an upgrade, or to another node, the file says so: a version that does not
//! know such a file would write without setting bits. The process or node that goes on has the file say again that the
//! bits are complete.

use std::fs::File;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use event_loop::sync::lock;
use guest_memory::{MappedRegion, Region};
use rustix::fs::{FallocateFlags, fallocate, ftruncate};
use rustix::io::{pread, pwrite};

/// First bytes of a file; the owner follows.
const MAGIC: &[u8; 16] = b"ringmill bitmap1";
/// Words of the header: the state, whether writes set bits, bytes of the disk and of a part, 1, the device of the
/// image's file, and bytes of the name, which follows.
const STATE: usize = 6;
const RECORDING: usize = 7;
const SIZE: usize = 8;
const GRANULARITY: usize = 9;
/// Where journals say that an image names them: versions that do not know these files leave such a file alone.
const NAMED: usize = 10;
const DEVICE: usize = 11;
const NAME_LEN: usize = 12;
const NAME_AT: usize = 8 * 13;
/// Bytes of the header, and its words.
const HEADER: usize = 4096;
const HEADER_WORDS: usize = HEADER / 8;

/// States: the bits may lack writes; they lack none; they lack none together with those behind.
const UNKNOWN: u64 = 0;
const COMPLETE: u64 = 1;
const TAKEN: u64 = 2;
/// Added to the last two while the image goes to another process or node.
const LENT: u64 = 2;

/// Longest name, bytes.
const MAX_NAME: usize = 1023;
/// Bytes of a part. The limits are those of bitmaps in images.
const GRANULARITIES: RangeInclusive<u64> = 1 << 9..=1 << 31;
/// Most bits: 512 MiB.
const MAX_BITS: u64 = 1 << 32;
/// Words that are copied at once.
const CHUNK: usize = 512;

/// What a bitmap is, beside its bits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Described {
    pub(crate) name: String,
    /// Bytes of the disk.
    pub(crate) size: u64,
    /// Bytes of a part, a power of two.
    pub(crate) granularity: u64,
    /// Writes set bits.
    pub(crate) recording: bool,
}

impl Described {
    fn bits(&self) -> u64 {
        self.size.div_ceil(self.granularity)
    }

    /// Words of its bits.
    fn words(&self) -> usize {
        self.bits().div_ceil(64) as usize
    }

    /// Whether an image can have it: a file may be damaged.
    fn is_possible(&self) -> bool {
        !self.name.is_empty()
            && self.name.len() <= MAX_NAME
            && !self.name.contains('\0')
            && self.granularity.is_power_of_two()
            && GRANULARITIES.contains(&self.granularity)
            && i64::try_from(self.size).is_ok()
            && self.bits() <= MAX_BITS
    }
}

/// Whose file it is: the mark of the image's journal, and the device of the image's file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Owner {
    pub(crate) mark: [u8; 32],
    pub(crate) device: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Writes do not set the bits yet.
    New,
    /// The file says that its bits are complete.
    Kept,
    /// The image goes to another process or node, or the bitmap was removed, which may be undone.
    Lent,
    /// It never does so again.
    GivenUp,
}

/// What the file says.
struct Said {
    phase: Phase,
    /// Bits that were taken are behind the words.
    taken: bool,
}

/// The bits of a bitmap; for all threads.
pub(crate) struct KeptBits {
    region: MappedRegion,
    said: Mutex<Said>,
    /// Bits that were taken are not needed any more.
    settled: AtomicBool,
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

impl KeptBits {
    /// Makes the file one of a bitmap without a set bit, which is not kept yet.
    ///
    /// # Errors
    ///
    /// There is no room for the bits, or they cannot be mapped.
    pub(crate) fn create(file: File, owner: Owner, of: &Described) -> io::Result<KeptBits> {
        if !of.is_possible() {
            return Err(invalid("no image can have it"));
        }
        let len = HEADER + of.words() * 8;
        fallocate(&file, FallocateFlags::empty(), 0, len as u64)?;
        let mut header = [0; HEADER];
        header[..16].copy_from_slice(MAGIC);
        header[16..48].copy_from_slice(&owner.mark);
        for (word, value) in [
            (STATE, UNKNOWN),
            (RECORDING, u64::from(of.recording)),
            (SIZE, of.size),
            (GRANULARITY, of.granularity),
            (NAMED, 1),
            (DEVICE, owner.device),
            (NAME_LEN, of.name.len() as u64),
        ] {
            header[word * 8..][..8].copy_from_slice(&value.to_ne_bytes());
        }
        header[NAME_AT..][..of.name.len()].copy_from_slice(of.name.as_bytes());
        file.write_all_at(&header, 0)?;
        KeptBits::map(file, len, false)
    }

    /// Finds the bits that a killed process has left, or, with `lent`, one that hands the image over. `None`: they may lack
    /// writes, or are those of another owner.
    ///
    /// The file says the same until [`seize`](Self::seize) or [`begin`](Self::begin).
    ///
    /// # Errors
    ///
    /// The file cannot be read or mapped.
    pub(crate) fn find(
        file: File,
        owner: Owner,
        lent: bool,
    ) -> io::Result<Option<(Described, KeptBits)>> {
        let mut header = [0; HEADER];
        file.read_exact_at(&mut header, 0)?;
        let word = |word: usize| {
            header[word * 8..].first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes))
        };
        let name = header.get(NAME_AT..NAME_AT + (word(NAME_LEN) as usize).min(HEADER));
        let name = name.and_then(|name| std::str::from_utf8(name).ok()).unwrap_or_default();
        let of = Described {
            name: name.to_owned(),
            size: word(SIZE),
            granularity: word(GRANULARITY),
            recording: word(RECORDING) == 1,
        };
        let state = word(STATE).checked_sub(if lent { LENT } else { 0 });
        let is_whole = header.starts_with(MAGIC)
            && header[16..].starts_with(&owner.mark)
            && word(DEVICE) == owner.device
            && (state == Some(COMPLETE) || state == Some(TAKEN))
            && of.is_possible();
        if !is_whole {
            return Ok(None);
        }
        let len = HEADER + of.words() * 8;
        if file.metadata()?.len() < len as u64 {
            return Ok(None);
        }
        let taken = state == Some(TAKEN);
        let found = KeptBits::map(file, len, lent && taken)?;
        if taken && !lent {
            found.add_taken()?;
        }
        if let (Some(last), rest @ 1..) = (found.words().last(), of.bits() % 64) {
            // Bits past the end are of no part.
            last.fetch_and((1 << rest) - 1, Ordering::Release);
        }
        Ok(Some((of, found)))
    }

    fn map(file: File, len: usize, taken: bool) -> io::Result<KeptBits> {
        let fd = OwnedFd::from(file);
        let (guest_addr, user_addr, mmap_offset) = (0, 0, 0);
        let region = Region { guest_addr, size: len as u64, user_addr, mmap_offset, fd };
        let region = region.map().map_err(io::Error::other)?;
        if region.words().len() != len / 8 {
            return Err(invalid("the mapping has no words"));
        }
        let said = Mutex::new(Said { phase: Phase::New, taken });
        Ok(KeptBits { region, said, settled: AtomicBool::new(false) })
    }

    /// The bits, 64 each, the lowest first.
    #[inline]
    pub(crate) fn words(&self) -> &[AtomicU64] {
        &self.region.words()[HEADER_WORDS..]
    }

    fn header(&self, word: usize) -> &AtomicU64 {
        &self.region.words()[word]
    }

    /// Where bits are that were taken.
    fn taken_at(&self) -> u64 {
        self.region.size()
    }

    /// This process has the image open from now on: the bits may lack writes until they are kept.
    pub(crate) fn seize(&self) {
        self.say(&lock(&self.said));
    }

    /// The file is to say that the bits are complete, from now on: all writes set them.
    pub(crate) fn begin(&self) {
        self.change(&[Phase::New, Phase::Lent], Phase::Kept);
    }

    /// The file does not say so until the next [`begin`](Self::begin), of this process or of the next one. No write begins
    /// before that.
    pub(crate) fn lend(&self) {
        self.change(&[Phase::Kept], Phase::Lent);
    }

    /// The file says no more that the bits are complete. To be called before a change that sets no bits.
    pub(crate) fn give_up(&self) {
        self.change(&[Phase::New, Phase::Kept, Phase::Lent], Phase::GivenUp);
    }

    fn change(&self, from: &[Phase], to: Phase) {
        let mut said = lock(&self.said);
        if from.contains(&said.phase) {
            // A mapping that is not that of the file any more sets no bits there.
            said.phase = if self.region.is_lost() { Phase::GivenUp } else { to };
            self.say(&said);
        }
    }

    fn say(&self, said: &Said) {
        let complete = if said.taken { TAKEN } else { COMPLETE };
        let state = match said.phase {
            Phase::New | Phase::GivenUp => UNKNOWN,
            Phase::Kept => complete,
            Phase::Lent => complete + LENT,
        };
        self.header(STATE).store(state, Ordering::Release);
        if self.region.is_lost() {
            let _ = self.write_at(&state.to_ne_bytes(), STATE as u64 * 8);
        }
    }

    /// Whether the file never says again that the bits are complete.
    pub(crate) fn is_given_up(&self) -> bool {
        lock(&self.said).phase == Phase::GivenUp
    }

    /// The file is another owner's from now on.
    ///
    /// # Errors
    ///
    /// As of pwrite(2).
    pub(crate) fn set_owner(&self, owner: Owner) -> io::Result<()> {
        self.write_at(&owner.mark, MAGIC.len() as u64)?;
        self.write_at(&owner.device.to_ne_bytes(), DEVICE as u64 * 8)
    }

    /// Whether writes set bits.
    pub(crate) fn set_recording(&self, recording: bool) {
        self.header(RECORDING).store(u64::from(recording), Ordering::Release);
    }

    /// The bits that were taken are not needed any more.
    pub(crate) fn settle(&self) {
        self.settled.store(true, Ordering::Relaxed);
    }

    /// Keeps bits that are about to be taken.
    pub(crate) fn retain(&self, bits: &[AtomicU64]) {
        let mut said = lock(&self.said);
        if said.phase == Phase::GivenUp {
            return;
        }
        let retained = match self.region.is_lost() {
            true => Err(io::Error::other("the file was made shorter")),
            false => self.write_taken(bits, &mut said),
        };
        if let Err(error) = retained {
            log::warn!("a dirty bitmap does not survive a kill from now on: {error}");
            said.phase = Phase::GivenUp;
            self.say(&said);
        }
    }

    /// Writes bits behind the words. Those that are there stay unless they are not needed any more.
    fn write_taken(&self, bits: &[AtomicU64], said: &mut Said) -> io::Result<()> {
        if self.settled.swap(false, Ordering::Relaxed) || !said.taken {
            // The words have all bits since then.
            said.taken = false;
            self.say(said);
            ftruncate(self.region.file(), self.taken_at())?;
        }
        let mut at = self.taken_at();
        for chunk in bits.chunks(CHUNK) {
            let len = chunk.len() * 8;
            if chunk.iter().any(|word| word.load(Ordering::Relaxed) != 0) {
                let mut bytes = [0; CHUNK * 8];
                self.read_at(&mut bytes[..len], at)?;
                for (place, word) in bytes.chunks_exact_mut(8).zip(chunk) {
                    for (byte, more) in
                        place.iter_mut().zip(word.load(Ordering::Relaxed).to_ne_bytes())
                    {
                        *byte |= more;
                    }
                }
                self.write_at(&bytes[..len], at)?;
            }
            at += len as u64;
        }
        said.taken = true;
        self.say(said);
        Ok(())
    }

    /// The bits that were taken and may be needed still, 64 each. `None`: there are none.
    ///
    /// # Errors
    ///
    /// They cannot be read.
    pub(crate) fn taken(&self) -> io::Result<Option<Vec<u64>>> {
        if !lock(&self.said).taken || self.settled.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let mut bytes = vec![0; self.words().len() * 8];
        self.read_at(&mut bytes, self.taken_at())?;
        Ok(Some(bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect()))
    }

    /// Sets the bits that are behind the words.
    fn add_taken(&self) -> io::Result<()> {
        let mut at = self.taken_at();
        for chunk in self.words().chunks(CHUNK) {
            let mut bytes = [0; CHUNK * 8];
            let bytes = &mut bytes[..chunk.len() * 8];
            self.read_at(bytes, at)?;
            let (taken, _) = bytes.as_chunks::<8>();
            for (word, taken) in chunk.iter().zip(taken).filter(|(_, taken)| **taken != [0; 8]) {
                word.fetch_or(u64::from_ne_bytes(*taken), Ordering::Release);
            }
            at += bytes.len() as u64;
        }
        Ok(())
    }

    /// Reads from the file. Bytes past its end stay as they are.
    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            match pread(self.region.file(), &mut bytes[done..], at + done as u64)? {
                0 => break,
                read => done += read,
            }
        }
        Ok(())
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            match pwrite(self.region.file(), &bytes[done..], at + done as u64)? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                written => done += written,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;

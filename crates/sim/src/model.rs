//! The model of a disk: for each sector, the writes of which it may have the contents.
//!
//! A write is a candidate from when it is offered. Until it is answered, a read may see it or not. Once
//! answered with success, it supersedes all writes that had ended before it was offered. Of concurrent writes,
//! each may be the last. A write that failed, or was lost with its device, may be there in part.
//!
//! Each word of a sector encodes its write, so all bytes are checked. A sector with one candidate must be
//! that write as a whole. With several candidates, each byte may be of another.
//!
//! If unflushed data can be lost, by a power cut or with a daemon that had it in memory, superseded writes are
//! kept. A flush that was offered later, or a stable write, drops them when it is answered. After a loss,
//! every kept write is a candidate again.

/// Bytes of a sector.
pub(crate) const SECTOR: usize = 512;
/// Words of a sector.
const WORDS: usize = SECTOR / 8;

/// The number of a write on its disk; 0 for the initial contents. Even numbers are writes of zeroes.
pub(crate) type Version = u32;

/// A point in time, as a count of a disk's events.
type Moment = u64;

/// A moment in the future.
const NEVER: Moment = u64::MAX;

#[derive(Debug, Clone, Copy)]
struct Write {
    version: Version,
    ended: Moment,
}

#[derive(Debug)]
struct Sector {
    /// Candidates, in the order they were offered. Never empty.
    writes: Vec<Write>,
    /// Writes superseded while a read was in flight, and when.
    ghosts: Vec<(Version, Moment)>,
    /// Number of reads in flight.
    readers: u32,
    /// Superseded writes that a loss may bring back.
    unflushed: Vec<Unflushed>,
}

/// A write superseded by one that may be lost.
#[derive(Debug, Clone, Copy)]
struct Unflushed {
    write: Write,
    superseded: Moment,
}

/// A disk as its user knows it.
#[derive(Debug)]
pub(crate) struct Model {
    sectors: Vec<Sector>,
    now: Moment,
    versions: Version,
    /// Unflushed data may be lost.
    volatile: bool,
    /// Sectors with unflushed writes.
    unflushed: Vec<u32>,
    /// The disk's size in sectors that no loss can reduce, and when it last grew.
    stable_sectors: u32,
    grown: Moment,
}

/// A write or read in flight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ticket {
    pub(crate) first: u32,
    pub(crate) count: u32,
    /// For writes.
    pub(crate) version: Version,
    offered: Moment,
}

/// What a disk may have had at some moment between two others, by sector.
pub(crate) struct Seen(Vec<Vec<Version>>);

impl Seen {
    /// Whether a copy of that moment may have these bytes. The disk may be larger than its user knew.
    pub(crate) fn check(&self, bytes: &[u8]) -> Result<(), String> {
        if bytes.len() < self.0.len() * SECTOR {
            return Err(format!("{} bytes, not {}", bytes.len(), self.0.len() * SECTOR));
        }
        for ((number, allowed), bytes) in (0..).zip(&self.0).zip(bytes.chunks_exact(SECTOR)) {
            check(number, allowed.clone(), bytes).map_err(|wrong| wrong.to_string())?;
        }
        Ok(())
    }
}

/// A sector with unexpected contents, and its candidates.
#[derive(Debug)]
pub(crate) struct Wrong {
    pub(crate) sector: u32,
    pub(crate) word: usize,
    pub(crate) found: u64,
    pub(crate) allowed: Vec<Version>,
}

impl std::fmt::Display for Wrong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Wrong { sector, word, found, allowed } = self;
        let what = match explain(*found) {
            Some((0, _, _)) => "zeroes".into(),
            Some((version, sector, word)) => {
                format!("write {version}, word {word} of sector {sector}")
            }
            None => "nothing that was ever written".to_string(),
        };
        write!(
            f,
            "sector {sector}, word {word}: expected one of the writes {allowed:?}, found {found:#018x}: \
             {what}"
        )
    }
}

/// Odd, so that the multiplication is invertible.
const SCATTER: u64 = 0x9e37_79b9_7f4a_7c15;

const GATHER: u64 = {
    // Newton's iteration; five steps suffice for 64 bits.
    let mut inverse = SCATTER;
    let mut i = 0;
    while i < 5 {
        inverse = inverse.wrapping_mul(2u64.wrapping_sub(SCATTER.wrapping_mul(inverse)));
        i += 1;
    }
    inverse
};

/// The first word of a sector, and the distance from one word to the next; both 0 for zeroes.
fn words(version: Version, sector: u32) -> (u64, u64) {
    if version.is_multiple_of(2) {
        return (0, 0);
    }
    ((u64::from(version) << 32 | u64::from(sector) << 6).wrapping_mul(SCATTER), SCATTER)
}

fn word(version: Version, sector: u32, word: usize) -> u64 {
    let (first, step) = words(version, sector);
    first.wrapping_add(step.wrapping_mul(word as u64))
}

/// Returns the write, sector and word that a word encodes.
fn explain(found: u64) -> Option<(Version, u32, usize)> {
    if found == 0 {
        return Some((0, 0, 0));
    }
    let plain = found.wrapping_mul(GATHER);
    let (version, sector, at) = ((plain >> 32) as u32, (plain as u32) >> 6, (plain & 63) as usize);
    (sector < 1 << 20 && version < 1 << 28).then_some((version, sector, at))
}

/// Fills a sector with the contents of a write.
pub(crate) fn fill(version: Version, sector: u32, bytes: &mut [u8]) {
    let (mut word, step) = words(version, sector);
    for place in bytes.as_chunks_mut().0 {
        *place = word.to_le_bytes();
        word = word.wrapping_add(step);
    }
}

fn word_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes.as_chunks().0[at])
}

fn holds(version: Version, sector: u32, bytes: &[u8]) -> bool {
    // Without an early exit and multiplications, so that the compiler vectorises the loop.
    let (mut word, step) = words(version, sector);
    let mut wrong = 0;
    for found in bytes.as_chunks().0 {
        wrong |= u64::from_le_bytes(*found) ^ word;
        word = word.wrapping_add(step);
    }
    wrong == 0
}

impl Model {
    /// A disk of zeroes. `volatile`: unflushed data may be [lost](Self::lose).
    pub(crate) fn new(sectors: u32, volatile: bool) -> Self {
        let mut model = Model {
            sectors: Vec::new(),
            now: 1,
            versions: 0,
            volatile,
            unflushed: Vec::new(),
            stable_sectors: sectors,
            grown: 0,
        };
        model.set_sectors(sectors);
        model
    }

    pub(crate) fn sectors(&self) -> u32 {
        self.sectors.len() as u32
    }

    /// Grows the disk by sectors of zeroes.
    pub(crate) fn grow(&mut self, sectors: u32) {
        self.now += 1;
        self.grown = self.now;
        self.set_sectors(sectors);
    }

    fn set_sectors(&mut self, sectors: u32) {
        let first = Write { version: 0, ended: 0 };
        let sector = || Sector {
            writes: vec![first],
            ghosts: Vec::new(),
            readers: 0,
            unflushed: Vec::new(),
        };
        self.sectors.resize_with(sectors as usize, sector);
    }

    /// Records that a read is offered.
    pub(crate) fn begin_read(&mut self, first: u32, count: u32) -> Ticket {
        self.now += 1;
        for sector in self.range(first, count) {
            sector.readers += 1;
        }
        Ticket { first, count, version: 0, offered: self.now }
    }

    /// Checks the bytes that a read returned; `None` if it failed or was lost.
    pub(crate) fn end_read(&mut self, ticket: &Ticket, bytes: Option<&[u8]>) -> Result<(), Wrong> {
        self.end_look(ticket, |at| bytes.map(|bytes| &bytes[at as usize * SECTOR..][..SECTOR]))
    }

    /// Checks a block status answer, which was offered with [`begin_read`](Self::begin_read) and reports these
    /// sectors, counted from the first, as zeroes.
    pub(crate) fn end_status(
        &mut self,
        ticket: &Ticket,
        is_zero: impl Fn(u32) -> bool,
    ) -> Result<(), Wrong> {
        self.end_look(ticket, |at| is_zero(at).then_some(&[0; SECTOR]))
    }

    fn end_look<'a>(
        &mut self,
        ticket: &Ticket,
        found: impl Fn(u32) -> Option<&'a [u8]>,
    ) -> Result<(), Wrong> {
        let mut result = Ok(());
        for at in 0..ticket.count {
            let number = ticket.first + at;
            let sector = &mut self.sectors[number as usize];
            if let Some(bytes) = found(at)
                && result.is_ok()
            {
                result = sector.check(number, ticket.offered, bytes);
            }
            sector.readers -= 1;
            if sector.readers == 0 {
                sector.ghosts.clear();
            }
        }
        result
    }

    /// Returns what the disk may have had since [`begin_read`](Self::begin_read), and ends that read.
    pub(crate) fn seen(&mut self, ticket: &Ticket) -> Seen {
        let range = ticket.first..ticket.first + ticket.count;
        let seen = range.clone().filter_map(|number| self.sectors.get(number as usize));
        let seen = Seen(seen.map(|sector| sector.allowed(ticket.offered)).collect());
        for number in range {
            // After a power cut the disk may be smaller, or another one.
            let Some(sector) = self.sectors.get_mut(number as usize) else { continue };
            sector.readers = sector.readers.saturating_sub(1);
            if sector.readers == 0 {
                sector.ghosts.clear();
            }
        }
        seen
    }

    /// Records that a write is offered, perhaps of zeroes.
    pub(crate) fn begin_write(&mut self, first: u32, count: u32, zeroes: bool) -> Ticket {
        self.now += 1;
        // Odd numbers have words of their own; even numbers are zeroes.
        self.versions += 2;
        let version = self.versions | u32::from(!zeroes);
        let offered = self.now;
        for sector in self.range(first, count) {
            sector.writes.push(Write { version, ended: NEVER });
        }
        Ticket { first, count, version, offered }
    }

    /// Records the end of a write. `done`: with success; otherwise a part may be written. `stable`: the data
    /// cannot be lost.
    pub(crate) fn end_write(&mut self, ticket: &Ticket, done: bool, stable: bool) {
        self.now += 1;
        let (now, keep) = (self.now, self.volatile && !stable);
        for number in ticket.first..ticket.first + ticket.count {
            let sector = &mut self.sectors[number as usize];
            let Some(write) = sector.writes.iter_mut().find(|w| w.version == ticket.version) else {
                // Superseded already.
                continue;
            };
            write.ended = now;
            if !done {
                continue;
            }
            let before = sector.unflushed.len();
            sector.supersede(ticket.offered, now, keep);
            if before == 0 && !sector.unflushed.is_empty() {
                self.unflushed.push(number);
            }
            if stable {
                sector.unflushed.retain(|old| old.write.ended >= ticket.offered);
            }
        }
    }

    /// Records that a flush is offered.
    pub(crate) fn begin_flush(&mut self) -> Ticket {
        self.now += 1;
        Ticket { first: 0, count: 0, version: 0, offered: self.now }
    }

    /// Records that a flush succeeded.
    pub(crate) fn flushed(&mut self, ticket: &Ticket) {
        let Model { sectors, unflushed, .. } = self;
        unflushed.retain(|number| {
            let Some(sector) = sectors.get_mut(*number as usize) else { return false };
            sector.unflushed.retain(|old| old.superseded >= ticket.offered);
            !sector.unflushed.is_empty()
        });
        if self.grown < ticket.offered {
            self.stable_sectors = self.sectors();
        }
    }

    /// Loses unflushed data: the disk now has `bytes`. `anew`: the guest restarts with nothing in flight.
    pub(crate) fn lose(&mut self, bytes: &[u8], anew: bool) -> Result<(), String> {
        for number in std::mem::take(&mut self.unflushed) {
            if let Some(Sector { writes, unflushed, .. }) = self.sectors.get_mut(number as usize) {
                writes.splice(0..0, unflushed.drain(..).map(|old| old.write));
            }
        }
        let sectors = (bytes.len() / SECTOR) as u32;
        let least = if anew { self.stable_sectors } else { self.sectors() };
        if sectors < least {
            return Err(format!("{sectors} sectors, not {least}"));
        }
        if anew {
            self.set_sectors(sectors);
            self.stable_sectors = sectors;
        }
        for (number, bytes) in (0..self.sectors()).zip(bytes.chunks_exact(SECTOR)) {
            self.check(number, bytes).map_err(|wrong| wrong.to_string())?;
            let writes = &mut self.sectors[number as usize].writes;
            if anew
                && writes.len() > 1
                && writes.iter().any(|write| holds(write.version, number, bytes))
            {
                // After a restart of the guest, only the present contents can be read.
                writes.retain(|write| holds(write.version, number, bytes));
            }
        }
        Ok(())
    }

    /// Whether a sector may have these bytes now, with no request in flight.
    pub(crate) fn check(&self, sector: u32, bytes: &[u8]) -> Result<(), Wrong> {
        self.sectors[sector as usize].check(sector, self.now, bytes)
    }

    /// Whether the disk may have these bytes now, with no request in flight.
    pub(crate) fn check_disk(&self, bytes: &[u8]) -> Result<(), String> {
        let mut sectors = (0..self.sectors()).zip(bytes.chunks_exact(SECTOR));
        let checked = sectors.try_for_each(|(sector, bytes)| self.check(sector, bytes));
        checked.map_err(|wrong| wrong.to_string())
    }

    fn range(&mut self, first: u32, count: u32) -> impl Iterator<Item = &mut Sector> {
        self.sectors[first as usize..(first + count) as usize].iter_mut()
    }
}

impl Sector {
    /// Removes writes that had ended before `offered` from the candidates. `keep`: a loss may bring them back.
    fn supersede(&mut self, offered: Moment, now: Moment, keep: bool) {
        let Sector { writes, ghosts, readers, unflushed } = self;
        writes.retain(|write| {
            let stays = write.ended >= offered;
            if !stays && *readers > 0 {
                ghosts.push((write.version, now));
            }
            if !stays && keep {
                unflushed.push(Unflushed { write: *write, superseded: now });
            }
            stays
        });
    }

    /// The writes that a read offered at `offered` may find.
    fn allowed(&self, offered: Moment) -> Vec<Version> {
        let ghosts =
            self.ghosts.iter().filter(|(_, at)| *at > offered).map(|(version, _)| *version);
        let mut allowed: Vec<_> = self.writes.iter().map(|write| write.version).collect();
        allowed.extend(ghosts);
        allowed
    }

    /// Checks the contents that a read found, which was offered at `offered`.
    fn check(&self, number: u32, offered: Moment, bytes: &[u8]) -> Result<(), Wrong> {
        let last = self.writes.last().map_or(0, |write| write.version);
        if holds(last, number, bytes) {
            return Ok(());
        }
        check(number, self.allowed(offered), bytes)
    }
}

/// Checks the contents of a sector, which may be of any of these writes.
fn check(number: u32, allowed: Vec<Version>, bytes: &[u8]) -> Result<(), Wrong> {
    for at in 0..WORDS {
        let found = word_at(bytes, at);
        let of = |version: &Version| word(*version, number, at);
        // A short transfer may end within a word.
        let is_mixed = |byte: u32| {
            allowed.iter().any(|version| (of(version) ^ found) >> (byte * 8) & 0xff == 0)
        };
        if !allowed.iter().any(|version| of(version) == found)
            && (allowed.len() == 1 || !(0..8).all(is_mixed))
        {
            return Err(Wrong { sector: number, word: at, found, allowed });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sector(version: Version) -> Vec<u8> {
        let mut bytes = vec![0; SECTOR];
        fill(version, 3, &mut bytes);
        bytes
    }

    fn read(model: &mut Model, version: Version) -> bool {
        let ticket = model.begin_read(3, 1);
        model.end_read(&ticket, Some(&sector(version))).is_ok()
    }

    #[test]
    fn answered_writes_are_the_only_contents() {
        let mut model = Model::new(8, false);
        assert!(read(&mut model, 0) && !read(&mut model, 3));
        let write = model.begin_write(3, 1, false);
        assert!(read(&mut model, 0) && read(&mut model, write.version));
        model.end_write(&write, true, false);
        assert!(!read(&mut model, 0) && read(&mut model, write.version));
    }

    #[test]
    fn a_read_may_find_the_contents_of_when_it_began() {
        let mut model = Model::new(8, false);
        let write = model.begin_write(3, 1, false);
        let during = model.begin_read(3, 1);
        model.end_write(&write, true, false);
        let after = model.begin_read(3, 1);
        assert!(model.end_read(&after, Some(&sector(0))).is_err());
        assert!(model.end_read(&during, Some(&sector(0))).is_ok());
    }

    #[test]
    fn of_writes_at_the_same_time_any_may_be_the_last() {
        let mut model = Model::new(8, false);
        let (a, b) = (model.begin_write(3, 1, false), model.begin_write(3, 1, false));
        model.end_write(&b, true, false);
        assert!(read(&mut model, a.version) && read(&mut model, b.version));
        model.end_write(&a, true, false);
        assert!(read(&mut model, a.version) && read(&mut model, b.version));
        let zeroes = model.begin_write(3, 1, true);
        model.end_write(&zeroes, true, false);
        assert!(
            read(&mut model, 0) && !read(&mut model, a.version) && !read(&mut model, b.version)
        );
    }

    #[test]
    fn a_failed_write_is_a_candidate_until_the_next_success() {
        let mut model = Model::new(8, false);
        let failed = model.begin_write(3, 1, false);
        model.end_write(&failed, false, false);
        assert!(read(&mut model, 0) && read(&mut model, failed.version));
        let write = model.begin_write(3, 1, false);
        model.end_write(&write, true, false);
        assert!(!read(&mut model, 0) && !read(&mut model, failed.version));
    }

    fn written(model: &mut Model, stable: bool) -> Version {
        let write = model.begin_write(3, 1, false);
        model.end_write(&write, true, stable);
        write.version
    }

    /// Whether a sector may have these contents after a loss.
    fn may_remain(model: &mut Model, version: Version) -> bool {
        let mut bytes = vec![0; 8 * SECTOR];
        bytes[3 * SECTOR..4 * SECTOR].copy_from_slice(&sector(version));
        model.lose(&bytes, false).is_ok()
    }

    #[test]
    fn a_loss_brings_back_superseded_unflushed_writes() {
        let mut model = Model::new(8, true);
        let (a, early) = (written(&mut model, false), model.begin_flush());
        let b = written(&mut model, false);
        model.flushed(&early);
        assert!(!read(&mut model, a));
        // The flush was offered before the second answer, so only the first write is stable.
        assert!([a, b].iter().all(|left| may_remain(&mut model, *left)));
        assert!(!may_remain(&mut model, 0));
        let c = written(&mut model, false);
        let flush = model.begin_flush();
        model.flushed(&flush);
        assert!(
            may_remain(&mut model, c)
                && ![0, a, b].iter().any(|left| may_remain(&mut model, *left))
        );
    }

    #[test]
    fn a_stable_write_is_not_lost() {
        let mut model = Model::new(8, true);
        let (a, b) = (written(&mut model, false), written(&mut model, true));
        assert!(
            may_remain(&mut model, b) && ![0, a].iter().any(|left| may_remain(&mut model, *left))
        );
    }

    #[test]
    fn a_restarted_guest_has_what_the_loss_left() {
        let mut model = Model::new(8, true);
        let a = written(&mut model, false);
        model.lose(&[0; 8 * SECTOR], true).unwrap();
        assert!(read(&mut model, 0) && !read(&mut model, a));
        model.grow(16);
        model.lose(&[0; 8 * SECTOR], true).unwrap();
        assert_eq!(model.sectors(), 8);
        assert!(model.lose(&[0; 7 * SECTOR], true).is_err());
    }

    #[test]
    fn words_encode_their_write_and_place() {
        assert_eq!(explain(word(7, 4095, 63)), Some((7, 4095, 63)));
        assert_eq!(explain(0xa5a5_a5a5_a5a5_a5a5), None);
    }
}

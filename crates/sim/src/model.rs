//! What a disk may hold: for each sector, which writes may be the last.
//!
//! A write is *in place* from when it is offered: until it is answered a read may see it or not. Once
//! it is answered as done it supersedes all that had ended before it was offered. Of writes under way at
//! the same time any may be the last; of one that failed, or was lost with its device, any part may be
//! there.
//!
//! Each word of a sector says which write it is of, so all bytes are checked. A sector with one
//! candidate must be that, whole; with several each byte may be of another.

/// Bytes of a sector.
pub(crate) const SECTOR: usize = 512;
/// Words of a sector.
const WORDS: usize = SECTOR / 8;

/// A write's number on its disk; 0 is what was there first. All words are 0 where it is even.
pub(crate) type Version = u32;

/// When something happened: a count of all events of a disk.
type Moment = u64;

/// Not yet.
const NEVER: Moment = u64::MAX;

#[derive(Debug, Clone, Copy)]
struct Write {
    version: Version,
    ended: Moment,
}

#[derive(Debug)]
struct Sector {
    /// That may be the last, in the order they were offered. Never empty.
    writes: Vec<Write>,
    /// That were superseded while a read was under way, and when.
    ghosts: Vec<(Version, Moment)>,
    /// Reads under way.
    readers: u32,
}

/// A disk as its guest knows it.
#[derive(Debug)]
pub(crate) struct Model {
    sectors: Vec<Sector>,
    now: Moment,
    versions: Version,
}

/// A write or read under way.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ticket {
    pub(crate) first: u32,
    pub(crate) count: u32,
    /// Of a write.
    pub(crate) version: Version,
    offered: Moment,
}

/// What a sector should have held.
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

/// Odd, so that multiplying by it can be undone.
const SCATTER: u64 = 0x9e37_79b9_7f4a_7c15;

const GATHER: u64 = {
    // Newton's iteration; five of them are enough for 64 bits.
    let mut inverse = SCATTER;
    let mut i = 0;
    while i < 5 {
        inverse = inverse.wrapping_mul(2u64.wrapping_sub(SCATTER.wrapping_mul(inverse)));
        i += 1;
    }
    inverse
};

fn word(version: Version, sector: u32, word: usize) -> u64 {
    if version.is_multiple_of(2) {
        return 0;
    }
    (u64::from(version) << 32 | u64::from(sector) << 6 | word as u64).wrapping_mul(SCATTER)
}

/// The write, sector and word that a word is of.
fn explain(found: u64) -> Option<(Version, u32, usize)> {
    if found == 0 {
        return Some((0, 0, 0));
    }
    let plain = found.wrapping_mul(GATHER);
    let (version, sector, at) = ((plain >> 32) as u32, (plain as u32) >> 6, (plain & 63) as usize);
    (sector < 1 << 20 && version < 1 << 28).then_some((version, sector, at))
}

/// What a write puts into a sector.
pub(crate) fn fill(version: Version, sector: u32, bytes: &mut [u8]) {
    for (at, chunk) in bytes.chunks_exact_mut(8).enumerate() {
        chunk.copy_from_slice(&word(version, sector, at).to_le_bytes());
    }
}

fn word_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at * 8..at * 8 + 8]);
    u64::from_le_bytes(word)
}

fn holds(version: Version, sector: u32, bytes: &[u8]) -> bool {
    // Without an early end, so that it is done in parallel.
    (0..WORDS).fold(0, |wrong, at| wrong | (word_at(bytes, at) ^ word(version, sector, at))) == 0
}

impl Model {
    /// A disk of zeroes.
    pub(crate) fn new(sectors: u32) -> Self {
        let mut model = Model { sectors: Vec::new(), now: 1, versions: 0 };
        model.grow(sectors);
        model
    }

    pub(crate) fn sectors(&self) -> u32 {
        self.sectors.len() as u32
    }

    /// There are more sectors now, of zeroes.
    pub(crate) fn grow(&mut self, sectors: u32) {
        let first = Write { version: 0, ended: 0 };
        let sector = || Sector { writes: vec![first], ghosts: Vec::new(), readers: 0 };
        self.sectors.resize_with(sectors as usize, sector);
    }

    /// A read is offered.
    pub(crate) fn begin_read(&mut self, first: u32, count: u32) -> Ticket {
        self.now += 1;
        for sector in self.range(first, count) {
            sector.readers += 1;
        }
        Ticket { first, count, version: 0, offered: self.now }
    }

    /// A read was answered with these bytes; `None`: it failed, or was lost.
    pub(crate) fn end_read(&mut self, ticket: &Ticket, bytes: Option<&[u8]>) -> Result<(), Wrong> {
        let mut result = Ok(());
        for at in 0..ticket.count {
            let number = ticket.first + at;
            let sector = &mut self.sectors[number as usize];
            if let Some(bytes) = bytes
                && result.is_ok()
            {
                let bytes = &bytes[at as usize * SECTOR..][..SECTOR];
                result = sector.check(number, ticket.offered, bytes);
            }
            sector.readers -= 1;
            if sector.readers == 0 {
                sector.ghosts.clear();
            }
        }
        result
    }

    /// A write is offered; of zeroes, maybe.
    pub(crate) fn begin_write(&mut self, first: u32, count: u32, zeroes: bool) -> Ticket {
        self.now += 1;
        // Odd numbers have words of their own, even ones are zeroes.
        self.versions += 2;
        let version = self.versions | u32::from(!zeroes);
        let offered = self.now;
        for sector in self.range(first, count) {
            sector.writes.push(Write { version, ended: NEVER });
        }
        Ticket { first, count, version, offered }
    }

    /// A write has ended. `done`: it was answered so. Otherwise it may have been done in part.
    pub(crate) fn end_write(&mut self, ticket: &Ticket, done: bool) {
        self.now += 1;
        let now = self.now;
        for sector in self.range(ticket.first, ticket.count) {
            let Some(write) = sector.writes.iter_mut().find(|w| w.version == ticket.version) else {
                // Superseded, which ended it.
                continue;
            };
            write.ended = now;
            if done {
                sector.supersede(ticket.offered, now);
            }
        }
    }

    /// Whether a sector may hold these bytes now, with no request under way.
    pub(crate) fn check(&self, sector: u32, bytes: &[u8]) -> Result<(), Wrong> {
        self.sectors[sector as usize].check(sector, self.now, bytes)
    }

    fn range(&mut self, first: u32, count: u32) -> impl Iterator<Item = &mut Sector> {
        self.sectors[first as usize..(first + count) as usize].iter_mut()
    }
}

impl Sector {
    /// Whatever had ended before this moment is not the last.
    fn supersede(&mut self, offered: Moment, now: Moment) {
        let (writes, ghosts, readers) = (&mut self.writes, &mut self.ghosts, self.readers);
        writes.retain(|write| {
            let stays = write.ended >= offered;
            if !stays && readers > 0 {
                ghosts.push((write.version, now));
            }
            stays
        });
    }

    /// Checks what a read that was offered then has found.
    fn check(&self, number: u32, offered: Moment, bytes: &[u8]) -> Result<(), Wrong> {
        let last = self.writes.last().map_or(0, |write| write.version);
        if holds(last, number, bytes) {
            return Ok(());
        }
        let ghosts =
            self.ghosts.iter().filter(|(_, at)| *at > offered).map(|(version, _)| *version);
        let mut allowed: Vec<_> = self.writes.iter().map(|write| write.version).collect();
        allowed.extend(ghosts);
        for at in 0..WORDS {
            let found = word_at(bytes, at);
            let of = |version: &Version| word(*version, number, at);
            // A transfer that stops short may stop within a word.
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
    fn what_is_answered_is_there_and_nothing_else() {
        let mut model = Model::new(8);
        assert!(read(&mut model, 0) && !read(&mut model, 3));
        let write = model.begin_write(3, 1, false);
        assert!(read(&mut model, 0) && read(&mut model, write.version));
        model.end_write(&write, true);
        assert!(!read(&mut model, 0) && read(&mut model, write.version));
    }

    #[test]
    fn a_read_under_way_may_find_what_was_there_when_it_began() {
        let mut model = Model::new(8);
        let write = model.begin_write(3, 1, false);
        let during = model.begin_read(3, 1);
        model.end_write(&write, true);
        let after = model.begin_read(3, 1);
        assert!(model.end_read(&after, Some(&sector(0))).is_err());
        assert!(model.end_read(&during, Some(&sector(0))).is_ok());
    }

    #[test]
    fn of_writes_at_the_same_time_any_may_be_the_last() {
        let mut model = Model::new(8);
        let (a, b) = (model.begin_write(3, 1, false), model.begin_write(3, 1, false));
        model.end_write(&b, true);
        assert!(read(&mut model, a.version) && read(&mut model, b.version));
        model.end_write(&a, true);
        assert!(read(&mut model, a.version) && read(&mut model, b.version));
        let zeroes = model.begin_write(3, 1, true);
        model.end_write(&zeroes, true);
        assert!(
            read(&mut model, 0) && !read(&mut model, a.version) && !read(&mut model, b.version)
        );
    }

    #[test]
    fn a_write_that_failed_may_be_there_until_another_is_done() {
        let mut model = Model::new(8);
        let failed = model.begin_write(3, 1, false);
        model.end_write(&failed, false);
        assert!(read(&mut model, 0) && read(&mut model, failed.version));
        let write = model.begin_write(3, 1, false);
        model.end_write(&write, true);
        assert!(!read(&mut model, 0) && !read(&mut model, failed.version));
    }

    #[test]
    fn words_tell_where_they_are_from() {
        assert_eq!(explain(word(7, 4095, 63)), Some((7, 4095, 63)));
        assert_eq!(explain(0xa5a5_a5a5_a5a5_a5a5), None);
    }
}

//! What a disk may hold: for each sector, which writes may be the last.
//!
//! A write is *in place* from when it is offered: until it is answered a read may see it or not. Once
//! it is answered as done it supersedes all that had ended before it was offered. Of writes under way at
//! the same time any may be the last; of one that failed, or was lost with its device, any part may be
//! there.
//!
//! Each word of a sector says which write it is of, so all bytes are checked. A sector with one
//! candidate must be that, whole; with several each byte may be of another.
//!
//! Where what was not flushed can be lost, with the power or with a daemon that kept it in memory, what
//! a write supersedes is kept until a flush is answered that was offered later, or a write that is
//! stable once it is answered. When something *is* lost, all that was kept may be the last again.

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
    /// That were superseded, and may come back.
    unflushed: Vec<Unflushed>,
}

/// A write that was superseded by one that may be lost.
#[derive(Debug, Clone, Copy)]
struct Unflushed {
    write: Write,
    superseded: Moment,
}

/// A disk as its guest knows it.
#[derive(Debug)]
pub(crate) struct Model {
    sectors: Vec<Sector>,
    now: Moment,
    versions: Version,
    /// What is not flushed may be lost.
    volatile: bool,
    /// Sectors with something unflushed.
    unflushed: Vec<u32>,
    /// Sectors that the disk has for certain, and when it got more.
    stable_sectors: u32,
    grown: Moment,
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
    /// A disk of zeroes. `volatile`: what is not flushed may be [lost](Self::lose).
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

    /// There are more sectors now, of zeroes.
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
        self.end_look(ticket, |at| bytes.map(|bytes| &bytes[at as usize * SECTOR..][..SECTOR]))
    }

    /// What is where was asked for as by a [read](Self::begin_read), and the answer has these sectors,
    /// counted from the first, as zeroes.
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

    /// A write has ended. `done`: it was answered so. Otherwise it may have been done in part. `stable`:
    /// and what was done is not lost any more.
    pub(crate) fn end_write(&mut self, ticket: &Ticket, done: bool, stable: bool) {
        self.now += 1;
        let (now, keep) = (self.now, self.volatile && !stable);
        for number in ticket.first..ticket.first + ticket.count {
            let sector = &mut self.sectors[number as usize];
            let Some(write) = sector.writes.iter_mut().find(|w| w.version == ticket.version) else {
                // Superseded, which ended it.
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

    /// A flush is offered.
    pub(crate) fn begin_flush(&mut self) -> Ticket {
        self.now += 1;
        Ticket { first: 0, count: 0, version: 0, offered: self.now }
    }

    /// A flush was answered, as done.
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

    /// What was not flushed may be lost, and `bytes` is what is left of the disk. `anew`: the guest begins
    /// anew, with that and nothing under way.
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
            if anew && writes.iter().any(|write| holds(write.version, number, bytes)) {
                // Nothing else will ever show.
                writes.retain(|write| holds(write.version, number, bytes));
            }
        }
        Ok(())
    }

    /// Whether a sector may hold these bytes now, with no request under way.
    pub(crate) fn check(&self, sector: u32, bytes: &[u8]) -> Result<(), Wrong> {
        self.sectors[sector as usize].check(sector, self.now, bytes)
    }

    /// Whether a disk may hold these bytes now, with no request under way.
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
    /// Whatever had ended before this moment is not the last. `keep`: it may come back.
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
        let mut model = Model::new(8, false);
        assert!(read(&mut model, 0) && !read(&mut model, 3));
        let write = model.begin_write(3, 1, false);
        assert!(read(&mut model, 0) && read(&mut model, write.version));
        model.end_write(&write, true, false);
        assert!(!read(&mut model, 0) && read(&mut model, write.version));
    }

    #[test]
    fn a_read_under_way_may_find_what_was_there_when_it_began() {
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
    fn a_write_that_failed_may_be_there_until_another_is_done() {
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

    /// Whether a sector may be left so, of a disk that is zeroes otherwise.
    fn may_be_left(model: &mut Model, version: Version) -> bool {
        let mut bytes = vec![0; 8 * SECTOR];
        bytes[3 * SECTOR..4 * SECTOR].copy_from_slice(&sector(version));
        model.lose(&bytes, false).is_ok()
    }

    #[test]
    fn what_was_superseded_comes_back_unless_it_was_flushed_since() {
        let mut model = Model::new(8, true);
        let (a, early) = (written(&mut model, false), model.begin_flush());
        let b = written(&mut model, false);
        model.flushed(&early);
        assert!(!read(&mut model, a));
        // The flush was offered before the second was answered, and so makes stable the first alone.
        assert!([a, b].iter().all(|left| may_be_left(&mut model, *left)));
        assert!(!may_be_left(&mut model, 0));
        let c = written(&mut model, false);
        let flush = model.begin_flush();
        model.flushed(&flush);
        assert!(
            may_be_left(&mut model, c)
                && ![0, a, b].iter().any(|left| may_be_left(&mut model, *left))
        );
    }

    #[test]
    fn a_stable_write_is_not_lost() {
        let mut model = Model::new(8, true);
        let (a, b) = (written(&mut model, false), written(&mut model, true));
        assert!(
            may_be_left(&mut model, b) && ![0, a].iter().any(|left| may_be_left(&mut model, *left))
        );
    }

    #[test]
    fn what_is_left_is_what_a_guest_that_begins_anew_has() {
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
    fn words_tell_where_they_are_from() {
        assert_eq!(explain(word(7, 4095, 63)), Some((7, 4095, 63)));
        assert_eq!(explain(0xa5a5_a5a5_a5a5_a5a5), None);
    }
}

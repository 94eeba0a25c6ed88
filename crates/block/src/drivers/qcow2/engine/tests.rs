//! The engine over a file in memory, and a reader of its own that judges the file after each call.

use std::collections::BTreeMap;
use std::ops::Range;

use fastrand::Rng;

use super::entry::ALL;
use super::*;
use crate::drivers::qcow2::header::Purpose;
use crate::drivers::qcow2::layout::CreateQcow2;
use crate::drivers::qcow2::plan::{Features, Plan};
use crate::drivers::qcow2::steps::number;

/// An image in memory.
pub(super) struct File {
    pub(super) bytes: Vec<u8>,
    /// Entries of L2 tables are extended, whatever the header says: the format has no such images with clusters as small as
    /// here.
    pub(super) is_extended: bool,
}

/// What the reader has found of a cluster of the disk: the place, plus 1 if it is compressed, and of each subcluster whether it has data, and whether it
/// reads as zeroes. All of them are alike if entries are not extended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Found {
    pub(super) host: Option<u64>,
    pub(super) data: u32,
    pub(super) zeroes: u32,
}

/// The uses of each cluster, as the reader finds them.
struct Uses {
    cluster: u64,
    of: BTreeMap<u64, u64>,
    /// Clusters that an entry of the disk leads to, and whether it says that they are used once.
    marks: Vec<(u64, bool)>,
    ranges: Vec<(u64, u64)>,
}

impl Uses {
    fn add(&mut self, offset: u64) {
        assert_eq!(offset % self.cluster, 0);
        *self.of.entry(offset / self.cluster).or_insert(0) += 1;
    }

    fn add_all(&mut self, bytes: Range<u64>) {
        bytes.step_by(self.cluster as usize).for_each(|at| self.add(at));
    }
}

impl File {
    pub(super) fn new(create: &CreateQcow2) -> File {
        File::with(create, &Features::default())
    }

    fn with(create: &CreateQcow2, features: &Features) -> File {
        let plan = Plan::new(create, features, 0).unwrap();
        let mut bytes = vec![0; plan.len() as usize];
        let clusters = bytes.chunks_exact_mut(plan.cluster() as usize);
        (0..plan.metadata()).zip(clusters).for_each(|(nth, memory)| plan.fill(nth, memory));
        File { bytes, is_extended: create.extended_l2 }
    }

    pub(super) fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let there = self.bytes.get(offset as usize..).unwrap_or_default();
        let mut bytes = there[..there.len().min(len)].to_vec();
        bytes.resize(len, 0);
        bytes
    }

    pub(super) fn write(&mut self, offset: u64, bytes: &[u8]) {
        let end = offset as usize + bytes.len();
        self.bytes.resize(self.bytes.len().max(end), 0);
        self.bytes[offset as usize..end].copy_from_slice(bytes);
    }

    pub(super) fn at(&self, offset: u64, len: usize) -> u64 {
        number(&self.read(offset, len))
    }

    pub(super) fn open(&self) -> Engine {
        let mut header = Header::parse(&self.bytes, Purpose::Write).unwrap();
        header.extended_l2 = self.is_extended;
        let table = |(offset, len): (u64, u64)| self.read(offset, len as usize);
        let contents = Contents {
            start: *self.bytes.first_chunk().unwrap(),
            header: &header,
            l1: &table(header.l1_table),
            refcounts: &table(header.refcount_table),
            others: &[],
            caches: CacheSizes::default(),
            end: self.bytes.len() as u64,
            read_only: false,
        };
        let mut engine = Engine::new(&contents).unwrap();
        // As few as a call needs, so that nearly each has to read.
        engine.l2 = Tables::new(engine.l1.len(), 2);
        engine.blocks = Tables::new(engine.refcounts.len(), 5);
        engine
    }

    /// Has the engine do something, and takes what that changes.
    pub(super) fn call<T>(
        &mut self,
        engine: &mut Engine,
        mut call: impl FnMut(&mut Engine) -> Result<T, Stop>,
    ) -> Result<T, Stop> {
        loop {
            let done = call(engine);
            engine.take_changed(|at, sector| self.write(at * SECTOR as u64, sector));
            match done {
                Err(Stop::Read(table)) => {
                    let bytes = self.read(table.offset(), engine.format.cluster() as usize);
                    engine.insert(table, bytes.into());
                }
                Err(Stop::Unbacked(clusters)) => {
                    let bytes = engine.begin_backing(clusters).unwrap();
                    self.write(bytes.start, &vec![0; (bytes.end - bytes.start) as usize]);
                    engine.end_backing(true);
                }
                done => return done,
            }
        }
    }

    pub(super) fn grow_l1(&mut self, engine: &mut Engine, size: u64) {
        let clusters = self.call(engine, |engine| engine.l1_clusters(size)).unwrap();
        let place = match clusters {
            0 => 0,
            1 => {
                let room = self.call(engine, |engine| engine.reserve(1)).unwrap();
                self.call(engine, |engine| engine.use_reserved(room.host)).unwrap();
                room.host
            }
            clusters => self.call(engine, |engine| engine.take(clusters)).unwrap(),
        };
        self.call(engine, |engine| engine.grow_l1(size, place)).unwrap();
    }

    /// Reads the image, and finds that each cluster counts as often as it is used.
    pub(super) fn judge(&self) -> Vec<Found> {
        self.judge_all(false).remove(0)
    }

    /// The same, of the disk and of each snapshot. `may_leak`: clusters may count more often than they are used.
    pub(super) fn judge_all(&self, may_leak: bool) -> Vec<Vec<Found>> {
        let (cluster, order) = (1 << self.at(20, 4), self.at(96, 4));
        let of = BTreeMap::from([(0, 1)]);
        let mut uses = Uses { cluster, of, marks: Vec::new(), ranges: Vec::new() };
        let (table, table_clusters) = (self.at(48, 8), self.at(56, 4));
        uses.add_all(table..table + table_clusters * cluster);
        let blocks: Vec<u64> =
            (0..table_clusters * cluster / 8).map(|nth| self.at(table + nth * 8, 8)).collect();
        blocks.iter().filter(|block| **block != 0).for_each(|block| uses.add(*block));
        let mut found = vec![self.judge_l1(self.at(40, 8), self.at(36, 4), &mut uses)];
        let Uses { marks, ranges, .. } = &mut uses;
        let marks = std::mem::take(marks);
        ranges.sort_unstable();
        assert!(ranges.windows(2).all(|two| two[0].1 <= two[1].0), "compressed clusters overlap");
        let first = self.at(64, 8);
        let mut at = first;
        for _ in 0..self.at(60, 4) {
            found.push(self.judge_l1(self.at(at, 8), self.at(at + 8, 4), &mut uses));
            let len = 40 + self.at(at + 36, 4) + self.at(at + 12, 2) + self.at(at + 14, 2);
            at += len.next_multiple_of(8);
        }
        uses.add_all(first..at);
        let reach = (cluster * 8) >> order;
        let mut counts = BTreeMap::new();
        for (index, block) in blocks.iter().enumerate().filter(|(_, block)| **block != 0) {
            let block = self.read(*block, cluster as usize);
            for nth in 0..reach {
                let count = match order {
                    3.. => number(&block[(nth << order >> 3) as usize..][..1 << (order - 3)]),
                    _ => {
                        let bit = nth << order;
                        u64::from(block[bit as usize / 8]) >> (bit % 8) & ((1 << (1 << order)) - 1)
                    }
                };
                if count != 0 {
                    counts.insert(index as u64 * reach + nth, count);
                }
            }
        }
        match may_leak {
            false => assert_eq!(counts, uses.of, "counted and used"),
            true => uses.of.iter().for_each(|(at, uses)| assert!(counts.get(at) >= Some(uses))),
        }
        for (at, is_marked) in marks {
            assert_eq!(is_marked, counts[&(at / cluster)] == 1, "the mark of {at:#x}");
        }
        found
    }

    fn judge_l1(&self, l1_at: u64, l1_entries: u64, uses: &mut Uses) -> Vec<Found> {
        let cluster = uses.cluster;
        uses.add_all(l1_at..l1_at + l1_entries * 8);
        let mut found = Vec::new();
        for l2 in (0..l1_entries).map(|nth| self.at(l1_at + nth * 8, 8)) {
            let at = l2 & !(1 << 63);
            if at != 0 {
                uses.add(at);
                uses.marks.push((at, l2 >> 63 != 0));
            }
            let entry_len = if self.is_extended { 16 } else { 8 };
            for nth in 0..cluster / entry_len {
                let entry_at = |word| match at {
                    0 => 0,
                    at => self.at(at + nth * entry_len + word, 8),
                };
                let entry = entry_at(0);
                if entry >> 62 == 1 {
                    let bits = 70 - cluster.trailing_zeros();
                    let host = entry & ((1 << bits) - 1);
                    let end = host + (((entry ^ 1 << 62) >> bits) + 1) * 512;
                    assert_eq!((host % 512, entry_at(8) * u64::from(self.is_extended)), (0, 0));
                    uses.ranges.push((host, end));
                    (host / cluster..end.div_ceil(cluster)).for_each(|at| uses.add(at * cluster));
                    found.push(Found { host: Some(host + 1), data: ALL, zeroes: 0 });
                    continue;
                }
                let host = entry & 0x00ff_ffff_ffff_fe00;
                if host != 0 {
                    uses.marks.push((host, entry >> 63 != 0));
                    uses.add(host);
                }
                let host = (host != 0).then_some(host);
                let (data, zeroes) = match self.is_extended {
                    true => (entry_at(8) as u32, (entry_at(8) >> 32) as u32),
                    false if entry & 1 != 0 => (0, ALL),
                    false => (if host.is_some() { ALL } else { 0 }, 0),
                };
                assert_eq!(data & zeroes, 0);
                assert!(host.is_some() || data == 0);
                found.push(Found { host, data, zeroes });
            }
        }
        found
    }
}

/// Each cluster of a new image has a place of its own, if it is to have one, and counts.
#[test]
fn new_images_are_consistent() {
    let raw = Features { data_file: Some("data".into()), is_raw: true, ..Features::default() };
    let mapped = Features { is_mapped: true, ..Features::default() };
    let apart = Features { data_file: Some("data".into()), ..mapped.clone() };
    for features in [Features::default(), mapped, apart, raw] {
        for (cluster_bits, extended_l2) in (9..=16).flat_map(|bits| [(bits, false), (bits, true)]) {
            for (refcount_bits, size) in [1, 16, 64]
                .into_iter()
                .flat_map(|bits| [0, 512, 1 << 20, (3 << 20) + 512].map(|size| (bits, size)))
            {
                let cluster_size = 1 << cluster_bits;
                if extended_l2 && cluster_bits < 14 {
                    continue;
                }
                let create = CreateQcow2 {
                    cluster_size,
                    refcount_bits,
                    extended_l2,
                    ..CreateQcow2::new(size)
                };
                let file = File::with(&create, &features);
                let mut header = Header::parse(&file.bytes, Purpose::Write).unwrap();
                assert_eq!((header.size, header.data_file_raw), (size, features.is_raw));
                assert_eq!(header.data_file.take().is_some(), features.data_file.is_some());
                if features.data_file.is_some() {
                    // The reader takes places in another file for places in this one.
                    continue;
                }
                let clusters = size.div_ceil(cluster_size.into()) as usize;
                let found = file.judge();
                let (disk, rest) = found.split_at(clusters);
                let has_place = |found: &Found| found.host.is_some();
                assert!(disk.iter().all(|found| has_place(found) == features.is_mapped));
                assert!(!rest.iter().any(has_place));
                let is_data = features.is_mapped && !extended_l2;
                assert!(
                    disk.iter().all(|found| (found.data == ALL) == is_data && found.zeroes == 0)
                );
            }
        }
    }
}

#[test]
fn a_version_2_image_has_no_features() {
    let features = Features { is_v2: true, is_mapped: true, ..Features::default() };
    let backing = Some(("base".to_owned(), Some("raw".to_owned())));
    let create = CreateQcow2 { backing, ..CreateQcow2::new(1 << 20) };
    let file = File::with(&create, &features);
    let header = Header::parse(&file.bytes, Purpose::Write).unwrap();
    let backing = header.backing.unwrap();
    assert_eq!((header.version, header.size, header.refcount_bits), (2, 1 << 20, 16));
    assert_eq!((backing.filename.to_str(), backing.format.as_deref()), (Some("base"), Some("raw")));
}

fn course(seed: u64, is_extended: bool) {
    let mut random = Rng::with_seed(seed);
    let cluster_size = 512 << random.u64(..3);
    let cluster = u64::from(cluster_size);
    let unit = if is_extended { cluster / 32 } else { cluster };
    let clusters = 512;
    let per_table = cluster / if is_extended { 16 } else { 8 };
    // Twice as large, since it is not told that entries are.
    let create = CreateQcow2 {
        cluster_size,
        refcount_bits: 1 << random.u64(..7),
        ..CreateQcow2::new(if is_extended { 2 } else { 1 } * clusters * cluster)
    };
    let mut file = File::new(&create);
    file.is_extended = is_extended;
    let mut engine = file.open();
    let mut expected: Vec<Found> = file.judge();
    let mut reserved: Vec<Room> = Vec::new();
    let mut packed: Vec<Packed> = Vec::new();
    let mut sealed = None;
    for _ in 0..300 {
        let guest = random.u64(..clusters);
        let most = (random.u64(..20) + 1).min(clusters - guest).min(per_table - guest % per_table);
        match random.u64(..18) {
            0 => {
                // Who opens it anew knows nothing of what is reserved or waits to be free.
                engine = file.open();
                reserved.clear();
                packed.clear();
                sealed = None;
            }
            1 if random.u64(..2) == 0 => sealed = Some(engine.seal()),
            // It is over before the next call, or has ended with its task.
            1 if engine.begin_ahead(8).is_some() => match random.u64(..3) {
                0 => engine.abandon_ahead(),
                is_done => engine.end_ahead(is_done == 1),
            },
            2 => sealed.take().into_iter().for_each(|age| engine.settle(age)),
            3 => reserved.extend(file.call(&mut engine, |engine| engine.reserve(most)).ok()),
            4 => {
                let room = (!reserved.is_empty()).then(|| reserved.swap_remove(0));
                let is_written = random.u64(..2) == 0;
                room.iter().for_each(|room| match is_written {
                    true => engine.give_up_room(room.host, room.clusters),
                    false => engine.release_room(room.host, room.clusters),
                });
            }
            5..7 => {
                let zeroing =
                    [Zeroing::Keep, Zeroing::Free, Zeroing::Uncover][random.u64(..3) as usize];
                let done =
                    file.call(&mut engine, |engine| engine.zero(guest, most, zeroing)).unwrap();
                for found in &mut expected[guest as usize..(guest + done) as usize] {
                    found.host = found.host.filter(|host| host % 2 == 0);
                    *found = match zeroing {
                        Zeroing::Keep => Found { data: 0, zeroes: ALL, ..*found },
                        Zeroing::Free => Found { zeroes: ALL, ..Found::default() },
                        Zeroing::Uncover => Found::default(),
                    };
                }
            }
            13..17 if cluster_size > 512 && !packed.is_empty() && random.u64(..2) == 0 => {
                let packed = packed.swap_remove(random.u64(..packed.len() as u64) as usize);
                if random.u64(..4) == 0 {
                    engine.give_up_packed(packed, random.u64(..2) == 0);
                } else {
                    let done = file.call(&mut engine, |engine| engine.map_packed(guest, packed));
                    done.unwrap();
                    let host = Some(packed.host + 1);
                    expected[guest as usize] = Found { host, data: ALL, zeroes: 0 };
                }
            }
            13..17 if cluster_size > 512 => {
                let len = (random.u64(..u64::from(cluster_size) / 512 - 1) + 1) * 512;
                let room = file.call(&mut engine, |engine| engine.pack(len)).unwrap();
                packed.extend(room);
            }
            7 if random.u64(..8) == 0 => {
                let size = engine.reach() + 1;
                file.grow_l1(&mut engine, size);
                expected.resize(file.judge().len(), Found::default());
            }
            8 if is_extended && expected[guest as usize].host.is_none_or(|host| host % 2 == 0) => {
                let (first, end) = (random.u64(..32), 1 + random.u64(..32));
                let (first, end) = (first.min(end - 1), end.max(first + 1));
                let at = guest * cluster;
                let range = at + first * unit..at + end * unit;
                let done = file.call(&mut engine, |engine| engine.zero_part(range.clone()));
                assert!(done.unwrap());
                let mask = (first..end).fold(0, |mask, nth| mask | 1 << nth);
                let Found { data, zeroes, .. } = &mut expected[guest as usize];
                (*data, *zeroes) = (*data & !mask, *zeroes | mask);
            }
            _ => {
                let at = guest * cluster + random.u64(..cluster / unit) * unit;
                let most = most * cluster - at % cluster;
                let (place, found) =
                    file.call(&mut engine, |engine| engine.find(at, most)).unwrap();
                if matches!(place, Place::Data { .. }) {
                    continue;
                }
                // Not only whole units.
                let end = at + 1 + random.u64(..found);
                write(&mut file, &mut engine, &mut expected, at..end);
            }
        }
        assert_eq!(file.judge(), expected);
        let hosts: Vec<u64> = expected.iter().filter_map(|found| found.host).collect();
        for room in &reserved {
            let taken = room.host..room.host + room.clusters * cluster;
            assert!(!hosts.iter().any(|host| taken.contains(host)), "reserved for another");
        }
        probe(&mut file, &mut engine, &expected, &mut random, unit);
    }
}

/// Maps what a write to a range in one place takes.
pub(super) fn write(
    file: &mut File,
    engine: &mut Engine,
    expected: &mut [Found],
    range: Range<u64>,
) {
    let cluster = engine.format.cluster();
    let unit = 1 << engine.format.unit_bits();
    let room = file.call(engine, |engine| engine.room(range.clone())).unwrap();
    let written = room.written.clone();
    assert!(written.start <= range.start && written.start / cluster == range.start / cluster);
    assert_eq!((written.start % unit, written.end % unit), (0, 0));
    assert_eq!((written.end - 1) / cluster - written.start / cluster, room.clusters - 1);
    let (mut next, mut host) = (written.start, room.host);
    while next < written.end {
        let mapped = file.call(engine, |engine| engine.map(next..written.end, host)).unwrap();
        for nth in 0..mapped {
            let index = next / cluster + nth;
            let first = index * cluster;
            let mask = (0..32u32)
                .filter(|sub| {
                    unit == cluster || written.contains(&(first + u64::from(*sub) * unit))
                })
                .fold(0, |mask, sub| mask | 1 << sub);
            let found = &mut expected[index as usize];
            let here = Some(host + nth * cluster);
            if found.host != here {
                assert_eq!(found.data & !mask, 0, "data that has not moved");
                found.data = 0;
            }
            *found = Found { host: here, data: found.data | mask, zeroes: found.zeroes & !mask };
        }
        next += mapped * cluster - next % cluster;
        host += mapped * cluster;
    }
}

/// Checks what the engine finds, and how far that goes.
fn probe(file: &mut File, engine: &mut Engine, expected: &[Found], random: &mut Rng, unit: u64) {
    let cluster = engine.format.cluster();
    let offset = random.u64(..512 * cluster / 512) * 512 + random.u64(..512);
    let place_of = |offset: u64| {
        let found = expected.get((offset / cluster) as usize).copied();
        let Found { host, data, zeroes } = found.unwrap_or_default();
        let bit = 1 << (offset % cluster * 32 / cluster);
        match host {
            Some(host) if host % 2 == 1 => Place::Compressed,
            Some(host) if data & bit != 0 => Place::Data { at: host + offset % cluster, own: true },
            _ if zeroes & bit != 0 => Place::Zeroes,
            _ => Place::Nowhere,
        }
    };
    let (place, found) = file.call(engine, |engine| engine.find(offset, 4 * cluster)).unwrap();
    assert_eq!(place, place_of(offset));
    let follows = |at: u64| match place {
        Place::Data { at: host, own } => {
            place_of(at) == Place::Data { at: host + at - offset, own }
        }
        place => place_of(at) == place,
    };
    // All of the range is alike, and what comes next is not, unless a table or the range ends. Where there is no table, the
    // next one is the end.
    let per_table = (1 << engine.format.l2_bits()) * cluster;
    let index = offset / per_table;
    let empty = engine.l1.iter().skip(index as usize).take_while(|raw| **raw == 0).count() as u64;
    let table_end = match empty {
        0 => (index + 1) * per_table,
        _ if index + empty == engine.l1.len() as u64 => u64::MAX,
        _ => (index + empty) * per_table,
    };
    let last = (offset + 4 * cluster).min(table_end);
    let mut end = offset - offset % unit + unit;
    while end < last && follows(end) {
        end += unit;
    }
    assert_eq!(offset + found, end.min(last));
}

/// As many seeds, and with `RINGMILL_LONG` ten times as many.
pub(super) fn seeds(short: u64) -> Range<u64> {
    0..if std::env::var_os("RINGMILL_LONG").is_some() { 10 * short } else { short }
}

#[test]
fn the_image_is_consistent_and_correct_after_each_call() {
    seeds(32).for_each(|seed| course(seed, false));
}

#[test]
fn the_same_with_subclusters() {
    seeds(32).for_each(|seed| course(seed, true));
}

#[test]
fn the_table_of_counts_grows() {
    // One refcount table of one cluster: 64 blocks of 64 counts.
    let create = CreateQcow2 { cluster_size: 512, refcount_bits: 64, ..CreateQcow2::new(8 << 20) };
    let mut file = File::new(&create);
    let mut engine = file.open();
    let before = engine.refcounts.len();
    let mut guest = 0;
    while guest < 8192 {
        let range = guest * 512..(guest + 64) * 512;
        let room = file.call(&mut engine, |engine| engine.room(range.clone())).unwrap();
        let Room { host, written, .. } = room;
        guest += file.call(&mut engine, |engine| engine.map(written.clone(), host)).unwrap();
        if guest % 1000 == 0 {
            file.judge();
        }
    }
    assert!(engine.refcounts.len() > before);
    assert!(file.judge().iter().take(8192).all(|found| found.host.is_some()));
}

#[test]
fn released_clusters_are_not_reused_before_the_release_is_settled() {
    let mut file = File::new(&CreateQcow2::new(1 << 30));
    let mut engine = file.open();
    let first = file.call(&mut engine, |engine| engine.room(0..4 << 16)).unwrap();
    assert!(first.is_fresh && first.clusters == 4);
    file.call(&mut engine, |engine| engine.map(0..4 << 16, first.host)).unwrap();
    file.call(&mut engine, |engine| engine.zero(0, 4, Zeroing::Free)).unwrap();
    let other = file.call(&mut engine, |engine| engine.reserve(4)).unwrap();
    assert!(other.host > first.host);
    let age = engine.seal();
    engine.give_up_room(other.host, 4);
    engine.settle(age);
    assert_eq!(engine.given_up(), 1);
    let again = file.call(&mut engine, |engine| engine.reserve(9)).unwrap();
    assert_eq!((again.host, again.clusters, again.is_fresh), (first.host, 4, false));
}

#[test]
fn room_of_a_failed_write_is_free_at_once() {
    let mut file = File::new(&CreateQcow2::new(1 << 30));
    let mut engine = file.open();
    let room = file.call(&mut engine, |engine| engine.room(0..16 << 16)).unwrap();
    engine.release_room(room.host, 16);
    let again = file.call(&mut engine, |engine| engine.room(0..16 << 16)).unwrap();
    // Something may be there by now.
    assert_eq!((again.host, again.clusters, again.is_fresh), (room.host, 16, false));
    file.call(&mut engine, |engine| engine.map(0..16 << 16, again.host)).unwrap();
    // The table is before the data that it leads to, where there is room in a full file.
    assert!(engine.l1[0] & !(1 << 63) < again.host);
    let len = file.call(&mut engine, |engine| engine.pack(512)).unwrap().unwrap();
    engine.give_up_packed(len, false);
    assert_eq!(file.call(&mut engine, |engine| engine.pack(512)).unwrap().unwrap().host, len.host);
}

#[test]
fn a_damaged_entry_fails_only_requests_that_need_it() {
    let mut file = File::new(&CreateQcow2::new(1 << 30));
    let mut engine = file.open();
    let room = file.call(&mut engine, |engine| engine.room(0..2 << 16)).unwrap();
    file.call(&mut engine, |engine| engine.map(0..2 << 16, room.host)).unwrap();
    let l2 = engine.l1[0] & !(1 << 63);
    file.write(l2 + 8, &(2u64 | 1 << 63).to_be_bytes());
    let mut engine = file.open();
    let found = file.call(&mut engine, |engine| engine.find(0, 1 << 20)).unwrap();
    assert_eq!(found, (Place::Data { at: room.host, own: true }, 1 << 16));
    let refused = file.call(&mut engine, |engine| engine.find(1 << 16, 512));
    assert!(matches!(refused, Err(Stop::Damaged(_))));
}

#[test]
fn nothing_finds_room_where_the_file_is_made_longer() {
    let mut file = File::new(&CreateQcow2::new(1 << 30));
    let mut engine = file.open();
    let ahead = engine.begin_ahead(16).unwrap();
    assert_eq!(ahead, file.bytes.len() as u64..file.bytes.len() as u64 + (16 << 16));
    assert!(engine.begin_ahead(16).is_none());
    assert!(matches!(file.call(&mut engine, |engine| engine.reserve(1)), Err(Stop::Busy)));
    engine.end_ahead(true);
    let room = file.call(&mut engine, |engine| engine.reserve(4)).unwrap();
    assert!(room.is_fresh && room.host == ahead.start);
    // There is enough for now.
    assert!(engine.begin_ahead(16).is_none());
    let room = file.call(&mut engine, |engine| engine.reserve(9)).unwrap();
    let ahead = engine.begin_ahead(16).unwrap();
    let before = file.call(&mut engine, |engine| engine.reserve(9)).unwrap();
    assert_eq!((room.clusters, before.clusters), (9, 3));
    engine.abandon_ahead();
    let after = file.call(&mut engine, |engine| engine.reserve(1)).unwrap();
    assert!(after.is_fresh && after.host == ahead.end);
}

/// An engine with one block, which counts few clusters, and what the second block counts.
fn before_the_second_block() -> (File, Engine, Range<u64>) {
    let create = CreateQcow2 { cluster_size: 512, refcount_bits: 64, ..CreateQcow2::new(1 << 20) };
    let mut file = File::new(&create);
    let mut engine = file.open();
    let end = engine.end_of_blocks() as u64 * 64;
    while engine.first_free < end {
        file.call(&mut engine, |engine| engine.reserve(64)).unwrap();
    }
    (file, engine, end..end + 64)
}

#[test]
fn no_block_is_put_where_zeroes_are_written() {
    let (_, mut engine, second) = before_the_second_block();
    engine.begin_backing(second.start..second.start + 1).unwrap();
    // The file becomes longer meanwhile.
    engine.fresh = second.start;
    engine.begin_ahead(64).unwrap();
    engine.end_ahead(true);
    assert!(engine.prepared > second.start);
    assert!(matches!(engine.reserve(1), Err(Stop::Unbacked(_))));
    engine.end_backing(true);
    engine.reserve(1).unwrap();
}

#[test]
fn no_room_is_found_where_zeroes_are_written() {
    let (_, mut engine, second) = before_the_second_block();
    engine.begin_backing(second.start..second.start + 1).unwrap();
    engine.end_backing(true);
    // Another task needs more, for tables.
    let bytes = engine.begin_backing(second.start..second.start + 2).unwrap();
    assert_eq!(bytes, (second.start + 1) << 9..(second.start + 2) << 9);
    assert!(matches!(engine.reserve(1), Err(Stop::Unbacked(_))));
    engine.end_backing(true);
    assert_eq!(engine.reserve(1).unwrap().host, (second.start + 1) << 9);
}

#[test]
fn a_task_that_made_the_file_longer_may_still_write_there() {
    let (_, mut engine, second) = before_the_second_block();
    engine.fresh = second.start;
    engine.prepared = second.start;
    engine.begin_ahead(64).unwrap();
    engine.abandon_ahead();
    let Err(Stop::Unbacked(clusters)) = engine.reserve(1) else { panic!() };
    assert!(engine.may_be_written(&clusters));
    let age = engine.seal();
    engine.settle(age);
    assert!(!engine.may_be_written(&clusters));
}

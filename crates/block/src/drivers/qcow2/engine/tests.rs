//! The engine over a file in memory, and a reader of its own that judges the file after each call.

use std::collections::BTreeMap;

use super::*;
use crate::drivers::qcow2::header::Purpose;
use crate::drivers::qcow2::layout::{CreateQcow2, parts};
use crate::drivers::qcow2::steps::number;

/// An image in memory.
struct File(Vec<u8>);

/// What the reader has found of a cluster of the disk: the place, and whether it reads as zeroes.
type Found = (Option<u64>, bool);

/// xorshift64*.
struct Random(u64);

impl Random {
    fn below(&mut self, most: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % most
    }
}

impl File {
    fn new(create: &CreateQcow2) -> File {
        let mut file = Vec::new();
        for (offset, bytes) in parts(create, 0).unwrap() {
            assert_eq!(offset, file.len() as u64);
            file.extend(bytes);
        }
        File(file)
    }

    fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let there = self.0.get(offset as usize..).unwrap_or_default();
        let mut bytes = there[..there.len().min(len)].to_vec();
        bytes.resize(len, 0);
        bytes
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) {
        let end = offset as usize + bytes.len();
        self.0.resize(self.0.len().max(end), 0);
        self.0[offset as usize..end].copy_from_slice(bytes);
    }

    fn at(&self, offset: u64, len: usize) -> u64 {
        number(&self.read(offset, len))
    }

    fn open(&self) -> Engine {
        let header = Header::parse(&self.0, Purpose::Write).unwrap();
        let table = |(offset, len): (u64, u64)| self.read(offset, len as usize);
        let contents = Contents {
            start: *self.0.first_chunk().unwrap(),
            header: &header,
            l1: &table(header.l1_table),
            refcounts: &table(header.refcount_table),
            others: &[],
            caches: CacheSizes::default(),
            end: self.0.len() as u64,
        };
        let mut engine = Engine::new(&contents).unwrap();
        // As few as a call needs, so that nearly each has to read.
        engine.l2 = Tables::new(engine.l1.len(), 2);
        engine.blocks = Tables::new(engine.refcounts.len(), 5);
        engine
    }

    /// Has the engine do something, and takes what that changes.
    fn call<T>(
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
                done => return done,
            }
        }
    }

    /// Reads the image, and finds that each cluster counts as often as it is used.
    fn judge(&self) -> Vec<Found> {
        let (cluster, order) = (1 << self.at(20, 4), self.at(96, 4));
        let mut uses = BTreeMap::from([(0, 1)]);
        let mut used = |offset: u64| {
            assert_eq!(offset % cluster, 0);
            *uses.entry(offset / cluster).or_insert(0u64) += 1;
        };
        let (l1_at, l1_entries) = (self.at(40, 8), self.at(36, 4));
        (l1_at..l1_at + l1_entries * 8).step_by(cluster as usize).for_each(&mut used);
        let (table, table_clusters) = (self.at(48, 8), self.at(56, 4));
        (0..table_clusters).for_each(|nth| used(table + nth * cluster));
        let blocks: Vec<u64> =
            (0..table_clusters * cluster / 8).map(|nth| self.at(table + nth * 8, 8)).collect();
        blocks.iter().filter(|block| **block != 0).for_each(|block| used(*block));
        let mut found = Vec::new();
        for l2 in (0..l1_entries).map(|nth| self.at(l1_at + nth * 8, 8)) {
            let at = l2 & !(1 << 63);
            if at != 0 {
                used(at);
            }
            for nth in 0..cluster / 8 {
                let entry = if at == 0 { 0 } else { self.at(at + nth * 8, 8) };
                let host = entry & 0x00ff_ffff_ffff_fe00;
                if host != 0 {
                    assert_ne!(entry >> 63, 0);
                    used(host);
                }
                found.push(((host != 0).then_some(host), entry & 1 != 0));
            }
        }
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
        assert_eq!(counts, uses, "counted and used");
        found
    }
}

fn course(seed: u64) {
    let mut random = Random(seed + 1);
    let cluster_size = 512 << random.below(3);
    let clusters = 512;
    let create = CreateQcow2 {
        cluster_size,
        refcount_bits: 1 << random.below(7),
        ..CreateQcow2::new(clusters * u64::from(cluster_size))
    };
    let mut file = File::new(&create);
    let mut engine = file.open();
    let mut expected: Vec<Found> = file.judge();
    let mut reserved: Vec<Room> = Vec::new();
    let mut sealed = None;
    for _ in 0..300 {
        let guest = random.below(clusters);
        let in_table = u64::from(cluster_size) / 8 - guest % (u64::from(cluster_size) / 8);
        let most = (random.below(20) + 1).min(clusters - guest).min(in_table);
        match random.below(12) {
            0 => {
                // Who opens it anew knows nothing of what is reserved or waits to be free.
                engine = file.open();
                reserved.clear();
                sealed = None;
            }
            1 if random.below(2) == 0 => sealed = Some(engine.seal()),
            // It is over before the next call, or has ended with its task.
            1 if engine.begin_ahead(8).is_some() => match random.below(3) {
                0 => engine.abandon_ahead(),
                is_done => engine.end_ahead(is_done == 1),
            },
            2 => sealed.take().into_iter().for_each(|age| engine.settle(age)),
            3 => reserved.extend(file.call(&mut engine, |engine| engine.reserve(most)).ok()),
            4 => {
                let room = (!reserved.is_empty()).then(|| reserved.swap_remove(0));
                room.iter().for_each(|room| engine.give_up_room(room.host, room.clusters));
            }
            5..7 => {
                let zeroing =
                    [Zeroing::Keep, Zeroing::Free, Zeroing::Uncover][random.below(3) as usize];
                let done =
                    file.call(&mut engine, |engine| engine.zero(guest, most, zeroing)).unwrap();
                for at in guest..guest + done {
                    let (host, _) = expected[at as usize];
                    expected[at as usize] = match zeroing {
                        Zeroing::Keep => (host, true),
                        Zeroing::Free => (None, true),
                        Zeroing::Uncover => (None, false),
                    };
                }
            }
            7 if random.below(8) == 0 => {
                let size = engine.reach() + 1;
                file.call(&mut engine, |engine| engine.grow_l1(size)).unwrap();
                expected.resize(file.judge().len(), (None, false));
            }
            _ => {
                if matches!(expected[guest as usize], (Some(_), false)) {
                    continue;
                }
                let room = file.call(&mut engine, |engine| engine.room(guest, most)).unwrap();
                let mut done = 0;
                while done < room.clusters {
                    let (at, host) = (guest + done, room.host + done * u64::from(cluster_size));
                    let left = room.clusters - done;
                    let mapped =
                        file.call(&mut engine, |engine| engine.map(at, host, left)).unwrap();
                    (0..mapped).for_each(|nth| {
                        let host = host + nth * u64::from(cluster_size);
                        expected[(at + nth) as usize] = (Some(host), false);
                    });
                    done += mapped;
                }
            }
        }
        assert_eq!(file.judge(), expected);
        let hosts: Vec<u64> = expected.iter().filter_map(|(host, _)| *host).collect();
        for room in &reserved {
            let taken = room.host..room.host + room.clusters * u64::from(cluster_size);
            assert!(!hosts.iter().any(|host| taken.contains(host)), "reserved for another");
        }
        let probe = random.below(clusters);
        let offset = probe * u64::from(cluster_size);
        let (place, _) = file.call(&mut engine, |engine| engine.find(offset, 512)).unwrap();
        assert_eq!(
            place,
            match expected[probe as usize] {
                (_, true) => Place::Zeroes,
                (Some(at), false) => Place::Data { at, own: true },
                (None, false) => Place::Nowhere,
            }
        );
    }
}

#[test]
fn the_image_is_consistent_and_correct_after_each_call() {
    (0..64).for_each(course);
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
        let room = file.call(&mut engine, |engine| engine.room(guest, 64)).unwrap();
        let mapped = file.call(&mut engine, |engine| engine.map(guest, room.host, room.clusters));
        guest += mapped.unwrap();
        if guest % 1000 == 0 {
            file.judge();
        }
    }
    assert!(engine.refcounts.len() > before);
    assert!(file.judge().iter().take(8192).all(|(host, _)| host.is_some()));
}

#[test]
fn released_clusters_are_not_reused_before_the_release_is_settled() {
    let mut file = File::new(&CreateQcow2::new(1 << 30));
    let mut engine = file.open();
    let first = file.call(&mut engine, |engine| engine.room(0, 4)).unwrap();
    assert!(first.is_fresh && first.clusters == 4);
    file.call(&mut engine, |engine| engine.map(0, first.host, 4)).unwrap();
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
fn a_damaged_entry_fails_only_requests_that_need_it() {
    let mut file = File::new(&CreateQcow2::new(1 << 30));
    let mut engine = file.open();
    let room = file.call(&mut engine, |engine| engine.room(0, 2)).unwrap();
    file.call(&mut engine, |engine| engine.map(0, room.host, 2)).unwrap();
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
    assert_eq!(ahead, file.0.len() as u64..file.0.len() as u64 + (16 << 16));
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

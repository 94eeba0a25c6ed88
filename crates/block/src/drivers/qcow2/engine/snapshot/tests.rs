//! Snapshots of images in memory, judged after each call, and before each write of a change.

use std::collections::HashSet;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use fastrand::Rng;

use super::super::counts::set_count;
use super::super::entry::ALL;
use super::super::tests::{File, Found, seeds, write};
use super::super::{Engine, Zeroing};
use super::*;
use crate::drivers::qcow2::access::Place;
use crate::drivers::qcow2::layout::CreateQcow2;
use crate::drivers::qcow2::steps::SECTOR;

/// A file that is judged before some of the writes.
struct Judged<'a> {
    file: &'a mut File,
    expected: &'a [Vec<Found>],
    writes_left: u64,
    random: Rng,
}

impl TableFile for Judged<'_> {
    async fn read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
        Ok(self.file.read(offset, len))
    }

    async fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        if self.random.u64(..8) == 0 {
            assert_eq!(self.file.judge_all(true), self.expected);
        }
        self.writes_left = self.writes_left.checked_sub(1).ok_or(Errno::EIO)?;
        self.file.write(offset, bytes);
        Ok(())
    }
}

/// The disk and its snapshots, each with its L1 table and its entry in the table of snapshots.
struct Image {
    file: File,
    engine: Engine,
    expected: Vec<Vec<Found>>,
    snapshots: Vec<(Range<u64>, Vec<u8>)>,
}

/// What becomes of the snapshots: of one, by its index.
#[derive(Debug, Clone, Copy)]
enum What {
    Make,
    Delete(usize),
    Apply(usize),
}

/// Clusters for a change: ranges that are reserved, and those that are counted.
#[derive(Default)]
struct Taken {
    reserved: Vec<(u64, u64)>,
    counted: Vec<u64>,
}

impl Image {
    fn cluster(&self) -> u64 {
        self.engine.format.cluster()
    }

    fn take(&mut self, taken: &mut Taken, clusters: u64) -> u64 {
        if clusters == 0 {
            return 0;
        }
        for _ in 0..2 {
            let room = self.file.call(&mut self.engine, |engine| engine.reserve(clusters)).unwrap();
            taken.reserved.push((room.host, room.clusters));
            if room.clusters == clusters {
                return room.host;
            }
        }
        let host = self.file.call(&mut self.engine, |engine| engine.take(clusters)).unwrap();
        taken.counted.extend((0..clusters).map(|nth| host + nth * self.cluster()));
        host
    }

    /// What was taken is free, unless it is in use.
    fn release(&mut self, taken: &Taken) {
        let release = |(host, clusters): &(u64, u64)| self.engine.release_room(*host, *clusters);
        taken.reserved.iter().for_each(release);
    }

    /// Changes the snapshots. `writes`: the write after so many fails.
    fn change(&mut self, what: What, writes: u64, random: &mut Rng) -> Result<(), SwitchError> {
        let before = self.file.judge_all(false);
        assert_eq!(before, self.expected);
        let mut taken = Taken::default();
        let cluster = self.cluster();
        let (mut l1_len, _) = self.engine.lens();
        if let What::Apply(at) = what {
            let (l1, _) = &self.snapshots[at];
            l1_len = l1_len.max(l1.end - l1.start);
        }
        let l1 = self.take(&mut taken, l1_len.div_ceil(cluster));
        let (change, snapshots) = match what {
            What::Make => {
                let place = self.take(&mut taken, l1_len.div_ceil(cluster));
                let mut all = self.snapshots.clone();
                let mut entry = place.to_be_bytes().to_vec();
                entry.extend((l1_len as u32 / 8).to_be_bytes());
                entry.resize(40 + random.usize(..9) * 8, 0);
                let extra = entry.len() as u32 - 40;
                entry[36..40].copy_from_slice(&extra.to_be_bytes());
                all.push((place..place + l1_len, entry));
                (SnapshotChange::Make(place), all)
            }
            What::Delete(at) => {
                let mut all = self.snapshots.clone();
                let (l1, _) = all.remove(at);
                (SnapshotChange::Delete(l1), all)
            }
            What::Apply(at) => {
                let (l1, _) = self.snapshots[at].clone();
                let entries = (l1.end - l1.start) as usize / ENTRY;
                let size = (before[at + 1].len() as u64) * cluster;
                (SnapshotChange::Apply(Applied { l1, entries, size }), self.snapshots.clone())
            }
        };
        let table: Vec<u8> = snapshots.iter().flat_map(|(_, entry)| entry.clone()).collect();
        let snapshots_at = self.take(&mut taken, (table.len() as u64).div_ceil(cluster));
        let mut rooms = SwitchRooms { l1, snapshots: snapshots_at, ..SwitchRooms::default() };
        let (l2, _) = self.engine.tables();
        rooms.l2.extend((0..l2).map(|_| self.take(&mut taken, 1)));
        let (mut len, before_table) = (0, taken.counted.len());
        loop {
            let ((_, blocks), (_, now)) = (self.engine.tables(), self.engine.lens());
            if rooms.blocks.len() as u64 == blocks && len == now {
                break;
            }
            if len != now {
                for host in taken.counted.split_off(before_table) {
                    self.file.call(&mut self.engine, |engine| engine.give_back(host)).unwrap();
                }
                (rooms.refcounts, len) = (self.take(&mut taken, now / cluster), now);
            }
            if rooms.blocks.len() as u64 != blocks {
                rooms.blocks.push(self.take(&mut taken, 1));
            }
        }
        // Nothing is lost by a kill.
        let may_leak = !taken.counted.is_empty();
        assert_eq!(self.file.judge_all(may_leak), before);
        let old = self.engine.roots();
        let old_table = self.file.at(64, 8);
        let len: usize = self.snapshots.iter().map(|(_, entry)| entry.len()).sum();
        let mut counts = Counts::new(old.format, &old.refcounts, &rooms.blocks).unwrap();
        if random.u64(..2) == 0 {
            counts = counts.with_least_memory();
        }
        let random = random.fork();
        let mut judged =
            Judged { file: &mut self.file, expected: &before, writes_left: writes, random };
        let prepared = {
            let old_table = old_table..old_table + len as u64;
            let table = (old_table, &*table);
            let mut call = pin!(prepare_with(counts, &mut judged, &old, &change, table, &rooms));
            match call.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(prepared) => prepared,
                Poll::Pending => panic!("it waits"),
            }
        };
        // Until the header leads to what was written, nothing has changed.
        assert_eq!(self.file.judge_all(may_leak), before);
        let (mut roots, free) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => {
                self.release(&taken);
                for host in taken.counted {
                    self.file.call(&mut self.engine, |engine| engine.give_back(host)).unwrap();
                }
                assert_eq!(self.file.judge_all(false), before);
                return Err(error);
            }
        };
        roots.snapshots = (snapshots.len() as u32, snapshots_at);
        let mut header: [u8; SECTOR] = *self.file.bytes.first_chunk().unwrap();
        roots.put_into(&mut header);
        self.file.write(0, &header);
        self.engine.switch(&mut roots.collect(free.all));
        self.release(&taken);
        self.snapshots = snapshots;
        match what {
            What::Make => self.expected.push(before[0].clone()),
            What::Delete(at) => drop(self.expected.remove(at + 1)),
            What::Apply(at) => {
                let len = before[0].len().max(before[at + 1].len());
                self.expected[0] = before[at + 1].clone();
                self.expected[0].resize(len, Found::default());
            }
        }
        // At once, all of it is as it is to be.
        assert_eq!(self.file.judge_all(false), self.expected);
        Ok(())
    }

    /// Clusters that a snapshot has.
    fn shared(&self) -> HashSet<u64> {
        let hosts = self.expected[1..].iter().flatten().filter_map(|found| found.host);
        hosts.collect()
    }
}

fn course(seed: u64, is_extended: bool) {
    let mut random = Rng::with_seed(seed);
    let cluster_size = 512 << random.u64(..3);
    let cluster = u64::from(cluster_size);
    let unit = if is_extended { cluster / 32 } else { cluster };
    let clusters = 256;
    let per_table = cluster / if is_extended { 16 } else { 8 };
    let refcount_bits = 1 << random.u64(..7);
    let create = CreateQcow2 {
        cluster_size,
        refcount_bits,
        ..CreateQcow2::new(if is_extended { 2 } else { 1 } * clusters * cluster)
    };
    let mut file = File::new(&create);
    file.is_extended = is_extended;
    let (engine, expected) = (file.open(), vec![file.judge()]);
    let mut image = Image { file, engine, expected, snapshots: Vec::new() };
    for _ in 0..200 {
        let guest = random.u64(..clusters);
        let most = (random.u64(..20) + 1).min(clusters - guest).min(per_table - guest % per_table);
        let has_snapshots = !image.snapshots.is_empty();
        let Image { file, engine, expected, .. } = &mut image;
        let disk = &mut expected[0];
        match random.u64(..16) {
            0 => *engine = file.open(),
            1 => {
                let age = engine.seal();
                engine.settle(age);
            }
            2 => {
                let made = image.change(What::Make, u64::MAX, &mut random);
                if let Err(error) = made {
                    assert!(matches!(error, SwitchError::Os(Errno::EINVAL)), "{error:?}");
                    assert!(refcount_bits <= 8, "a count of {refcount_bits} bits is too large");
                }
            }
            3 if has_snapshots => {
                let at = random.usize(..image.snapshots.len());
                let what = [What::Delete(at), What::Apply(at)][random.usize(..2)];
                match image.change(what, u64::MAX, &mut random) {
                    Ok(()) => {}
                    Err(SwitchError::Os(Errno::EINVAL)) if refcount_bits <= 8 => {}
                    Err(error) => panic!("{what:?}: {error:?}"),
                }
            }
            4 => {
                // A disk that is full, or broken.
                let at = Some(image.snapshots.len()).filter(|len| *len > 0);
                let what = match at.map(|len| random.usize(..len)) {
                    Some(at) => [What::Make, What::Delete(at), What::Apply(at)][random.usize(..3)],
                    None => What::Make,
                };
                let writes = random.u64(..12);
                let _ = image.change(what, writes, &mut random);
            }
            5 if cluster_size > 512 => {
                let len = (random.u64(..cluster / 512 - 1) + 1) * 512;
                let packed = file.call(engine, |engine| engine.pack(len)).unwrap().unwrap();
                file.call(engine, |engine| engine.map_packed(guest, packed)).unwrap();
                let host = Some(packed.host + 1);
                disk[guest as usize] = Found { host, data: ALL, zeroes: 0 };
            }
            6..9 => {
                let zeroing = [Zeroing::Keep, Zeroing::Free, Zeroing::Uncover][random.usize(..3)];
                let done = file.call(engine, |engine| engine.zero(guest, most, zeroing)).unwrap();
                for found in &mut disk[guest as usize..(guest + done) as usize] {
                    found.host = found.host.filter(|host| host % 2 == 0);
                    *found = match zeroing {
                        Zeroing::Keep => Found { data: 0, zeroes: ALL, ..*found },
                        Zeroing::Free => Found { zeroes: ALL, ..Found::default() },
                        Zeroing::Uncover => Found::default(),
                    };
                }
            }
            9 if random.u64(..8) == 0 => {
                let size = engine.reach() + 1;
                file.grow_l1(engine, size);
                disk.resize(file.judge_all(false)[0].len(), Found::default());
            }
            _ => {
                let at = guest * cluster + random.u64(..cluster / unit) * unit;
                let most = most * cluster - at % cluster;
                let (place, found) = file.call(engine, |engine| engine.find(at, most)).unwrap();
                let shared = image.shared();
                let Image { file, engine, expected, .. } = &mut image;
                if let Place::Data { at: host, own } = place {
                    let first = host - host % cluster;
                    assert_eq!(own, !shared.contains(&first), "{first:#x} may be written");
                    if own {
                        continue;
                    }
                }
                let end = at + 1 + random.u64(..found);
                write(file, engine, &mut expected[0], at..end);
                let here = (at / cluster) as usize;
                let host = expected[0][here].host.unwrap();
                assert!(!shared.contains(&host), "{host:#x} is a snapshot's");
            }
        }
        assert_eq!(image.file.judge_all(false), image.expected, "seed {seed}");
    }
}

#[test]
fn the_image_is_consistent_with_each_snapshot() {
    seeds(10).for_each(|seed| course(seed, false));
}

#[test]
fn the_same_with_subclusters() {
    seeds(16).for_each(|seed| course(seed, true));
}

/// A disk with data in its first cluster, where `count` is the number of the cluster `of`, which gets the L2 table and the
/// data.
fn miscounted(of: impl FnOnce(u64, u64) -> u64, count: u64) -> (File, Roots) {
    let mut file = File::new(&CreateQcow2 { cluster_size: 512, ..CreateQcow2::new(64 << 10) });
    let (mut engine, mut expected) = (file.open(), file.judge());
    write(&mut file, &mut engine, &mut expected, 0..512);
    let roots = engine.roots();
    let (l2, _) = table(roots.l1[0], &roots.format).unwrap().unwrap();
    let cluster = of(l2, expected[0].host.unwrap()) >> roots.format.cluster_bits;
    let (bits, at) = (roots.format.block_bits(), roots.refcounts[0] as usize);
    assert_eq!(cluster >> bits, 0, "the first block counts it");
    let block = &mut file.bytes[at..at + 512];
    set_count(block, cluster as usize, roots.format.refcount_order, count);
    (file, roots)
}

/// Calls `call` for a change of these tables, which must not write.
fn found_damage(
    mut file: File,
    roots: &Roots,
    call: impl AsyncFnOnce(&mut Work<'_, Judged<'_>>) -> Result<(), SwitchError>,
) -> bool {
    let random = Rng::with_seed(0);
    let mut judged = Judged { file: &mut file, expected: &[], writes_left: 0, random };
    let counts = Counts::new(roots.format, &roots.refcounts, &roots.refcounts).unwrap();
    let mut work = Work { file: &mut judged, format: roots.format, counts, l2_rooms: [].iter() };
    let called = pin!(call(&mut work)).poll(&mut Context::from_waker(Waker::noop()));
    let Poll::Ready(called) = called else { panic!("it waits") };
    matches!(called, Err(SwitchError::Damaged(_)))
}

#[test]
fn a_snapshot_is_not_deleted_where_the_disk_uses_what_is_not_counted() {
    let own = |(file, roots): (File, Roots)| {
        found_damage(file, &roots, async |work| work.own(&roots.l1).await.map(drop))
    };
    assert!(!own(miscounted(|_, data| data, 1)));
    assert!(own(miscounted(|_, data| data, 0)));
    assert!(own(miscounted(|l2, _| l2, 0)));
}

/// The data counts once, the L2 table that leads there twice.
#[test]
fn a_snapshot_is_not_deleted_where_a_shared_table_leads_to_what_becomes_free() {
    let (file, roots) = miscounted(|l2, _| l2, 2);
    let l1 = roots.l1_at..roots.l1_at + (roots.l1.len() * ENTRY) as u64;
    assert!(found_damage(file, &roots, async |work| work.give_up_snapshot(l1).await));
}

#[test]
fn a_block_without_a_place_fails_before_anything_is_written() {
    let (_, Roots { format, .. }) = miscounted(|_, data| data, 1);
    let new = |places: &[u64]| Counts::new(format, &[512, 0, 1024], places).map(|new| new.new);
    assert_eq!(new(&[2048, 4096]), Ok(vec![2048, 0, 4096]));
    assert_eq!(new(&[2048]), Err(Errno::EBUSY));
}

/// They may have been written to, behind what the file had when it was opened.
#[test]
fn clusters_that_a_switch_frees_are_not_fresh() {
    let (file, roots) = miscounted(|_, data| data, 1);
    let mut engine = file.open();
    let fresh = engine.fresh;
    engine.switch(&mut roots.clone().collect(Some(3..fresh)));
    assert_eq!(engine.fresh, fresh);
    engine.switch(&mut roots.collect(Some(fresh + 2..fresh + 5)));
    assert_eq!(engine.fresh, fresh + 5);
}

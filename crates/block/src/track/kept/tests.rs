use std::sync::Arc;

use nix::sys::memfd::{MFdFlags, memfd_create};

use super::*;
use crate::track::{DirtyBitmap, Storage, Tracking};

const OWNER: Owner = Owner { mark: [7; 32], device: 3 };
const SIZE: u64 = 1000 << 16;

fn described() -> Described {
    Described { name: "b0".into(), size: SIZE, granularity: 65536, recording: true }
}

/// A bitmap that is kept, and its file.
fn kept() -> (Arc<DirtyBitmap>, Tracking, File) {
    let file = File::from(memfd_create("kept", MFdFlags::MFD_CLOEXEC).unwrap());
    let bits = KeptBits::create(file.try_clone().unwrap(), OWNER, &described()).unwrap();
    let bitmap = DirtyBitmap::of_kept(described(), Arc::new(bits));
    let (bitmap, tracking) = (Arc::new(bitmap), Tracking::new("disk", None));
    assert!(left(&file).is_none(), "nothing sets its bits yet");
    tracking.add_bitmap(bitmap.clone());
    (bitmap, tracking, file)
}

/// What the next process finds after a kill at this moment: parts with set bits.
fn left(file: &File) -> Option<Vec<usize>> {
    let copy = File::from(memfd_create("left", MFdFlags::MFD_CLOEXEC).unwrap());
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    copy.write_all_at(&bytes, 0).unwrap();
    let (of, found) = KeptBits::find(copy, OWNER, false).unwrap()?;
    assert_eq!(of, described());
    let is_set =
        |part: &usize| found.words()[part / 64].load(Ordering::Relaxed) >> (part % 64) & 1 != 0;
    Some((0..1000).filter(is_set).collect())
}

fn write(bitmap: &DirtyBitmap, part: u64) {
    bitmap.bits().set(part << 16, 1);
}

#[test]
fn bits_are_there_after_a_kill() {
    let (bitmap, tracking, file) = kept();
    assert_eq!(left(&file), Some(vec![]));
    for part in [0, 63, 64, 999] {
        write(&bitmap, part);
    }
    assert_eq!(left(&file), Some(vec![0, 63, 64, 999]));
    tracking.remove_bitmap("b0");
    assert_eq!(left(&file), None);
    // A transaction is undone.
    tracking.restore_bitmap(0, bitmap.clone());
    assert_eq!(left(&file), Some(vec![0, 63, 64, 999]));
    bitmap.give_up_keeping();
    tracking.begin_keeping();
    assert_eq!(left(&file), None, "not again");
}

/// The image goes to another process. A version that does not know lent bits finds none, as another one after a kill.
#[test]
fn lent_bits_are_those_of_the_process_that_goes_on() {
    let (bitmap, tracking, file) = kept();
    let found = |lent| {
        let found = KeptBits::find(file.try_clone().unwrap(), OWNER, lent).unwrap();
        found.map(|(of, bits)| Arc::new(DirtyBitmap::of_kept(of, Arc::new(bits))))
    };
    write(&bitmap, 1);
    bitmap.bits().take();
    write(&bitmap, 2);
    assert!(found(true).is_none());
    bitmap.lend_keeping();
    assert!(left(&file).is_none() && found(false).is_none());
    // It does not take place.
    let other = found(true).unwrap();
    tracking.begin_keeping();
    assert_eq!(left(&file), Some(vec![1, 2]));
    assert!(found(true).is_none());
    write(&bitmap, 3);
    bitmap.lend_keeping();
    drop(other);
    // The next attempt does. What was taken is still behind the words.
    let next = found(true).unwrap();
    next.begin_keeping();
    assert_eq!(next.bits().count(), 2 << 16);
    write(&next, 4);
    assert_eq!(left(&file), Some(vec![1, 2, 3, 4]));
    next.settle();
    next.bits().take();
    assert_eq!(left(&file), Some(vec![2, 3, 4]));
}

/// A job that was killed may not have copied what it took, and a client may not know of one that has ended.
#[test]
fn taken_bits_stay_until_a_client_knows_what_became_of_them() {
    let (bitmap, _tracking, file) = kept();
    write(&bitmap, 1);
    let taken = bitmap.bits().take();
    assert_eq!((taken.count(), bitmap.bits().count()), (1 << 16, 0));
    write(&bitmap, 2);
    assert_eq!(left(&file), Some(vec![1, 2]));
    // Taken again by the same client.
    bitmap.bits().take();
    write(&bitmap, 700);
    assert_eq!(left(&file), Some(vec![1, 2, 700]));
    bitmap.settle();
    let taken = bitmap.bits().take();
    write(&bitmap, 4);
    assert_eq!(left(&file), Some(vec![4, 700]));
    // Undone.
    bitmap.bits().restore(&taken);
    assert_eq!(bitmap.bits().count(), 1 << 16);
    assert_eq!(left(&file), Some(vec![700]));
    bitmap.settle();
    bitmap.bits().take();
    bitmap.settle();
    bitmap.bits().take();
    assert_eq!(left(&file), Some(vec![]));
}

#[test]
fn bits_of_a_bitmap_that_is_resized_or_replaced_are_given_up() {
    let (_, tracking, file) = kept();
    tracking.resize_bitmaps(SIZE);
    assert!(left(&file).is_some());
    tracking.resize_bitmaps(SIZE * 2);
    assert!(left(&file).is_none());
    let (bitmap, tracking, file) = kept();
    tracking.set_stored(vec![bitmap]);
    assert!(left(&file).is_some(), "it is there as before");
    tracking.set_stored(Vec::new());
    assert!(left(&file).is_none());
    let (_, tracking, file) = kept();
    tracking.set_bitmaps(Vec::new());
    assert!(left(&file).is_none());
}

#[test]
fn a_file_of_another_owner_or_size_is_not_taken() {
    let (_, _tracking, file) = kept();
    let find = |owner| KeptBits::find(file.try_clone().unwrap(), owner, false).unwrap();
    assert!(find(Owner { device: 4, ..OWNER }).is_none());
    assert!(find(Owner { mark: [8; 32], ..OWNER }).is_none());
    assert!(find(OWNER).is_some());
    file.set_len(HEADER as u64 + 8).unwrap();
    assert!(find(OWNER).is_none());
    file.set_len(10).unwrap();
    assert!(KeptBits::find(file, OWNER, false).is_err());
}

/// What an image cannot have would make it unreadable once it is stored.
#[test]
fn a_damaged_file_is_not_taken() {
    let (_, _tracking, file) = kept();
    let word = |number: usize, value: u64| {
        let copy = File::from(memfd_create("damaged", MFdFlags::MFD_CLOEXEC).unwrap());
        let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes[number * 8..][..8].copy_from_slice(&value.to_ne_bytes());
        copy.write_all_at(&bytes, 0).unwrap();
        copy.set_len(1 << 40).unwrap();
        KeptBits::find(copy, OWNER, false).unwrap().map(|(_, bits)| bits)
    };
    assert!(word(RECORDING, 1).is_some());
    let zero_byte = u64::from_ne_bytes(*b"b\0aaaaaa");
    for (number, value) in [
        (STATE, 7),
        (GRANULARITY, 0),
        (GRANULARITY, 256),
        (GRANULARITY, 65537),
        (GRANULARITY, 1 << 32),
        (super::SIZE, u64::MAX),
        (super::SIZE, 1 << 50),
        (NAME_LEN, 0),
        (NAME_LEN, 1024),
        (NAME_LEN, u64::MAX),
        (NAME_AT / 8, zero_byte),
        (NAME_AT / 8, u64::MAX),
    ] {
        assert!(word(number, value).is_none(), "{number} {value:#x}");
    }
    // 1000 parts: the last word has 40 bits.
    let past_the_end = word(HEADER_WORDS + 15, u64::MAX).unwrap();
    assert_eq!(past_the_end.words()[15].load(Ordering::Relaxed), (1 << 40) - 1);
}

/// After a kill, a bitmap that records has recorded all the time.
#[test]
fn whether_it_records_is_kept() {
    let (bitmap, _tracking, file) = kept();
    let records = |file: &File| {
        let mut word = [0; 8];
        file.read_exact_at(&mut word, 8 * RECORDING as u64).unwrap();
        word != [0; 8]
    };
    assert!(records(&file));
    bitmap.set_recording(false);
    assert!(!records(&file) && !bitmap.is_recording());
    bitmap.set_recording(true);
    assert!(records(&file) && bitmap.is_recording());
    assert_eq!(bitmap.storage(), Storage::Image);
}

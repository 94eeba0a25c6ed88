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
    let (of, found) = KeptBits::find(copy, OWNER).unwrap()?;
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
    tracking.restore_bitmap(0, bitmap);
    assert_eq!(left(&file), None, "not again");
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
    let find = |owner| KeptBits::find(file.try_clone().unwrap(), owner).unwrap();
    assert!(find(Owner { device: 4, ..OWNER }).is_none());
    assert!(find(Owner { mark: [8; 32], ..OWNER }).is_none());
    assert!(find(OWNER).is_some());
    file.set_len(HEADER as u64 + 8).unwrap();
    assert!(find(OWNER).is_none());
    file.set_len(10).unwrap();
    assert!(KeptBits::find(file, OWNER).is_err());
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

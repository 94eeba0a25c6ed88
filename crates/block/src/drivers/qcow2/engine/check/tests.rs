use std::io;

use super::{Check, CheckedFile, Places, Repair};
use crate::drivers::qcow2::header::{Header, Purpose};

const CLUSTER: usize = 4096;

/// An image in memory.
struct Memory {
    bytes: Vec<u8>,
    /// Bytes that were read.
    read: usize,
}

impl CheckedFile for Memory {
    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read(&mut self, at: u64, len: usize) -> io::Result<Vec<u8>> {
        self.read += len;
        let start = self.bytes.len().min(at as usize);
        let end = self.bytes.len().min(at as usize + len);
        let mut bytes = self.bytes[start..end].to_vec();
        bytes.resize(len, 0);
        Ok(bytes)
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let end = self.bytes.len().max(at as usize + bytes.len());
        self.bytes.resize(end, 0);
        self.bytes[at as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A dirty image: so many L1 entries lead to one L2 table, whose entries lead to one cluster.
fn shared_tables(entries: usize) -> Memory {
    let place = |cluster: usize| ((cluster * CLUSTER) as u64).to_be_bytes();
    let used = |cluster: usize| ((cluster * CLUSTER) as u64 | 1 << 63).to_be_bytes();
    let mut bytes = vec![0; 5 * CLUSTER];
    let size = (entries * CLUSTER / 8 * CLUSTER) as u64;
    let parts: [(usize, &[u8]); 11] = [
        (0, b"QFI\xfb\0\0\0\x03"),
        (20, &12u32.to_be_bytes()),
        (24, &size.to_be_bytes()),
        (36, &(entries as u32).to_be_bytes()),
        (40, &place(5)),
        (48, &place(1)),
        (56, &1u32.to_be_bytes()),
        // The dirty bit; refcounts of 64 bits, so that none overflows.
        (72, &1u64.to_be_bytes()),
        (96, &6u32.to_be_bytes()),
        (100, &104u32.to_be_bytes()),
        (CLUSTER, &place(2)),
    ];
    for (at, part) in parts {
        bytes[at..][..part.len()].copy_from_slice(part);
    }
    bytes[3 * CLUSTER..4 * CLUSTER].copy_from_slice(&used(4).repeat(CLUSTER / 8));
    bytes.extend(used(3).repeat(entries));
    Memory { bytes, read: 0 }
}

/// Returns the bytes that a repair reads beside L1 tables, and what it finds.
fn repair(entries: usize) -> (usize, super::Checked) {
    let mut image = shared_tables(entries);
    let header = Header::parse(&image.bytes, Purpose::Check).unwrap();
    let places = Places::default();
    let checked = Check::new(&header, &places, Repair::All, &mut image, |_| {}).run().unwrap();
    // Of the walks: to count, to count again, and for the flags.
    (image.read - 3 * entries * 8, checked)
}

#[test]
fn a_table_that_many_entries_share_is_read_a_few_times() {
    let (few, _) = repair(512);
    let (many, checked) = repair(32 * 512);
    assert_eq!(checked.corruptions, 0);
    assert_eq!(checked.allocated, 32 * 512 * 512);
    // Beside a longer refcount structure.
    assert!(many < few + 32 * CLUSTER, "{many} bytes, {few}");
}

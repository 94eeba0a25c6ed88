//! Checks a qcow2 image by the specification (docs/interop/qcow2.rst in QEMU's sources), and returns the
//! contents of its disk. Shares nothing with the driver.

const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
/// Mask of the offset in an entry of a table.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Flag of an L2 entry: reads as zeroes.
const ZERO: u64 = 1;
/// Incompatible feature: extended L2 entries, with a bitmap of so many subclusters.
const EXTENDED: u64 = 1 << 4;
const SUBCLUSTERS: usize = 32;
/// Header extensions: the bitmaps, and the place of the LUKS header.
const BITMAPS: u32 = 0x2385_2875;
const LUKS: u32 = 0x0537_be77;

/// The user of a cluster that has compressed clusters.
const SHARED: &str = "compressed clusters";

/// Decompresses a cluster of that many bytes.
fn inflate(data: &[u8], len: usize) -> Result<Vec<u8>, String> {
    use miniz_oxide::inflate::core::{DecompressorOxide, decompress};
    let mut cluster = vec![0; len];
    let (status, _, found) = decompress(&mut DecompressorOxide::new(), data, &mut cluster, 0, 0);
    match found == len {
        true => Ok(cluster),
        false => Err(format!("{found} bytes of compressed data: {status:?}")),
    }
}

/// Bytes of a sector, which is encrypted by its number.
const SECTOR: u64 = 512;

/// Decrypts sectors from the one of that number on.
type Decrypt = dyn Fn(u64, &mut [u8]) + Send + Sync;

/// The LUKS header of an encrypted image, which never changes.
pub(crate) struct Luks {
    /// Its place in the file.
    pub(crate) at: usize,
    pub(crate) bytes: Vec<u8>,
    pub(crate) decrypt: Box<Decrypt>,
}

/// A bitmap in an image.
pub(crate) struct Stored {
    pub(crate) name: String,
    /// Its bits may be wrong, and no program uses them.
    pub(crate) in_use: bool,
    /// Bytes of the disk for each bit.
    pub(crate) granularity: usize,
    pub(crate) bits: Vec<u8>,
}

/// The contents of an image.
pub(crate) struct Found {
    pub(crate) contents: Vec<u8>,
    pub(crate) bitmaps: Vec<Stored>,
    /// Compressed clusters.
    pub(crate) compressed: usize,
    /// The contents of the internal snapshots.
    pub(crate) snapshots: Vec<Vec<u8>>,
}

/// An image's bytes.
pub(crate) struct Image<'a> {
    bytes: &'a [u8],
    cluster: usize,
    refcount_bits: usize,
    /// Entries of L2 tables have a bitmap of subclusters.
    is_extended: bool,
    /// The references to each cluster, each with the number of its snapshot, or 0.
    users: Vec<Vec<(usize, String)>>,
    /// The snapshot whose tables are read. 0: none.
    snapshot: usize,
    /// Where compressed clusters are.
    compressed: Vec<std::ops::Range<usize>>,
    luks: Option<&'a Luks>,
}

impl<'a> Image<'a> {
    fn new(bytes: &'a [u8], luks: Option<&'a Luks>) -> Image<'a> {
        let (users, compressed) = (Vec::new(), Vec::new());
        Image {
            bytes,
            cluster: 0,
            refcount_bits: 16,
            is_extended: false,
            users,
            snapshot: 0,
            compressed,
            luks,
        }
    }

    /// Checks the image, which may have leaks, and returns the contents of its disk. `behind`: the contents of
    /// the backing image.
    pub(crate) fn read(bytes: &'a [u8], behind: &[u8]) -> Result<Vec<u8>, String> {
        Ok(Image::read_all(bytes, behind, None)?.contents)
    }

    /// The same, with bitmaps. `luks`: the image is encrypted.
    pub(crate) fn read_all(
        bytes: &'a [u8],
        behind: &[u8],
        luks: Option<&'a Luks>,
    ) -> Result<Found, String> {
        if bytes.len() < 104 || !bytes.starts_with(b"QFI\xfb") {
            return Err("no header".into());
        }
        let mut image = Image::new(bytes, luks);
        let version = image.u32(4);
        image.cluster = 1 << image.u32(20);
        if version == 3 {
            image.refcount_bits = 1 << image.u32(96);
            // With a mark of ours the image may be dirty: the mark says that reference counts are right.
            let last = image.cluster.checked_sub(512).and_then(|at| bytes.get(at..));
            let is_marked = last.is_some_and(|sector| sector.starts_with(b"ringmill journal"));
            if image.u64(72) & 3 > u64::from(is_marked) {
                return Err("marked as dirty or corrupt".into());
            }
            image.is_extended = image.u64(72) & EXTENDED != 0;
        }
        image.users = vec![Vec::new(); bytes.len().div_ceil(image.cluster)];
        image.refer(0, "the header")?;
        image.check_luks()?;
        let size = image.u64(24) as usize;
        let contents = image.walk(version, behind, size, (image.u64(40), image.u32(36)))?;
        let compressed = image.end_compressed()?;
        let snapshots = image.snapshots(version, behind)?;
        let bitmaps = image.bitmaps(version, contents.len())?;
        image.check_counts()?;
        Ok(Found { contents, bitmaps, compressed, snapshots })
    }

    /// Reads the disks of the snapshots.
    fn snapshots(&mut self, version: u32, behind: &[u8]) -> Result<Vec<Vec<u8>>, String> {
        let (count, first) = (self.u32(60) as usize, self.u64(64));
        let (mut all, mut at) = (Vec::new(), first as usize);
        for number in 1..=count {
            let (l1, entries, lengths) = (self.u64(at), self.u32(at + 8), self.u32(at + 12));
            let (extra, size) = (self.u32(at + 36), self.u64(at + 48) as usize);
            if extra < 16 {
                return Err(format!("snapshot {number} has {extra} bytes of extra data"));
            }
            self.snapshot = number;
            let disk = self.walk(version, behind, size, (l1, entries));
            all.push(disk.map_err(|why| format!("snapshot {number}: {why}"))?);
            self.end_compressed()?;
            at += 40 + (extra + (lengths >> 16) + (lengths & 0xffff)) as usize;
            at = at.next_multiple_of(8);
        }
        self.snapshot = 0;
        self.refer_all(first, at - first as usize, "the snapshot table")?;
        Ok(all)
    }

    /// Ends the search for compressed clusters of a disk. Returns how many there are.
    fn end_compressed(&mut self) -> Result<usize, String> {
        let mut compressed = std::mem::take(&mut self.compressed);
        compressed.sort_unstable_by_key(|range| range.start);
        match compressed.windows(2).find(|w| w[0].end > w[1].start) {
            Some(two) => Err(format!("compressed clusters overlap: {two:x?}")),
            None => Ok(compressed.len()),
        }
    }

    /// Returns place and length of the LUKS header. `None`: the image is not encrypted.
    pub(crate) fn luks_place(bytes: &'a [u8]) -> Option<(usize, usize)> {
        let image = Image::new(bytes, None);
        let data = image.extension(LUKS)?;
        Some((image.u64(data) as usize, image.u64(data + 8) as usize))
    }

    /// Where the data of a header extension begins, in version 3.
    fn extension(&self, kind: u32) -> Option<usize> {
        let mut at = self.u32(100) as usize;
        while self.u32(at) != kind {
            if self.u32(at) == 0 {
                return None;
            }
            at += 8 + (self.u32(at + 4) as usize).next_multiple_of(8);
        }
        Some(at + 8)
    }

    fn refer_all(&mut self, at: u64, len: usize, subject: &str) -> Result<(), String> {
        (0..len.div_ceil(self.cluster))
            .try_for_each(|nth| self.refer(at + (nth * self.cluster) as u64, subject))
    }

    /// Checks that the LUKS header is what it was.
    fn check_luks(&mut self) -> Result<(), String> {
        let method = self.u32(32);
        let Some(Luks { at, bytes, .. }) = self.luks else {
            return if method == 0 { Ok(()) } else { Err(format!("encryption method {method}")) };
        };
        let (place, len) = Image::luks_place(self.bytes).ok_or("no place of the LUKS header")?;
        if method != 2 || place != *at || self.bytes.get(place..place + len) != Some(&bytes[..]) {
            return Err("the LUKS header has changed".into());
        }
        self.refer_all(place as u64, len, "the LUKS header")
    }

    /// Reads the bitmaps of a disk of that size.
    fn bitmaps(&mut self, version: u32, size: usize) -> Result<Vec<Stored>, String> {
        let data = (version == 3).then(|| self.extension(BITMAPS)).flatten();
        let Some(data) = data else { return Ok(Vec::new()) };
        if self.u64(88) & 1 == 0 {
            return Err("bitmaps that are not valid".into());
        }
        let (count, len, mut at) =
            (self.u32(data), self.u64(data + 8) as usize, self.u64(data + 16) as usize);
        self.refer_all(at as u64, len, "the bitmap directory")?;
        let end = at + len;
        let mut all = Vec::new();
        while at < end {
            let (table, entries, flags) = (self.u64(at), self.u32(at + 8), self.u32(at + 12));
            let (kind, bits) = (self.u64(at + 16) >> 56, self.u64(at + 17) >> 56);
            let name_len = (self.u64(at + 18) >> 48) as usize;
            if kind != 1 || self.u32(at + 20) != 0 || flags & !3 != 0 || bits > 31 {
                return Err(format!("the bitmap directory's entry at {at:#x} is wrong"));
            }
            let name = self.bytes.get(at + 24..at + 24 + name_len).unwrap_or_default();
            let name = String::from_utf8_lossy(name).into_owned();
            let stored = self.bitmap(name, (table, entries as usize), flags & 1 != 0, 1 << bits)?;
            let needed = size.div_ceil(stored.granularity).div_ceil(8);
            if !stored.in_use && entries as usize != needed.div_ceil(self.cluster) {
                return Err(format!("bitmap {} is of another size", stored.name));
            }
            all.push(stored);
            at += (24 + name_len).next_multiple_of(8);
        }
        match all.len() == count as usize {
            true => Ok(all),
            false => Err(format!("{} bitmaps, and {count} in the header", all.len())),
        }
    }

    fn bitmap(
        &mut self,
        name: String,
        (table, entries): (u64, usize),
        in_use: bool,
        granularity: usize,
    ) -> Result<Stored, String> {
        let subject = format!("bitmap {name}");
        self.refer_all(table, entries * 8, &subject)?;
        let mut bits = vec![0; entries * self.cluster];
        for (nth, part) in bits.chunks_mut(self.cluster).enumerate() {
            match self.u64(table as usize + nth * 8) {
                0 => {}
                1 => part.fill(0xff),
                host => {
                    let there = self.bytes.get(host as usize..).unwrap_or_default();
                    let len = part.len().min(there.len());
                    part[..len].copy_from_slice(&there[..len]);
                    self.refer(host, &subject)?;
                }
            }
        }
        Ok(Stored { name, in_use, granularity, bits })
    }

    fn u32(&self, at: usize) -> u32 {
        self.u64(at).wrapping_shr(32) as u32
    }

    /// Zeroes past the end.
    fn u64(&self, at: usize) -> u64 {
        let mut word = [0; 8];
        let there = self.bytes.get(at..).unwrap_or_default();
        let len = there.len().min(8);
        word[..len].copy_from_slice(&there[..len]);
        u64::from_be_bytes(word)
    }

    fn refer(&mut self, at: u64, subject: impl Into<String>) -> Result<(), String> {
        let (at, subject) = (at as usize, subject.into());
        if !at.is_multiple_of(self.cluster) {
            return Err(format!("{subject} is at {at:#x}, which is no cluster"));
        }
        match self.users.get_mut(at / self.cluster) {
            Some(users) => users.push((self.snapshot, subject)),
            None => return Err(format!("{subject} is at {at:#x}, past the end")),
        }
        Ok(())
    }

    fn walk(
        &mut self,
        version: u32,
        behind: &[u8],
        size: usize,
        (l1, entries): (u64, u32),
    ) -> Result<Vec<u8>, String> {
        let entries = entries as usize;
        let mut contents = vec![0; size];
        let there = behind.len().min(size);
        contents[..there].copy_from_slice(&behind[..there]);
        for part in 0..(entries * 8).div_ceil(self.cluster) {
            self.refer(l1 + (part * self.cluster) as u64, "the L1 table")?;
        }
        let entry_len = if self.is_extended { 16 } else { 8 };
        let per_table = self.cluster / entry_len;
        if entries < size.div_ceil(self.cluster * per_table) {
            return Err(format!("an L1 table of {entries} entries for {size} bytes"));
        }
        for index in 0..entries {
            let entry = self.u64(l1 as usize + index * 8);
            let table = entry & OFFSET;
            if table == 0 {
                continue;
            }
            let subject = format!("L2 table {index}");
            self.refer(table, &subject)?;
            self.check_copied(entry, table, &subject)?;
            for slot in 0..per_table {
                let place = table as usize + slot * entry_len;
                let (entry, at) = (self.u64(place), (index * per_table + slot) * self.cluster);
                match self.is_extended {
                    true => self.extended_at(entry, self.u64(place + 8), at, &mut contents)?,
                    false => self.cluster_at(version, entry, at, &mut contents)?,
                }
            }
        }
        Ok(contents)
    }

    fn cluster_at(
        &mut self,
        version: u32,
        entry: u64,
        at: usize,
        contents: &mut [u8],
    ) -> Result<(), String> {
        if entry == 0 {
            return Ok(());
        }
        let subject = format!("the disk's cluster at {at:#x}");
        if entry & COMPRESSED != 0 {
            return self
                .compressed_at(entry, at, contents)
                .map_err(|why| format!("{subject}: {why}"));
        }
        if entry & !(COPIED | OFFSET | ZERO) != 0 {
            return Err(format!("{subject} has the entry {entry:#x}"));
        }
        let (host, is_zero) = (entry & OFFSET, entry & ZERO != 0);
        if is_zero && version < 3 {
            return Err(format!("{subject} has the entry {entry:#x} in version 2"));
        }
        if host != 0 {
            self.refer(host, &subject)?;
            self.check_copied(entry, host, &subject)?;
        }
        self.put(at, self.cluster, (!is_zero && host != 0).then_some(host), contents);
        Ok(())
    }

    /// The same, of an extended entry with that bitmap.
    fn extended_at(
        &mut self,
        entry: u64,
        bitmap: u64,
        at: usize,
        contents: &mut [u8],
    ) -> Result<(), String> {
        let who = format!("the disk's cluster at {at:#x}");
        if entry & COMPRESSED != 0 && bitmap == 0 {
            return self.compressed_at(entry, at, contents).map_err(|why| format!("{who}: {why}"));
        }
        let (host, data, zeroes) = (entry & OFFSET, bitmap as u32, (bitmap >> 32) as u32);
        if entry & !(COPIED | OFFSET) != 0 || data & zeroes != 0 || (host == 0 && data != 0) {
            return Err(format!("{who} has the entry {entry:#x}, {bitmap:#x}"));
        }
        if host != 0 {
            self.refer(host, &who)?;
            self.check_copied(entry, host, &who)?;
        }
        let len = self.cluster / SUBCLUSTERS;
        for nth in 0..SUBCLUSTERS {
            let from = (data >> nth & 1 != 0).then_some(host + (nth * len) as u64);
            if from.is_some() || zeroes >> nth & 1 != 0 {
                self.put(at + nth * len, len, from, contents);
            }
        }
        Ok(())
    }

    /// Puts data from a place of the file, or zeroes, into the disk's contents.
    fn put(&self, at: usize, len: usize, from: Option<u64>, contents: &mut [u8]) {
        // A table may reach farther than the disk.
        let Some(place) = contents.get_mut(at..) else { return };
        let len = place.len().min(len);
        let place = &mut place[..len];
        place.fill(0);
        let Some(host) = from else { return };
        let data = self.bytes.get(host as usize..).unwrap_or_default();
        let there = len.min(data.len());
        place[..there].copy_from_slice(&data[..there]);
        if let Some(Luks { decrypt, .. }) = self.luks {
            // Bytes beyond the end of the file are zeroes, which are noise once decrypted.
            decrypt(host / SECTOR, place);
        }
    }

    fn compressed_at(&mut self, entry: u64, at: usize, contents: &mut [u8]) -> Result<(), String> {
        let bits = 62 - (self.cluster.trailing_zeros() - 8);
        let host = (entry & ((1 << bits) - 1)) as usize;
        let units = ((entry & !(COPIED | COMPRESSED)) >> bits) as usize + 1;
        let range = host..(host / 512 + units) * 512;
        if entry & COPIED != 0 || self.luks.is_some() {
            return Err(format!("the compressed entry {entry:#x}"));
        }
        let last = (range.end - 1) / self.cluster;
        for cluster in host / self.cluster..=last {
            self.refer((cluster * self.cluster) as u64, SHARED)?;
        }
        self.compressed.push(range.clone());
        let data = self.bytes.get(host..range.end.min(self.bytes.len())).unwrap_or_default();
        let found = inflate(data, self.cluster)?;
        let Some(place) = contents.get_mut(at..) else { return Ok(()) };
        let len = place.len().min(self.cluster);
        place[..len].copy_from_slice(&found[..len]);
        Ok(())
    }

    /// Checks that the flag is set exactly if the count is 1.
    fn check_copied(&self, entry: u64, at: u64, subject: &str) -> Result<(), String> {
        let count = self.count(at as usize / self.cluster);
        // Those of snapshots mean nothing.
        if self.snapshot == 0 && (entry & COPIED != 0) != (count == 1) {
            return Err(format!("{subject}: entry {entry:#x}, but {count} references"));
        }
        Ok(())
    }

    /// A cluster's reference count, as the image has it.
    fn count(&self, cluster: usize) -> u64 {
        let per_block = self.cluster * 8 / self.refcount_bits;
        let (block, index) = (cluster / per_block, cluster % per_block);
        let (table, clusters) = (self.u64(48) as usize, self.u32(56) as usize);
        if block >= clusters * self.cluster / 8 {
            return 0;
        }
        let block = self.u64(table + block * 8) as usize;
        let bits = self.refcount_bits;
        match bits {
            _ if block == 0 => 0,
            64 => self.u64(block + index * 8),
            8.. => self.u64(block + index * bits / 8) >> (64 - bits),
            _ => {
                let byte = self.u64(block + index * bits / 8) >> 56;
                byte >> (index * bits % 8) & ((1 << bits) - 1)
            }
        }
    }

    fn check_counts(&mut self) -> Result<(), String> {
        let (table, clusters) = (self.u64(48), self.u32(56) as usize);
        for part in 0..clusters {
            self.refer(table + (part * self.cluster) as u64, "the refcount table")?;
        }
        for index in 0..clusters * self.cluster / 8 {
            let block = self.u64(table as usize + index * 8);
            if block != 0 {
                self.refer(block, format!("refcount block {index}"))?;
            }
        }
        for (cluster, users) in self.users.iter().enumerate() {
            let count = self.count(cluster);
            let is_shared = users.iter().all(|(_, user)| user == SHARED);
            let is_twice = users.windows(2).any(|two| two[0].0 == two[1].0);
            if is_twice && !is_shared || users.len() as u64 > count {
                let at = cluster * self.cluster;
                return Err(format!("{at:#x} is used by {users:?}, and counted {count} times"));
            }
        }
        Ok(())
    }
}

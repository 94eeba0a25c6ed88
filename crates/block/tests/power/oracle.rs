//! Checks a qcow2 image by the specification (docs/interop/qcow2.rst in QEMU's sources), and returns the
//! contents of its disk. Shares nothing with the driver.

const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
/// Mask of the offset in an entry of a table.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Flag of an L2 entry: reads as zeroes.
const ZERO: u64 = 1;

/// An image's bytes.
pub(crate) struct Image<'a> {
    bytes: &'a [u8],
    cluster: usize,
    refcount_bits: usize,
    /// The references to each cluster.
    users: Vec<Vec<String>>,
}

impl<'a> Image<'a> {
    /// Checks the image, which may have leaks, and returns the contents of its disk. `behind`: the contents of
    /// the backing image.
    pub(crate) fn read(bytes: &'a [u8], behind: &[u8]) -> Result<Vec<u8>, String> {
        if bytes.len() < 104 || !bytes.starts_with(b"QFI\xfb") {
            return Err("no header".into());
        }
        let mut image = Image { bytes, cluster: 0, refcount_bits: 16, users: Vec::new() };
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
        }
        image.users = vec![Vec::new(); bytes.len().div_ceil(image.cluster)];
        image.refer(0, "the header")?;
        let contents = image.walk(version, behind)?;
        image.check_counts()?;
        Ok(contents)
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

    fn refer(&mut self, at: u64, who: impl Into<String>) -> Result<(), String> {
        let (at, who) = (at as usize, who.into());
        if !at.is_multiple_of(self.cluster) {
            return Err(format!("{who} is at {at:#x}, which is no cluster"));
        }
        match self.users.get_mut(at / self.cluster) {
            Some(users) => users.push(who),
            None => return Err(format!("{who} is at {at:#x}, past the end")),
        }
        Ok(())
    }

    fn walk(&mut self, version: u32, behind: &[u8]) -> Result<Vec<u8>, String> {
        let (size, l1, entries) = (self.u64(24) as usize, self.u64(40), self.u32(36) as usize);
        let mut contents = vec![0; size];
        let there = behind.len().min(size);
        contents[..there].copy_from_slice(&behind[..there]);
        for part in 0..(entries * 8).div_ceil(self.cluster) {
            self.refer(l1 + (part * self.cluster) as u64, "the L1 table")?;
        }
        let per_table = self.cluster / 8;
        if entries < size.div_ceil(self.cluster * per_table) {
            return Err(format!("an L1 table of {entries} entries for {size} bytes"));
        }
        for index in 0..entries {
            let entry = self.u64(l1 as usize + index * 8);
            let table = entry & OFFSET;
            if table == 0 {
                continue;
            }
            let who = format!("L2 table {index}");
            self.refer(table, &who)?;
            self.check_copied(entry, table, &who)?;
            for slot in 0..per_table {
                let entry = self.u64(table as usize + slot * 8);
                let at = (index * per_table + slot) * self.cluster;
                self.cluster_at(version, entry, at, &mut contents)?;
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
        let who = format!("the disk's cluster at {at:#x}");
        if entry & COMPRESSED != 0 || entry & !(COPIED | OFFSET | ZERO) != 0 {
            return Err(format!("{who} has the entry {entry:#x}"));
        }
        let (host, is_zero) = (entry & OFFSET, entry & ZERO != 0);
        if is_zero && version < 3 {
            return Err(format!("{who} has the entry {entry:#x} in version 2"));
        }
        if host != 0 {
            self.refer(host, &who)?;
            self.check_copied(entry, host, &who)?;
        }
        // A table may reach farther than the disk.
        let Some(place) = contents.get_mut(at..) else { return Ok(()) };
        let len = place.len().min(self.cluster);
        place[..len].fill(0);
        if !is_zero && host != 0 {
            let data = self.bytes.get(host as usize..).unwrap_or_default();
            let len = len.min(data.len());
            place[..len].copy_from_slice(&data[..len]);
        }
        Ok(())
    }

    /// Checks that the flag is set exactly if the count is 1.
    fn check_copied(&self, entry: u64, at: u64, who: &str) -> Result<(), String> {
        let count = self.count(at as usize / self.cluster);
        if (entry & COPIED != 0) != (count == 1) {
            return Err(format!("{who}: entry {entry:#x}, but {count} references"));
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
            if users.len() > 1 || users.len() as u64 > count {
                let at = cluster * self.cluster;
                return Err(format!("{at:#x} is used by {users:?}, and counted {count} times"));
            }
        }
        Ok(())
    }
}

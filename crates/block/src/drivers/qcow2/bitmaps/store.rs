//! Writing the bitmaps of an image that is closed, and removing one.

use std::collections::{HashMap, HashSet};

use event_loop::AlignedBuf;
use event_loop::sync::lock;
use nix::errno::Errno;

use super::directory::{self, Entry, Extension};
use super::{Directory, ImageBitmaps, data_clusters, inconsistent, is_data};
use crate::drivers::qcow2::context::{Channels, Transfer};
use crate::drivers::qcow2::header_layout::Change;
use crate::drivers::qcow2::rooms::Rooms;
use crate::drivers::qcow2::steps::ENTRY;
use crate::request::Part;
use crate::track::Storage;

/// Bytes written at once.
const RUN: u64 = 1 << 20;

/// A bitmap that is to be stored.
struct New {
    entry: Entry,
    bits: Vec<u8>,
}

impl Rooms<'_> {
    /// Writes bytes to new clusters, as many as follow each other. Returns the first byte's place in the file, and how
    /// many bytes were written.
    async fn put_some(&mut self, bytes: &[u8]) -> Result<(u64, usize), Errno> {
        let cluster = self.image.cluster;
        let most = (bytes.len() as u64).div_ceil(cluster).min((RUN / cluster).max(1));
        let room = self.reserve(most).await?;
        let (host, len) = (room.host, bytes.len().min((room.clusters * cluster) as usize));
        self.write(host, &bytes[..len]).await?;
        Ok((host, len))
    }

    /// Writes bytes to new clusters that follow each other. Returns the first byte's place in the file.
    async fn put(&mut self, bytes: &[u8]) -> Result<u64, Errno> {
        let host = self.take((bytes.len() as u64).div_ceil(self.image.cluster)).await?;
        self.write(host, bytes).await?;
        Ok(host)
    }

    async fn write(&self, mut offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        for run in bytes.chunks(RUN as usize) {
            let len = (run.len() as u64).next_multiple_of(self.image.cluster);
            let mut bufs = AlignedBuf::io_bufs(len as usize, 4096).ok_or(Errno::ENOMEM)?;
            bufs.copy_in(0, run);
            let ticket = self.image.shared.begin_write();
            let write =
                Transfer::start_part_write(self.channels, Part::Other, offset, bufs, ticket);
            write.await.0?;
            offset += len;
        }
        self.image.wrote_new_data();
        Ok(())
    }

    /// Writes a bitmap and its table.
    async fn put_bitmap(&mut self, new: New) -> Result<Entry, Errno> {
        let New { mut entry, bits } = new;
        let cluster = self.image.cluster as usize;
        let parts: Vec<&[u8]> = bits.chunks(cluster).collect();
        let is_set = |part: &&[u8]| part.iter().any(|byte| *byte != 0);
        let mut table = vec![0u64; parts.len()];
        let mut at = 0;
        while at < parts.len() {
            let run = parts[at..].iter().take_while(|part| is_set(part)).count();
            if run == 0 {
                at += 1;
                continue;
            }
            let bytes = &bits[at * cluster..bits.len().min((at + run) * cluster)];
            let (host, len) = self.put_some(bytes).await?;
            let written = len.div_ceil(cluster);
            for nth in 0..written {
                table[at + nth] = host + (nth * cluster) as u64;
            }
            at += written;
        }
        let bytes: Vec<u8> = table.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        entry.table = (self.put(&bytes).await?, table.len() as u32);
        Ok(entry)
    }
}

impl ImageBitmaps {
    /// Stores all bitmaps. Nobody changes them any more. They are on stable storage when the image is flushed.
    pub(in super::super) async fn store(&self, channels: &Channels) -> Result<(), Errno> {
        if self.are_whole() {
            return Ok(());
        }
        if self.image.damage.is_damaged() {
            return Err(Errno::EIO);
        }
        let _turn = self.changing.lock().await;
        let before = lock(&self.directory).clone();
        let stored = self.stored();
        let kept = inconsistent(&stored);
        // As in QEMU, bitmaps keep their order, and those that are new follow, the newest first.
        let places = before.entries.iter().zip(0..).map(|(entry, place)| (&*entry.name, place));
        let places: HashMap<&str, usize> = places.collect();
        let mut new: Vec<_> = stored.iter().rev().collect();
        new.retain(|bitmap| bitmap.storage() == Storage::Image);
        new.sort_by_key(|bitmap| places.get(bitmap.name()).copied().unwrap_or(usize::MAX));
        let new = new.into_iter().map(|bitmap| New {
            entry: Entry {
                name: bitmap.name().to_owned(),
                in_use: false,
                auto: bitmap.is_recording(),
                granularity_bits: bitmap.bits().granularity().trailing_zeros(),
                table: (0, 0),
            },
            bits: bitmap.bits().to_bytes(),
        });
        let new = new.collect();
        let stays = |entry: &Entry| kept.contains(&*entry.name);
        let (kept, gone) = before.entries.iter().cloned().partition(stays);
        self.replace(channels, kept, new, gone).await
    }

    /// Has the file say that all bitmaps in it are in use, after they were stored.
    pub(in super::super) async fn mark(&self, channels: &Channels) -> Result<(), Errno> {
        let _turn = self.changing.lock().await;
        let mut entries = lock(&self.directory).entries.clone();
        if entries.iter().all(|entry| entry.in_use) {
            return Ok(());
        }
        entries.iter_mut().for_each(|entry| entry.in_use = true);
        self.replace(channels, entries, Vec::new(), Vec::new()).await
    }

    /// Removes a bitmap.
    pub(super) async fn remove(&self, channels: &Channels, name: &str) -> Result<(), Errno> {
        let _turn = self.changing.lock().await;
        let entries = lock(&self.directory).entries.clone();
        let (gone, left): (Vec<_>, _) = entries.into_iter().partition(|entry| entry.name == name);
        match gone.is_empty() {
            true => Ok(()),
            false => self.replace(channels, left, Vec::new(), gone).await,
        }
    }

    /// Writes a new directory. What refers to it changes in one sector, after all else.
    async fn replace(
        &self,
        channels: &Channels,
        mut entries: Vec<Entry>,
        new: Vec<New>,
        gone: Vec<Entry>,
    ) -> Result<(), Errno> {
        let image = &*self.image;
        let mut rooms = Rooms::new(image, channels);
        let mut old = Vec::new();
        for entry in &gone {
            old.extend(self.clusters_of(channels, entry).await?);
        }
        let at = lock(&self.directory).at;
        old.extend(clusters(at.0, at.1, image.cluster));
        let written = async {
            for new in new {
                entries.push(rooms.put_bitmap(new).await?);
            }
            let bytes = directory::bytes(&entries);
            let at = match bytes.is_empty() {
                true => (0, 0),
                false => (rooms.put(&bytes).await?, bytes.len() as u64),
            };
            let count = entries.len() as u32;
            let extension = (count > 0).then_some(Extension { count, directory: at });
            let change = Change { bitmaps: Some(extension), ..Change::default() };
            image.check_header_change(channels, &change).await?;
            rooms.count().await?;
            image.change_header(channels, &change).await?;
            Ok(Directory { entries, at })
        };
        match written.await {
            Ok(directory) => {
                *lock(&self.directory) = directory;
                let counted: HashSet<u64> = rooms.counted.iter().copied().collect();
                old.retain(|host| !counted.contains(host));
                rooms.give_back(&old).await;
                Ok(())
            }
            Err(errno) => {
                rooms.give_back(&rooms.counted).await;
                Err(errno)
            }
        }
    }

    /// The clusters of a bitmap and its table.
    async fn clusters_of(&self, channels: &Channels, entry: &Entry) -> Result<Vec<u64>, Errno> {
        let (cluster, end) = (self.image.cluster, self.below.file_end());
        let len = u64::from(entry.table.1) * ENTRY as u64;
        let mut all: Vec<u64> = clusters(entry.table.0, len, cluster).collect();
        let data = data_clusters(channels, entry, end).await?.unwrap_or_default();
        // The clusters of a damaged table may be in use elsewhere: rather leak them.
        if data.iter().all(|entry| *entry <= 1 || is_data(*entry, cluster, end)) {
            all.extend(data.into_iter().filter(|entry| *entry > 1));
        }
        Ok(all)
    }
}

/// The clusters of a range of the file.
fn clusters(offset: u64, len: u64, cluster: u64) -> impl Iterator<Item = u64> {
    (0..len.div_ceil(cluster)).map(move |nth| offset + nth * cluster)
}

//! New clusters for metadata, until the header leads to them.

use nix::errno::Errno;

use super::context::Channels;
use super::core::Reserved;
use super::engine::Room;
use super::image::Image;

/// Tries to find neighbouring clusters among those that are free.
const TRIES: usize = 16;

/// Clusters that nothing leads to and no other use takes. Dropping frees the reserved ones.
pub(super) struct Rooms<'a> {
    pub(super) image: &'a Image,
    pub(super) channels: &'a Channels,
    pub(super) reserved: Vec<Reserved<'a>>,
    /// The first bytes of clusters that are counted as in use.
    pub(super) counted: Vec<u64>,
}

impl<'a> Rooms<'a> {
    pub(super) fn new(image: &'a Image, channels: &'a Channels) -> Rooms<'a> {
        Rooms { image, channels, reserved: Vec::new(), counted: Vec::new() }
    }

    /// Reserves clusters that follow each other, at most so many.
    pub(super) async fn reserve(&mut self, most: u64) -> Result<Room, Errno> {
        let reserved = self.find(most).await?;
        let room = reserved.room.clone();
        self.reserved.push(reserved);
        Ok(room)
    }

    /// Takes clusters that follow each other. Returns the first byte.
    pub(super) async fn take(&mut self, clusters: u64) -> Result<u64, Errno> {
        if clusters == 0 {
            return Ok(0);
        }
        // Too small ones are held, so that they are not found again.
        let mut small = Vec::new();
        for _ in 0..TRIES {
            let reserved = self.find(clusters).await?;
            if reserved.room.clusters == clusters {
                let host = reserved.room.host;
                self.reserved.push(reserved);
                return Ok(host);
            }
            small.push(reserved);
        }
        let (image, channels) = (self.image, self.channels);
        let host = image.engine(channels, |engine| engine.take(clusters)).await?;
        self.counted.extend((0..clusters).map(|nth| host + nth * image.cluster));
        Ok(host)
    }

    /// Makes clusters that are not in use yet zeroes, so that they have blocks in the file.
    pub(super) async fn write_zeroes(&mut self, host: u64, clusters: u64) -> Result<(), Errno> {
        if clusters == 0 {
            return Ok(());
        }
        // Dropped meanwhile, they are free only after the write to them.
        self.set_writing(true);
        let bytes = host..host + clusters * self.image.cluster;
        let written = self.image.write_blocks(self.channels, bytes).await;
        self.set_writing(false);
        written
    }

    /// Whether writes to the reserved clusters are in flight.
    pub(super) fn set_writing(&mut self, is_writing: bool) {
        self.reserved.iter_mut().for_each(|reserved| reserved.is_writing = is_writing);
    }

    /// Counts the reserved clusters as in use.
    pub(super) async fn count(&mut self) -> Result<(), Errno> {
        let (image, channels) = (self.image, self.channels);
        for reserved in &mut self.reserved {
            while reserved.room.clusters > 0 {
                let host = reserved.room.host;
                image.engine(channels, |engine| engine.use_reserved(host)).await?;
                reserved.advance(1);
                self.counted.push(host);
            }
        }
        Ok(())
    }

    /// Gives clusters back that are counted.
    pub(super) async fn give_back(&self, clusters: &[u64]) {
        for host in clusters {
            // A failure leaves the cluster counted, and unused until the image is checked.
            let _ = self.image.engine(self.channels, |engine| engine.give_back(*host)).await;
        }
    }

    async fn find(&self, most: u64) -> Result<Reserved<'a>, Errno> {
        let room = self.image.engine(self.channels, |engine| engine.reserve(most)).await?;
        Ok(Reserved::new(self.image, room))
    }
}

//! Where on the disk requests go.

use fastrand::Rng;

/// The order of offsets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Uniformly random blocks.
    Random,
    /// One block after the other, from the start again at the end.
    Sequential,
}

/// The offsets of one queue, each a multiple of the block size.
#[derive(Debug)]
pub struct Offsets {
    order: Order,
    blocks: u64,
    block_size: u64,
    next_block: u64,
    random: Rng,
}

impl Offsets {
    /// Offsets on a disk of `blocks` blocks, for queue `queue` of `queues`. Sequential queues start
    /// at different places, so that they do not read the same blocks at the same time.
    pub fn new(order: Order, blocks: u64, block_size: u64, queue: u64, queues: u64) -> Self {
        let next_block = blocks / queues.max(1) * queue;
        Self { order, blocks, block_size, next_block, random: Rng::with_seed(queue + 1) }
    }

    /// The next offset, in bytes.
    pub fn next_offset(&mut self) -> u64 {
        let block = match self.order {
            Order::Random => self.random.u64(..self.blocks),
            Order::Sequential => {
                let block = self.next_block;
                self.next_block = if block + 1 == self.blocks { 0 } else { block + 1 };
                block
            }
        };
        block * self.block_size
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_offsets_cover_the_disk_and_stay_on_it() {
        let mut offsets = Offsets::new(Order::Random, 16, 4096, 0, 1);
        let mut seen = [0u32; 16];
        for _ in 0..16_000 {
            let offset = offsets.next_offset();
            assert_eq!(offset % 4096, 0);
            seen[(offset / 4096) as usize] += 1;
        }
        assert!(seen.iter().all(|&n| (800..1200).contains(&n)), "{seen:?}");
    }

    #[test]
    fn sequential_offsets_start_apart_and_wrap() {
        let mut offsets = Offsets::new(Order::Sequential, 8, 512, 1, 2);
        let taken: Vec<u64> = (0..5).map(|_| offsets.next_offset() / 512).collect();
        assert_eq!(taken, [4, 5, 6, 7, 0]);
    }
}

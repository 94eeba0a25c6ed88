//! The one source of chance.

pub(crate) use event_loop::ring::sim::Random;

/// Some of the sectors of a disk: all, or a hot area, so that requests overlap.
pub(crate) fn area(random: &Random, sectors: u32) -> u32 {
    if random.one_in(4) { sectors.min(64) } else { sectors }
}

/// The first sector and the number of sectors of a request for at most `count` of them.
pub(crate) fn range(random: &Random, sectors: u32, count: u32) -> (u32, u32) {
    let area = area(random, sectors);
    let count = count.min(area);
    (random.below(u64::from(area - count + 1)) as u32, count)
}

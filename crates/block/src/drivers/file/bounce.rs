//! A channel's bounce buffers, for memory and ranges that `O_DIRECT` does not take.

use std::collections::VecDeque;

use event_loop::{AlignedBuf, IoBufs};

use super::plan::BOUNCE;

/// Most buffers a channel has: 4 MiB. Requests beyond that wait for one.
const MAX: usize = 32;
/// What any device takes, bytes.
const ALIGN: usize = 4096;

/// Bounce buffers, made on demand and kept.
#[derive(Default)]
pub(crate) struct Bounces {
    free: Vec<IoBufs>,
    made: usize,
    waiting: VecDeque<u32>,
}

/// What a request that asks for a bounce buffer gets.
pub(crate) enum Bounce {
    /// The buffer, [`BOUNCE`] bytes.
    Here(IoBufs),
    /// Its token was put in line.
    Wait,
    /// There is no memory for one, and none in use that could become free.
    NoMemory,
}

impl Bounces {
    pub(crate) fn take(&mut self, token: u32, align: usize) -> Bounce {
        if let Some(buf) = self.free.pop() {
            return Bounce::Here(buf);
        }
        if self.made < MAX
            && let Some(buf) = AlignedBuf::io_bufs(BOUNCE, align.max(ALIGN))
        {
            self.made += 1;
            return Bounce::Here(buf);
        }
        if self.made == 0 {
            return Bounce::NoMemory;
        }
        self.waiting.push_back(token);
        Bounce::Wait
    }

    /// Takes a buffer back; the token returned has waited longest and may try again now.
    pub(crate) fn give(&mut self, buf: IoBufs) -> Option<u32> {
        self.free.push(buf);
        self.waiting.pop_front()
    }
}

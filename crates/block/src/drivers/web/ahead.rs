//! Reads ahead of a sequential reader.
//!
//! A read that begins where the last one has ended starts a stream. Bytes behind a stream are fetched in windows before
//! they are asked for: `readahead` bytes at first, and more when half a window is used. A read elsewhere ends the stream.
//!
//! If the server is far away, `readahead` bytes are too few: with 50 ms to the server, 256 KiB at a time are 5 MB/s. So the
//! number doubles when the reader has to wait for such a server, up to what the stream has read.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use event_loop::sync::lock;
use tokio::sync::OnceCell;

use super::image::Image;
use super::source::Answer;

/// Windows that are kept behind the reader, for reads that overtake each other.
const KEPT: usize = 3;
/// The most that is fetched ahead, bytes, unless `readahead` is more.
const FARTHEST: u64 = 8 << 20;
/// Of what is fetched ahead, a window is at least this part.
const WINDOWS: u64 = 8;

/// What is read ahead.
pub(super) struct Ahead {
    /// The node's `readahead`, bytes. 0: nothing is read ahead.
    least: u64,
    stream: Mutex<Stream>,
}

#[derive(Default)]
struct Stream {
    /// Where the first read began, and the last one ended.
    read: Range<u64>,
    /// Bytes that are fetched ahead. 0: as few as possible.
    ahead: u64,
    /// Windows that begin before this byte were asked for before `ahead` grew last.
    grown: u64,
    /// Adjacent, in order.
    windows: VecDeque<Arc<Window>>,
}

/// Bytes that are fetched, or were. `None`: that has failed.
struct Window {
    range: Range<u64>,
    answer: OnceCell<Option<Answer>>,
}

impl Ahead {
    pub(super) fn new(least: u64) -> Ahead {
        Ahead { least, stream: Mutex::default() }
    }

    /// Returns a range that was read ahead. `None`: it was not.
    pub(super) async fn take(&self, image: &Arc<Image>, range: &Range<u64>) -> Option<Vec<Bytes>> {
        let (hit, next) = lock(&self.stream).advance(range, self.least, image.len());
        for window in next {
            let image = image.clone();
            tokio::spawn(async move {
                let _ = window.answer(&image).await;
            });
        }
        let mut pieces = Vec::new();
        for window in hit {
            let is_late = !window.answer.initialized();
            let answer = window.answer(image).await?;
            if is_late && answer.is_from_afar {
                lock(&self.stream).grow(&window.range, self.least);
            }
            pieces.extend(part(&answer.pieces, window.range.start, range));
        }
        (!pieces.is_empty()).then_some(pieces)
    }
}

impl Window {
    async fn answer(&self, image: &Image) -> Option<&Answer> {
        let fetched = self.answer.get_or_init(async || image.fetch(&self.range).await.ok());
        fetched.await.as_ref()
    }
}

impl Stream {
    /// Takes note of a read. Returns the windows with its range, and the windows to fetch.
    fn advance(
        &mut self,
        range: &Range<u64>,
        least: u64,
        len: u64,
    ) -> (Vec<Arc<Window>>, Vec<Arc<Window>>) {
        if least == 0 {
            return (Vec::new(), Vec::new());
        }
        // The next read will be as long: it has to find all of its bytes in windows.
        let least = least.max(FARTHEST.min(range.end - range.start));
        let is_next = range.start == self.read.end && range.start > 0;
        let (first, last) = (self.windows.front(), self.windows.back());
        let known = first.zip(last).map(|(first, last)| first.range.start..last.range.end);
        let is_known =
            known.is_some_and(|known| known.start <= range.start && range.end <= known.end);
        if is_known {
            self.read.end = self.read.end.max(range.end);
        } else {
            let (start, ahead) =
                if is_next { (self.read.start, self.ahead) } else { (range.start, 0) };
            *self = Stream { read: start..range.end, ahead, ..Stream::default() };
        }
        let overlaps = |window: &&Arc<Window>| {
            window.range.start < range.end && range.start < window.range.end
        };
        let hit = self.windows.iter().filter(overlaps).cloned().collect();
        let next =
            if is_known || is_next { self.fetch_from(range.end, least, len) } else { Vec::new() };
        (hit, next)
    }

    /// Returns new windows, until enough is fetched behind byte `end`.
    fn fetch_from(&mut self, end: u64, least: u64, len: u64) -> Vec<Arc<Window>> {
        let ahead = self.ahead.max(least);
        let size = least.max(ahead / WINDOWS);
        let mut next = Vec::new();
        let mut from = self.windows.back().map_or(end, |last| last.range.end);
        while from < len && from.saturating_sub(end) <= ahead - size / 2 {
            let range = from..len.min(from + size);
            from = range.end;
            next.push(Arc::new(Window { range, answer: OnceCell::new() }));
        }
        self.windows.extend(next.iter().cloned());
        while self.windows.get(KEPT).is_some_and(|window| window.range.end <= end) {
            self.windows.pop_front();
        }
        next
    }

    /// A reader has waited for a window, as the server is far away: more is fetched ahead from now on.
    fn grow(&mut self, late: &Range<u64>, least: u64) {
        let is_of_stream = self.windows.iter().any(|window| window.range == *late);
        if !is_of_stream || late.start < self.grown {
            return;
        }
        let most = FARTHEST.min(self.read.end - self.read.start).max(least);
        self.ahead = (2 * self.ahead.max(least)).min(most);
        self.grown = self.windows.back().map_or(0, |last| last.range.end);
    }
}

/// Returns the bytes of `range` in pieces that begin at byte `start`.
fn part<'a>(
    pieces: &'a [Bytes],
    start: u64,
    range: &'a Range<u64>,
) -> impl Iterator<Item = Bytes> + 'a {
    let mut at = start;
    pieces.iter().filter_map(move |piece| {
        let (first, end) = (at, at + piece.len() as u64);
        at = end;
        let (from, to) = (range.start.max(first), range.end.min(end));
        (from < to).then(|| piece.slice((from - first) as usize..(to - first) as usize))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 1000;
    const LEN: u64 = 1 << 30;

    /// Start and end of windows.
    type Windows = Vec<(u64, u64)>;

    /// The windows that a read finds, and those that are fetched.
    fn read(stream: &mut Stream, range: Range<u64>) -> (Windows, Windows) {
        let (hit, next) = stream.advance(&range, SIZE, LEN);
        let ranges = |windows: Vec<Arc<Window>>| {
            windows.iter().map(|window| (window.range.start, window.range.end)).collect()
        };
        (ranges(hit), ranges(next))
    }

    #[test]
    fn a_stream_is_found_and_kept_ahead_of() {
        let mut stream = Stream::default();
        assert_eq!(read(&mut stream, 2000..2100), (vec![], vec![]));
        assert_eq!(read(&mut stream, 2100..2200), (vec![], vec![(2200, 3200)]));
        assert_eq!(read(&mut stream, 2200..2600), (vec![(2200, 3200)], vec![]));
        assert_eq!(read(&mut stream, 2600..2800), (vec![(2200, 3200)], vec![(3200, 4200)]));
        assert_eq!(read(&mut stream, 2800..3300), (vec![(2200, 3200), (3200, 4200)], vec![]));
        // A read elsewhere ends it.
        assert_eq!(read(&mut stream, 100..200), (vec![], vec![]));
        assert_eq!(read(&mut stream, 3300..3400), (vec![], vec![]));
    }

    #[test]
    fn nothing_is_read_past_the_end_or_without_a_size() {
        let mut stream = Stream::default();
        read(&mut stream, LEN - 1000..LEN - 500);
        let (found, next) = read(&mut stream, LEN - 500..LEN - 400);
        assert_eq!((found, next), (vec![], vec![(LEN - 400, LEN)]));
        let (found, next) = read(&mut stream, LEN - 400..LEN);
        assert_eq!((found, next), (vec![(LEN - 400, LEN)], vec![]));
        let mut stream = Stream::default();
        stream.advance(&(0..10), 0, LEN);
        assert!(stream.advance(&(10..20), 0, LEN).1.is_empty());
    }

    #[test]
    fn reads_that_overtake_each_other_find_their_windows() {
        let mut stream = Stream::default();
        read(&mut stream, 1000..1500);
        assert_eq!(read(&mut stream, 1500..2000).1, [(2000, 3000)]);
        assert_eq!(read(&mut stream, 2500..3000), (vec![(2000, 3000)], vec![(3000, 4000)]));
        assert_eq!(read(&mut stream, 2000..2500), (vec![(2000, 3000)], vec![]));
        assert_eq!(read(&mut stream, 3000..3500), (vec![(3000, 4000)], vec![(4000, 5000)]));
        for start in (3500..10_000).step_by(500) {
            read(&mut stream, start..start + 500);
        }
        assert!(stream.windows.len() <= KEPT + 2, "{}", stream.windows.len());
    }

    #[test]
    fn more_is_fetched_ahead_for_a_reader_that_waits() {
        let mut stream = Stream::default();
        let mut at = 1000;
        let mut read_on = |stream: &mut Stream| {
            at += 500;
            read(stream, at - 500..at);
        };
        read_on(&mut stream);
        read_on(&mut stream);
        // As much as was read, and no more.
        let late = stream.windows[0].range.clone();
        stream.grow(&late, SIZE);
        assert_eq!(stream.ahead, SIZE);
        for _ in 0..6 {
            read_on(&mut stream);
        }
        let late = stream.windows.back().expect("a window").range.clone();
        stream.grow(&late, SIZE);
        assert_eq!(stream.ahead, 2 * SIZE);
        // Another reader of the same window does not count.
        stream.grow(&late, SIZE);
        assert_eq!(stream.ahead, 2 * SIZE);
        for _ in 0..20_000 {
            read_on(&mut stream);
            let late = stream.windows.back().expect("a window").range.clone();
            stream.grow(&late, SIZE);
        }
        assert_eq!(stream.ahead, FARTHEST);
        let behind = stream.windows.back().expect("a window").range.end - stream.read.end;
        assert!((FARTHEST - FARTHEST / WINDOWS..=FARTHEST + FARTHEST / WINDOWS).contains(&behind));
        assert!(stream.windows.len() <= KEPT + WINDOWS as usize + 3, "{}", stream.windows.len());
        // A read elsewhere starts anew.
        read(&mut stream, 100..200);
        assert_eq!((stream.ahead, stream.windows.len()), (0, 0));
    }

    #[test]
    fn a_part_of_several_pieces_is_cut_out() {
        let pieces =
            [Bytes::from_static(b"abc"), Bytes::from_static(b"def"), Bytes::from_static(b"g")];
        let cut = |range: Range<u64>| part(&pieces, 10, &range).collect::<Vec<_>>().concat();
        assert_eq!(cut(10..17), b"abcdefg");
        assert_eq!(cut(12..14), b"cd");
        assert_eq!(cut(13..16), b"def");
        assert_eq!(cut(16..17), b"g");
    }
}

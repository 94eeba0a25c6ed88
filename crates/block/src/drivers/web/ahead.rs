//! Reads ahead of a sequential reader.
//!
//! A read that begins where the last one has ended starts a stream. Behind a stream, windows of `readahead` bytes are
//! fetched before they are asked for: one, and the next one when half of it is used. A read elsewhere ends the stream.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use event_loop::sync::lock;
use tokio::sync::OnceCell;

use super::image::Image;

/// Windows that are kept, for reads that overtake each other.
const KEPT: usize = 4;

/// What is read ahead.
pub(super) struct Ahead {
    /// Bytes of a window. 0: nothing is read ahead.
    size: u64,
    stream: Mutex<Stream>,
}

#[derive(Default)]
struct Stream {
    /// Where the last read ended.
    end: u64,
    /// Adjacent, in order.
    windows: VecDeque<Arc<Window>>,
}

/// Bytes that are fetched, or were. `None`: that has failed.
struct Window {
    range: Range<u64>,
    pieces: OnceCell<Option<Vec<Bytes>>>,
}

impl Ahead {
    pub(super) fn new(size: u64) -> Ahead {
        Ahead { size, stream: Mutex::default() }
    }

    /// Returns a range that was read ahead. `None`: it was not.
    pub(super) async fn take(&self, image: &Arc<Image>, range: &Range<u64>) -> Option<Vec<Bytes>> {
        let (hit, next) = lock(&self.stream).advance(range, self.size, image.len());
        if let Some(window) = next {
            let image = image.clone();
            tokio::spawn(async move {
                let _ = window.pieces(&image).await;
            });
        }
        let mut pieces = Vec::new();
        for window in hit {
            let all = window.pieces(image).await?;
            pieces.extend(part(all, window.range.start, range));
        }
        (!pieces.is_empty()).then_some(pieces)
    }
}

impl Window {
    async fn pieces(&self, image: &Image) -> Option<&Vec<Bytes>> {
        let fetched = self.pieces.get_or_init(async || image.fetch(&self.range).await.ok());
        fetched.await.as_ref()
    }
}

impl Stream {
    /// Takes note of a read. Returns the windows with its range, and the window to fetch.
    fn advance(
        &mut self,
        range: &Range<u64>,
        size: u64,
        len: u64,
    ) -> (Vec<Arc<Window>>, Option<Arc<Window>>) {
        if size == 0 {
            return (Vec::new(), None);
        }
        let known =
            |window: &Arc<Window>| window.range.start < range.end && range.start < window.range.end;
        let (first, last) = (self.windows.front(), self.windows.back());
        let ahead = first.zip(last).map(|(first, last)| first.range.start..last.range.end);
        let is_known = ahead.as_ref().is_some_and(|a| a.start <= range.start && range.end <= a.end);
        let hit = match is_known {
            true => self.windows.iter().filter(|window| known(window)).cloned().collect(),
            false => Vec::new(),
        };
        let is_next = range.start == self.end && range.start > 0;
        if !is_known {
            self.windows.clear();
        }
        self.end = if is_known { self.end.max(range.end) } else { range.end };
        // From where on bytes are missing, if it is time to fetch them.
        let from = match (is_known, self.windows.back()) {
            (true, Some(last)) => (last.range.end - range.end.min(last.range.end) <= size / 2)
                .then_some(last.range.end),
            _ => is_next.then_some(range.end),
        };
        let next = from.filter(|from| *from < len).map(|from| {
            let range = from..len.min(from + size);
            let window = Arc::new(Window { range, pieces: OnceCell::new() });
            self.windows.push_back(window.clone());
            self.windows.drain(..self.windows.len().saturating_sub(KEPT));
            window
        });
        (hit, next)
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
    const LEN: u64 = 10_000;

    /// The windows that a read finds, and the window that is fetched.
    fn read(stream: &mut Stream, range: Range<u64>) -> (Vec<(u64, u64)>, Option<Range<u64>>) {
        let (hit, next) = stream.advance(&range, SIZE, LEN);
        let ranges = hit.iter().map(|window| (window.range.start, window.range.end)).collect();
        (ranges, next.map(|window| window.range.clone()))
    }

    #[test]
    fn a_stream_is_found_and_kept_ahead_of() {
        let mut stream = Stream::default();
        assert_eq!(read(&mut stream, 2000..2100), (vec![], None));
        assert_eq!(read(&mut stream, 2100..2200), (vec![], Some(2200..3200)));
        assert_eq!(read(&mut stream, 2200..2600), (vec![(2200, 3200)], None));
        assert_eq!(read(&mut stream, 2600..2800), (vec![(2200, 3200)], Some(3200..4200)));
        assert_eq!(read(&mut stream, 2800..3300), (vec![(2200, 3200), (3200, 4200)], None));
        // A read elsewhere ends it.
        assert_eq!(read(&mut stream, 100..200), (vec![], None));
        assert_eq!(read(&mut stream, 3300..3400), (vec![], None));
    }

    #[test]
    fn nothing_is_read_past_the_end_or_without_a_size() {
        let mut stream = Stream::default();
        read(&mut stream, 9000..9500);
        assert_eq!(read(&mut stream, 9500..9600), (vec![], Some(9600..10_000)));
        assert_eq!(read(&mut stream, 9600..10_000), (vec![(9600, 10_000)], None));
        let mut stream = Stream::default();
        stream.advance(&(0..10), 0, LEN);
        assert!(stream.advance(&(10..20), 0, LEN).1.is_none());
    }

    #[test]
    fn reads_that_overtake_each_other_find_their_windows() {
        let mut stream = Stream::default();
        read(&mut stream, 1000..1500);
        assert_eq!(read(&mut stream, 1500..2000).1, Some(2000..3000));
        assert_eq!(read(&mut stream, 2500..3000), (vec![(2000, 3000)], Some(3000..4000)));
        assert_eq!(read(&mut stream, 2000..2500), (vec![(2000, 3000)], None));
        assert_eq!(read(&mut stream, 3000..3500), (vec![(3000, 4000)], Some(4000..5000)));
        assert!(stream.windows.len() <= KEPT);
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

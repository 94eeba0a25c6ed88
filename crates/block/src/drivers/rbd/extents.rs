//! Block status: which objects of an image exist.

use std::ops::ControlFlow;

use nix::errno::Errno;
use rbd::{Image, Span};

use crate::status::{Extent, ExtentState};

/// Bytes of a range that are asked about at once: the library lists all objects before it answers.
const AT_ONCE: u64 = 64 << 30;

/// Returns what is stored in a range, from its beginning on, in at most `room` extents. Blocks.
///
/// The node's size may lie past `size`, the image's: that part reads as zeroes.
pub(super) fn extents(
    image: &Image,
    offset: u64,
    len: u64,
    size: u64,
    room: usize,
) -> Result<Vec<Extent>, Errno> {
    let mut list = List { extents: Vec::new(), at: offset, room: room.max(1) };
    let end = offset.saturating_add(len);
    let stored = end.min(size).min(offset.saturating_add(AT_ONCE));
    if offset < stored {
        let listed = image.spans(offset, stored - offset, |span| list.span(span, stored));
        match listed.map_err(|error| error.errno)? {
            true => list.fill(stored, ExtentState::Hole),
            false => list.fill(stored, ExtentState::Data),
        }
    }
    if stored == end.min(size) {
        list.fill(end, ExtentState::Hole);
    }
    Ok(list.extents)
}

struct List {
    extents: Vec<Extent>,
    /// Where the next extent begins.
    at: u64,
    room: usize,
}

impl List {
    /// Takes a part that exists, or is known to be zeroes.
    fn span(&mut self, span: Span, end: u64) -> ControlFlow<()> {
        let state = if span.exists { ExtentState::Data } else { ExtentState::Hole };
        self.fill(span.offset.min(end), ExtentState::Hole);
        self.fill(span.offset.saturating_add(span.len).min(end), state);
        match self.extents.len() > self.room {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }

    /// Extends the list up to `end`.
    fn fill(&mut self, end: u64, state: ExtentState) {
        let Some(len) = end.checked_sub(self.at).filter(|len| *len > 0) else { return };
        self.at = end;
        match self.extents.last_mut() {
            Some(last) if last.state == state => last.len += len,
            _ => self.extents.push(Extent::own(len, state)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_between_objects_are_holes_and_neighbours_are_one_extent() {
        let mut list = List { extents: Vec::new(), at: 100, room: 8 };
        for (offset, len, exists) in [(150, 50, true), (200, 10, true), (210, 5, false)] {
            let span = Span { offset, len, exists };
            assert!(list.span(span, 1000).is_continue());
        }
        assert!(list.span(Span { offset: 990, len: 100, exists: true }, 1000).is_continue());
        list.fill(1024, ExtentState::Hole);
        let found: Vec<_> = list.extents.iter().map(|extent| (extent.len, extent.state)).collect();
        let expected = [
            (50, ExtentState::Hole),
            (60, ExtentState::Data),
            (780, ExtentState::Hole),
            (10, ExtentState::Data),
            (24, ExtentState::Hole),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_full_list_ends_the_iteration() {
        let mut list = List { extents: Vec::new(), at: 0, room: 1 };
        assert!(list.span(Span { offset: 10, len: 10, exists: true }, 100).is_break());
    }
}

//! Asynchronous events (section 5.2): requests that wait for one, and events that wait for a request.

use crate::saved::{Invalid, Reader, Words};
use std::collections::VecDeque;

/// Requests that may wait at a time. AERL is one less.
pub(crate) const MAX_REQUESTS: usize = 4;

/// An event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// A doorbell of a queue that is not there was written.
    NoSuchDoorbell,
    /// A doorbell got a value beyond its queue's end.
    BadDoorbell,
    /// A namespace has another size.
    NamespaceChanged,
}

/// All events.
const EVENTS: [Event; 3] = [Event::NoSuchDoorbell, Event::BadDoorbell, Event::NamespaceChanged];

/// Log pages by which events are taken note of.
pub(crate) const ERROR_LOG: u8 = 0x01;
pub(crate) const CHANGED_NAMESPACES: u8 = 0x04;

impl Event {
    /// Dword 0 of the answer: type, information, log page.
    fn result(self) -> u32 {
        let (kind, information, page) = match self {
            Event::NoSuchDoorbell => (0, 0x00, ERROR_LOG),
            Event::BadDoorbell => (0, 0x01, ERROR_LOG),
            Event::NamespaceChanged => (2, 0x00, CHANGED_NAMESPACES),
        };
        kind | information << 8 | u32::from(page) << 16
    }

    fn page(self) -> u8 {
        (self.result() >> 16) as u8
    }
}

/// The requests and events of a controller.
#[derive(Debug, Default)]
pub(crate) struct Events {
    /// CIDs of requests that wait.
    requests: VecDeque<u16>,
    waiting: VecDeque<Event>,
    /// A bit per log page that the driver has yet to read after an event: no more events of such a page are reported.
    masked: u32,
}

impl Events {
    /// Writes its state.
    pub(super) fn save(&self, words: &mut Words) {
        words.list(self.requests.iter(), |words, cid| words.put(*cid));
        words.list(self.waiting.iter(), |words, event| words.put(event.result()));
        words.put(self.masked);
    }

    /// Reads what [`save`](Self::save) wrote.
    ///
    /// # Errors
    ///
    /// An event is unknown, or there are too many.
    pub(super) fn restored(words: &mut Reader<'_>) -> Result<Self, Invalid> {
        let requests = words.list(MAX_REQUESTS, Reader::take)?.into();
        let results: Vec<u32> = words.list(EVENTS.len(), Reader::take)?;
        let known = |result: u32| EVENTS.into_iter().find(|event| event.result() == result);
        let waiting = results.into_iter().map(|result| {
            known(result).ok_or(Invalid("an event is unknown, or there are too many"))
        });
        let waiting = waiting.collect::<Result<_, _>>()?;
        Ok(Events { requests, waiting, masked: words.take()? })
    }

    /// Whether requests wait for an event.
    pub(super) fn has_requests(&self) -> bool {
        !self.requests.is_empty()
    }

    /// A request. `false`: there are too many.
    pub(crate) fn request(&mut self, cid: u16) -> bool {
        let has_room = self.requests.len() < MAX_REQUESTS;
        if has_room {
            self.requests.push_back(cid);
        }
        has_room
    }

    /// A request is aborted. `false`: it does not wait.
    pub(crate) fn abort(&mut self, cid: u16) -> bool {
        let at = self.requests.iter().position(|waiting| *waiting == cid);
        at.and_then(|at| self.requests.remove(at)).is_some()
    }

    /// Whether a request waits for an event.
    pub(crate) fn waits(&self, cid: u16) -> bool {
        self.requests.contains(&cid)
    }

    /// An event has happened. One that waits already is not told twice.
    pub(crate) fn happened(&mut self, event: Event) {
        if !self.waiting.contains(&event) {
            self.waiting.push_back(event);
        }
    }

    /// A request to be answered, and with which result.
    pub(crate) fn answer(&mut self) -> Option<(u16, u32)> {
        let is_told = |event: &Event| self.masked >> event.page() & 1 == 0;
        let at = self.waiting.iter().position(is_told)?;
        let cid = self.requests.pop_front()?;
        let event = self.waiting.remove(at)?;
        self.masked |= 1 << event.page();
        Some((cid, event.result()))
    }

    /// The driver has read a log page: its events are reported again.
    pub(crate) fn was_read(&mut self, page: u8) {
        self.masked &= !1u32.checked_shl(page.into()).unwrap_or(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_of_a_page_are_told_once_until_it_is_read() {
        let mut events = Events::default();
        events.happened(Event::NamespaceChanged);
        assert_eq!(events.answer(), None, "nobody asks");
        assert!((7..11).all(|cid| events.request(cid)));
        assert!(!events.request(11));
        assert_eq!(events.answer(), Some((7, 0x0004_0002)));
        events.happened(Event::NamespaceChanged);
        events.happened(Event::NamespaceChanged);
        assert_eq!(events.answer(), None);
        events.happened(Event::BadDoorbell);
        assert_eq!(events.answer(), Some((8, 0x0001_0100)));
        events.was_read(CHANGED_NAMESPACES);
        assert_eq!(events.answer(), Some((9, 0x0004_0002)));
        events.was_read(CHANGED_NAMESPACES);
        assert_eq!(events.answer(), None, "it was told once");
    }
}

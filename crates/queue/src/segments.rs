//! The buffers of a chain as one run of bytes, regardless of their boundaries.

use std::rc::Rc;

use event_loop::IoBufs;
use guest_memory::{AccessError, MemoryView};

use crate::error::SegmentsError;

/// A buffer of a chain.
///
/// Not empty, and its end fits 64 bits. Whether it is memory is checked on access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Guest address of the first byte.
    pub addr: u64,
    /// Length, bytes.
    pub len: u32,
}

/// A run of bytes in the buffers of a chain. A small value, copied freely.
///
/// The driver may split the bytes in any way (VIRTIO_F_ANY_LAYOUT). Splitting a run copies no data.
///
/// ```
/// # use queue::{Chain, SegmentsError}; use guest_memory::MemoryView;
/// # fn request(chain: &Chain, memory: &MemoryView) -> Result<(), SegmentsError> {
/// let (header, data) = chain.readable().split_array::<16>(memory)?;
/// let Some((read_into, status_addr)) = chain.writable().split_last() else { return Ok(()) };
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Segments<'a> {
    /// The segments that have bytes of the run; empty if the run is.
    list: &'a [Segment],
    /// Bytes of the first segment before the run; less than its length.
    skip: u32,
    /// Bytes of the last segment after the run; less than its length.
    cut: u32,
    /// Bytes in the run.
    len: u32,
}

impl<'a> Segments<'a> {
    const EMPTY: Segments<'static> = Segments { list: &[], skip: 0, cut: 0, len: 0 };

    /// All bytes of `list`, which are `len`.
    pub(crate) fn new(list: &'a [Segment], len: u32) -> Self {
        Segments { list, skip: 0, cut: 0, len }
    }

    /// Returns the number of bytes.
    pub fn len(self) -> u32 {
        self.len
    }

    /// Returns whether there are no bytes.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Returns the pieces, in order.
    #[inline]
    pub fn iter(self) -> impl Iterator<Item = Segment> + use<'a> {
        let (mut skip, mut left) = (u64::from(self.skip), self.len);
        self.list.iter().map(move |s| {
            // The list has `skip + len + cut` bytes, so only the first and the last segment are partial, and nothing
            // underflows.
            let len = (s.len - skip as u32).min(left);
            let piece = Segment { addr: s.addr + skip, len };
            skip = 0;
            left -= len;
            piece
        })
    }

    /// Returns the first `at` bytes, and the rest. `None` if there are fewer.
    #[inline]
    pub fn split_at(self, at: u32) -> Option<(Self, Self)> {
        let rest = self.len.checked_sub(at)?;
        if rest == 0 {
            return Some((self, Self::EMPTY));
        }
        // Bytes from the start of the current segment to the split.
        let mut from = u64::from(self.skip) + u64::from(at);
        for (i, s) in self.list.iter().enumerate() {
            if from >= u64::from(s.len) {
                from -= u64::from(s.len);
                continue;
            }
            let from = from as u32;
            let (head, cut) = if from == 0 {
                (self.list.get(..i), 0)
            } else {
                (self.list.get(..=i), s.len - from)
            };
            let front = match head {
                Some(list) if at > 0 => Segments { list, skip: self.skip, cut, len: at },
                _ => Self::EMPTY,
            };
            let list = self.list.get(i..).unwrap_or_default();
            return Some((front, Segments { list, skip: from, cut: self.cut, len: rest }));
        }
        None
    }

    /// Returns all bytes but the last, and the guest address of the last.
    ///
    /// `None` if the run is empty.
    #[inline]
    pub fn split_last(self) -> Option<(Self, u64)> {
        let (last, before) = self.list.split_last()?;
        let end = last.len - self.cut;
        let begin = if before.is_empty() { self.skip } else { 0 };
        let addr = last.addr + u64::from(end - 1);
        let len = self.len - 1;
        let rest = if len == 0 {
            Self::EMPTY
        } else if end - begin == 1 {
            Segments { list: before, skip: self.skip, cut: 0, len }
        } else {
            Segments { list: self.list, skip: self.skip, cut: self.cut + 1, len }
        };
        Some((rest, addr))
    }

    /// Reads the first `N` bytes; returns them and the rest of the run.
    ///
    /// # Errors
    ///
    /// [`SegmentsError`] if there are fewer, or they are not in memory.
    #[inline]
    pub fn split_array<const N: usize>(
        self,
        memory: &MemoryView,
    ) -> Result<([u8; N], Self), SegmentsError> {
        let wanted = u32::try_from(N).unwrap_or(u32::MAX);
        let short = SegmentsError::Short { wanted, len: self.len };
        let (front, rest) = self.split_at(wanted).ok_or(short)?;
        let mut bytes = [0; N];
        if front.read(memory, &mut bytes)? < N {
            return Err(short);
        }
        Ok((bytes, rest))
    }

    /// Copies bytes to `dst`, as many as both have. Returns their number.
    ///
    /// # Errors
    ///
    /// [`AccessError`] if they are not all in memory; `dst` then has a part of them.
    #[inline]
    pub fn read(self, memory: &MemoryView, dst: &mut [u8]) -> Result<usize, AccessError> {
        let mut done = 0;
        for s in self.iter() {
            let Some(rest) = dst.get_mut(done..).filter(|rest| !rest.is_empty()) else { break };
            let n = rest.len().min(s.len as usize);
            memory.read_bytes(s.addr, &mut rest[..n])?;
            done += n;
        }
        Ok(done)
    }

    /// Copies bytes from `src`, as many as both have. Returns their number.
    ///
    /// # Errors
    ///
    /// [`AccessError`] if they are not all in memory; a part of them may then be written.
    #[inline]
    pub fn write(self, memory: &MemoryView, src: &[u8]) -> Result<usize, AccessError> {
        let mut done = 0;
        for s in self.iter() {
            let Some(rest) = src.get(done..).filter(|rest| !rest.is_empty()) else { break };
            let n = rest.len().min(s.len as usize);
            memory.write_bytes(s.addr, &rest[..n])?;
            done += n;
        }
        Ok(done)
    }

    /// Appends all bytes to `bufs` as segments for the kernel.
    ///
    /// See [`MemoryView::push_iovecs`].
    ///
    /// # Errors
    ///
    /// [`AccessError`] if they are not all in memory; `bufs` may then have a part of them.
    #[inline]
    pub fn push_iovecs(
        self,
        memory: &Rc<MemoryView>,
        bufs: &mut IoBufs,
    ) -> Result<(), AccessError> {
        self.iter().try_for_each(|s| memory.push_iovecs(s.addr, s.len as usize, bufs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The guest address of each byte.
    fn flat(run: Segments<'_>) -> Vec<u64> {
        run.iter().flat_map(|s| s.addr..s.addr + u64::from(s.len)).collect()
    }

    #[derive(Debug, Clone)]
    enum Op {
        Front(u32),
        Back(u32),
        AllButLast,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            (0..40u32).prop_map(Op::Front),
            (0..10u32).prop_map(Op::Back),
            Just(Op::AllButLast),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn taken_apart_like_a_list_of_bytes(
            list in prop::collection::vec((0..1000u64, 1..6u32), 0..8),
            ops in prop::collection::vec(op(), 0..12),
        ) {
            let list: Vec<_> = list.into_iter().map(|(addr, len)| Segment { addr, len }).collect();
            let mut run = Segments::new(&list, list.iter().map(|s| s.len).sum());
            let mut model = flat(run);
            for op in ops {
                match op {
                    Op::Front(at) | Op::Back(at) => {
                        let Some((front, back)) = run.split_at(at) else {
                            prop_assert!(at as usize > model.len());
                            continue;
                        };
                        let (model_front, model_back) = model.split_at(at as usize);
                        prop_assert_eq!(flat(front), model_front);
                        prop_assert_eq!(flat(back), model_back);
                        (run, model) = match op {
                            Op::Front(_) => (front, model_front.to_vec()),
                            _ => (back, model_back.to_vec()),
                        };
                    }
                    Op::AllButLast => match run.split_last() {
                        Some((rest, last)) => {
                            prop_assert_eq!(Some(last), model.pop());
                            run = rest;
                        }
                        None => prop_assert!(model.is_empty()),
                    },
                }
                prop_assert_eq!(flat(run), &model[..]);
                prop_assert_eq!((run.len() as usize, run.is_empty()), (model.len(), model.is_empty()));
                prop_assert!(run.iter().all(|s| s.len > 0), "no empty pieces");
            }
        }
    }
}

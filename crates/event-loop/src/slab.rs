//! Values by number, where numbers are used again: what is kept per request under way.

/// Slots by tag. A free slot keeps its contents, such as memory or a generation, for the next use.
///
/// Allocates only to have more slots than ever before.
///
/// ```
/// let mut pool: event_loop::Pool<_> = [10, 20].into_iter().collect();
/// assert_eq!([pool.take(), pool.take(), pool.take()], [Some(0), Some(1), None]);
/// pool.give(0);
/// assert_eq!(pool.take_or_add(|tag| tag), (0, &mut 10));
/// assert_eq!(pool.take_or_add(|tag| tag), (2, &mut 2));
/// ```
#[derive(Debug)]
pub struct Pool<T> {
    slots: Vec<T>,
    free: Vec<u32>,
}

impl<T> Default for Pool<T> {
    fn default() -> Self {
        Pool::with_capacity(0)
    }
}

/// A pool of these slots, all of them free.
impl<T> FromIterator<T> for Pool<T> {
    fn from_iter<I: IntoIterator<Item = T>>(slots: I) -> Self {
        let slots: Vec<T> = slots.into_iter().collect();
        Pool { free: (0..slots.len() as u32).rev().collect(), slots }
    }
}

impl<T> Pool<T> {
    /// Returns a pool without slots, with room for `capacity`.
    ///
    /// Memory is touched when it is used first.
    pub fn with_capacity(capacity: usize) -> Self {
        Pool { slots: Vec::with_capacity(capacity), free: Vec::with_capacity(capacity) }
    }

    /// Takes the slot that became free last. `None`: no slot is free.
    #[inline]
    pub fn take(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// Takes the slot that became free last, or makes one with the next tag.
    #[inline]
    pub fn take_or_add(&mut self, make: impl FnOnce(u32) -> T) -> (u32, &mut T) {
        let tag = match self.free.pop() {
            Some(tag) => tag,
            None => self.add(make),
        };
        (tag, &mut self.slots[tag as usize])
    }

    #[cold]
    fn add(&mut self, make: impl FnOnce(u32) -> T) -> u32 {
        let tag = self.slots.len() as u32;
        self.slots.push(make(tag));
        // Giving a slot back does not allocate.
        self.free.reserve(self.slots.len());
        tag
    }

    /// Gives a slot back, once per [`take`](Self::take).
    #[inline]
    pub fn give(&mut self, tag: u32) {
        self.free.push(tag);
    }

    /// Returns a slot, taken or free.
    #[inline]
    pub fn get(&self, tag: u32) -> Option<&T> {
        self.slots.get(tag as usize)
    }

    /// Returns a slot, taken or free.
    #[inline]
    pub fn get_mut(&mut self, tag: u32) -> Option<&mut T> {
        self.slots.get_mut(tag as usize)
    }

    /// Returns the number of slots that are taken.
    pub fn in_use(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Returns whether [`take`](Self::take) finds a slot.
    pub fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Returns the taken slots and their tags, in the order of the tags. Searches the free ones for each.
    pub fn taken(&self) -> impl Iterator<Item = (u32, &T)> {
        (0..).zip(&self.slots).filter(|(tag, _)| !self.free.contains(tag))
    }

    /// Returns the slots, taken or free, in the order of their tags.
    pub fn iter(&self) -> std::slice::Iter<'_, T> {
        self.slots.iter()
    }

    /// Returns the slots, taken or free, in the order of their tags.
    pub fn iter_mut(&mut self) -> std::slice::IterMut<'_, T> {
        self.slots.iter_mut()
    }
}

/// Values by tag. Allocates only to hold more values than ever before.
///
/// ```
/// let mut slab = event_loop::Slab::default();
/// let tag = slab.insert("request");
/// assert_eq!(slab.remove(tag), Some("request"));
/// assert_eq!(slab.insert("next"), tag);
/// ```
#[derive(Debug)]
pub struct Slab<T>(Pool<Option<T>>);

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Slab::with_capacity(0)
    }
}

impl<T> Slab<T> {
    /// Returns an empty slab with room for `capacity` values.
    ///
    /// Memory is touched when it is used first.
    pub fn with_capacity(capacity: usize) -> Self {
        Slab(Pool::with_capacity(capacity))
    }

    /// Returns the tag that the next value gets.
    pub fn next_tag(&self) -> u32 {
        self.0.free.last().copied().unwrap_or(self.0.slots.len() as u32)
    }

    /// Returns whether a value can be added without allocation.
    pub fn has_room(&self) -> bool {
        self.0.has_free() || self.0.slots.len() < self.0.slots.capacity()
    }

    /// Adds a value. Returns its tag.
    ///
    /// Tags are reused. A tag is below the number of values that the slab has held at most.
    #[inline]
    pub fn insert(&mut self, value: T) -> u32 {
        let (tag, slot) = self.0.take_or_add(|_| None);
        *slot = Some(value);
        tag
    }

    /// Returns the value of a tag.
    #[inline]
    pub fn get(&self, tag: u32) -> Option<&T> {
        self.0.get(tag)?.as_ref()
    }

    /// Returns the value of a tag.
    #[inline]
    pub fn get_mut(&mut self, tag: u32) -> Option<&mut T> {
        self.0.get_mut(tag)?.as_mut()
    }

    /// Takes a value out. `None`: the tag has no value.
    #[inline]
    pub fn remove(&mut self, tag: u32) -> Option<T> {
        let value = self.0.get_mut(tag)?.take()?;
        self.0.give(tag);
        Some(value)
    }

    /// Returns the number of values.
    pub fn len(&self) -> usize {
        self.0.in_use()
    }

    /// Returns whether there is no value.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the values, in the order of their tags.
    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.0.iter().flatten()
    }

    /// Returns the values, in the order of their tags.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.0.iter_mut().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_free_slot_keeps_its_contents_and_giving_it_back_does_not_allocate() {
        let mut pool = Pool::default();
        let tags: Vec<u32> = (0..9).map(|_| pool.take_or_add(|tag| 10 * tag).0).collect();
        assert_eq!((tags.iter().sum::<u32>(), pool.in_use()), (36, 9));
        let room = pool.free.capacity();
        tags.iter().for_each(|tag| pool.give(*tag));
        assert_eq!((pool.free.capacity(), pool.in_use()), (room, 0));
        assert_eq!(pool.take_or_add(|_| 0), (8, &mut 80));
        assert_eq!(pool.take(), Some(7));
        assert_eq!(pool.taken().collect::<Vec<_>>(), [(7, &70), (8, &80)]);
    }

    #[test]
    fn tags_are_used_again_and_a_tag_without_a_value_gives_none() {
        let mut slab = Slab::default();
        assert_eq!([slab.insert('a'), slab.insert('b'), slab.next_tag()], [0, 1, 2]);
        assert_eq!((slab.remove(0), slab.remove(0), slab.remove(7)), (Some('a'), None, None));
        assert_eq!((slab.len(), slab.next_tag(), slab.insert('c')), (1, 0, 0));
        slab.values_mut().for_each(|value| value.make_ascii_uppercase());
        assert_eq!([0, 1].map(|tag| slab.get_mut(tag).copied()), [Some('C'), Some('B')]);
    }
}

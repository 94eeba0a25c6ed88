//! Values by number, where numbers are used again: what is kept per request under way.

/// Values by tag. Allocates only to hold more values than ever before.
///
/// ```
/// let mut slab = event_loop::Slab::default();
/// let tag = slab.insert("request");
/// assert_eq!(slab.remove(tag), Some("request"));
/// assert_eq!(slab.insert("next"), tag);
/// ```
#[derive(Debug)]
pub struct Slab<T> {
    values: Vec<Option<T>>,
    free: Vec<u32>,
}

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
        Slab { values: Vec::with_capacity(capacity), free: Vec::with_capacity(capacity) }
    }

    /// Returns the tag that the next value gets.
    pub fn next_tag(&self) -> u32 {
        self.free.last().copied().unwrap_or(self.values.len() as u32)
    }

    /// Returns whether a value can be added without allocation.
    pub fn has_room(&self) -> bool {
        !self.free.is_empty() || self.values.len() < self.values.capacity()
    }

    /// Adds a value. Returns its tag.
    ///
    /// Tags are reused. A tag is below the number of values that the slab has held at most.
    #[inline]
    pub fn insert(&mut self, value: T) -> u32 {
        match self.free.pop() {
            Some(tag) => {
                self.values[tag as usize] = Some(value);
                tag
            }
            None => {
                self.values.push(Some(value));
                self.values.len() as u32 - 1
            }
        }
    }

    /// Returns the value of a tag.
    #[inline]
    pub fn get(&self, tag: u32) -> Option<&T> {
        self.values.get(tag as usize)?.as_ref()
    }

    /// Returns the value of a tag.
    #[inline]
    pub fn get_mut(&mut self, tag: u32) -> Option<&mut T> {
        self.values.get_mut(tag as usize)?.as_mut()
    }

    /// Takes a value out. `None`: the tag has no value.
    #[inline]
    pub fn remove(&mut self, tag: u32) -> Option<T> {
        let value = self.values.get_mut(tag as usize)?.take()?;
        self.free.push(tag);
        Some(value)
    }

    /// Returns the number of values.
    pub fn len(&self) -> usize {
        self.values.len() - self.free.len()
    }

    /// Returns whether there is no value.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the values, in the order of their tags.
    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.values.iter().flatten()
    }

    /// Returns the values, in the order of their tags.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.values.iter_mut().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

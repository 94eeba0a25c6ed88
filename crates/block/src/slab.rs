//! Values by number, where numbers are used again: what a channel keeps per request under way.

/// Values by tag. Allocates only to hold more values than ever before.
#[derive(Debug)]
pub(crate) struct Slab<T> {
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
    pub(crate) fn with_capacity(capacity: usize) -> Self {
        Slab { values: Vec::with_capacity(capacity), free: Vec::with_capacity(capacity) }
    }

    /// Returns the tag of the next value.
    pub(crate) fn next_tag(&self) -> u32 {
        self.free.last().copied().unwrap_or(self.values.len() as u32)
    }

    /// Adds a value. Returns its tag.
    pub(crate) fn insert(&mut self, value: T) -> u32 {
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
    pub(crate) fn get_mut(&mut self, tag: u32) -> Option<&mut T> {
        self.values.get_mut(tag as usize)?.as_mut()
    }

    /// Takes a value out. `None`: the tag has no value.
    pub(crate) fn remove(&mut self, tag: u32) -> Option<T> {
        let value = self.values.get_mut(tag as usize)?.take()?;
        self.free.push(tag);
        Some(value)
    }

    /// Returns the number of values.
    pub(crate) fn len(&self) -> usize {
        self.values.len() - self.free.len()
    }

    /// Returns the values, in the order of their tags.
    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
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

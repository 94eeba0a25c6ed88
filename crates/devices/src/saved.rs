//! The state of a paused controller as bytes, on its way to another process.
//!
//! The bytes are little-endian words of 64 bits, the format's number first. Each controller parses them into a type of its
//! own that is valid: another process wrote them.

/// Why bytes are no state of a controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the state of the controller is invalid: {0}")]
pub struct Invalid(pub(crate) &'static str);

/// Writes words.
pub(crate) struct Words(Vec<u8>);

impl Words {
    /// Words of this format.
    pub(crate) fn new(format: u64) -> Self {
        let mut words = Words(Vec::new());
        words.put(format);
        words
    }

    pub(crate) fn put(&mut self, word: impl Into<u64>) {
        self.0.extend(word.into().to_le_bytes());
    }

    pub(crate) fn list<T>(
        &mut self,
        items: impl ExactSizeIterator<Item = T>,
        put: impl Fn(&mut Self, T),
    ) {
        self.put(items.len() as u64);
        items.for_each(|item| put(self, item));
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

/// Reads words.
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Reads words of this format.
    ///
    /// # Errors
    ///
    /// It is another format.
    pub(crate) fn new(bytes: &'a [u8], format: u64) -> Result<Self, Invalid> {
        let mut words = Reader(bytes);
        match words.take::<u64>()? == format {
            true => Ok(words),
            false => Err(Invalid("its format is unknown")),
        }
    }

    pub(crate) fn take<T: TryFrom<u64>>(&mut self) -> Result<T, Invalid> {
        let (word, rest) = self.0.split_first_chunk().ok_or(Invalid("it is too short"))?;
        self.0 = rest;
        T::try_from(u64::from_le_bytes(*word)).map_err(|_| Invalid("a number is too large"))
    }

    pub(crate) fn flag(&mut self) -> Result<bool, Invalid> {
        match self.take()? {
            0u8 => Ok(false),
            1 => Ok(true),
            _ => Err(Invalid("a flag is neither 0 nor 1")),
        }
    }

    pub(crate) fn list<T>(
        &mut self,
        most: usize,
        item: impl Fn(&mut Self) -> Result<T, Invalid>,
    ) -> Result<Vec<T>, Invalid> {
        let len: usize = self.take()?;
        if len > most {
            return Err(Invalid("a list is too long"));
        }
        (0..len).map(|_| item(self)).collect()
    }

    /// There are no more words.
    pub(crate) fn end(self) -> Result<(), Invalid> {
        match self.0 {
            [] => Ok(()),
            _ => Err(Invalid("it is too long")),
        }
    }
}

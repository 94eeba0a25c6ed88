//! Memory that O_DIRECT takes.

/// 4 KiB, aligned to itself.
#[repr(C, align(4096))]
#[derive(Debug)]
pub(crate) struct Page(pub(crate) [u8; PAGE_SIZE]);

/// Bytes of a [`Page`].
pub(crate) const PAGE_SIZE: usize = 4096;

impl Page {
    /// One of zeroes, on the heap.
    pub(crate) fn boxed() -> Box<Self> {
        Box::new(Page([0; PAGE_SIZE]))
    }
}

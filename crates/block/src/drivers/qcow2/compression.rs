//! How compressed clusters are compressed.

use std::io::Read;

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress};
use ruzstd::decoding::{FrameDecoder, StreamingDecoder};

/// Largest window of a zstd frame, bytes. An encoder needs no larger one for the largest cluster, which has 2 MiB.
const MAX_WINDOW: u64 = 8 << 20;

/// The compression type of an image, as its header has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compression {
    /// Raw deflate streams.
    Zlib,
    /// Zstandard frames.
    Zstd,
}

impl Compression {
    /// QEMU's name.
    pub(super) fn name(self) -> &'static str {
        match self {
            Compression::Zlib => "zlib",
            Compression::Zstd => "zstd",
        }
    }

    /// Decompresses a cluster of `len` bytes. What follows it in `data` belongs to others. `None`: it is damaged.
    pub(super) fn decompress(self, data: &[u8], len: usize) -> Option<Vec<u8>> {
        let mut cluster = vec![0; len];
        match self {
            Compression::Zlib => {
                let (status, _, found) =
                    decompress(&mut DecompressorOxide::new(), data, &mut cluster, 0, 0);
                let is_done = matches!(status, TINFLStatus::Done | TINFLStatus::HasMoreOutput);
                (is_done && found == len).then_some(cluster)
            }
            Compression::Zstd => {
                let mut decoder = FrameDecoder::new();
                decoder.set_max_window_size(MAX_WINDOW);
                let mut decoder = StreamingDecoder::new_with_decoder(data, decoder).ok()?;
                decoder.read_exact(&mut cluster).ok()?;
                Some(cluster)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Bytes of a stranger end in an error or in a whole cluster, without a panic.
        #[test]
        fn any_bytes_are_decompressed_or_refused(
            mut data in proptest::collection::vec(any::<u8>(), 0..300),
            begins_well in any::<bool>(),
        ) {
            if begins_well {
                let magic = 0xfd2f_b528u32.to_le_bytes();
                data.splice(0..data.len().min(4), magic);
            }
            for compression in [Compression::Zlib, Compression::Zstd] {
                if let Some(cluster) = compression.decompress(&data, 4096) {
                    prop_assert_eq!(cluster.len(), 4096);
                }
            }
        }
    }
}

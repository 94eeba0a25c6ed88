//! How compressed clusters are compressed.

use std::io::Read;

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress};
use ruzstd::decoding::{FrameDecoder, StreamingDecoder};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use zlib_rs::{DeflateConfig, ReturnCode, compress_slice};

use super::engine::UNIT;

/// Largest window of a zstd frame, bytes. An encoder needs no larger one for the largest cluster, which has 2 MiB.
const MAX_WINDOW: u64 = 8 << 20;

/// Raw deflate with the window that QEMU decompresses with, two to the power of 12 bytes.
const DEFLATE: i32 = -12;

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

    /// Compresses a cluster. The result has a multiple of [`UNIT`] bytes. `None`: it would not be smaller.
    pub(super) fn compress(self, data: &[u8]) -> Option<Vec<u8>> {
        let mut compressed = match self {
            Compression::Zlib => {
                let mut compressed = vec![0; data.len()];
                let config = DeflateConfig { window_bits: DEFLATE, ..DeflateConfig::default() };
                let (done, code) = compress_slice(&mut compressed, data, config);
                let len = (code == ReturnCode::Ok).then_some(done.len())?;
                compressed.truncate(len);
                compressed
            }
            Compression::Zstd => compress_to_vec(data, CompressionLevel::Fastest),
        };
        compressed.resize(compressed.len().next_multiple_of(UNIT as usize), 0);
        (compressed.len() < data.len()).then_some(compressed)
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
        #[test]
        fn what_is_compressed_is_the_same_when_decompressed(
            pattern in proptest::collection::vec(any::<u8>(), 1..9000),
            order in 10..14usize,
        ) {
            let cluster: Vec<u8> = pattern.iter().copied().cycle().take(1 << order).collect();
            for compression in [Compression::Zlib, Compression::Zstd] {
                if let Some(data) = compression.compress(&cluster) {
                    prop_assert!(data.len() < cluster.len());
                    prop_assert_eq!(data.len() as u64 % UNIT, 0);
                    let found = compression.decompress(&data, cluster.len());
                    prop_assert!(found.is_some_and(|found| found == cluster));
                }
            }
            prop_assert!(Compression::Zlib.compress(&vec![7; 1 << order]).is_some());
        }

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

//! How compressed clusters are compressed.

use libdeflater::Decompressor;
use zlib_rs::{DeflateConfig, InflateConfig, ReturnCode, compress_slice, decompress_slice};
use zstd_safe::{CCtx, DCtx, DParameter, InBuffer, OutBuffer};

use super::engine::UNIT;

/// Largest window of a zstd frame, as a power of two. An encoder needs no larger one for the largest cluster, which has
/// 2 MiB; a frame may ask for gigabytes.
const MAX_WINDOW: u32 = 23;

/// The level of a zstd frame: QEMU's, which is the library's default.
const ZSTD_LEVEL: i32 = 3;

/// Raw deflate with the window that QEMU decompresses with, two to the power of 12 bytes.
const DEFLATE: i32 = -12;
/// Raw deflate with any window.
const INFLATE: i32 = -15;

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
            Compression::Zstd => {
                let mut compressed = vec![0; data.len()];
                let mut context = CCtx::try_create()?;
                let len = context.compress(&mut compressed[..], data, ZSTD_LEVEL).ok()?;
                compressed.truncate(len);
                compressed
            }
        };
        compressed.resize(compressed.len().next_multiple_of(UNIT as usize), 0);
        (compressed.len() < data.len()).then_some(compressed)
    }

    /// Decompresses a cluster of `len` bytes. What follows it in `data` belongs to others. `None`: it is damaged.
    pub(super) fn decompress(self, data: &[u8], len: usize) -> Option<Vec<u8>> {
        let mut cluster = vec![0; len];
        let is_whole = match self {
            Compression::Zlib => inflate(data, &mut cluster),
            Compression::Zstd => decode(data, &mut cluster).is_some(),
        };
        is_whole.then_some(cluster)
    }
}

/// Fills `cluster` from a raw deflate stream. `false`: the stream is damaged or too short.
fn inflate(data: &[u8], cluster: &mut [u8]) -> bool {
    if Decompressor::new().deflate_decompress(data, cluster) == Ok(cluster.len()) {
        return true;
    }
    // QEMU also takes streams that are longer than the cluster, or have no end. The faster library does not.
    let config = InflateConfig { window_bits: INFLATE };
    let len = cluster.len();
    let (found, code) = decompress_slice(cluster, data, config);
    found.len() == len && matches!(code, ReturnCode::Ok | ReturnCode::BufError)
}

/// Fills `cluster` from a Zstandard frame. `None`: the frame is damaged or too short.
fn decode(data: &[u8], cluster: &mut [u8]) -> Option<()> {
    let mut context = DCtx::try_create()?;
    context.set_parameter(DParameter::WindowLogMax(MAX_WINDOW)).ok()?;
    let mut input = InBuffer::around(data);
    let mut output = OutBuffer::around(cluster);
    while output.pos() < output.capacity() {
        let before = (input.pos(), output.pos());
        let left = context.decompress_stream(&mut output, &mut input).ok()?;
        let is_full = output.pos() == output.capacity();
        if !is_full && (left == 0 || before == (input.pos(), output.pos())) {
            return None;
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// QEMU reads such images: the cluster is all that counts.
    #[test]
    fn a_deflate_stream_longer_than_the_cluster_or_without_end_is_read() {
        let data: Vec<u8> = (0..8192u32).map(|n| (n / 5) as u8).collect();
        let stream = Compression::Zlib.compress(&data).unwrap();
        let found = Compression::Zlib.decompress(&stream, 4096);
        assert_eq!(found.as_deref(), Some(&data[..4096]));
        // A stored block that is not the last one, and nothing behind it.
        let mut endless = vec![0, 0, 16, 0xff, 0xef];
        endless.extend(&data[..4096]);
        assert_eq!(Compression::Zlib.decompress(&endless, 4096).as_deref(), Some(&data[..4096]));
        assert_eq!(Compression::Zlib.decompress(&endless[..4000], 4096), None, "too short");
    }

    /// A frame of a few bytes may ask for any window.
    #[test]
    fn a_frame_with_a_large_window_is_refused() {
        let frame = |window_log: u8| {
            let raw_block = [1 | 4096 << 3, 4096 >> 5, 0].map(|byte: i32| byte as u8);
            let mut frame = vec![0x28, 0xb5, 0x2f, 0xfd, 0, (window_log - 10) << 3];
            frame.extend(raw_block);
            frame.extend([7; 4096]);
            frame
        };
        assert_eq!(Compression::Zstd.decompress(&frame(23), 4096), Some(vec![7; 4096]));
        assert_eq!(Compression::Zstd.decompress(&frame(24), 4096), None);
    }

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

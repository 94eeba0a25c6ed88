//! Images that make small requests costly. Each is the NBD export of its name.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// An image that makes requests costly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Costly {
    /// Has 2 PiB, and nothing in them.
    Sparse,
    /// Is compressed in clusters of 64 KiB, with deflate.
    Deflate,
    /// Is compressed in clusters of 2 MiB, with zstd.
    Zstd,
    /// Has 16 TiB, and [`BITMAPS`] empty dirty bitmaps.
    Bitmaps,
    /// Has 4 Mi entries in its L1 table, which all name one L2 table, and was not closed. It is not exported.
    SharedTables,
}

/// Number of bitmaps of [`Costly::Bitmaps`], which are `b0` and so on.
pub const BITMAPS: usize = 8;

impl Costly {
    /// Its name, also that of its export.
    pub fn name(self) -> &'static str {
        match self {
            Costly::Sparse => "sparse",
            Costly::Deflate => "deflate",
            Costly::Zstd => "zstd",
            Costly::Bitmaps => "bitmaps",
            Costly::SharedTables => "shared-tables",
        }
    }

    /// Bytes of its disk.
    pub(crate) fn size(self) -> u64 {
        match self {
            Costly::Sparse | Costly::SharedTables => 2 << 50,
            Costly::Deflate | Costly::Zstd => 64 << 20,
            Costly::Bitmaps => 16 << 40,
        }
    }

    /// Options of its NBD export, with a comma before each.
    pub fn export_options(self) -> String {
        match self {
            Costly::Bitmaps => (0..BITMAPS).map(|i| format!(",bitmaps.{i}=b{i}")).collect(),
            _ => String::new(),
        }
    }

    /// Makes the image in a folder with `qemu_img`, which runs that program. Returns its path.
    ///
    /// # Errors
    ///
    /// Those of `qemu_img` and of writing files.
    pub fn make(
        self,
        folder: &Path,
        qemu_img: &mut dyn FnMut(&[&OsStr]) -> io::Result<()>,
    ) -> io::Result<PathBuf> {
        let path = folder.join(self.name()).with_extension("qcow2");
        let mut run = |options: &[&str], paths: &[&OsStr]| {
            let options = options.iter().map(OsStr::new);
            qemu_img(&options.chain(paths.iter().copied()).collect::<Vec<_>>())
        };
        let create: &[&str] = &["create", "-f", "qcow2"];
        let size = self.size().to_string();
        match self {
            Costly::Sparse => run(create, &[path.as_os_str(), size.as_ref()])?,
            Costly::Deflate | Costly::Zstd => {
                let raw = folder.join("compressible.raw");
                compressible(&raw, self.size())?;
                let options = match self {
                    Costly::Zstd => "compression_type=zstd,cluster_size=2M",
                    _ => "compression_type=zlib",
                };
                let convert = ["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", options];
                run(&convert, &[raw.as_os_str(), path.as_os_str()])?;
                std::fs::remove_file(raw)?;
            }
            Costly::Bitmaps => {
                run(create, &[path.as_os_str(), size.as_ref()])?;
                for i in 0..BITMAPS {
                    let name = format!("b{i}");
                    run(&["bitmap", "--add"], &[path.as_os_str(), name.as_ref()])?;
                }
            }
            Costly::SharedTables => shared_tables(&path, self.size())?,
        }
        Ok(path)
    }
}

/// Text of a kind: words of a small vocabulary, which compress to a half or less.
fn compressible(path: &Path, size: u64) -> io::Result<()> {
    let mut random = fastrand::Rng::with_seed(5);
    let words: Vec<Vec<u8>> = (0..512)
        .map(|_| (0..random.usize(2..12)).map(|_| random.alphabetic() as u8).collect())
        .collect();
    let mut file = io::BufWriter::new(File::create(path)?);
    let mut written = 0;
    while written < size {
        let word = &words[random.usize(..words.len())];
        file.write_all(word)?;
        file.write_all(b" ")?;
        written += word.len() as u64 + 1;
    }
    file.into_inner()?.set_len(size)
}

fn shared_tables(path: &Path, size: u64) -> io::Result<()> {
    const CLUSTER: u64 = 64 << 10;
    const L2: u64 = 3 * CLUSTER;
    const L1: u64 = 4 * CLUSTER;
    // Each has 8192 clusters.
    let entries = size / (CLUSTER / 8 * CLUSTER);
    let file = File::create(path)?;
    file.set_len(L1 + entries * 8)?;
    let mut header = Vec::new();
    header.extend(b"QFI\xfb");
    header.extend(3u32.to_be_bytes());
    // No backing file; clusters of 64 KiB.
    header.extend([0; 12]);
    header.extend(16u32.to_be_bytes());
    header.extend(size.to_be_bytes());
    header.extend(0u32.to_be_bytes());
    header.extend((entries as u32).to_be_bytes());
    header.extend(L1.to_be_bytes());
    // The refcount table, a cluster; no snapshots.
    header.extend(CLUSTER.to_be_bytes());
    header.extend(1u32.to_be_bytes());
    header.extend([0; 12]);
    // The dirty bit; refcounts of 16 bits; a header of 104 bytes.
    header.extend(1u64.to_be_bytes());
    header.extend([0; 16]);
    header.extend(4u32.to_be_bytes());
    header.extend(104u32.to_be_bytes());
    file.write_all_at(&header, 0)?;
    file.write_all_at(&(2 * CLUSTER).to_be_bytes(), CLUSTER)?;
    file.write_all_at(&(L2 | 1 << 63).to_be_bytes().repeat(entries as usize), L1)?;
    // The L2 table has each second cluster, all of them the header's.
    let mapped = [(1u64 << 63 | CLUSTER).to_be_bytes(), [0; 8]].concat();
    file.write_all_at(&mapped.repeat((CLUSTER / 16) as usize), L2)
}

//! The file on which file nodes are measured.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use fastrand::Rng;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::unistd::{Whence, lseek};

/// Makes sure that `directory` has a file of `size` bytes, all written: holes are read without the disk, and allocated but
/// unwritten blocks nearly so.
pub fn prepare(directory: &Path, size: u64) -> Result<PathBuf> {
    let path = directory.join(format!("disk-{}m.dat", size >> 20));
    if is_written(&path, size) {
        return Ok(path);
    }
    fs::create_dir_all(directory)
        .with_context(|| format!("making the directory {}", directory.display()))?;
    // Under another name until it is complete on the disk, so that an incomplete file is not used later.
    let unfinished = path.with_extension("unfinished");
    write_random(&unfinished, size)
        .with_context(|| format!("writing {} ({} MiB)", unfinished.display(), size >> 20))?;
    fs::rename(&unfinished, &path).with_context(|| format!("naming {}", path.display()))?;
    Ok(path)
}

fn is_written(path: &Path, size: u64) -> bool {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(path).is_ok_and(|meta| meta.len() == size && meta.blocks() * 512 >= size)
}

fn write_random(path: &Path, size: u64) -> Result<()> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
    fill(&mut file, size)
}

/// Writes `size` bytes of random data, to the disk.
pub fn fill(file: &mut File, size: u64) -> Result<()> {
    let mut random = Rng::with_seed(size);
    let mut chunk = vec![0u8; 1 << 20];
    let mut left = size;
    while left > 0 {
        random.fill(&mut chunk);
        let length = left.min(chunk.len() as u64);
        file.write_all(&chunk[..length as usize])?;
        left -= length;
    }
    file.sync_all()?;
    Ok(())
}

/// Reads the data of a file into the page cache; holes are left out.
pub fn bring_into_cache(path: &Path) -> Result<()> {
    let read = || -> Result<()> {
        let mut file = File::open(path)?;
        let mut end = 0;
        // Fails with ENXIO after the last data.
        while let Ok(start) = lseek(&file, end, Whence::SeekData) {
            end = lseek(&file, start, Whence::SeekHole)?;
            lseek(&file, start, Whence::SeekSet)?;
            io::copy(&mut (&mut file).take((end - start) as u64), &mut io::sink())?;
        }
        Ok(())
    };
    read().with_context(|| format!("reading {}", path.display()))
}

/// Drops a file from the page cache.
pub fn drop_from_cache(path: &Path) -> Result<()> {
    let drop = || -> Result<()> {
        let file = File::open(path)?;
        // Dirty pages cannot be dropped.
        file.sync_all()?;
        Ok(posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?)
    };
    drop().with_context(|| format!("dropping {} from the page cache", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sparse_file_is_written_anew() {
        let directory =
            std::env::temp_dir().join(format!("bench-data-file-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let size = 3 << 20;
        let path = directory.join("disk-3m.dat");
        File::create(&path).unwrap().set_len(size).unwrap();
        assert!(!is_written(&path, size));
        assert_eq!(prepare(&directory, size).unwrap(), path);
        assert!(is_written(&path, size));
        let data = fs::read(&path).unwrap();
        assert!(data.chunks(4096).all(|block| block.iter().any(|&byte| byte != 0)));
        fs::remove_dir_all(&directory).unwrap();
    }
}

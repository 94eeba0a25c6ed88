//! The bare ring: reads of a file with nothing between them and the kernel. The minimum cost of a server's request.

#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use io_uring::{IoUring, opcode, types};
use nix::fcntl::OFlag;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::time::{ClockId, clock_gettime};
use vm_memory::FileOffset;
use vm_memory::mmap::MmapRegion;

use crate::load::Load;
use crate::load::offsets::Offsets;

/// The loop's results.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Done {
    /// Requests per second.
    pub(crate) iops: f64,
    /// CPU time of the thread per request, microseconds.
    pub(crate) cpu: f64,
}

/// Number of requests submitted and awaited together: half of those in flight, so that the disk has the other half
/// meanwhile. fio's t/io_uring gets the same.
pub(crate) fn batch(depth: usize) -> usize {
    (depth / 2).max(1)
}

/// Reads `path` according to `load` (block size, order, depth) on the calling thread, with O_DIRECT, a registered file and
/// registered buffers.
pub(crate) fn read(path: &Path, load: &Load, run_time: Duration) -> Result<Done> {
    let (file, size) = open(path).with_context(|| format!("opening {}", path.display()))?;
    let block_size = load.block_size as u64;
    ensure!(size >= block_size, "{} is smaller than a block", path.display());
    let mut offsets = Offsets::new(load.order, size / block_size, block_size, 0, 1);
    // Unmapped when dropped. If reads are in flight after an error, they end in pages that only the registration keeps.
    let buffers = shared_memory(load.depth * load.block_size)?;
    let mut ring = set_up(load.depth as u32).context("io_uring_setup")?;
    ring.submitter().register_files(&[file.as_raw_fd()]).context("registering a file")?;
    let all = libc::iovec { iov_base: buffers.as_ptr().cast(), iov_len: buffers.size() };
    // SAFETY: `all` is the whole mapping. Registration pins its pages: the kernel may write to them until the ring is
    // closed, even after the mapping is gone.
    unsafe { ring.submitter().register_buffers(&[all]) }
        .context("registering the buffers (limited by RLIMIT_MEMLOCK, except for root)")?;

    let mut free: Vec<usize> = (0..load.depth).collect();
    let mut requests = 0u64;
    let (begin, cpu_before) = (Instant::now(), cpu_time()?);
    loop {
        // At least once, however long this thread waits for a CPU: figures are per request.
        let goes_on = requests == 0 || begin.elapsed() < run_time;
        while goes_on && let Some(slot) = free.pop() {
            // SAFETY: `slot` is below the depth, so its block is inside the mapping.
            let buffer = unsafe { buffers.as_ptr().add(slot * load.block_size) };
            let read = opcode::ReadFixed::new(types::Fixed(0), buffer, load.block_size as u32, 0)
                .offset(offsets.next_offset())
                .build()
                .user_data(slot as u64);
            // SAFETY: the buffer is registered and used only by this slot.
            unsafe { ring.submission().push(&read) }.context("the submission queue is full")?;
        }
        let in_flight = load.depth - free.len();
        if in_flight == 0 {
            break;
        }
        match ring.submit_and_wait(batch(load.depth).min(in_flight)) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => drop(other.context("io_uring_enter")?),
        }
        for completion in ring.completion() {
            let result = completion.result();
            ensure!(result >= 0, "a read failed: {}", io::Error::from_raw_os_error(-result));
            ensure!(result as usize == load.block_size, "a read returned {result} bytes");
            free.push(completion.user_data() as usize);
            requests += 1;
        }
    }
    let cpu = cpu_time()?.saturating_sub(cpu_before);
    Ok(Done {
        iops: requests as f64 / begin.elapsed().as_secs_f64(),
        cpu: cpu.as_secs_f64() * 1e6 / requests as f64,
    })
}

fn open(path: &Path) -> io::Result<(File, u64)> {
    let direct = OFlag::O_DIRECT.bits();
    let mut file = OpenOptions::new().read(true).custom_flags(direct).open(path)?;
    let size = file.seek(SeekFrom::End(0))?;
    Ok((file, size))
}

/// Shared memory like a guest's; anonymous memory may consist of huge pages.
fn shared_memory(size: usize) -> Result<MmapRegion> {
    let file = memfd_create("bench-bare", MFdFlags::MFD_CLOEXEC).context("memfd_create")?;
    let file = File::from(file);
    file.set_len(size as u64).context("sizing the buffers")?;
    MmapRegion::from_file(FileOffset::new(file, 0), size).context("mapping the buffers")
}

/// Creates a ring with the cheapest flags, if the kernel has them (6.6), else without.
fn set_up(entries: u32) -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    builder.setup_single_issuer().setup_defer_taskrun().setup_no_sqarray();
    builder.build(entries).or_else(|_| IoUring::new(entries))
}

/// CPU time of the calling thread.
pub(crate) fn cpu_time() -> Result<Duration> {
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).context("reading the CPU time")?;
    Ok(time.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::data_file;
    use crate::peers::rows::load;

    #[test]
    fn reads_are_counted_and_a_short_file_is_an_error() {
        let name = format!("bench-bare-{}", std::process::id());
        // Beside this program: /tmp may be a tmpfs, which takes O_DIRECT only since Linux 6.5.
        let directory = std::env::current_exe().unwrap().with_file_name(name);
        let file = data_file::prepare(&directory, 1 << 20).unwrap();
        for (block_size, depth) in [(4096, 1), (4096, 64), (131_072, 16)] {
            let load = Load { block_size, depth, ..load() };
            for time in [Duration::ZERO, Duration::from_millis(20)] {
                let done = read(&file, &load, time).unwrap();
                assert!(done.iops > 0.0 && done.cpu > 0.0 && done.cpu.is_finite(), "{done:?}");
            }
        }
        let load = Load { block_size: 2 << 20, ..load() };
        assert!(read(&file, &load, Duration::ZERO).is_err());
        std::fs::remove_dir_all(&directory).unwrap();
    }
}

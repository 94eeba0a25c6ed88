//! The environment of a guest: memory, I/O threads, a disk.

use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use block::NodeRegistry;
use block::node::BlockNode;
use block::options::{BlockdevOptions, Cache, Driver, FileOptions, Locking, NullOptions};
use event_loop::{EventLoop, IoThread, IoThreadConfig, LoopHandle, oneshot};
use fastrand::Rng;
use guest_memory::{GuestMemory, MemoryView, test_util};

use crate::clock::thread_cpu;

/// Configuration of a machine.
#[derive(Debug, Clone)]
pub struct MachineConfig {
    /// Bytes of guest memory, from guest address 0 on.
    pub memory: u64,
    /// The I/O threads, at least one.
    pub io_threads: Vec<IoThreadConfig>,
    /// The disk.
    pub disk: BlockdevOptions,
}

/// Guest memory in one memfd, I/O threads that run their loops, and an opened block node.
///
/// Devices start on the I/O threads by closures ([`LoopHandle::spawn`]). vCPUs are threads of the caller. Dropping the
/// machine stops the I/O threads, so drop devices first.
pub struct Machine {
    io_threads: Vec<IoThread>,
    memory: Arc<GuestMemory>,
    disk: Arc<dyn BlockNode>,
}

impl Machine {
    /// Makes a machine.
    ///
    /// # Errors
    ///
    /// The memory, a thread, or the disk is unavailable.
    pub fn new(config: MachineConfig) -> Result<Machine> {
        Self::with(config, |_| {})
    }

    /// Makes a machine with a periodic timer on each loop. The timer exists before the loop first sleeps, as a loop that
    /// is [not woken](event_loop::Ablation::no_wake) needs an event.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new).
    pub fn with_timer(config: MachineConfig, every: Duration) -> Result<Machine> {
        let every = every.as_nanos() as u64;
        Self::with(config, move |event_loop| {
            let ticking = event_loop.clone();
            event_loop.spawn(async move {
                loop {
                    ticking.sleep_until(ticking.now_ns() + every).await;
                }
            });
        })
    }

    fn with(
        config: MachineConfig,
        prepare: impl Fn(&EventLoop) + Copy + Send + 'static,
    ) -> Result<Machine> {
        ensure!(!config.io_threads.is_empty(), "a machine needs an I/O thread");
        let memory = test_util::memfd_memory(&[(0, config.memory)]).context("guest memory")?;
        let disk = NodeRegistry::new().open(&config.disk).context("opening the disk")?;
        let io_threads = config
            .io_threads
            .into_iter()
            .map(|config| IoThread::spawn_with(config, prepare).context("starting an I/O thread"))
            .collect::<Result<_>>()?;
        Ok(Machine { io_threads, memory, disk })
    }

    /// The guest's memory.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// The disk.
    pub fn disk(&self) -> &Arc<dyn BlockNode> {
        &self.disk
    }

    /// The I/O threads, at least one.
    pub fn io_threads(&self) -> &[IoThread] {
        &self.io_threads
    }

    /// Returns the loop that serves queue, port or device number `index`: the threads alternate.
    pub fn loop_of(&self, index: usize) -> &LoopHandle {
        self.io_threads[index % self.io_threads.len()].handle()
    }

    /// Returns the CPU time that the I/O threads have used so far, user and system.
    ///
    /// # Errors
    ///
    /// An I/O thread has stopped.
    pub fn io_cpu_time(&self) -> Result<Duration> {
        let times = self.io_threads.iter().map(|thread| on_loop(thread.handle(), |_| thread_cpu()));
        times.sum()
    }

    /// Fills guest memory from `addr` on with random bytes, which are neither zeroes nor compressible.
    ///
    /// # Errors
    ///
    /// Part of the range is not memory.
    pub fn fill(&self, addr: u64, len: u64) -> Result<()> {
        let view = MemoryView::new(self.memory.clone());
        let mut random = Rng::with_seed(addr);
        let mut chunk = [0; 4096];
        let mut done = 0;
        while done < len {
            random.fill(&mut chunk);
            let n = (len - done).min(chunk.len() as u64);
            view.write_bytes(addr + done, &chunk[..n as usize])?;
            done += n;
        }
        Ok(())
    }
}

/// Runs `job` on a loop and waits for its result.
///
/// # Errors
///
/// The loop has ended.
pub fn on_loop<R: Send + 'static>(
    handle: &LoopHandle,
    job: impl FnOnce(&EventLoop) -> R + Send + 'static,
) -> Result<R> {
    let (sender, receiver) = mpsc::sync_channel(1);
    handle.spawn(move |event_loop| {
        let _ = sender.send(job(event_loop));
    })?;
    receiver.recv().map_err(|_| anyhow!("the event loop stopped on the way"))
}

/// A device's part on one loop. Dropping it ends the part and waits until nothing is in flight.
pub(crate) struct OnLoop {
    stop: Option<oneshot::Sender<()>>,
    stopped: mpsc::Receiver<()>,
}

impl OnLoop {
    /// Starts the part on the loop. The future that `begin` returns ends it.
    pub(crate) fn start<E: Future<Output = ()> + 'static>(
        handle: &LoopHandle,
        begin: impl FnOnce(&EventLoop) -> Result<E> + Send + 'static,
    ) -> Result<OnLoop> {
        let (stop, stopping) = oneshot::channel();
        let (end, stopped) = mpsc::sync_channel(1);
        on_loop(handle, move |event_loop| {
            let ending = begin(event_loop)?;
            event_loop.spawn(async move {
                let _ = stopping.await;
                ending.await;
                let _ = end.send(());
            });
            anyhow::Ok(())
        })??;
        Ok(OnLoop { stop: Some(stop), stopped })
    }
}

impl Drop for OnLoop {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            stop.send(());
        }
        // Fails if the loop has ended, which has dropped the device.
        let _ = self.stopped.recv();
    }
}

/// A disk that answers requests at once, without writing to the memory of reads.
pub fn null_co(size: u64) -> BlockdevOptions {
    let null = NullOptions { size, latency_ns: 0, read_zeroes: false };
    options(Cache::default(), Driver::null_co(null))
}

/// A disk on a regular file or a block device, opened with `O_DIRECT`. Its I/O uses io_uring if the loop has it.
///
/// # Errors
///
/// `path` does not exist.
pub fn direct(path: &Path) -> Result<BlockdevOptions> {
    use std::os::unix::fs::FileTypeExt;
    let kind = std::fs::metadata(path).with_context(|| path.display().to_string())?.file_type();
    let file = FileOptions { filename: path.to_path_buf(), aio: None, locking: Locking::default() };
    let driver =
        if kind.is_block_device() { Driver::host_device(file) } else { Driver::file(file) };
    Ok(options(Cache { direct: true, no_flush: false }, driver))
}

fn options(cache: Cache, driver: Driver) -> BlockdevOptions {
    BlockdevOptions { auto_read_only: true, cache, ..BlockdevOptions::new(Some("disk"), driver) }
}

//! What targets that play against a whole export have in common: a loop that does not poll, a disk, a
//! socket's path, and patience.

use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use block::NodeRegistry;
use block::node::BlockNode;
use block::options::{BlockdevOptions, Cache, Discard, Driver, NullOptions};
use event_loop::{EventLoop, LoopConfig, PollParams};

/// How long may be waited for what happens at once on an idle machine: the kernel's threads, too, have
/// to get their turn.
const PATIENCE: Duration = Duration::from_secs(20);

/// A loop that sleeps as soon as there is nothing to do.
pub fn quiet_loop() -> EventLoop {
    let poll = PollParams { max_ns: 0, ..PollParams::default() };
    EventLoop::new(LoopConfig { poll, ..LoopConfig::default() }).expect("a loop")
}

/// Options of a node with this driver, which is written to and does not sync.
pub fn node_options(node_name: Option<&str>, driver: Driver) -> BlockdevOptions {
    BlockdevOptions {
        discard: Discard::Unmap,
        cache: Cache { direct: false, no_flush: true },
        ..BlockdevOptions::new(node_name, driver)
    }
}

/// A disk of `size` bytes that reads as zeroes.
pub fn null_node(size: u64) -> Arc<dyn BlockNode> {
    let null = NullOptions { size, latency_ns: 0, read_zeroes: true };
    let options = node_options(Some("null"), Driver::null_co(null));
    NodeRegistry::new().open(&options).expect("a null node")
}

/// A path that this thread alone has, for a socket or a folder. Nothing is there yet.
pub fn own_path(what: &str) -> PathBuf {
    let thread = std::thread::current().id();
    let name = format!("ringmill-fuzz-{what}-{}-{thread:?}", std::process::id());
    std::env::temp_dir().join(name)
}

/// Turns the loop that often, without waiting.
pub fn turn(event_loop: &EventLoop, times: u32) {
    for _ in 0..times {
        event_loop.run_once(false).expect("it turns");
    }
}

/// Turns the loop until that is so.
pub fn until(event_loop: &EventLoop, what: &str, mut so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        if so() {
            return;
        }
        turn(event_loop, 4);
    }
    let files = std::fs::read_dir("/proc/self/fd").expect("it is there");
    let open: Vec<_> = files.flatten().flat_map(|file| std::fs::read_link(file.path())).collect();
    panic!("{what}: it does not happen; {} are open: {open:?}", open.len());
}

/// Descriptors of this process.
pub fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("it is there").count()
}

/// A name for what is open under this descriptor, for as long as it is.
pub fn path_of(fd: &impl AsRawFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

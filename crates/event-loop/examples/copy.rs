//! Copies a file with 64 operations in flight.
//!
//!     cargo run -p ringmill-event-loop --example copy FROM TO

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::path::Path;
use std::rc::Rc;

use event_loop::{EventLoop, LoopConfig, LoopFile, Part};

/// Tasks, each with one operation in flight at a time.
const DEPTH: usize = 64;
/// Bytes of one operation.
const CHUNK: usize = 64 << 10;

/// Copies one chunk after the other until all `len` bytes are taken. `next`: the first byte that no task has taken.
async fn work(from: LoopFile, to: LoopFile, len: u64, next: Rc<Cell<u64>>) -> io::Result<()> {
    let mut buf = vec![0; CHUNK];
    while next.get() < len {
        let offset = next.get();
        let size = (len - offset).min(CHUNK as u64);
        next.set(offset + size);
        let part = from.read_exact_at(Part::new(buf, 0..size as usize), offset).await?;
        buf = to.write_all_at(part, offset).await?.into_inner();
    }
    Ok(())
}

/// Copies `from` to `to`, and returns the number of bytes when they are on stable storage.
fn copy(from: &Path, to: &Path) -> Result<u64, Box<dyn std::error::Error>> {
    let (from, to) = (File::open(from)?, File::create(to)?);
    let (len, next) = (from.metadata()?.len(), Rc::default());
    let event_loop = EventLoop::new(LoopConfig::default())?;
    let (from, to) = (event_loop.file(from), event_loop.file(to));
    let task = |_| event_loop.spawn(work(from.clone(), to.clone(), len, Rc::clone(&next)));
    let tasks: Vec<_> = (0..DEPTH).map(task).collect();
    event_loop.block_on(async {
        for task in tasks {
            task.await??;
        }
        to.sync_all().await
    })??;
    Ok(len)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let [from, to] = arguments.as_slice() else { return Err("usage: copy FROM TO".into()) };
    println!("{} bytes", copy(from.as_ref(), to.as_ref())?);
    Ok(())
}

#[test]
fn the_copy_is_equal() {
    // More than a chunk per task, and a part of one.
    let bytes: Vec<u8> = (0..9_000_001_u32).map(|n| (n ^ (n >> 8)) as u8).collect();
    assert!(bytes.len() > 2 * DEPTH * CHUNK);
    let file =
        |name| std::env::temp_dir().join(format!("event-loop-{name}-{}", std::process::id()));
    let (from, to) = (file("from"), file("to"));
    std::fs::write(&from, &bytes).unwrap();
    assert_eq!(copy(&from, &to).unwrap(), bytes.len() as u64);
    assert!(std::fs::read(&to).unwrap() == bytes);
    std::fs::remove_file(from).unwrap();
    std::fs::remove_file(to).unwrap();
}

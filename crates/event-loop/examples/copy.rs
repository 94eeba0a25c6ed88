//! Copies a file with 64 operations in flight.
//!
//!     cargo run -p ringmill-event-loop --example copy FROM TO

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use event_loop::{AlignedBuf, Engine, EventLoop, IoBufs, IoOp, LoopConfig, LoopFile};

/// Tasks, each with one operation in flight at a time.
const DEPTH: usize = 64;
/// Bytes of one operation.
const CHUNK: usize = 64 << 10;

/// What the tasks share.
struct Copy {
    event_loop: EventLoop,
    from: LoopFile,
    to: LoopFile,
    len: u64,
    /// The first byte that no task has taken.
    next: Cell<u64>,
}

impl Copy {
    /// Copies one chunk after the other until all are taken.
    async fn work(self: Rc<Self>) -> io::Result<()> {
        let chunk = AlignedBuf::io_bufs(CHUNK, 4096).ok_or(io::ErrorKind::OutOfMemory)?;
        loop {
            let offset = self.next.get();
            let len = (CHUNK as u64).min(self.len - offset);
            if len == 0 {
                return Ok(());
            }
            self.next.set(offset + len);
            self.copy(offset, len as usize, &chunk).await?;
        }
    }

    /// Copies `len` bytes from `offset` on through the memory of `chunk`.
    async fn copy(&self, offset: u64, len: usize, chunk: &IoBufs) -> io::Result<()> {
        let part = |from: usize, to: usize| {
            let mut part = IoBufs::new();
            part.set_part(chunk, from, to - from, usize::MAX);
            part
        };
        // Reads and writes may be short.
        let mut filled = 0;
        while filled < len {
            let read = IoOp::Read { offset: offset + filled as u64 };
            match self.operate(&self.from, read, part(filled, len)).await? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                more => filled += more,
            }
        }
        let mut written = 0;
        while written < len {
            let write = IoOp::Write { offset: offset + written as u64, dsync: false };
            match self.operate(&self.to, write, part(written, len)).await? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                more => written += more,
            }
        }
        Ok(())
    }

    async fn operate(&self, file: &LoopFile, op: IoOp, bufs: IoBufs) -> io::Result<usize> {
        self.event_loop.operate(file, op, Engine::Uring, bufs).await.0
    }
}

/// Copies `from` to `to`, and returns the number of bytes when they are on stable storage.
fn copy(from: &Path, to: &Path) -> Result<u64, Box<dyn std::error::Error>> {
    let (from, to) = (File::open(from)?, File::create(to)?);
    let len = from.metadata()?.len();
    let event_loop = EventLoop::new(LoopConfig::default())?;
    let copy = Rc::new(Copy {
        from: event_loop.register_file(Arc::new(from.into())),
        to: event_loop.register_file(Arc::new(to.into())),
        event_loop: event_loop.clone(),
        len,
        next: Cell::new(0),
    });
    let tasks: Vec<_> = (0..DEPTH).map(|_| event_loop.spawn(copy.clone().work())).collect();
    event_loop.block_on(async move {
        for task in tasks {
            task.await.map_err(io::Error::other)??;
        }
        copy.operate(&copy.to, IoOp::Fsync { data_only: false }, IoBufs::new()).await
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

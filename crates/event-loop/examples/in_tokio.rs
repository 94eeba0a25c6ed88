//! A loop as a task of a Tokio runtime: Tokio's tasks await its operations.
//!
//!     cargo run -p ringmill-event-loop --features tokio --example in_tokio FILE

use std::error::Error;
use std::fs::File;
use std::path::Path;
use std::time::Duration;

use event_loop::{EventLoop, LoopConfig, foreign};
use tokio::task::{LocalSet, spawn_local};

/// Reads the first four bytes of a file by the ring, beside a task of Tokio's that counts milliseconds.
async fn first_bytes(path: &Path) -> Result<([u8; 4], u32), Box<dyn Error>> {
    let event_loop = EventLoop::new(LoopConfig::default())?;
    // The loop turns from here on.
    let turning = spawn_local(foreign::tokio::run(&event_loop));
    let ticking = spawn_local(async {
        let mut interval = tokio::time::interval(Duration::from_millis(1));
        for _ in 0..3 {
            interval.tick().await;
        }
        3
    });

    let bytes = event_loop.file(File::open(path)?).read_exact_at([0; 4], 0).await?;

    let ticks = ticking.await?;
    event_loop.handle().stop();
    turning.await??;
    Ok((bytes, ticks))
}

fn run(path: &Path) -> Result<([u8; 4], u32), Box<dyn Error>> {
    // The loop stays on one thread.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    LocalSet::new().block_on(&runtime, first_bytes(path))
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args_os().nth(1).ok_or("usage: in_tokio FILE")?;
    let (bytes, _) = run(path.as_ref())?;
    println!("{bytes:02x?}");
    Ok(())
}

#[test]
fn both_kinds_of_tasks_run() {
    let program = std::env::current_exe().unwrap();
    assert_eq!(run(&program).unwrap(), (*b"\x7fELF", 3));
}

//! A loop as a source of a `GMainContext`: GLib's futures await its operations.
//!
//!     cargo run -p ringmill-event-loop --features glib --example in_glib FILE

use std::cell::RefCell;
use std::error::Error;
use std::fs::File;
use std::io;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use event_loop::foreign::glib::LoopSource;
use event_loop::{AlignedBuf, Engine, EventLoop, IoOp, LoopConfig};
use glib::{MainContext, MainLoop, Priority};

/// Reads the first four bytes of a file by the ring, and waits for a timer of GLib's.
async fn first_bytes(event_loop: &EventLoop, file: File) -> io::Result<[u8; 4]> {
    let file = event_loop.register_file(Arc::new(file.into()));
    let bufs = AlignedBuf::io_bufs(4, 4).ok_or(io::ErrorKind::OutOfMemory)?;
    let read = IoOp::Read { offset: 0 };
    let (len, bufs) = event_loop.operate(&file, read, Engine::Uring, bufs).await;
    let mut bytes = [0; 4];
    bufs.copy_out(0, &mut bytes[..len?]);
    glib::timeout_future(Duration::from_millis(1)).await;
    Ok(bytes)
}

fn run(path: &Path) -> Result<[u8; 4], Box<dyn Error>> {
    let file = File::open(path)?;
    let event_loop = EventLoop::new(LoopConfig::default())?;
    let main_loop = MainLoop::new(Some(&MainContext::new()), false);
    let ended = Rc::new(RefCell::new(None));
    let (quit, end) = (main_loop.clone(), ended.clone());
    let _source =
        LoopSource::attach(&event_loop, &main_loop.context(), Priority::DEFAULT, move |result| {
            end.replace(Some(result));
            quit.quit();
        })?;
    let bytes = Rc::new(RefCell::new(None));
    let read = bytes.clone();
    main_loop.context().spawn_local(async move {
        let result = first_bytes(&event_loop, file).await;
        read.replace(Some(result));
        // The source ends, and with it the main loop.
        event_loop.handle().stop();
    });
    main_loop.run();
    ended.take().ok_or("the source has not ended")??;
    Ok(bytes.take().ok_or("the task has not ended")??)
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args_os().nth(1).ok_or("usage: in_glib FILE")?;
    println!("{:02x?}", run(path.as_ref())?);
    Ok(())
}

#[test]
fn a_future_of_glib_reads_by_the_ring() {
    let program = std::env::current_exe().unwrap();
    assert_eq!(&run(&program).unwrap(), b"\x7fELF");
}

//! Opens an image file read-only, and prints its first sector in hexadecimal: `read_image FILE`.

use block::options::{BlockdevOptions, Driver, FileOptions, Locking};
use block::request::Op;
use block::{NodeRegistry, submit};
use event_loop::{AlignedBuf, EventLoop, LoopConfig};

const SECTOR: usize = 512;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let filename = std::env::args_os().nth(1).ok_or("usage: read_image FILE")?.into();
    let file = FileOptions { filename, aio: None, locking: Locking::Auto };
    let options = BlockdevOptions {
        read_only: true,
        ..BlockdevOptions::new(Some("disk"), Driver::file(file))
    };

    let event_loop = EventLoop::new(LoopConfig::default())?;
    let node = NodeRegistry::new().open(&options)?;
    let channel = node.open_channel(&event_loop)?;
    let sector = event_loop.block_on(async move {
        let memory = AlignedBuf::io_bufs(SECTOR, SECTOR).expect("a sector of memory");
        let (read, memory) = submit(&channel, Op::Read, 0, SECTOR as u64, memory).await;
        let mut sector = [0; SECTOR];
        memory.copy_out(0, &mut sector);
        read.map(|()| sector)
    })??;
    println!("{}", sector.map(|byte| format!("{byte:02x}")).concat());
    Ok(())
}

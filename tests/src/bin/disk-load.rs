//! `disk-load SOCKET PROGRESS`: a front end that writes blocks of an export, reads them back and compares, until it
//! is killed, two hundred a second. The file PROGRESS says how many it has done.

#![forbid(unsafe_code)]

use std::env;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;
use std::time::Duration;

use integration::{BlkClient, pattern};

/// The guest's processors have other things to do.
const PAUSE: Duration = Duration::from_millis(5);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = env::args().skip(1);
    let (Some(socket), Some(progress)) = (arguments.next(), arguments.next()) else {
        return Err("usage: disk-load SOCKET PROGRESS".into());
    };
    let progress = File::create(progress)?;
    let mut client = BlkClient::connect(Path::new(&socket), 1, 64)?;
    let blocks = u64::from(client.config()?.capacity) * 512 / pattern::BLOCK as u64;
    for generation in 1.. {
        let index = generation % blocks;
        client.write(index * 8, &pattern::block(index, generation));
        let found = pattern::generation(index, &client.read(index * 8, pattern::BLOCK))?;
        if found != generation {
            return Err(format!("block {index}: generation {found}, not {generation}").into());
        }
        thread::sleep(PAUSE);
        progress.write_all_at(format!("{generation:>20}\n").as_bytes(), 0)?;
    }
    Ok(())
}

//! `pattern-writer SOCKET SEED`: a front end that writes pattern blocks to random places of an export until
//! it is killed. For each write that the device has acknowledged it prints two 64-bit numbers in the host's
//! byte order: the block's index and its generation.

#![forbid(unsafe_code)]

use std::env;
use std::io::{self, Write};
use std::path::Path;

use fastrand::Rng;
use integration::pattern;
use integration::{BlkClient, Request, Segment, request};

/// Writes in flight at any time.
const DEPTH: u64 = 16;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = env::args().skip(1);
    let (Some(socket), Some(seed)) = (arguments.next(), arguments.next()) else {
        return Err("usage: pattern-writer SOCKET SEED".into());
    };
    let seed = seed.parse::<u64>()?;
    let mut random = Rng::with_seed(seed);
    // Later writers have later generations, as long as none writes a block a million times.
    let mut generation = seed * 1_000_000;

    let mut client = BlkClient::connect(Path::new(&socket), 1, 64)?;
    let blocks = u64::from(client.config()?.capacity) * 512 / pattern::BLOCK as u64;
    // What each slot writes: two never write the same block at a time, else either could be the last.
    let mut submit = |client: &mut BlkClient, slot: u64| {
        let index = random.u64(..blocks / DEPTH) * DEPTH + slot;
        generation += 1;
        let at = slot * pattern::BLOCK as u64;
        client.put(at, &pattern::block(index, generation));
        let segments = vec![Segment { at, len: pattern::BLOCK, device_writes: false }];
        let id = client.submit(0, &Request { kind: request::OUT, sector: index * 8, segments });
        (id, slot, index, generation)
    };
    let mut in_flight: Vec<_> = (0..DEPTH).map(|slot| submit(&mut client, slot)).collect();
    loop {
        // All of a batch are looked up before the first new request, which may take over an id.
        let mut free = Vec::new();
        for done in client.wait(0)? {
            let place = in_flight.iter().position(|&(id, ..)| id == done.id);
            let (_, slot, index, generation) = in_flight.swap_remove(place.ok_or("unknown id")?);
            if done.status != 0 {
                return Err(format!("a write of block {index} got status {}", done.status).into());
            }
            let record = [index.to_ne_bytes(), generation.to_ne_bytes()].concat();
            io::stdout().lock().write_all(&record)?;
            io::stdout().lock().flush()?;
            free.push(slot);
        }
        in_flight.extend(free.into_iter().map(|slot| submit(&mut client, slot)));
    }
}

//! dev only
use std::path::Path;
use vcpu::machine::{direct, null_co};
use vcpu::one_thread::OneThread;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let mut disk =
        if a[1] == "null" { null_co(1 << 30) } else { direct(Path::new(&a[1])).unwrap() };
    disk.cache.direct = a.len() > 4 && a[4] == "direct";
    let depth = a[2].parse().unwrap();
    let poll = event_loop::PollParams {
        max_ns: if a.len() > 5 { 32768 } else { 0 },
        ..Default::default()
    };
    let mut one =
        OneThread::new(event_loop::LoopConfig { poll, ..Default::default() }, &disk, depth)
            .unwrap();
    one.read(a[3].parse().unwrap()).unwrap();
    let s = one.event_loop().stats();
    println!(
        "it {} en {} sig {} batches {}",
        s.iterations.get(),
        s.enters.get(),
        one.stats().signals.get(),
        one.stats().batches.get()
    );
}

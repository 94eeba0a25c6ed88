//! Loops that code under simulation makes by itself. Alone in its process, which they concern as a whole.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use event_loop::ring::sim::{Faults, Sim, simulate_new_loops};
use event_loop::{AlignedBuf, Engine, EventLoop, IoBufs, IoOp, LoopConfig};

fn operate(event_loop: &EventLoop, fd: &Arc<OwnedFd>, op: IoOp, bufs: IoBufs) {
    let file = event_loop.register_file(fd.clone());
    event_loop.block_on(event_loop.operate(&file, op, Engine::Uring, bufs)).unwrap().0.unwrap();
}

#[test]
fn the_storage_knows_what_other_threads_loops_write_and_flush() {
    let sim = Sim::new(1, Faults::default());
    let (storage, fd) = (sim.storage(), sim.file(&[0; 4096]).unwrap());
    let write = |byte: u8| {
        let fd = fd.clone();
        let thread = std::thread::spawn(move || {
            let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
            let mut bufs = AlignedBuf::io_bufs(512, 512).unwrap();
            bufs.copy_in(0, &[byte; 512]);
            operate(&event_loop, &fd, IoOp::Write { offset: 0, dsync: false }, bufs);
            event_loop.shut_down().unwrap();
        });
        thread.join().unwrap();
    };
    write(1);
    assert_eq!(storage.unstable_sectors(&fd), 0, "a real loop");
    simulate_new_loops(Some(storage.clone()));
    write(2);
    assert_eq!(storage.unstable_sectors(&fd), 1);
    assert_eq!(storage.stable(&fd).unwrap()[0], 0);
    let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
    operate(&event_loop, &fd, IoOp::Fsync { data_only: true }, IoBufs::new());
    assert_eq!(storage.stable(&fd).unwrap()[0], 2);
    simulate_new_loops(None);
    write(3);
    assert_eq!(storage.unstable_sectors(&fd), 0, "a real loop again");
    assert!(storage.descriptor(&fd).is_some());
    storage.remove(&fd);
    assert_eq!(storage.descriptor(&fd), None);
}

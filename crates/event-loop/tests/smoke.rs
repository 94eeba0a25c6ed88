//! A first turn of every part, on io_uring and on epoll.

use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use event_loop::{
    AlignedBuf, Engine, EventLoop, Handler, IoOp, IoThread, IoThreadConfig, LoopConfig, Progress,
    RingChoice, Trigger, oneshot,
};

fn loops() -> Vec<EventLoop> {
    [RingChoice::default(), RingChoice::Epoll]
        .into_iter()
        .map(|ring| EventLoop::new(LoopConfig { ring, ..LoopConfig::default() }).unwrap())
        .collect()
}

#[test]
fn a_file_is_written_and_read_back() {
    for event_loop in loops() {
        for engine in [Engine::Uring, Engine::Threads] {
            let file = tempfile();
            let file = event_loop.register_file(Arc::new(file));
            let on_loop = event_loop.clone();
            event_loop
                .block_on(async move {
                    let mut bufs = AlignedBuf::io_bufs(8192, 4096).unwrap();
                    bufs.copy_in(100, b"hello");
                    let write = IoOp::Write { offset: 4096, dsync: false };
                    let (n, _) = on_loop.operate(&file, write, engine, bufs).await;
                    assert_eq!(n.unwrap(), 8192);
                    let (n, _) = on_loop
                        .operate(&file, IoOp::Fsync { data_only: true }, engine, Default::default())
                        .await;
                    assert_eq!(n.unwrap(), 0);
                    let bufs = AlignedBuf::io_bufs(4096, 4096).unwrap();
                    let read = IoOp::Read { offset: 4096 };
                    let (n, bufs) = on_loop.operate(&file, read, engine, bufs).await;
                    let mut out = [0; 5];
                    bufs.copy_out(100, &mut out);
                    assert_eq!((n.unwrap(), &out), (4096, b"hello"));
                })
                .unwrap();
        }
    }
}

fn tempfile() -> OwnedFd {
    let path = std::env::temp_dir().join(format!("event-loop-smoke-{}", std::process::id()));
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&path)
        .unwrap();
    std::fs::remove_file(&path).unwrap();
    file.into()
}

struct Count(Cell<u32>);

impl Handler for Count {
    fn ready(&self, _events: u32) -> Progress {
        self.0.set(self.0.get() + 1);
        Progress::Done
    }
}

#[test]
fn an_eventfd_fires_with_each_write_unread() {
    for event_loop in loops() {
        let fd = nix::sys::eventfd::EventFd::new().unwrap();
        let write = |fd: &OwnedFd| nix::unistd::write(fd, &1u64.to_ne_bytes()).unwrap();
        let fd: OwnedFd = fd.into();
        let fd = Arc::new(fd);
        let count = Rc::new(Count(Cell::new(0)));
        let id = event_loop.add_handler(fd.clone(), 1, Trigger::Edge, count.clone());
        for n in 1..4 {
            write(&fd);
            while count.0.get() < n {
                event_loop.run_once(true).unwrap();
            }
        }
        event_loop.remove_handler(id);
        write(&fd);
        for _ in 0..3 {
            event_loop.run_once(false).unwrap();
        }
        assert_eq!(count.0.get(), 3);
    }
}

#[test]
fn an_io_thread_answers_and_stops() {
    for ring in [RingChoice::default(), RingChoice::Epoll] {
        let mut config = IoThreadConfig::default();
        config.event_loop.ring = ring;
        let thread = IoThread::spawn(config).unwrap();
        let main = EventLoop::new(LoopConfig::default()).unwrap();
        let (sender, receiver) = oneshot::channel();
        thread
            .handle()
            .spawn(|on_thread| {
                let at = on_thread.now_ns() + 1_000_000;
                on_thread.add_timer(at, move || sender.send(42));
            })
            .unwrap();
        assert_eq!(main.block_on(receiver).unwrap(), Ok(42));
        thread.stop().unwrap();
    }
}

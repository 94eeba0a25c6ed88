//! Reads, writes and connections with the caller's own buffers, on every ring; what a dropped future leaves behind.

use crate::common;

use std::cell::Cell;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use common::*;
use event_loop::ring::sim::{Faults, Verdict};
use event_loop::{AlignedBuf, Elapsed, Engine, EventLoop, IoBufs, IoOp, LoopFile, Part};
use nix::fcntl::OFlag;
use nix::libc;
use nix::unistd::pipe2;

/// A task of the loop, run to its end.
fn run<T: 'static>(event_loop: &EventLoop, future: impl Future<Output = T>) -> T {
    event_loop.block_on(future).unwrap()
}

/// A buffer that counts its drops.
struct Noted(Vec<u8>, Rc<Cell<u32>>);

impl AsMut<[u8]> for Noted {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        self.1.set(self.1.get() + 1);
    }
}

/// Buffers of several kinds are written and read back.
fn written_and_read(name: &str, event_loop: &EventLoop, file: &LoopFile) {
    let bytes: Vec<u8> = (0..10_000_u32).map(|n| (n % 251) as u8).collect();
    let expected = bytes.clone();
    run(event_loop, async {
        let back = file.write_all_at(bytes, 0).await.unwrap();
        file.write_all_at("text", 10_000).await.unwrap();
        file.write_all_at(Part::new(back, 250..260), 10_004).await.unwrap();
        file.sync_data().await.unwrap();
        file.sync_all().await.unwrap();
        let all = file.read_exact_at(vec![0; 10_000], 0).await.unwrap();
        assert!(all == expected, "{name}");
        let boxed = file.read_exact_at(vec![0; 8].into_boxed_slice(), 9_998).await.unwrap();
        assert_eq!((&boxed[..2], &boxed[2..6]), (&expected[9_998..], &b"text"[..]), "{name}");
        let part = Part::new([9; 6], 2..4);
        let array = file.read_exact_at(part, 10_004).await.unwrap().into_inner();
        assert_eq!(array, [9, 9, 250, 0, 9, 9], "{name}");
        assert_eq!(file.read_exact_at([0; 0], 0).await.unwrap(), [], "{name}");
    });
}

#[test]
fn a_files_bytes_are_written_and_read_by_every_ring() {
    for (name, event_loop) in loops() {
        let file = event_loop.register_file(tempfile(b""));
        written_and_read(name, &event_loop, &file);
        run(&event_loop, async {
            let end = file.read_exact_at([0; 8], 10_010).await.unwrap_err();
            assert_eq!(end.kind(), ErrorKind::UnexpectedEof, "{name}");
            let (count, bytes) = file.read_at([0; 8], 10_012).await.unwrap();
            assert_eq!((count, bytes), (2, [7, 8, 0, 0, 0, 0, 0, 0]), "{name}");
            let beyond = file.write_all_at([0; 8], u64::MAX - 3).await.unwrap_err();
            assert_eq!(beyond.raw_os_error(), Some(libc::EINVAL), "{name}");
        });
    }
}

/// Short transfers and interruptions are carried on.
#[test]
fn short_and_interrupted_transfers_are_carried_on() {
    // Miri is slow.
    let (seeds, len) = if cfg!(miri) { (1, 500) } else { (10, 10_000) };
    for seed in 0..seeds {
        let (sim, event_loop) = simulated(seed, Faults::rough());
        let turn = Cell::new(0_u64);
        sim.script(move |_| {
            turn.set(turn.get() + 1);
            match turn.get() % 3 {
                0 => Verdict::Fail(libc::EINTR),
                1 => Verdict::Short(turn.get() * 20),
                _ => Verdict::Seeded,
            }
        });
        let file = event_loop.register_file(sim.file(&[]).unwrap());
        let bytes: Vec<u8> = (0..len).map(|n| (n % 251) as u8).collect();
        let back = run(&event_loop, async {
            let bytes = file.write_all_at(bytes, 5).await.unwrap();
            assert_eq!(file.read_exact_at(vec![0; bytes.len()], 5).await.unwrap(), bytes);
            bytes
        });
        assert_eq!(back.len(), len);
    }
}

fn sockets(event_loop: &EventLoop) -> (UnixStream, LoopFile) {
    let (theirs, ours) = UnixStream::pair().unwrap();
    (theirs, event_loop.file(ours))
}

#[test]
fn a_stream_is_sent_whole_and_received_as_it_comes() {
    for (name, event_loop) in loops() {
        let _watchdog = Watchdog::new(name);
        let (mut theirs, ours) = sockets(&event_loop);
        let message: Vec<u8> = (0..3 << 20).map(|n| (n % 249) as u8).collect();
        let expected = message.clone();
        let other = std::thread::spawn(move || {
            let mut bytes = vec![0; 3 << 20];
            theirs.read_exact(&mut bytes).unwrap();
            theirs.write_all(&bytes).unwrap();
            theirs.write_all(b"end").unwrap();
        });
        run(&event_loop, async {
            let message = ours.send_all(message).await.unwrap();
            assert!(ours.recv_exact(message).await.unwrap() == expected, "{name}");
            let (count, bytes) = ours.recv([0; 8]).await.unwrap();
            assert_eq!(&bytes[..count], b"end", "{name}");
            assert_eq!(ours.recv([0; 8]).await.unwrap().0, 0, "{name}: the end");
            let end = ours.recv_exact([0; 8]).await.unwrap_err();
            assert_eq!(end.kind(), ErrorKind::UnexpectedEof, "{name}");
            let gone = ours.send_all("x").await.unwrap_err();
            assert_eq!(gone.kind(), ErrorKind::BrokenPipe, "{name}");
        });
        other.join().unwrap();
    }
}

/// The same program runs on each ring, epoll's included, without pool threads.
#[test]
fn pipes_are_read_and_written_by_every_ring() {
    for (name, event_loop) in loops() {
        for flags in [OFlag::empty(), OFlag::O_NONBLOCK] {
            let _watchdog = Watchdog::new(name);
            let ((reader, their_end), (their_start, writer)) =
                (pipe2(flags).unwrap(), pipe2(flags).unwrap());
            let (reader, writer) = (event_loop.file(reader), event_loop.file(writer));
            // Both wait at first: nothing to read, and then no room.
            let reading = event_loop.spawn(async move { reader.recv([0; 16]).await });
            event_loop.run_once(false).unwrap();
            nix::unistd::write(&their_end, b"by the pipe").unwrap();
            let (count, bytes) = run(&event_loop, reading).unwrap().unwrap();
            assert_eq!(&bytes[..count], b"by the pipe", "{name}, {flags:?}");
            let message: Vec<u8> = (0..1 << 20).map(|n| (n % 249) as u8).collect();
            let expected = message.clone();
            let sending = event_loop.spawn(async move { writer.send_all(message).await });
            (0..20).for_each(|_| event_loop.run_once(false).unwrap());
            let other = std::thread::spawn(move || {
                let (mut file, mut bytes) = (std::fs::File::from(their_start), Vec::new());
                let mut chunk = vec![0; 1 << 16];
                loop {
                    match file.read(&mut chunk) {
                        Ok(0) => return bytes,
                        Ok(count) => bytes.extend_from_slice(&chunk[..count]),
                        Err(_) => std::thread::yield_now(),
                    }
                }
            });
            run(&event_loop, sending).unwrap().unwrap();
            assert!(other.join().unwrap() == expected, "{name}, {flags:?}");
        }
    }
}

#[test]
fn a_read_that_timed_out_takes_no_later_bytes_and_frees_its_socket() {
    for (name, event_loop) in loops() {
        let _watchdog = Watchdog::new(name);
        let (mut theirs, ours) = sockets(&event_loop);
        for _ in 0..10 {
            let read = event_loop.timeout(Duration::from_millis(1), ours.recv([0; 8]));
            assert_eq!(run(&event_loop, read).err(), Some(Elapsed), "{name}");
            // The cancellation goes to the kernel with the next call.
            event_loop.run_once(false).unwrap();
            theirs.write_all(b"later").unwrap();
            let (count, bytes) = run(&event_loop, ours.recv([0; 8])).unwrap();
            assert_eq!(&bytes[..count], b"later", "{name}");
        }
        let read = event_loop.timeout(Duration::from_millis(1), ours.recv([0; 8]));
        assert_eq!(run(&event_loop, read).err(), Some(Elapsed), "{name}");
        drop(ours);
        theirs.set_nonblocking(true).unwrap();
        turn_until(&event_loop, name, || {
            event_loop.add_timer(0, || {});
            matches!(theirs.read(&mut [0; 1]), Ok(0))
        });
    }
}

#[test]
fn a_cancelled_operation_tells_so_and_a_detached_one_continues() {
    for (name, event_loop) in loops() {
        let _watchdog = Watchdog::new(name);
        let (mut theirs, ours) = sockets(&event_loop);
        let read = || {
            let bufs = AlignedBuf::io_bufs(8, 8).unwrap();
            event_loop.operate(&ours, IoOp::Read { offset: 0 }, Engine::Uring, bufs)
        };
        let cancelled = read();
        event_loop.run_once(false).unwrap();
        cancelled.cancel();
        cancelled.cancel();
        let (result, bufs) = run(&event_loop, cancelled);
        assert_eq!((raw(result), bufs.len()), (-libc::ECANCELED, 8), "{name}");
        let detached = read();
        event_loop.run_once(false).unwrap();
        detached.detach();
        event_loop.run_once(false).unwrap();
        theirs.write_all(b"detached").unwrap();
        theirs.write_all(b"next").unwrap();
        let (count, bytes) = run(&event_loop, ours.recv([0; 8])).unwrap();
        assert_eq!(&bytes[..count], b"next", "{name}");
    }
}

/// Memory contract: also where the kernel is too late to cancel, and writes after the drop.
#[test]
fn memory_of_a_dropped_read_lives_until_its_completion() {
    for late in [false, true] {
        let faults = Faults { late_cancel: if late { 100 } else { 0 }, ..Faults::default() };
        let (sim, event_loop) = simulated(1, faults);
        sim.script(|_| Verdict::Hold);
        let file = event_loop.register_file(sim.file(&[9; 64]).unwrap());
        let drops = Rc::new(Cell::new(0));
        let buf = Noted(vec![0; 64], drops.clone());
        let reader = file.clone();
        let read = event_loop.spawn(async move { reader.read_exact_at(buf, 0).await.map(drop) });
        (0..3).for_each(|_| event_loop.run_once(false).unwrap());
        assert_eq!(sim.in_flight(), 1);
        read.abort();
        assert_eq!(drops.get(), 0, "freed under the kernel's hands");
        turn_until(&event_loop, "the end", || sim.in_flight() == 0 && drops.get() == 1);
        // With the loop itself.
        let buf = Noted(vec![0; 64], drops.clone());
        event_loop.spawn(async move { file.read_exact_at(buf, 0).await.map(drop) });
        (0..3).for_each(|_| event_loop.run_once(false).unwrap());
        assert_eq!(sim.in_flight(), 1);
        drop(event_loop);
        assert_eq!((sim.in_flight(), drops.get()), (0, 2));
    }
}

#[test]
fn a_file_of_a_dropped_loop_is_an_error() {
    for (name, event_loop) in loops() {
        let (_theirs, ours) = sockets(&event_loop);
        drop(event_loop);
        let other = EventLoop::new(Default::default()).unwrap();
        let error = run(&other, ours.recv([0; 8])).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ECANCELED), "{name}");
    }
}

#[test]
fn connections_are_made_and_accepted() {
    for (name, event_loop) in loops() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let _watchdog = Watchdog::new(name);
            // A machine without IPv6.
            let Ok(listener) = TcpListener::bind(address) else { continue };
            let address = listener.local_addr().unwrap();
            let listener = event_loop.file(listener);
            let on_loop = event_loop.clone();
            let server = event_loop.spawn(async move {
                for _ in 0..3 {
                    let client = listener.accept().await?;
                    on_loop.spawn(async move {
                        let mut buf = vec![0; 64];
                        while let Ok((count @ 1.., bytes)) = client.recv(buf).await {
                            let part = Part::new(bytes, 0..count);
                            buf = client.send_all(part).await.unwrap().into_inner();
                        }
                    });
                }
                std::io::Result::Ok(())
            });
            event_loop.run_once(false).unwrap();
            run(&event_loop, async {
                for _ in 0..3 {
                    let server = event_loop.connect(address).await.unwrap();
                    server.send_all("echo").await.unwrap();
                    assert_eq!(&server.recv_exact([0; 4]).await.unwrap(), b"echo", "{name}");
                }
                server.await.unwrap().unwrap();
            });
            // The listener is closed.
            let refused = run(&event_loop, event_loop.connect(address)).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::ConnectionRefused, "{name}");
        }
    }
}

/// An accept that is dropped takes no connection.
#[test]
fn an_accept_that_timed_out_leaves_the_next_client_to_others() {
    for (name, event_loop) in loops() {
        let _watchdog = Watchdog::new(name);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address: SocketAddr = listener.local_addr().unwrap();
        let listener = event_loop.file(listener);
        let accept = event_loop.timeout(Duration::from_millis(1), listener.accept());
        assert_eq!(run(&event_loop, accept).err(), Some(Elapsed), "{name}");
        let mut client = std::net::TcpStream::connect(address).unwrap();
        let server = run(&event_loop, listener.accept()).unwrap();
        client.write_all(b"here").unwrap();
        assert_eq!(&run(&event_loop, server.recv_exact([0; 4])).unwrap(), b"here", "{name}");
    }
}

#[test]
fn a_poll_waits_for_one_event() {
    for (name, event_loop) in loops() {
        let _watchdog = Watchdog::new(name);
        for engine in [Engine::Uring, Engine::Native, Engine::Threads] {
            let fd = eventfd();
            let file = event_loop.register_file(Arc::clone(&fd));
            let poll = IoOp::Poll { events: libc::POLLIN as u32 };
            let ready = event_loop.operate(&file, poll, engine, IoBufs::new());
            event_loop.run_once(false).unwrap();
            signal(&fd);
            let (mask, _) = run(&event_loop, ready);
            assert_eq!(mask.unwrap(), libc::POLLIN as usize, "{name}, {engine:?}");
        }
    }
}

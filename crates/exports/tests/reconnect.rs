//! Front ends that come and go leave nothing behind. Alone in its process: it counts descriptors.

use crate::common;

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use common::{
    Daemon, Guest, NEED_REPLY, Options, SECTOR, ask, eventually, message, number, send_with,
    with_reply_ack,
};
use exports::vhost_user::wire::Request;

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Mappings of memory that front ends hand over.
fn mapped_memfds() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("memfd:guest-memory")).count()
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

fn start(stream: &mut UnixStream, guest: &Guest) {
    let ack = |stream: &mut UnixStream, request, payload: &[u8], fds: &[i32]| {
        send_with(stream, &message(request, NEED_REPLY, payload), fds);
        assert_eq!(number(stream, request as u32), 0, "{request:?}");
    };
    let table: Vec<u8> = [1, 0, common::MEMORY, 0x7000_0000_0000, 0]
        .into_iter()
        .flat_map(u64::to_ne_bytes)
        .collect();
    ack(stream, Request::SetMemTable, &table, &[guest.files[0].as_raw_fd()]);
    for (index, queue) in guest.queues.iter().enumerate() {
        let config = queue.driver.config();
        let state = |num: u32| [index as u32, num].map(u32::to_ne_bytes).concat();
        ack(stream, Request::SetVringNum, &state(config.size.into()), &[]);
        let addr: Vec<u8> = [index as u64, config.desc, config.used, config.avail, 0]
            .into_iter()
            .flat_map(u64::to_ne_bytes)
            .collect();
        ack(stream, Request::SetVringAddr, &addr, &[]);
        let index = (index as u64).to_ne_bytes();
        ack(stream, Request::SetVringCall, &index, &[queue.call.as_raw_fd()]);
        ack(stream, Request::SetVringErr, &index, &[queue.call.as_raw_fd()]);
        ack(stream, Request::SetVringKick, &index, &[queue.kick.as_raw_fd()]);
        ack(stream, Request::SetVringEnable, &state(1), &[]);
    }
}

#[test]
fn two_hundred_front_ends_leave_nothing_behind() {
    let daemon = Daemon::with(Options { num_queues: 2, io_threads: 2, ..Options::default() });
    let mut guest = Guest::new(2, 8);
    let settled = |daemon: &Daemon| {
        eventually("the front end is gone", || !daemon.export().is_connected());
        (open_descriptors(), mapped_memfds(), threads())
    };
    let mut at_first = None;
    for round in 0..200u64 {
        let mut stream = with_reply_ack(daemon.connect());
        guest = Guest::new(2, 8);
        start(&mut stream, &guest);
        let queue = (round % 2) as usize;
        assert_eq!(guest.write(queue, round, &[round as u8; SECTOR]), 0);
        match round % 4 {
            0 => {
                let state = [queue as u32, 0].map(u32::to_ne_bytes).concat();
                send_with(&stream, &message(Request::GetVringBase, 0, &state), &[]);
                common::receive(&mut stream).unwrap();
            }
            1 => assert_eq!(ask(&mut stream, Request::ResetDevice, NEED_REPLY, &[]), 0),
            // In the middle of a message, with descriptors on their way.
            2 => send_with(&stream, &[0; 5], &[guest.queues[0].call.as_raw_fd(); 3]),
            // With a request on its way.
            _ => guest.offer(queue, 1, round, &[round as u8; SECTOR]),
        }
        drop(stream);
        // A poll in flight holds its descriptor until it has ended, in the loop's next turn.
        let (fds, memfds, threads) = match at_first {
            _ if round < 8 => continue,
            None => *at_first.insert(settled(&daemon)),
            Some(at_first) => at_first,
        };
        eventually(&format!("all is as at first, round {round}"), || {
            let now = settled(&daemon);
            now.0 <= fds && now.1 <= memfds && now.2 <= threads
        });
    }
    drop(guest);
    assert!(at_first.is_some());
}

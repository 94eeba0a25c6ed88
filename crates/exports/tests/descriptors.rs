//! Descriptors of files that block any access, or the close, for as long as their owner likes.

use crate::common;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;

use common::{
    Daemon, Dir, NEED_REPLY, PATIENCE, ask, connect, message, number, send_with, with_reply_ack,
};
use exports::vhost_user::Listen;
use exports::vhost_user::fd_passing;
use exports::vhost_user::wire::{MAX_FDS, Request};
use guest_memory::test_util::fuse::Fuse;
use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket::{MsgFlags, recv};
use test_requirements::{Needs, untested};

const SIZE: u64 = 1 << 20;

fn region() -> Vec<u8> {
    [0, 0, SIZE, 0x7000_0000_0000, 0].into_iter().flat_map(u64::to_ne_bytes).collect()
}

/// A file on FUSE; `None`, and a word of it, where there can be none.
fn fuse() -> Option<Fuse> {
    if let Err(why) = std::fs::File::options().read(true).write(true).open("/dev/fuse") {
        untested(Needs::Fuse, format_args!("descriptors of files on FUSE take /dev/fuse: {why}"));
        return None;
    }
    Some(Fuse::mount(SIZE).unwrap())
}

/// What a file that hangs comes along with, and how many of it.
#[test]
fn a_hanging_close_blocks_no_other_thread() {
    let Some(fuse) = fuse() else { return };
    let event = nix::sys::eventfd::EventFd::new().unwrap();
    for (request, payload, count) in [
        (Request::GetQueueNum, Vec::new(), 1),
        (Request::SetVringCall, 0u64.to_ne_bytes().to_vec(), 1),
        (Request::SetVringKick, 0u64.to_ne_bytes().to_vec(), 2),
        (Request::SetBackendReqFd, Vec::new(), 1),
        (Request::AddMemReg, region(), 1),
        (Request::SetMemTable, [0; 8].to_vec(), MAX_FDS + 1),
    ] {
        let daemon = Daemon::new();
        let dir = Dir::new();
        let config = daemon.config(Listen::Path(dir.socket()), 1);
        let _neighbour = daemon.start(config).unwrap();
        let file = fuse.open().unwrap();
        let hanging = fuse.hang();
        let stream = with_reply_ack(daemon.connect());
        let mut fds = vec![event.as_raw_fd(); count - 1];
        fds.push(file.as_raw_fd());
        send_with(&stream, &message(request, NEED_REPLY, &payload), &fds);
        // Nobody is answered before it is closed, and all others are.
        stream.set_read_timeout(Some(common::NOT_YET)).unwrap();
        recv(stream.as_raw_fd(), &mut [0], MsgFlags::empty()).unwrap_err();
        let mut other = connect(&dir.socket());
        assert_ne!(ask(&mut other, Request::GetFeatures, 0, &[]), 0, "{request:?}");
        // It leaves; the next one is served once that is closed.
        drop(stream);
        let mut next = daemon.connect();
        next.set_read_timeout(Some(common::NOT_YET)).unwrap();
        send_with(&next, &message(Request::GetFeatures, 0, &[]), &[]);
        recv(next.as_raw_fd(), &mut [0], MsgFlags::empty()).unwrap_err();
        assert_ne!(ask(&mut other, Request::GetFeatures, 0, &[]), 0, "{request:?}");
        drop(hanging);
        next.set_read_timeout(Some(PATIENCE)).unwrap();
        assert_ne!(number(&mut next, Request::GetFeatures as u32), 0, "{request:?}");
    }
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// The error names the limit, and the descriptors that did come are closed again. A process of its own, as nextest runs
/// each test, since the limit is the process'.
#[test]
fn descriptors_beyond_the_limit_of_open_files_are_an_error_and_none_stays() {
    let (sender, receiver) = UnixStream::pair().unwrap();
    let event = nix::sys::eventfd::EventFd::new().unwrap();
    let before = open_files();
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let highest = File::open("/dev/null").unwrap().as_raw_fd() as u64;
    setrlimit(Resource::RLIMIT_NOFILE, highest + 2, hard).unwrap();
    send_with(&sender, &[1], &[event.as_raw_fd(); 5]);
    let received = fd_passing::receive(receiver.as_fd(), &mut [0]).map(|received| received.len);
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
    assert_eq!(received, Err(Errno::EMFILE));
    assert_eq!(open_files(), before);
}

/// An export whose front end hands over such a file can be stopped.
#[test]
fn an_export_that_waits_for_a_file_to_be_closed_can_be_stopped() {
    let Some(fuse) = fuse() else { return };
    let mut daemon = Daemon::new();
    let file = fuse.open().unwrap();
    let hanging = fuse.hang();
    let stream = daemon.connect();
    send_with(&stream, &message(Request::GetFeatures, 0, &[]), &[file.as_raw_fd()]);
    stream.set_read_timeout(Some(common::NOT_YET)).unwrap();
    recv(stream.as_raw_fd(), &mut [0], MsgFlags::empty()).unwrap_err();
    daemon.stop().unwrap();
    drop(hanging);
}

/// The thread of `release` closes the last descriptor of a large memfd, whichever message it comes with.
#[test]
fn a_large_memfd_is_closed_by_a_thread_of_its_own() {
    let daemon = Daemon::new();
    let (sender, blocked) = std::sync::mpsc::channel::<()>();
    struct Blocks(std::sync::mpsc::Receiver<()>);
    impl Drop for Blocks {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }
    guest_memory::release(Blocks(blocked));
    let count = || {
        let links = std::fs::read_dir("/proc/self/fd").unwrap();
        let links = links.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok());
        links.filter(|file| file.to_string_lossy().contains("memfd:large")).count()
    };
    let mut expected = 0;
    for (request, payload, count_of_fds) in [
        (Request::GetQueueNum, Vec::new(), 1),
        (Request::SetVringCall, 0u64.to_ne_bytes().to_vec(), 1),
        (Request::SetVringKick, 0u64.to_ne_bytes().to_vec(), 2),
        (Request::AddMemReg, [0; 40].to_vec(), 1),
        (Request::SetMemTable, [0; 8].to_vec(), MAX_FDS + 1),
    ] {
        let stream = with_reply_ack(daemon.connect());
        let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
        let file = nix::sys::memfd::memfd_create(c"large", flags).unwrap();
        nix::fcntl::fallocate(&file, nix::fcntl::FallocateFlags::empty(), 0, 8 << 20).unwrap();
        let fds = vec![file.as_raw_fd(); count_of_fds];
        send_with(&stream, &message(request, NEED_REPLY, &payload), &fds);
        drop(file);
        // Answered or disconnected: then the next front end is served.
        drop(stream);
        let next = ask(&mut daemon.connect(), Request::GetFeatures, 0, &[]);
        assert_ne!(next, 0, "{request:?}");
        assert!(count() > expected, "{request:?}: {} of {expected}", count());
        expected = count();
    }
    drop(sender);
    let (end, ended) = std::sync::mpsc::channel::<()>();
    guest_memory::release(end);
    ended.recv().unwrap_err();
    assert_eq!(count(), 0);
}

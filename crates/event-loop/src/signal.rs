//! Signals to eventfds that other processes share, or by a call.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use io_uring::register::Restriction;
use io_uring::{IoUring, opcode};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::linux_aio::Signals;

/// Signals an eventfd of an untrusted process without blocking.
///
/// The process may have filled the counter: a write(2) would then block the loop until the counter is read.
///
/// Whether a write blocks is a flag of the open file description, which both sides share. Changing the flag
/// would change the other side's reads. So a non-blocking eventfd is written to, and a blocking one is
/// registered with its own ring (io_uring_register(2), `IORING_REGISTER_EVENTFD`). The kernel's increment
/// never blocks, and leaves a full counter unchanged. Without io_uring, Linux AIO does the same
/// (`IOCB_FLAG_RESFD`). If the other side changes the flag later, a write may still block.
#[derive(Debug)]
pub struct Signal {
    fd: Arc<OwnedFd>,
    way: Way,
}

enum Way {
    /// The eventfd is non-blocking.
    Write,
    /// Each completion of this ring signals the eventfd.
    Ring(Box<RefCell<IoUring>>),
    /// Each completion of Linux AIO does.
    LinuxAio(Box<Signals>),
    /// Neither is available: write if the counter is not full.
    Look,
    /// The descriptor is no eventfd.
    Call(Box<dyn Fn(&OwnedFd) + Send>),
}

impl Way {
    fn without_a_ring() -> Way {
        Signals::new().map_or(Way::Look, |signals| Way::LinuxAio(Box::new(signals)))
    }
}

impl std::fmt::Debug for Way {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Way::Write => "write",
            Way::Ring(_) => "ring",
            Way::LinuxAio(_) => "Linux AIO",
            Way::Look => "look",
            Way::Call(_) => "call",
        })
    }
}

impl Signal {
    /// Returns a `Signal` for this eventfd.
    pub fn new(fd: Arc<OwnedFd>) -> Self {
        let flags = fcntl(fd.as_fd(), FcntlArg::F_GETFL).map(OFlag::from_bits_retain);
        let way = match flags {
            Ok(flags) if flags.contains(OFlag::O_NONBLOCK) => Way::Write,
            _ => match ring_of(&fd) {
                Ok(ring) => Way::Ring(Box::new(RefCell::new(ring))),
                Err(_) => Way::without_a_ring(),
            },
        };
        Signal { fd, way }
    }

    /// Returns a `Signal` that `send` sends on a descriptor, such as one of a device that has no eventfd.
    ///
    /// `send` must not block.
    pub fn by_call(fd: Arc<OwnedFd>, send: impl Fn(&OwnedFd) + Send + 'static) -> Self {
        Signal { fd, way: Way::Call(Box::new(send)) }
    }

    /// Adds one to the counter, unless it is full.
    ///
    /// If it is full, the reader has an event already. Makes one system call, or two without io_uring and
    /// Linux AIO.
    pub fn send(&self) {
        let sent = match &self.way {
            Way::Write => {
                // A failure is the other side's doing and loss.
                let _ = nix::unistd::write(&self.fd, &1u64.to_ne_bytes());
                return;
            }
            Way::Ring(ring) => complete_one(&mut ring.borrow_mut()),
            Way::LinuxAio(signals) => signals.send(&self.fd),
            Way::Look => false,
            Way::Call(send) => return send(&self.fd),
        };
        if !sent {
            signal_if_not_full(&self.fd);
        }
    }
}

/// Adds one to an eventfd's counter unless it is full. If the counter is filled between the two calls, the
/// write blocks.
fn signal_if_not_full(fd: &OwnedFd) {
    let mut ready = [PollFd::new(fd.as_fd(), PollFlags::POLLOUT)];
    if poll(&mut ready, PollTimeout::ZERO) == Ok(1) {
        let _ = nix::unistd::write(fd, &1u64.to_ne_bytes());
    }
}

/// A ring restricted to signalling: no other operation and no further registration.
fn ring_of(fd: &OwnedFd) -> io::Result<IoUring> {
    let ring = IoUring::builder().setup_r_disabled().dontfork().build(1)?;
    let submitter = ring.submitter();
    submitter.register_eventfd(fd.as_raw_fd())?;
    submitter.register_restrictions(&mut [Restriction::sqe_op(opcode::Nop::CODE)])?;
    submitter.register_enable_rings()?;
    Ok(ring)
}

/// Completes an operation without an effect. Returns `false` if it could not be submitted.
fn complete_one(ring: &mut IoUring) -> bool {
    // Discard the completions of earlier signals.
    ring.completion().for_each(drop);
    // SAFETY: the entry names no memory.
    //
    // Fails if an earlier entry could not be submitted, which is then submitted now.
    let _ = unsafe { ring.submission().push(&opcode::Nop::new().build()) };
    loop {
        match ring.submit() {
            Ok(submitted) => return submitted > 0,
            Err(error) if error.raw_os_error() == Some(Errno::EINTR as i32) => {}
            Err(_) => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use nix::sys::eventfd::{EfdFlags, EventFd};

    use super::*;

    fn eventfd(flags: EfdFlags) -> (EventFd, Arc<OwnedFd>) {
        let eventfd = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | flags).unwrap();
        let copy = eventfd.as_fd().try_clone_to_owned().unwrap();
        (eventfd, Arc::new(copy))
    }

    #[test]
    fn each_signal_adds_one() {
        for flags in [EfdFlags::empty(), EfdFlags::EFD_NONBLOCK] {
            let (reader, fd) = eventfd(flags);
            for way in [None, Some(Way::without_a_ring()), Some(Way::Look)] {
                let mut signal = Signal::new(fd.clone());
                assert_eq!(matches!(signal.way, Way::Write), !flags.is_empty(), "{signal:?}");
                if let Some(way) = way {
                    signal.way = way;
                }
                (0..1000).for_each(|_| signal.send());
                assert_eq!(reader.read(), Ok(1000), "{signal:?}");
            }
        }
    }

    #[test]
    fn a_call_is_made_on_the_descriptor() {
        let (reader, fd) = eventfd(EfdFlags::EFD_NONBLOCK);
        let signal = Signal::by_call(fd, |fd| {
            nix::unistd::write(fd, &5u64.to_ne_bytes()).unwrap();
        });
        signal.send();
        signal.send();
        assert_eq!(reader.read(), Ok(10));
    }

    /// A plain write would block here, as the counter is never read.
    #[test]
    fn a_full_counter_blocks_no_signal() {
        for flags in [EfdFlags::empty(), EfdFlags::EFD_NONBLOCK] {
            for way in [None, Some(Way::without_a_ring as fn() -> Way), Some(|| Way::Look)] {
                let (reader, fd) = eventfd(flags);
                let full = u64::MAX - 1;
                reader.write(full).unwrap();
                let (done, sent) = mpsc::channel();
                std::thread::spawn(move || {
                    let mut signal = Signal::new(fd);
                    if let Some(way) = way {
                        signal.way = way();
                    }
                    (0..3).for_each(|_| signal.send());
                    done.send(()).unwrap();
                });
                sent.recv_timeout(Duration::from_secs(60)).expect("it does not wait");
                assert!(reader.read().unwrap() >= full);
            }
        }
    }

    /// A check before a write leaves a gap; this does not.
    #[test]
    fn without_a_ring_linux_aio_signals() {
        assert!(matches!(Way::without_a_ring(), Way::LinuxAio(_)));
        let (reader, fd) = eventfd(EfdFlags::empty());
        let signals = Signals::new().unwrap();
        reader.write(u64::MAX - 1).unwrap();
        // As if the counter was filled after the check.
        assert!(signals.send(&fd));
        assert_eq!(reader.read(), Ok(u64::MAX));
        assert!(signals.send(&fd));
        assert_eq!(reader.read(), Ok(1));
    }
}

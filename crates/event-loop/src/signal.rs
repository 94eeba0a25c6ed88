//! Signals to eventfds that others have, too.

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

/// The way to signal an eventfd of a stranger's, who may have filled its counter: a write(2) would
/// then wait until somebody reads it, and with it the loop.
///
/// Whether it waits is a flag of the description that both sides have, and setting it would change
/// how the other side reads. So an eventfd that does not wait is written to, and one that does is
/// registered with a ring of its own (io_uring_register(2), `IORING_REGISTER_EVENTFD`), which has the
/// kernel add to it: that never waits, and leaves a counter that is full as it is. Where there is no
/// io_uring, Linux AIO does the same (`IOCB_FLAG_RESFD`). A stranger that changes the flag later can still
/// make a write wait.
#[derive(Debug)]
pub struct Signal {
    fd: Arc<OwnedFd>,
    way: Way,
}

enum Way {
    /// It does not wait.
    Write,
    /// What completes in this ring adds to it.
    Ring(Box<RefCell<IoUring>>),
    /// What completes by Linux AIO does.
    LinuxAio(Box<Signals>),
    /// There is neither: it is written to if it is not full.
    Look,
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
        })
    }
}

impl Signal {
    /// The way to signal this eventfd.
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

    /// Adds one to its counter, unless that is full: then its reader has something to wake for. One
    /// system call, or two where there are neither rings nor Linux AIO.
    pub fn send(&self) {
        let sent = match &self.way {
            Way::Write => {
                // It is the other side's loss when it has taken away what it waits for.
                let _ = nix::unistd::write(&self.fd, &1u64.to_ne_bytes());
                return;
            }
            Way::Ring(ring) => complete_one(&mut ring.borrow_mut()),
            Way::LinuxAio(signals) => signals.send(&self.fd),
            Way::Look => false,
        };
        if !sent {
            signal_if_not_full(&self.fd);
        }
    }
}

/// Adds one to the counter of an eventfd unless it is full. Whoever fills it between the two calls has
/// the second one wait.
fn signal_if_not_full(fd: &OwnedFd) {
    let mut ready = [PollFd::new(fd.as_fd(), PollFlags::POLLOUT)];
    if poll(&mut ready, PollTimeout::ZERO) == Ok(1) {
        let _ = nix::unistd::write(fd, &1u64.to_ne_bytes());
    }
}

/// A ring that can do nothing but signal: no other operation, nothing registered any more.
fn ring_of(fd: &OwnedFd) -> io::Result<IoUring> {
    let ring = IoUring::builder().setup_r_disabled().dontfork().build(1)?;
    let submitter = ring.submitter();
    submitter.register_eventfd(fd.as_raw_fd())?;
    submitter.register_restrictions(&mut [Restriction::sqe_op(opcode::Nop::CODE)])?;
    submitter.register_enable_rings()?;
    Ok(ring)
}

/// Has an operation complete that does nothing. `false`: it could not be submitted.
fn complete_one(ring: &mut IoUring) -> bool {
    // Of earlier ones nothing is wanted but their places.
    ring.completion().for_each(drop);
    // SAFETY: the entry names no memory.
    //
    // There is no room when an earlier one could not be submitted: then that one goes now.
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

    /// Without its own way to signal, this waits for a reader that does not come.
    #[test]
    fn a_full_counter_holds_nobody_up() {
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

    /// A look before a write has a gap; this has none.
    #[test]
    fn without_a_ring_linux_aio_signals() {
        assert!(matches!(Way::without_a_ring(), Way::LinuxAio(_)));
        let (reader, fd) = eventfd(EfdFlags::empty());
        let signals = Signals::new().unwrap();
        reader.write(u64::MAX - 1).unwrap();
        // As if somebody had filled it since it was looked at.
        assert!(signals.send(&fd));
        assert_eq!(reader.read(), Ok(u64::MAX));
        assert!(signals.send(&fd));
        assert_eq!(reader.read(), Ok(1));
    }
}

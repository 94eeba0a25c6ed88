//! Memory contract: memory that the kernel may write to lives until the completion. Removal contract.

use crate::common;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use common::*;
use event_loop::ring::sim::{Faults, Verdict};
use event_loop::{
    AlignedBuf, BlockingCall, Engine, EventLoop, Handler, HandlerId, IoBufs, IoOp, LoopConfig,
    Progress, Trigger,
};

/// Memory whose life is visible as the count of its `Rc`.
fn watched() -> (Rc<[u8; 64]>, IoBufs) {
    let memory = Rc::new([0u8; 64]);
    let mut bufs = IoBufs::with_capacity(1);
    bufs.set_owner(memory.clone());
    // SAFETY: inside the array, which the owner keeps; the test does not access it.
    #[allow(unsafe_code)]
    unsafe {
        bufs.push(memory.as_ptr().cast_mut(), 64);
    }
    (memory, bufs)
}

#[test]
fn memory_outlives_a_detached_future_and_a_dropped_file() {
    let (sim, event_loop) = simulated(1, Faults::default());
    sim.script(|_| Verdict::Hold);
    let file = event_loop.register_file(sim.file(&[9; 64]).unwrap());
    let (memory, bufs) = watched();
    let read = event_loop.operate(&file, IoOp::Read { offset: 0 }, Engine::Uring, bufs);
    read.detach();
    drop(file);
    for _ in 0..3 {
        event_loop.run_once(false).unwrap();
    }
    assert_eq!((Rc::strong_count(&memory), sim.in_flight()), (2, 1), "the loop keeps it");
    sim.release();
    turn_until(&event_loop, "the read", || sim.in_flight() == 0 && Rc::strong_count(&memory) == 1);
}

#[test]
fn memory_outlives_the_loop_while_in_flight() {
    for seed in 0..20 {
        let faults = Faults { late_cancel: 50, entries: 2, ..Faults::default() };
        let (sim, event_loop) = simulated(seed, faults);
        sim.script(|_| Verdict::Hold);
        let file = event_loop.register_file(sim.file(&[9; 64]).unwrap());
        let memories: Vec<_> = (0..8)
            .map(|_| {
                let (memory, bufs) = watched();
                let read = IoOp::Read { offset: 0 };
                event_loop.operate(&file, read, Engine::Uring, bufs).detach();
                memory
            })
            .collect();
        event_loop.run_once(false).unwrap();
        drop((event_loop, file));
        assert_eq!(sim.in_flight(), 0, "seed {seed}");
        assert!(memories.iter().all(|memory| Rc::strong_count(memory) == 1));
    }
}

/// Real reads of a pipe that gets no data.
#[test]
fn memory_reads_in_flight_for_real_are_ended_and_freed_with_the_loop() {
    for (name, event_loop) in loops() {
        let _watchdog = Watchdog::new(name);
        let (reader, writer) = pipe();
        let file = event_loop.register_file(reader);
        let (memory, bufs) = watched();
        let read = event_loop.operate(&file, IoOp::Read { offset: 0 }, Engine::Uring, bufs);
        event_loop.run_once(false).unwrap();
        event_loop.run_once(false).unwrap();
        read.detach();
        assert_eq!(Rc::strong_count(&memory), 2, "{name}: freed under the kernel's hands");
        drop(event_loop);
        assert_eq!(Rc::strong_count(&memory), 1, "{name}");
        drop((writer, file));
    }
}

/// A pool thread reads and the future is dropped: the memory stays valid.
#[test]
fn memory_with_a_pool_thread_outlives_a_dropped_future() {
    for (name, event_loop) in loops() {
        let file = event_loop.register_file(tempfile(&[7; 64]));
        let (memory, bufs) = watched();
        drop(event_loop.operate(&file, IoOp::Read { offset: 0 }, Engine::Threads, bufs));
        assert_eq!(Rc::strong_count(&memory), 2, "{name}");
        turn_until(&event_loop, name, || Rc::strong_count(&memory) == 1);
    }
}

/// A slot is reused: a second completion for the old operation is ignored.
#[test]
fn memory_reused_slots_ignore_old_completions() {
    let (sim, event_loop) = simulated(3, Faults::default());
    let file = event_loop.register_file(sim.file(&[9; 64]).unwrap());
    for n in 0..1000 {
        let bufs = AlignedBuf::io_bufs(8, 8).unwrap();
        let read = event_loop.operate(&file, IoOp::Read { offset: 0 }, Engine::Uring, bufs);
        if n % 2 == 0 {
            drop(read);
        } else {
            assert_eq!(event_loop.block_on(read).unwrap().0.unwrap(), 8);
        }
    }
}

/// A list that shares the memory of a call under way has the bytes of before, or all of the call's.
#[test]
fn memory_of_a_call_is_written_on_the_loops_thread() {
    const LEN: usize = 64 << 10;
    static FILL: BlockingCall = BlockingCall {
        name: c"fill",
        run: |_, byte, _, memory| {
            (0..memory.len()).step_by(8).for_each(|at| memory.put(at, &[byte as u8; 8]));
            Ok(memory.len())
        },
    };
    for (name, event_loop) in loops() {
        let file = event_loop.register_file(tempfile(b""));
        let mut bufs = AlignedBuf::io_bufs(LEN, 4096).unwrap();
        let (mut shared, mut found) = (IoBufs::new(), vec![0; LEN]);
        for byte in 1..=20 {
            shared.set_part(&bufs, 0, LEN, 1);
            let done = Rc::new(RefCell::new(None));
            let fill = IoOp::Call { call: &FILL, offset: byte, len: 0 };
            let (operation, end) =
                (event_loop.operate(&file, fill, Engine::Threads, bufs), done.clone());
            event_loop.spawn(async move {
                end.replace(Some(operation.await));
            });
            while done.borrow().is_none() {
                event_loop.run_once(false).unwrap();
                shared.copy_out(0, &mut found);
                assert!(found.iter().all(|other| *other == found[0]), "{name}: a mixture");
            }
            let (filled, back) = done.take().unwrap();
            assert_eq!((filled.unwrap(), u64::from(found[0])), (LEN, byte), "{name}");
            bufs = back;
        }
    }
}

// ---- removal ----------------------------------------------------------------------------------------

/// Counts its drops.
struct Dropped(Rc<Cell<u32>>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.set(self.0.get() + 1);
    }
}

/// Two handlers on two descriptors. Each removes the listed handlers once.
struct Remover {
    event_loop: EventLoop,
    calls: Cell<u32>,
    remove: RefCell<Vec<HandlerId>>,
    _dropped: Dropped,
}

impl Handler for Remover {
    fn ready(&self, _events: u32) -> Progress {
        self.calls.set(self.calls.get() + 1);
        for id in self.remove.take() {
            self.event_loop.remove_handler(id);
        }
        Progress::More
    }
}

fn removers(event_loop: &EventLoop) -> ([Rc<Remover>; 2], [HandlerId; 2], Rc<Cell<u32>>) {
    let drops = Rc::new(Cell::new(0));
    let handlers = [(); 2].map(|()| {
        Rc::new(Remover {
            event_loop: event_loop.clone(),
            calls: Cell::new(0),
            remove: RefCell::default(),
            _dropped: Dropped(drops.clone()),
        })
    });
    let ids = handlers.each_ref().map(|handler| {
        let fd = eventfd();
        signal(&fd);
        event_loop.add_handler(fd, 1, Trigger::Edge, handler.clone())
    });
    (handlers, ids, drops)
}

/// Runs until all effects of a removal have arrived.
fn settle(event_loop: &EventLoop, in_flight: u64) {
    turn_until(event_loop, "the end of the polls", || event_loop.in_flight() <= in_flight);
    event_loop.run_once(false).unwrap();
}

#[test]
fn removal_while_the_poll_is_in_flight() {
    for (name, event_loop) in loops() {
        event_loop.run_once(false).unwrap();
        let before = event_loop.in_flight();
        let (fd, count) = (eventfd(), Count::new());
        for trigger in [Trigger::Edge, Trigger::Level] {
            let id = event_loop.add_handler(fd.clone(), 1, trigger, count.clone());
            // Remove a handler that is not armed, and one that is.
            for armed in [false, true] {
                if armed {
                    event_loop.run_once(false).unwrap();
                }
            }
            event_loop.remove_handler(id);
            event_loop.remove_handler(id);
            assert_eq!(Rc::strong_count(&count), 1, "{name}: freed at once");
            signal(&fd);
            settle(&event_loop, before);
            assert_eq!((count.calls.get(), event_loop.in_flight()), (0, before), "{name}");
            nix::unistd::read(&*fd, &mut [0; 8]).unwrap();
        }
    }
}

#[test]
fn removal_by_another_loop_changes_nothing() {
    for ((name, event_loop), (_, other)) in loops().zip(loops()) {
        let (fd, count, theirs) = (eventfd(), Count::new(), Count::new());
        let id = event_loop.add_handler(fd.clone(), 1, Trigger::Edge, count.clone());
        other.add_handler(fd.clone(), 1, Trigger::Edge, theirs.clone());
        other.remove_handler(id);
        other.call_again(id);
        other.run_once(false).unwrap();
        assert_eq!(theirs.calls.get(), 0, "{name}");
        signal(&fd);
        turn_until(&event_loop, name, || count.calls.get() == 1);
        turn_until(&other, name, || theirs.calls.get() == 1);
    }
}

#[test]
fn removal_from_inside_its_own_callback() {
    for (name, event_loop) in loops() {
        event_loop.run_once(false).unwrap();
        let before = event_loop.in_flight();
        let (handlers, ids, drops) = removers(&event_loop);
        for (handler, id) in handlers.iter().zip(ids) {
            // The second removal has no effect.
            *handler.remove.borrow_mut() = vec![id, id];
        }
        let calls = handlers.each_ref().map(Rc::downgrade);
        turn_until(&event_loop, name, || handlers.iter().all(|handler| handler.calls.get() > 0));
        settle(&event_loop, before);
        assert_eq!(handlers.each_ref().map(|handler| handler.calls.get()), [1, 1], "{name}");
        assert_eq!(event_loop.in_flight(), before, "{name}");
        drop(handlers);
        assert!(calls.iter().all(|handler| handler.upgrade().is_none()));
        assert_eq!(drops.get(), 2, "{name}: freed once each");
    }
}

#[test]
fn removal_from_inside_another_callback_of_the_same_iteration() {
    for (name, event_loop) in loops() {
        event_loop.run_once(false).unwrap();
        let before = event_loop.in_flight();
        let (handlers, ids, drops) = removers(&event_loop);
        // Both have fired; the first one called removes both.
        for handler in &handlers {
            *handler.remove.borrow_mut() = ids.to_vec();
        }
        let calls = || handlers.iter().map(|handler| handler.calls.get()).sum::<u32>();
        turn_until(&event_loop, name, || calls() > 0);
        settle(&event_loop, before);
        assert_eq!(calls(), 1, "{name}: the other ran after its removal");
        assert_eq!(event_loop.in_flight(), before, "{name}");
        drop(handlers);
        assert_eq!(drops.get(), 2, "{name}");
    }
}

#[test]
fn removal_from_another_thread() {
    for (name, event_loop) in loops() {
        event_loop.run_once(false).unwrap();
        let before = event_loop.in_flight();
        let (fd, count) = (eventfd(), Count::new());
        let id = event_loop.add_handler(fd.clone(), 1, Trigger::Edge, count.clone());
        signal(&fd);
        turn_until(&event_loop, name, || count.calls.get() == 1);
        let handle = event_loop.handle();
        let remover = std::thread::spawn(move || {
            handle.spawn(move |event_loop| event_loop.remove_handler(id)).unwrap();
        });
        turn_until(&event_loop, name, || Rc::strong_count(&count) == 1);
        remover.join().unwrap();
        signal(&fd);
        settle(&event_loop, before);
        assert_eq!((count.calls.get(), event_loop.in_flight()), (1, before), "{name}");
    }
}

/// The poll has fired and its task work has not run: IORING_OP_POLL_REMOVE would fail here.
#[test]
fn removal_of_a_poll_that_has_just_fired_ends_it() {
    for (name, event_loop) in loops() {
        event_loop.run_once(false).unwrap();
        let before = event_loop.in_flight();
        for _ in 0..100 {
            let (fd, count) = (eventfd(), Count::new());
            let id = event_loop.add_handler(fd.clone(), 1, Trigger::Edge, count.clone());
            event_loop.run_once(false).unwrap();
            std::thread::scope(|scope| drop(scope.spawn(|| signal(&fd))));
            event_loop.remove_handler(id);
            settle(&event_loop, before);
            assert_eq!((count.calls.get(), event_loop.in_flight()), (0, before), "{name}");
        }
    }
}

/// Pending events of a removed handler are not delivered to the handler that reuses its slot.
#[test]
fn removal_a_place_used_again_inherits_nothing() {
    for (name, event_loop) in loops() {
        event_loop.run_once(false).unwrap();
        let before = event_loop.in_flight();
        for armed in [false, true] {
            let (old_fd, new_fd) = (eventfd(), eventfd());
            let (old, new) = (Count::new(), Count::new());
            let id = event_loop.add_handler(old_fd.clone(), 1, Trigger::Edge, old.clone());
            if armed {
                event_loop.run_once(false).unwrap();
            }
            signal(&old_fd);
            event_loop.remove_handler(id);
            let id = event_loop.add_handler(new_fd.clone(), 1, Trigger::Edge, new.clone());
            settle(&event_loop, before + 1);
            signal(&old_fd);
            (0..3).for_each(|_| event_loop.run_once(false).unwrap());
            assert_eq!((old.calls.get(), new.calls.get()), (0, 0), "{name}");
            signal(&new_fd);
            turn_until(&event_loop, name, || new.calls.get() == 1);
            event_loop.remove_handler(id);
            settle(&event_loop, before);
        }
    }
}

/// A handler found by polling removes another one polled in the same round.
#[test]
fn removal_a_removed_handler_is_not_polled_either() {
    struct Polled {
        event_loop: EventLoop,
        other: Cell<Option<HandlerId>>,
        polls: Cell<u32>,
    }
    impl Handler for Polled {
        fn ready(&self, _events: u32) -> Progress {
            Progress::Done
        }
        fn can_poll(&self) -> bool {
            true
        }
        fn poll(&self) -> bool {
            self.polls.set(self.polls.get() + 1);
            if let Some(other) = self.other.take() {
                self.event_loop.remove_handler(other);
            }
            false
        }
    }
    let sim = event_loop::ring::sim::Sim::new(1, Faults::default());
    let poll = event_loop::PollParams::of(event_loop::PollPolicy::Weighted);
    let config = event_loop::LoopConfig { poll, ..event_loop::LoopConfig::default() };
    let event_loop = sim.event_loop(config).unwrap();
    let handlers = [(); 2].map(|()| {
        Rc::new(Polled {
            event_loop: event_loop.clone(),
            other: Cell::new(None),
            polls: Cell::new(0),
        })
    });
    let fds = [eventfd(), eventfd()];
    let ids: Vec<_> = handlers
        .iter()
        .zip(&fds)
        .map(|(handler, fd)| event_loop.add_handler(fd.clone(), 1, Trigger::Edge, handler.clone()))
        .collect();
    let round = || {
        fds.iter().for_each(|fd| signal(fd));
        for _ in 0..5 {
            event_loop.run_once(false).unwrap();
            sim.advance(5_000);
        }
        event_loop.add_timer(sim.now_ns() + 50_000, || {});
        event_loop.run_once(true).unwrap();
        event_loop.run_once(true).unwrap();
    };
    while handlers.iter().any(|handler| handler.polls.get() == 0) {
        round();
    }
    let before = handlers.each_ref().map(|handler| handler.polls.get());
    handlers[0].other.set(Some(ids[1]));
    handlers[1].other.set(Some(ids[0]));
    round();
    let after = handlers.each_ref().map(|handler| handler.polls.get());
    assert!(
        after[0] > before[0] && after[1] == before[1]
            || after[1] > before[1] && after[0] == before[0],
        "{before:?}, then {after:?}: the removed one was polled"
    );
    // Handlers and loop hold each other.
    event_loop.shut_down().unwrap();
}

/// A queued poll names its descriptor by number until the kernel has seen it.
#[test]
fn removal_a_removed_handlers_descriptor_stays_open_until_its_poll_has_ended() {
    for (name, ring) in rings() {
        // All but the first poll wait in the backlog.
        let event_loop = EventLoop::new(LoopConfig { entries: 1, ..config(ring) }).unwrap();
        let add = |_| {
            let fd = eventfd();
            let id = event_loop.add_handler(fd.clone(), 1, Trigger::Edge, Count::new());
            (id, Arc::downgrade(&fd))
        };
        let handlers: Vec<_> = (0..4).map(add).collect();
        event_loop.run_once(false).unwrap();
        for (id, fd) in handlers {
            event_loop.remove_handler(id);
            assert!(fd.upgrade().is_some(), "{name}");
            turn_until(&event_loop, name, || fd.upgrade().is_none());
        }
    }
}

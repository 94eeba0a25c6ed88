//! Kicks and signals: wanted when something new comes, not wanted otherwise, never lost.

use crate::common;

use common::{DATA, Pair, Setup, segment};
use queue::QueueConfig;

fn event_idx() -> Pair {
    Setup { event_idx: true, start: u16::MAX - 2, ..Setup::default() }.build()
}

#[test]
fn kicks_by_flag() {
    let mut pair = Setup::default().build();
    assert!(pair.offer(1) && pair.offer(1), "by flag, each is a kick");
    pair.queue.suppress_kicks();
    assert!(!pair.offer(1));
    assert!(pair.queue.enable_kicks(), "three are there");
    (0..3).for_each(|_| pair.complete());
    assert!(!pair.queue.enable_kicks());
    assert!(pair.offer(1));
}

#[test]
fn kicks_by_event_idx_come_once_per_enabling() {
    let mut pair = event_idx();
    assert!(pair.offer(1), "enabled at set-up");
    assert!(!pair.offer(1), "the device knows already");
    (0..2).for_each(|_| pair.complete());
    assert!(!pair.queue.enable_kicks());
    assert!(!pair.queue.enable_kicks(), "twice is the same as once");
    pair.driver.add(&[segment(DATA, 1)], &[]).unwrap();
    pair.driver.add(&[segment(DATA, 1)], &[]).unwrap();
    assert!(pair.driver.publish(), "one kick for a batch over the wrap");
    pair.complete();
    assert!(pair.queue.enable_kicks(), "one was left");
    pair.complete();
    pair.queue.suppress_kicks();
    assert!(!pair.offer(1), "polled");
    pair.complete();
    assert!(!pair.queue.enable_kicks());
    assert!(pair.offer(1));
}

#[test]
fn suppressed_kicks_stay_away_for_a_turn_of_the_index() {
    let mut pair = event_idx();
    pair.queue.suppress_kicks();
    let mut kicks = 0;
    // Miri takes a minute for a tenth of a turn.
    for _ in 0..if cfg!(miri) { 64 } else { u16::MAX } {
        kicks += u32::from(pair.offer(1));
        pair.complete();
        let _ = pair.queue.publish();
        pair.driver.reap().unwrap();
    }
    assert_eq!(kicks, 0);
}

#[test]
fn set_up_undoes_what_a_device_left_behind() {
    for event_idx in [false, true] {
        let mut pair = Setup { event_idx, ..Setup::default() }.build();
        pair.queue.suppress_kicks();
        let config = QueueConfig { next_avail: 0, ..*pair.queue.config() };
        pair.queue = queue::Queue::new(pair.memory.clone(), config).unwrap();
        assert!(pair.offer(1));
    }
}

#[test]
fn signals_by_flag_come_once_per_batch() {
    let mut pair = Setup::default().build();
    assert!(!pair.queue.publish(), "nothing to signal");
    for suppressed in [false, true, false] {
        if suppressed {
            pair.driver.suppress_signals();
        } else {
            assert!(!pair.driver.enable_signals());
        }
        (0..3).for_each(|_| {
            pair.offer(1);
            pair.complete();
        });
        assert_eq!(pair.queue.publish(), !suppressed);
        assert!(!pair.queue.publish(), "nothing more to signal");
        while pair.driver.reap().is_some() {}
    }
}

#[test]
fn signals_by_event_idx() {
    let mut pair = event_idx();
    let complete = |pair: &mut Pair, chains: u32| {
        for _ in 0..chains {
            pair.offer(1);
            pair.complete();
        }
        pair.queue.publish()
    };
    assert!(complete(&mut pair, 1), "the first in any case");
    assert!(!complete(&mut pair, 1), "the driver has not asked for another");
    assert!(pair.driver.enable_signals(), "two are there");
    while pair.driver.reap().is_some() {}
    assert!(!pair.driver.enable_signals());
    assert!(complete(&mut pair, 3), "over the wrap");
    assert!(!complete(&mut pair, 3));
    while pair.driver.reap().is_some() {}
    pair.driver.suppress_signals();
    for _ in 0..3 {
        assert!(!complete(&mut pair, 5));
        while pair.driver.reap().is_some() {}
    }
    assert!(!pair.driver.enable_signals());
    assert!(complete(&mut pair, 1));
}

#[test]
fn early_publication_is_signalled_once() {
    for event_idx in [false, true] {
        let mut pair = Setup { event_idx, ..Setup::default() }.build();
        let _ = pair.queue.publish();
        assert!(!pair.driver.enable_signals());
        for shown in 1..=3 {
            for _ in 0..4 {
                assert!(pair.driver.reap().is_none(), "not shown yet");
                pair.offer(1);
                pair.complete();
            }
            assert_eq!(pair.queue.used_idx(), 4 * shown);
            for _ in 0..4 {
                assert!(pair.driver.reap().is_some());
            }
        }
        assert!(pair.queue.publish(), "the driver asked before, and may sleep");
        assert!(!pair.queue.publish());
    }
    // A driver that polls says so anew with each chain it takes: no signal at the end either.
    let mut pair = event_idx();
    pair.offer(1);
    pair.complete();
    assert!(pair.queue.publish(), "the first in any case");
    for _ in 0..3 {
        while pair.driver.reap().is_some() {}
        pair.driver.suppress_signals();
        for _ in 0..4 {
            pair.offer(1);
            pair.complete();
        }
    }
    assert!(!pair.queue.publish());
    // A driver that has seen everything and then asks for the next needs no signal for these.
    let mut pair = event_idx();
    pair.offer(1);
    pair.complete();
    assert!(pair.queue.publish(), "the first in any case");
    for _ in 0..4 {
        pair.offer(1);
        pair.complete();
    }
    while pair.driver.reap().is_some() {}
    assert!(!pair.driver.enable_signals());
    assert!(!pair.queue.publish());
}

/// Driver and device on two threads, each waiting until the other notifies it: a lost notification
/// would leave both waiting.
#[test]
fn no_notification_is_lost_between_threads() {
    use std::sync::Arc;
    use std::sync::mpsc::sync_channel;
    use std::time::Duration;

    use guest_memory::MemoryView;
    use guest_memory::test_util::memfd_memory;
    use queue::driver::Driver;
    use queue::{Chain, Queue};

    const REQUESTS: u32 = if cfg!(miri) { 64 } else { 50_000 };
    const LOST: Duration = Duration::from_secs(60);
    for event_idx in [false, true] {
        let memory = memfd_memory(&[(0, common::MEMORY)]).unwrap();
        let mut driver =
            Driver::new(&MemoryView::new(Arc::clone(&memory)), common::RINGS, 16, event_idx)
                .unwrap();
        let config = driver.config();
        // A channel of one is an eventfd: more notifications while one is pending are one.
        let (kick, kicked) = sync_channel::<()>(1);
        let (signal, signalled) = sync_channel::<()>(1);
        let device = std::thread::spawn(move || {
            let queue = Queue::new(MemoryView::new(memory), config).unwrap();
            let mut chain = Chain::new();
            let mut done = 0;
            while done < REQUESTS {
                queue.suppress_kicks();
                loop {
                    while queue.pop(&mut chain).unwrap() {
                        queue.add_used(chain.head(), done);
                        done += 1;
                        if done % 3 == 0 && queue.publish() {
                            let _ = signal.try_send(());
                        }
                    }
                    if queue.publish() {
                        let _ = signal.try_send(());
                    }
                    if !queue.enable_kicks() {
                        break;
                    }
                    queue.suppress_kicks();
                }
                if done < REQUESTS {
                    kicked.recv_timeout(LOST).expect("a kick was lost");
                }
            }
        });
        let (mut sent, mut reaped) = (0, 0);
        while reaped < REQUESTS {
            while sent < REQUESTS && driver.add(&[segment(DATA, 1)], &[]).is_some() {
                sent += 1;
            }
            if driver.publish() {
                let _ = kick.try_send(());
            }
            driver.suppress_signals();
            loop {
                while let Some(used) = driver.reap() {
                    assert_eq!(used.written, reaped);
                    reaped += 1;
                }
                if !driver.enable_signals() {
                    break;
                }
            }
            if reaped < sent {
                signalled.recv_timeout(LOST).expect("a signal was lost");
            }
        }
        device.join().unwrap();
    }
}

//! What a seed's run is made of: each its own mixture, so that some have much of one thing and none of
//! another.

use block::options::Discard;
use event_loop::ring::sim::Faults;

use crate::random::Random;
use crate::{daemon, guest};

pub(crate) use crate::world::Plan;

/// Requests of a run.
const REQUESTS: u64 = 20_000;

impl Plan {
    pub(crate) fn new(seed: u64, requests: Option<u64>) -> Self {
        let random = Random::new(seed);
        let guests = random.pick(&[1, 1, 2, 3]);
        let guests: Vec<_> = (0..guests).map(|_| guest::Plan::new(&random)).collect();
        Plan {
            daemon: daemon_plan(&random),
            guests,
            requests: requests.unwrap_or(REQUESTS),
            pause: random.pick(&[0, 10, 50, 200]),
        }
    }
}

/// Errors that pass by themselves: no guest ever hears of them.
const TRANSIENT: &[i32] = &[libc::EAGAIN, libc::EINTR];
const HARD: &[i32] = &[libc::EIO, libc::ENOSPC];
const ALL: &[i32] = &[libc::EAGAIN, libc::EINTR, libc::EIO];

fn daemon_plan(random: &Random) -> daemon::Plan {
    let chance = |most: u64| random.pick(&[0, 0, 1, most / 2, most]) as u8;
    let faults = Faults {
        latency_ns: random.pick(&[(0, 0), (1_000, 20_000), (1_000, 100_000)]),
        late: chance(5),
        short: chance(30),
        fail: chance(6),
        errnos: random.pick(&[TRANSIENT, HARD, ALL]).to_vec(),
        entries: random.pick(&[1, 4, 64, 256]),
        full: chance(20),
        completions: random.pick(&[1, 3, 64, 1024]),
        early_return: chance(20),
        spurious_poll: chance(20),
        poll_fails: chance(5),
        multishot_ends: chance(30),
        duplicate: chance(10),
        late_cancel: chance(50),
        no_fixed_file: chance(50),
        scribble: random.one_in(2),
        clock_step_ns: random.pick(&[50, 500, 2_000]),
    };
    daemon::Plan {
        io_threads: random.pick(&[1, 1, 2, 3]),
        faults,
        poll_max_ns: random.pick(&[0, 0, 8_000, 32_768]),
        entries: random.pick(&[1, 8, 256]),
        preempt: random.pick(&[0, 5, 20, 100]),
        discard: random.pick(&[Discard::Ignore, Discard::Unmap]),
        life_ns: random.pick(&[0, 0, 1_000_000, 20_000_000]),
        throttled: random.one_in(4),
    }
}

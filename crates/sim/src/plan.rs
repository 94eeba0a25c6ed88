//! The mixture of a seed's run. Mixtures differ much, so that some have many faults of one kind and none of
//! another.

use block::options::Discard;
use event_loop::ring::sim::Faults;

use crate::image::Format;
use crate::random::Random;
use crate::{ahci, client, daemon, guest, nvme};

pub(crate) use crate::world::Plan;

/// Requests of a run.
const REQUESTS: u64 = 20_000;

impl Plan {
    pub(crate) fn new(seed: u64, requests: Option<u64>) -> Self {
        let random = Random::new(seed);
        let guests = random.pick(&[1, 1, 2, 3]);
        let guests: Vec<_> = (0..guests).map(|_| guest::Plan::new(&random)).collect();
        let mut plan = Plan {
            daemon: daemon_plan(&random),
            guests,
            clients: Vec::new(),
            ahci_guests: Vec::new(),
            nvme_guests: Vec::new(),
            is_attacked: false,
            requests: requests.unwrap_or(REQUESTS),
            pause: random.pick(&[0, 10, 50, 200]),
        };
        // Of 16 seeds, five have power cuts, two qcow2 images, three virtio-scsi, two NBD, and three NVMe or AHCI. Of
        // every other 16, five have VMMs that replace kick eventfds, and four an attacker.
        let is_odd = seed / 16 % 2 == 1;
        match seed % 16 {
            0 => {
                plan.cut_power(&random);
                plan.format(&random);
            }
            7 | 15 => plan.cut_power(&random),
            8 => plan.format(&random),
            2 => plan.attach_controllers(&random, is_odd),
            4 => {
                plan.cut_power(&random);
                plan.attach_controllers(&random, is_odd);
            }
            13 => {
                let is_ahci = is_odd && random.one_in(2);
                plan.attach_controllers(&random, is_ahci);
                if is_odd {
                    plan.format(&random);
                }
            }
            6 => plan.serve_nbd(&random),
            11 => {
                plan.cut_power(&random);
                plan.serve_nbd(&random);
            }
            5 | 10 => plan.guests.iter_mut().for_each(guest::Plan::attach_scsi),
            12 => {
                plan.cut_power(&random);
                plan.guests.iter_mut().for_each(guest::Plan::attach_scsi);
            }
            _ => {}
        }
        plan.daemon.state = plan.daemon.life_ns > 0 && random.one_in(2);
        if is_odd && matches!(seed % 16, 0 | 8) {
            // Commits, streams and mirrors move disks in all worlds of this kind, kills, power cuts or not.
            plan.daemon.faults.fail = 0;
            plan.daemon.state = plan.daemon.life_ns > 0;
            if plan.daemon.power_cuts > 0 {
                // Long enough for jobs.
                plan.daemon.life_ns = 20_000_000;
            }
        }
        if is_odd && matches!(seed % 16, 10 | 12) {
            plan.guests.iter_mut().for_each(guest::Plan::manage_tasks);
        }
        if is_odd && matches!(seed % 16, 1 | 3 | 5 | 9 | 14) {
            plan.guests.iter_mut().for_each(guest::Plan::replace_kicks);
        }
        plan.is_attacked = is_odd && matches!(seed % 16, 2 | 6 | 11 | 15);
        if plan.is_attacked {
            // What waits in a backlog, or is repeated, is begun at once, whatever the shares.
            let faults = &mut plan.daemon.faults;
            (faults.entries, faults.full, faults.early_return) = (256, 0, 0);
            (faults.short, faults.fail) = (0, 0);
        }
        plan
    }

    /// Adds power cuts.
    fn cut_power(&mut self, random: &Random) {
        let daemon = &mut self.daemon;
        daemon.life_ns = random.pick(&[1_000_000, 20_000_000]);
        // A failed flush is reported once, to the daemon that issued it. If that daemon is killed, flushes of the next
        // daemon succeed although data is lost, as on Linux.
        let hard = daemon.faults.fail > 0 && daemon.faults.errnos != TRANSIENT;
        daemon.power_cuts = if hard { 1 } else { random.pick(&[1, 2]) };
    }

    /// Replaces most or all guests by guests with AHCI or NVMe.
    fn attach_controllers(&mut self, random: &Random, is_ahci: bool) {
        let stay = usize::from(self.guests.len() > 1 && random.one_in(4));
        let replaced = self.guests.drain(stay..);
        match is_ahci {
            true => self.ahci_guests = replaced.map(|_| ahci::Plan::new(random)).collect(),
            false => self.nvme_guests = replaced.map(|_| nvme::Plan::new(random)).collect(),
        }
    }

    /// Replaces most or all guests by NBD clients.
    fn serve_nbd(&mut self, random: &Random) {
        let guests = self.guests.len() as u64;
        let stay = if random.one_in(4) { random.below(guests) } else { 0 };
        self.guests.truncate(stay as usize);
        self.clients = (stay..guests).map(|_| client::Plan::new(random)).collect();
    }

    /// Sets the format of the images.
    fn format(&mut self, random: &Random) {
        let formats = (self.guests.iter_mut().map(|guest| &mut guest.format))
            .chain(self.ahci_guests.iter_mut().map(|guest| &mut guest.format))
            .chain(self.nvme_guests.iter_mut().map(|guest| &mut guest.format));
        for format in formats {
            *format = Format::Qcow2(random.pick(&[512, 512, 4096, 65536]));
        }
        self.daemon.journals = !random.one_in(4);
    }
}

/// Transient errors, which guests never see.
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
        power_cuts: 0,
        journals: false,
        state: false,
    }
}

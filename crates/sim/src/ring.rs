//! A simulated ring that lets other actors run while its loop waits.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::RawFd;

use event_loop::ring::sim::{Faults, Sim, Storage};
use event_loop::ring::{Completion, Ready, Ring, RingOp, Wait};
use event_loop::{Clock, CpuShare};

use crate::machine::{FOREVER, Machine};

/// How often a ring yields to other actors: once in this many times.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Preemption {
    /// At a call that submits, waits, or checks for completions.
    pub(crate) calls: u64,
    /// At the queueing of an operation; 0 for never.
    pub(crate) pushes: u64,
}

/// A simulated ring and its loop's clock, on a [`Machine`].
#[derive(Clone)]
pub(crate) struct MachineRing {
    machine: Machine,
    pub(crate) sim: Sim,
    ring: Sim,
    preemption: Preemption,
    /// Duration of a clock reading, nanoseconds.
    clock_step_ns: u64,
}

impl MachineRing {
    pub(crate) fn new(
        machine: &Machine,
        seed: u64,
        faults: Faults,
        preemption: Preemption,
        storage: &Storage,
    ) -> Self {
        let clock_step_ns = faults.clock_step_ns;
        let faults = Faults { clock_step_ns: 0, ..faults };
        let sim = Sim::with_storage(seed, faults, storage.clone());
        sim.look_at_descriptors();
        let ring = sim.clone();
        MachineRing { machine: machine.clone(), sim, ring, preemption, clock_step_ns }
    }

    /// Sets the ring's time to the machine's.
    fn catch_up(&self) {
        let behind = self.machine.now_ns() - self.sim.now_ns();
        if behind > 0 {
            self.sim.advance(behind);
        }
    }
}

impl Clock for MachineRing {
    fn now_ns(&self) -> u64 {
        self.machine.advance_to(self.machine.now_ns() + self.clock_step_ns);
        self.machine.now_ns()
    }

    fn cpu_ns(&self) -> Option<u64> {
        None
    }

    fn cpu_share(&self) -> Option<CpuShare> {
        None
    }
}

impl Ring for MachineRing {
    unsafe fn push(&mut self, op: &RingOp, user_data: u64) -> bool {
        self.machine.preempt(self.preemption.pushes);
        // SAFETY: the caller's promise.
        unsafe { self.ring.push(op, user_data) }
    }

    fn queued(&mut self) -> u32 {
        self.ring.queued()
    }

    fn enter(&mut self, wait: Wait) -> io::Result<()> {
        self.machine.preempt(self.preemption.calls);
        let deadline = match wait {
            Wait::No => 0,
            Wait::For(ns) => self.machine.now_ns().saturating_add(ns),
            Wait::Forever => FOREVER,
        };
        loop {
            self.catch_up();
            self.ring.enter(Wait::No)?;
            let now = self.machine.now_ns();
            if now >= deadline || self.ring.ready() != Ready::Nothing || self.ring.queued() > 0 {
                return Ok(());
            }
            let due = self.sim.next_due_ns().unwrap_or(FOREVER);
            self.machine.wait_until(deadline.min(due).max(now));
        }
    }

    fn ready(&mut self) -> Ready {
        self.machine.preempt(self.preemption.calls);
        self.catch_up();
        self.ring.ready()
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        self.ring.reap(into);
    }

    fn pollable_fd(&self) -> Option<RawFd> {
        None
    }

    fn does_file_io(&self) -> bool {
        true
    }

    fn register_file(&mut self, fd: RawFd) -> Option<u32> {
        self.ring.register_file(fd)
    }

    fn unregister_file(&mut self, index: u32) {
        self.ring.unregister_file(index);
    }
}

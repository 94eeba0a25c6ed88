//! The VMM and the driver's part that is of no I/O queue: connects, enables the controller, and disturbs it at random.

use vcpu::vfio_user::wire;

use super::memory::ADMIN;
use super::{NvmeGuest, admin};
use crate::fds::Kept;
use crate::user::{PATIENCE_NS, User};
use crate::vfio::{Gone, Line};

/// How a VMM or its guest disturbs the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Disturbance {
    /// Disables the controller, and enables it again.
    Reset,
    /// DEVICE_RESET.
    DeviceReset,
    /// Resets the function by its configuration space.
    FunctionReset,
    /// Announces that power will go, and resets the controller.
    ShutDown,
    /// Closes the connection without a message, as a killed VMM, and connects again.
    Vanish,
    /// Closes the connection within a message.
    CutShort,
    /// Deletes an I/O queue pair and creates it again.
    Requeue,
    /// Takes the memory with the data away for a while.
    Unplug,
    /// Switches the write cache on or off.
    WriteCache,
    /// Replaces the eventfd of an interrupt.
    Interrupt,
    /// Aborts a command.
    Abort,
    /// Reads the log page of health.
    Look,
    /// Rings the doorbell of a queue that does not exist, among others.
    NoSuchDoorbell,
}

impl Disturbance {
    pub(super) const ALL: &[Disturbance] = &[
        Disturbance::Reset,
        Disturbance::DeviceReset,
        Disturbance::FunctionReset,
        Disturbance::ShutDown,
        Disturbance::Vanish,
        Disturbance::CutShort,
        Disturbance::Requeue,
        Disturbance::Unplug,
        Disturbance::WriteCache,
        Disturbance::Interrupt,
        Disturbance::Abort,
        Disturbance::Look,
        Disturbance::NoSuchDoorbell,
    ];
}

/// Registers (section 3.1).
const CC: u64 = 0x14;
const CSTS: u64 = 0x1c;
const AQA: u64 = 0x24;
const ASQ: u64 = 0x28;
const ACQ: u64 = 0x30;
const DOORBELLS: u64 = 0x1000;
/// CC: enabled, entries of 64 and 16 bytes; a normal shutdown.
const ENABLE: u32 = 0x0046_0001;
const SHUT_DOWN: u32 = 1 << 14;
const CSTS_RDY: u32 = 1;
const CSTS_FATAL: u32 = 2;
/// CSTS: the status of a shutdown, and that it is complete.
const CSTS_SHUT_DOWN: u32 = 3 << 2;
const CSTS_IS_SHUT_DOWN: u32 = 2 << 2;

/// Interval at which a register is polled, nanoseconds: at first, and at most.
const LOOK_NS: u64 = 5_000;
const MOST_NS: u64 = 100_000;

impl NvmeGuest {
    /// The actor's main function.
    pub(super) fn run(&self) {
        let hang_up = || {
            self.is_up.set(false);
            self.queues.iter().for_each(|queue| queue.is_paused.set(true));
        };
        self.shared.link.live(|| self.life(), hang_up);
        self.done.set(true);
    }

    /// Runs one connection.
    fn life(&self) -> Result<(), Gone> {
        let (shared, world) = (&self.shared, &self.shared.world);
        let (random, plan) = (world.random(), &shared.plan);
        let line = shared.link.connect(plan.pieces)?;
        self.wait_for_queues(&line)?;
        shared.link.set_line(&line);
        self.forget_all();
        self.attach(&line)?;
        self.enable(&line)?;
        while self.queues.iter().any(|queue| world.is_there(queue.actor.get())) {
            self.leave_alone(&line, random.between(plan.calm_ns / 4, plan.calm_ns))?;
            if !plan.disturbances.is_empty() {
                let disturbance = random.pick(&plan.disturbances);
                world
                    .machine
                    .say(|| format!("NVMe guest of disk {}: {disturbance:?}", shared.disk));
                self.disturb(&line, disturbance)?;
                shared.link.is_undisturbed();
            }
        }
        Ok(())
    }

    /// Lets the guest work for `ns` nanoseconds, or until it has finished.
    fn leave_alone(&self, line: &Line, ns: u64) -> Result<(), Gone> {
        let world = &self.shared.world;
        let until = world.machine.now_ns() + ns;
        while world.machine.now_ns() < until
            && self.queues.iter().any(|queue| world.is_there(queue.actor.get()))
        {
            line.check()?;
            self.admin.handle_events()?;
            self.admin.sleep((ns / 2).clamp(100_000, 1_000_000));
        }
        Ok(())
    }

    /// Waits until no driver of a queue is amid something.
    fn wait_for_queues(&self, line: &Line) -> Result<(), Gone> {
        while self.queues.iter().any(|queue| queue.is_paused.get() && queue.is_busy.get()) {
            line.check()?;
            self.shared.world.machine.sleep(1_000);
        }
        Ok(())
    }

    /// Makes the drivers leave their queues alone.
    fn pause(&self, line: &Line) -> Result<(), Gone> {
        self.queues.iter().for_each(|queue| queue.is_paused.set(true));
        self.wait_for_queues(line)
    }

    /// Forgets all commands in flight, of which none is answered any more.
    pub(super) fn forget_all(&self) {
        self.shared.write_through.set(None);
        self.queues.iter().for_each(|queue| queue.renew());
        self.admin.renew();
    }

    // ---- setting up ----------------------------------------------------------------------------

    /// Shares memory and interrupts with the device.
    fn attach(&self, line: &Line) -> Result<(), Gone> {
        let Self { shared, admin, queues, .. } = self;
        let calls: Vec<_> = (0..self.vectors()).map(|_| Kept::eventfd(&shared.world.fds)).collect();
        shared.link.attach(line, &shared.memory, wire::MSIX, &calls)?;
        let places = std::iter::once(&admin.call).chain(queues.iter().map(|it| &it.call));
        for (place, call) in places.zip(calls) {
            place.replace(Some(call));
        }
        Ok(())
    }

    /// Number of interrupts: of the admin queue, and of each I/O queue.
    fn vectors(&self) -> u32 {
        self.queues.len() as u32 + 1
    }

    /// Writes a register of 4 bytes.
    fn set(&self, line: &Line, register: u64, value: u32) -> Result<(), Gone> {
        let is_answered = self.shared.world.random().one_in(2);
        line.write(register, &value.to_ne_bytes(), is_answered)
    }

    /// Waits until these bits of CSTS have this value.
    fn wait_for(&self, line: &Line, bits: u32, value: u32) -> Result<(), Gone> {
        let machine = &self.shared.world.machine;
        let (until, mut pause_ns) = (machine.now_ns() + PATIENCE_NS, LOOK_NS);
        loop {
            let csts = line.read(CSTS)?;
            if csts & CSTS_FATAL != 0 || machine.now_ns() > until {
                self.shared.fail(&format!("CSTS is {csts:#x}, {value:#x} of {bits:#x} is awaited"));
            }
            if csts & bits == value {
                return Ok(());
            }
            machine.sleep(pause_ns);
            pause_ns = (pause_ns * 2).min(MOST_NS);
        }
    }

    /// Enables the controller, creates the queues, and resumes their drivers.
    fn enable(&self, line: &Line) -> Result<(), Gone> {
        let Self { shared, admin, queues, .. } = self;
        let plan = &shared.plan;
        let last = u32::from(admin::ENTRIES - 1);
        self.set(line, AQA, last << 16 | last)?;
        for (register, at) in [ASQ, ACQ].into_iter().zip(ADMIN) {
            line.write(register, &at.to_ne_bytes(), false)?;
        }
        self.set(line, CC, ENABLE)?;
        self.wait_for(line, CSTS_RDY, CSTS_RDY)?;
        admin.identify_controller()?;
        admin.request_queues(plan.queues)?;
        admin.ask_for_events()?;
        admin.identify_namespace()?;
        if plan.shadow && !plan.shadow_late {
            admin.set_doorbell_buffers()?;
        }
        for queue in queues {
            admin.create(queue)?;
        }
        if plan.shadow && plan.shadow_late {
            admin.set_doorbell_buffers()?;
        }
        for queue in queues {
            queue.rings.borrow_mut().is_shadowed = plan.shadow;
        }
        shared.link.is_undisturbed();
        self.is_up.set(true);
        queues.iter().for_each(|queue| queue.resume());
        Ok(())
    }

    // ---- disturbances --------------------------------------------------------------------------

    fn disturb(&self, line: &Line, what: Disturbance) -> Result<(), Gone> {
        let Self { shared, admin, .. } = self;
        let world = &shared.world;
        let (coverage, random) = (&world.coverage, world.random());
        let queue = &self.queues[random.below(self.queues.len() as u64) as usize];
        match what {
            Disturbance::Reset => {
                coverage.nvme_resets.one();
                self.pause(line)?;
                self.disable(line)?;
                self.enable(line)?;
            }
            Disturbance::DeviceReset | Disturbance::FunctionReset => {
                self.pause(line)?;
                self.is_up.set(false);
                let is_function = what == Disturbance::FunctionReset;
                match is_function {
                    true => coverage.nvme_function_resets.one(),
                    false => coverage.nvme_device_resets.one(),
                }
                shared.link.reset(line, is_function)?;
                self.wait_for(line, u32::MAX, 0)?;
                self.forget_all();
                shared.link.switch_on(line)?;
                self.enable(line)?;
            }
            Disturbance::ShutDown => {
                coverage.nvme_shut_downs.one();
                self.pause(line)?;
                let flush = shared.model.borrow_mut().begin_flush();
                self.set(line, CC, ENABLE | SHUT_DOWN)?;
                self.wait_for(line, CSTS_SHUT_DOWN, CSTS_IS_SHUT_DOWN)?;
                // The controller cannot report that a flush has failed.
                if !world.has_failed() {
                    shared.model.borrow_mut().flushed(&flush);
                }
                self.disable(line)?;
                self.enable(line)?;
            }
            Disturbance::Vanish => {
                coverage.nvme_vanished.add(u64::from(self.in_flight() > 0));
                return Err(shared.link.vanish());
            }
            Disturbance::CutShort => {
                coverage.nvme_cut_short.one();
                return Err(shared.link.cut_short(line));
            }
            Disturbance::Requeue => {
                coverage.nvme_requeued.one();
                queue.is_paused.set(true);
                self.wait_for_queues(line)?;
                admin.delete(queue.qid)?;
                queue.renew();
                admin.create(queue)?;
                queue.rings.borrow_mut().is_shadowed = shared.plan.shadow;
                queue.resume();
            }
            Disturbance::Unplug => {
                coverage.nvme_unplugged.one();
                self.queues.iter().for_each(|queue| queue.is_unplugged());
                let all = || self.queues.iter();
                shared.link.unplug(
                    line,
                    &shared.memory.data,
                    || all().map(|queue| queue.data_of_reads()).collect(),
                    |before: Vec<_>| all().zip(&before).any(|(it, was)| it.has_other_data(was)),
                )?;
            }
            Disturbance::WriteCache => {
                coverage.write_caches.one();
                let on = random.one_in(2);
                shared.write_through.set(None);
                let is_set = admin.set_write_cache(on)?;
                shared.write_through.set((is_set && !on).then(|| world.machine.steps()));
            }
            Disturbance::Interrupt => {
                let number = queue.qid.into();
                if shared.link.replace_call(line, wire::MSIX, number, &queue.call)? {
                    queue.wake();
                }
            }
            Disturbance::Abort => {
                if let Some(cid) = queue.pick_to_abort() {
                    coverage.nvme_aborts.one();
                    admin.abort(queue.qid, cid)?;
                }
            }
            Disturbance::Look => admin.read_health()?,
            Disturbance::NoSuchDoorbell => {
                coverage.nvme_multi.one();
                let at = DOORBELLS + 8 * u64::from(self.vectors());
                line.write_multi(&[(at, 1), (at + 4, 1)])?;
            }
        }
        Ok(())
    }

    /// Disables the controller. Its commands have ended when this returns.
    fn disable(&self, line: &Line) -> Result<(), Gone> {
        self.is_up.set(false);
        self.set(line, CC, 0)?;
        self.wait_for(line, CSTS_RDY, 0)?;
        self.forget_all();
        Ok(())
    }
}

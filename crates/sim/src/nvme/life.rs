//! The VMM and the driver's part that is of no I/O queue: connects, enables the controller, and disturbs it at random.

use std::os::fd::{AsRawFd, RawFd};

use vcpu::vfio_user::wire;

use super::line::{Gone, Line};
use super::memory::{ADMIN, Part};
use super::reply::u32_at;
use super::{NvmeGuest, admin};
use crate::fds::Kept;
use crate::user::{PATIENCE_NS, User};

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

/// PCI: the command register with memory and bus mastering on, and the byte that resets the function.
const PCI_COMMAND: u64 = 0x04;
const PCI_ON: [u8; 2] = [6, 0];
const PCI_RESET: u64 = 0x54;
/// Bytes of BAR 0 and of the configuration space.
const REGIONS: &[(u32, u64)] = &[(wire::BAR0, 0x4000), (wire::CONFIG, 256)];

/// Interval at which a register is polled, nanoseconds: at first, and at most.
const LOOK_NS: u64 = 5_000;
const MOST_NS: u64 = 100_000;

impl NvmeGuest {
    /// The actor's main function.
    pub(super) fn run(&self) {
        let world = &self.shared.world;
        while self.life().is_err() {
            world.coverage.gone.one();
            if !self.has_left.take() && world.losses() == self.connected.get() {
                self.shared.fail("the daemon has closed the connection");
            }
            self.hang_up();
            world.machine.sleep(10_000);
        }
        self.hang_up();
        self.done.set(true);
    }

    fn hang_up(&self) {
        self.is_up.set(false);
        self.queues.iter().for_each(|queue| queue.is_paused.set(true));
        if let Some(line) = self.shared.line.take() {
            line.close();
        }
    }

    /// Runs one connection.
    fn life(&self) -> Result<(), Gone> {
        let (shared, world) = (&self.shared, &self.shared.world);
        let (random, plan) = (world.random(), &shared.plan);
        self.connected.set(world.losses());
        let line = Line::connect(world, shared.disk, plan.pieces);
        world.machine.say(|| format!("NVMe guest of disk {} connects", shared.disk));
        line.ask(wire::VERSION, &wire::version(), &[])?;
        world.coverage.nvme_connections.one();
        // The export has answered the first message after the last command of an earlier connection has ended.
        self.wait_for_queues(&line)?;
        shared.line.replace(Some(line.clone()));
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
                shared.undisturbed_ns.set(world.machine.now_ns());
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

    /// Looks at the device, and shares memory and interrupts with it.
    fn attach(&self, line: &Line) -> Result<(), Gone> {
        let info = line.ask(wire::DEVICE_GET_INFO, &wire::device_info(), &[])?;
        for (index, size) in REGIONS {
            let info = line.ask(wire::GET_REGION_INFO, &wire::region_info(*index, 32), &[])?;
            if u64::from(u32_at(&info, 16)) != *size {
                self.shared.fail(&format!("region {index} is {info:?}"));
            }
        }
        let irqs = line.ask(wire::GET_IRQ_INFO, &wire::irq_info(), &[])?;
        if u32_at(&info, 4) & 3 != 3 || u32_at(&irqs, 12) != self.vectors() {
            self.shared.fail(&format!("the device is {info:?}, its interrupts are {irqs:?}"));
        }
        let memory = &self.shared.memory;
        self.map(line, &memory.queues)?;
        self.map(line, &memory.data)?;
        self.shared.is_unplugged.set(false);
        let calls: Vec<_> =
            (0..self.vectors()).map(|_| Kept::eventfd(&self.shared.world.fds)).collect();
        let fds: Vec<RawFd> = calls.iter().map(|call| call.as_raw_fd()).collect();
        line.ask(wire::SET_IRQS, &wire::eventfds(0, self.vectors()), &fds)?;
        let places = std::iter::once(&self.admin.call).chain(self.queues.iter().map(|it| &it.call));
        for (place, call) in places.zip(calls) {
            place.replace(Some(call));
        }
        self.switch_on(line)
    }

    /// Number of interrupts: of the admin queue, and of each I/O queue.
    fn vectors(&self) -> u32 {
        self.queues.len() as u32 + 1
    }

    /// Shares a part of the memory.
    fn map(&self, line: &Line, part: &Part) -> Result<(), Gone> {
        let map = wire::map(part.offset, part.address, part.len);
        line.ask(wire::DMA_MAP, &map, &[part.file.as_raw_fd()]).map(drop)
    }

    fn switch_on(&self, line: &Line) -> Result<(), Gone> {
        let on = wire::write(wire::CONFIG, PCI_COMMAND, &PCI_ON);
        line.ask(wire::REGION_WRITE, &on, &[]).map(drop)
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
        shared.undisturbed_ns.set(shared.world.machine.now_ns());
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
        let pause = random.pick(&[0, 1_000, 200_000]);
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
                if what == Disturbance::DeviceReset {
                    coverage.nvme_device_resets.one();
                    line.ask(wire::DEVICE_RESET, &[], &[])?;
                } else {
                    coverage.nvme_function_resets.one();
                    let reset = wire::write(wire::CONFIG, PCI_RESET, &[1]);
                    line.ask(wire::REGION_WRITE, &reset, &[])?;
                }
                self.wait_for(line, u32::MAX, 0)?;
                self.forget_all();
                self.switch_on(line)?;
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
                self.has_left.set(true);
                return Err(Gone);
            }
            Disturbance::CutShort => {
                coverage.nvme_cut_short.one();
                self.has_left.set(true);
                // Would reset the controller and its configuration space.
                line.cut_short(wire::REGION_WRITE, &wire::write(wire::CONFIG, PCI_RESET, &[1]))?;
                return Err(Gone);
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
                shared.is_unplugged.set(true);
                self.queues.iter().for_each(|queue| queue.is_unplugged());
                let data = &shared.memory.data;
                line.ask(wire::DMA_UNMAP, &wire::unmap(data.address, data.len), &[])?;
                // Nothing uses the memory from now on.
                let before: Vec<_> = self.queues.iter().map(|it| it.data_of_reads()).collect();
                world.machine.sleep(pause);
                for (queue, before) in self.queues.iter().zip(before) {
                    queue.check_data_of_reads(&before);
                }
                self.map(line, data)?;
                shared.is_unplugged.set(false);
            }
            Disturbance::WriteCache => {
                coverage.write_caches.one();
                let on = random.one_in(2);
                shared.write_through.set(None);
                let is_set = admin.set_write_cache(on)?;
                shared.write_through.set((is_set && !on).then(|| world.machine.steps()));
            }
            Disturbance::Interrupt => {
                coverage.calls.one();
                let call = Kept::eventfd(&world.fds);
                let before = queue.call.replace(Some(call.clone()));
                let set = wire::eventfds(queue.qid.into(), 1);
                line.ask(wire::SET_IRQS, &set, &[call.as_raw_fd()])?;
                // A VMM injects what has come by the old eventfd meanwhile.
                if let Some(before) = before
                    && nix::unistd::read(&**before, &mut [0; 8]).is_ok()
                {
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

//! The VMM and its guest's driver: connects, brings the port up, and disturbs it at random.

use std::rc::Rc;

use vcpu::ahci::{PortDriver, Registers, reg};
use vcpu::vfio_user::wire;

use super::{AREA, AhciGuest, Issued, Kind};
use crate::fds::Kept;
use crate::vfio::{Gone, Line};

/// How a VMM or its guest disturbs the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Disturbance {
    /// Stops the command list, and starts it again.
    List,
    /// Resets the link, and the drive with it.
    Link,
    /// Resets the controller by GHC.HR.
    Reset,
    /// DEVICE_RESET.
    DeviceReset,
    /// Resets the function by its configuration space.
    FunctionReset,
    /// Closes the connection without a message, as a killed VMM, and connects again.
    Vanish,
    /// Closes the connection within a message.
    CutShort,
    /// Takes the memory with the data away for a while.
    Unplug,
    /// Replaces the eventfd of the interrupt.
    Interrupt,
}

impl Disturbance {
    pub(super) const ALL: &[Disturbance] = &[
        Disturbance::List,
        Disturbance::Link,
        Disturbance::Reset,
        Disturbance::DeviceReset,
        Disturbance::FunctionReset,
        Disturbance::Vanish,
        Disturbance::CutShort,
        Disturbance::Unplug,
        Disturbance::Interrupt,
    ];
}

/// Interval at which the driver polls a register, nanoseconds.
const LOOK_NS: u64 = 2_000;
/// Interval at which a sleeping VMM checks its connection, nanoseconds.
const CHECK_NS: u64 = 500_000;

/// The controller's registers, by messages. After the end of the connection all bits are read as set.
struct ByMessage {
    line: Rc<Line>,
    guest: Rc<AhciGuest>,
}

impl Registers for ByMessage {
    fn read(&self, offset: u64) -> u32 {
        self.guest.world.coverage.ahci_registers.one();
        self.line.read(offset).unwrap_or(u32::MAX)
    }

    fn write(&self, offset: u64, value: u32) {
        let AhciGuest { world, plan, .. } = &*self.guest;
        world.coverage.ahci_registers.one();
        let is_answered = world.random().one_in(plan.answered);
        // The end of the connection is found when the result is used.
        let _ = self.line.write(offset, &value.to_ne_bytes(), is_answered);
    }
}

impl AhciGuest {
    /// The actor's main function.
    pub(super) fn run(self: &Rc<Self>) {
        self.link.live(|| self.life(), || self.is_up.set(false));
        self.done.set(true);
    }

    /// Runs one connection.
    fn life(self: &Rc<Self>) -> Result<(), Gone> {
        let AhciGuest { world, plan, left, .. } = &**self;
        let (machine, random) = (&world.machine, world.random());
        let line = self.link.connect(plan.pieces)?;
        self.link.set_line(&line);
        self.forget_all();
        let call = Kept::eventfd(&world.fds);
        self.call.replace(Some(call.clone()));
        self.interrupted.set(false);
        self.link.attach(&line, &self.memory, self.interrupts(), &[call])?;
        let registers = ByMessage { line: line.clone(), guest: self.clone() };
        let (waiting, clock) = (line.clone(), machine.clone());
        let idle = move || {
            clock.sleep(LOOK_NS);
            waiting.check().is_ok()
        };
        let memory = self.memory.view.memory();
        let mut driver = PortDriver::over(Box::new(registers), memory, 0, AREA, idle);
        self.bring_up(&line, &mut driver)?;
        loop {
            self.handle(&line, &mut driver)?;
            if left.get() == 0 && self.count() == 0 {
                return Ok(());
            }
            if left.get() > 0 && self.issue_some(&mut driver) {
                if random.one_in(plan.calm) {
                    self.disturb(&line, &mut driver)?;
                    self.link.is_undisturbed();
                }
                if random.one_in(4) {
                    machine.wait_until(0);
                    continue;
                }
            }
            let more = left.get() > 0;
            let is_thinking = more && (self.count() == 0 || random.one_in(2));
            self.sleep(&line, is_thinking.then(|| random.below(plan.think_ns + 1)))?;
        }
    }

    /// The kind of the interrupts.
    fn interrupts(&self) -> u32 {
        if self.plan.has_pin { wire::INTX } else { wire::MSI }
    }

    /// Sleeps for so long, or until an interrupt.
    fn sleep(&self, line: &Line, ns: Option<u64>) -> Result<(), Gone> {
        let machine = &self.world.machine;
        let until = ns.map_or(u64::MAX, |ns| machine.now_ns() + ns);
        while !self.is_interrupted() && machine.now_ns() < until {
            self.is_asleep.set(true);
            machine.wait_until(until.min(machine.now_ns() + CHECK_NS));
            self.is_asleep.set(false);
            line.check()?;
        }
        Ok(())
    }

    /// The result of the driver, if the connection has not ended: whatever was read after its end is nonsense.
    pub(super) fn expect<T>(
        &self,
        line: &Line,
        result: Result<T, impl std::fmt::Display>,
    ) -> Result<T, Gone> {
        line.check()?;
        Ok(result.unwrap_or_else(|error| self.link.fail(&error.to_string())))
    }

    /// Initialises the port: from no drive to a running command list.
    fn bring_up(&self, line: &Line, driver: &mut PortDriver) -> Result<(), Gone> {
        driver.write_generic(reg::GHC, reg::GHC_AE | reg::GHC_IE);
        self.start(line, driver)?;
        let identity = self.expect(line, driver.identify())?;
        let sectors =
            identity[200..206].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        if sectors != u64::from(self.plan.sectors) {
            self.link.fail(&format!("the drive has {sectors} sectors, it says"));
        }
        self.world.coverage.ahci_starts.one();
        self.link.is_undisturbed();
        self.is_up.set(true);
        Ok(())
    }

    /// Resets the link, and starts the command list.
    fn start(&self, line: &Line, driver: &mut PortDriver) -> Result<(), Gone> {
        let started = driver.start();
        self.expect(line, started)?;
        self.unread.set(0);
        self.write_through.set(false);
        Ok(())
    }

    /// Disturbs the device while commands are in flight.
    fn disturb(&self, line: &Line, driver: &mut PortDriver) -> Result<(), Gone> {
        let AhciGuest { world, plan, link, .. } = self;
        let (machine, coverage, random) = (&world.machine, &world.coverage, world.random());
        let what = random.pick(&plan.disturbances);
        machine.say(|| format!("AHCI guest of disk {}: {what:?}", self.disk));
        machine.sleep(random.pick(&[0, 5_000, 50_000]));
        // Commands that have completed before keep their results.
        self.handle(line, driver)?;
        match what {
            Disturbance::List => {
                coverage.ahci_lists.one();
                let recovered = driver.recover();
                self.expect(line, recovered)?;
                let may_be_named = |issued: &Issued| issued.queued && self.may_fail(issued);
                let issued = self.issued.borrow();
                let slots = (0..).zip(issued.iter());
                let slots = slots.filter(|(_, issued)| issued.as_ref().is_some_and(may_be_named));
                self.unread.set(slots.fold(self.unread.get(), |bits, (slot, _)| bits | 1 << slot));
            }
            Disturbance::Link => {
                coverage.ahci_links.one();
                self.start(line, driver)?;
            }
            Disturbance::Reset => {
                coverage.ahci_resets.one();
                driver.write_generic(reg::GHC, reg::GHC_AE | reg::GHC_HR);
                while driver.read_generic(reg::GHC) & reg::GHC_HR != 0 {
                    line.check()?;
                    machine.sleep(LOOK_NS);
                }
                driver.write_generic(reg::GHC, reg::GHC_AE | reg::GHC_IE);
                self.start(line, driver)?;
            }
            Disturbance::DeviceReset | Disturbance::FunctionReset => {
                let is_function = what == Disturbance::FunctionReset;
                match is_function {
                    true => coverage.ahci_function_resets.one(),
                    false => coverage.ahci_device_resets.one(),
                }
                link.reset(line, is_function)?;
                self.forget_all();
                link.switch_on(line)?;
                return self.bring_up(line, driver);
            }
            Disturbance::Vanish => {
                coverage.ahci_vanished.add(u64::from(self.count() > 0));
                return Err(link.vanish());
            }
            Disturbance::CutShort => {
                coverage.ahci_cut_short.one();
                return Err(link.cut_short(line));
            }
            Disturbance::Unplug => {
                coverage.ahci_unplugged.one();
                for issued in self.issued.borrow_mut().iter_mut().flatten() {
                    issued.was_unplugged = true;
                }
                // The only actor that takes answers is this one.
                let contents = || self.data_of_reads();
                let has_changed = |before| before != self.data_of_reads();
                return link.unplug(line, &self.memory.data, contents, has_changed);
            }
            Disturbance::Interrupt => {
                if link.replace_call(line, self.interrupts(), 0, &self.call)? {
                    self.interrupted.set(true);
                }
                return Ok(());
            }
        }
        self.forget_all();
        Ok(())
    }

    /// The data of the reads in flight.
    fn data_of_reads(&self) -> Vec<Vec<u8>> {
        let issued = self.issued.borrow();
        let slots = (0..).zip(issued.iter());
        let reads = slots.filter_map(|(slot, issued)| {
            let issued = issued.as_ref().filter(|issued| issued.kind == Kind::Read)?;
            let mut bytes = vec![0; issued.ticket.as_ref()?.count as usize * crate::model::SECTOR];
            self.memory.view.read_bytes(AREA.data(slot), &mut bytes).expect("memory");
            Some(bytes)
        });
        reads.collect()
    }
}

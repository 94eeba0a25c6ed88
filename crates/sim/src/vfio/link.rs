//! The life of a VMM's connections to a device.

use std::cell::{Cell, RefCell};
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;

use vcpu::vfio_user::wire;

use super::line::{Gone, Line};
use super::memory::{Memory, Part};
use super::reply::u32_at;
use crate::fds::Kept;
use crate::world::World;

/// A device, as its VMM finds it.
pub(crate) struct Device {
    pub(crate) name: &'static str,
    /// The BAR with the registers.
    pub(crate) bar: u32,
    /// Bytes of that BAR.
    pub(crate) size: u64,
    /// Offset in configuration space of the byte that resets the function.
    pub(crate) reset_at: u64,
}

/// Bytes of the configuration space; its command register, and memory and bus mastering on.
const CONFIG: u32 = 256;
const PCI_COMMAND: u64 = 0x04;
const PCI_ON: [u8; 2] = [6, 0];

/// A VMM's link to a device: one connection after the other.
pub(crate) struct Link {
    world: Rc<World>,
    disk: usize,
    device: &'static Device,
    /// The connection, if there is one.
    line: RefCell<Option<Rc<Line>>>,
    /// Losses at the time of the connection.
    connected: Cell<u64>,
    /// The VMM has closed its connection itself.
    has_left: Cell<bool>,
    /// Time of the last disturbance that delays commands.
    undisturbed_ns: Cell<u64>,
    /// The data is not memory of the device.
    is_unplugged: Cell<bool>,
}

impl Link {
    pub(crate) fn new(world: &Rc<World>, disk: usize, device: &'static Device) -> Self {
        Link {
            world: world.clone(),
            disk,
            device,
            line: RefCell::default(),
            connected: Cell::new(0),
            has_left: Cell::new(false),
            undisturbed_ns: Cell::new(0),
            is_unplugged: Cell::new(false),
        }
    }

    pub(crate) fn fail(&self, what: &str) -> ! {
        self.world.fail(&format!("{} guest of disk {}: {what}", self.device.name, self.disk))
    }

    /// The connection.
    pub(crate) fn line(&self) -> Result<Rc<Line>, Gone> {
        self.line.borrow().clone().ok_or(Gone)
    }

    /// Lets all actors of the guest use a connection.
    pub(crate) fn set_line(&self, line: &Rc<Line>) {
        self.line.replace(Some(line.clone()));
    }

    /// Notes that commands are delayed no more.
    pub(crate) fn is_undisturbed(&self) {
        self.undisturbed_ns.set(self.world.machine.now_ns());
    }

    /// Time of the last disturbance that delays commands.
    pub(crate) fn undisturbed_ns(&self) -> u64 {
        self.undisturbed_ns.get()
    }

    /// How long a command that was offered then has been in flight without disturbance, nanoseconds.
    pub(crate) fn took_ns(&self, offered_ns: u64) -> u64 {
        let now = self.world.machine.now_ns();
        let undisturbed = now.saturating_sub(self.undisturbed_ns.get());
        let all = now - offered_ns;
        // Disturbances stretch the time limit at most 20 times.
        all.min(undisturbed.max(all / 20))
    }

    /// Whether the daemon of the connection has not died since.
    pub(crate) fn is_alive(&self) -> bool {
        self.connected.get() == self.world.losses()
    }

    /// Whether the data is not memory of the device.
    pub(crate) fn is_unplugged(&self) -> bool {
        self.is_unplugged.get()
    }

    // ---- connections ---------------------------------------------------------------------------

    /// Runs one connection after the other by `life`, until one has done all. Calls `hang_up` after each.
    pub(crate) fn live(&self, life: impl Fn() -> Result<(), Gone>, hang_up: impl Fn()) {
        let world = &self.world;
        loop {
            let lived = life();
            hang_up();
            if let Some(line) = self.line.take() {
                line.close();
            }
            if lived.is_ok() {
                return;
            }
            world.coverage.gone.one();
            if !self.has_left.take() && self.is_alive() {
                self.fail("the daemon has closed the connection");
            }
            world.machine.sleep(10_000);
        }
    }

    /// Connects, and agrees on a version. The last command of an earlier connection has ended when this returns. One
    /// send in `pieces` is in pieces.
    pub(crate) fn connect(&self, pieces: u64) -> Result<Rc<Line>, Gone> {
        let Link { world, disk, device, .. } = self;
        self.connected.set(world.losses());
        let line = Line::connect(world, *disk, device.bar, pieces);
        world.machine.say(|| format!("{} guest of disk {disk} connects", device.name));
        line.ask(wire::VERSION, &wire::version(), &[])?;
        world.coverage.vfio_connections.one();
        Ok(line)
    }

    /// Looks at the device, and shares memory and all interrupts of a kind with it.
    pub(crate) fn attach(
        &self,
        line: &Line,
        memory: &Memory,
        kind: u32,
        calls: &[Rc<Kept>],
    ) -> Result<(), Gone> {
        let info = line.ask(wire::DEVICE_GET_INFO, &wire::device_info(), &[])?;
        for (index, size) in [(self.device.bar, self.device.size), (wire::CONFIG, CONFIG.into())] {
            let info = line.ask(wire::GET_REGION_INFO, &wire::region_info(index, 32), &[])?;
            if u64::from(u32_at(&info, 16)) != size {
                self.fail(&format!("region {index} is {info:?}"));
            }
        }
        let count = calls.len() as u32;
        let irqs = line.ask(wire::GET_IRQ_INFO, &wire::irq_info(kind), &[])?;
        if u32_at(&info, 4) & 3 != 3 || u32_at(&irqs, 12) != count {
            self.fail(&format!("the device is {info:?}, its interrupts are {irqs:?}"));
        }
        line.map(&memory.tables)?;
        line.map(&memory.data)?;
        self.is_unplugged.set(false);
        let fds: Vec<RawFd> = calls.iter().map(|call| call.as_raw_fd()).collect();
        line.ask(wire::SET_IRQS, &wire::eventfds(kind, 0, count), &fds)?;
        self.switch_on(line)
    }

    /// Has the device answer accesses to its memory, and access the guest's.
    pub(crate) fn switch_on(&self, line: &Line) -> Result<(), Gone> {
        let on = wire::write(wire::CONFIG, PCI_COMMAND, &PCI_ON);
        line.ask(wire::REGION_WRITE, &on, &[]).map(drop)
    }

    // ---- disturbances --------------------------------------------------------------------------

    /// Closes the connection without a message, as a killed VMM.
    pub(crate) fn vanish(&self) -> Gone {
        self.has_left.set(true);
        Gone
    }

    /// Closes the connection within a message, which would reset the function.
    pub(crate) fn cut_short(&self, line: &Line) -> Gone {
        self.has_left.set(true);
        let reset = wire::write(wire::CONFIG, self.device.reset_at, &[1]);
        line.cut_short(wire::REGION_WRITE, &reset).err().unwrap_or(Gone)
    }

    /// Resets the device by DEVICE_RESET, or the function by its configuration space.
    pub(crate) fn reset(&self, line: &Line, is_function: bool) -> Result<(), Gone> {
        let reset = wire::write(wire::CONFIG, self.device.reset_at, &[1]);
        let (command, payload) = match is_function {
            true => (wire::REGION_WRITE, &reset[..]),
            false => (wire::DEVICE_RESET, &[][..]),
        };
        line.ask(command, payload, &[]).map(drop)
    }

    /// Takes the data away for a while, in which nothing may use it. `contents` returns the data of the reads in flight,
    /// and `has_changed` whether it is another by now.
    pub(crate) fn unplug<T>(
        &self,
        line: &Line,
        data: &Part,
        contents: impl Fn() -> T,
        has_changed: impl Fn(T) -> bool,
    ) -> Result<(), Gone> {
        let world = &self.world;
        self.is_unplugged.set(true);
        line.ask(wire::DMA_UNMAP, &wire::unmap(data.address, data.len), &[])?;
        let before = contents();
        world.machine.sleep(world.random().pick(&[0, 1_000, 200_000]));
        // A daemon that is killed meanwhile ends the connection, and the guest forgets its commands.
        line.check()?;
        if has_changed(before) {
            self.fail("a command uses memory that the device has no more");
        }
        line.map(data)?;
        self.is_unplugged.set(false);
        Ok(())
    }

    /// Replaces the eventfd of an interrupt. Returns whether there was one by the old eventfd.
    pub(crate) fn replace_call(
        &self,
        line: &Line,
        kind: u32,
        number: u32,
        place: &RefCell<Option<Rc<Kept>>>,
    ) -> Result<bool, Gone> {
        self.world.coverage.calls.one();
        let call = Kept::eventfd(&self.world.fds);
        let before = place.replace(Some(call.clone()));
        line.ask(wire::SET_IRQS, &wire::eventfds(kind, number, 1), &[call.as_raw_fd()])?;
        // A VMM injects what has come by the old eventfd meanwhile.
        Ok(before.is_some_and(|before| before.was_signalled()))
    }
}

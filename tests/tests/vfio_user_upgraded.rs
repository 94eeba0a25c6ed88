//! A daemon with a vfio-user-nvme export is upgraded under load on several queues and threads: each command is answered once,
//! interrupts arrive, and an event request of before is answered. The device is reset, and memory unmapped, under load. The
//! driver is the test's own; real guests are in `guest_nvme.rs`.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::thread;

use integration::{Image, Qmp, Scratch, Server, ServerCommand, eventually};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::memfd::{MFdFlags, memfd_create};
use serde_json::json;
use vcpu::vfio_user::{BAR0, CONFIG, Client};

const COMMANDS: u32 = 20_000;
/// Upgrades begin when so many commands are answered.
const UPGRADES: [u32; 4] = [100, 4000, 9000, 15_000];

/// Entries of each queue, and commands in flight.
const ENTRIES: u32 = 64;
const DEPTH: u16 = 32;
/// I/O queues, on two threads.
const QUEUES: usize = 4;

/// Guest addresses. The queues of number n are `n << 16` further on.
const MEMORY: u64 = 2 << 20;
const SUBMISSIONS: u64 = 0x1000;
const COMPLETIONS: u64 = 0x8000;
const SHADOW: u64 = 0x6_0000;
const EVENTS: u64 = 0x6_1000;
const DATA: u64 = 1 << 20;

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Where the data of a command is.
fn data_of(queue: usize, cid: u16) -> u64 {
    DATA + (queue as u64 - 1) * u64::from(DEPTH) * 4096 + u64::from(cid) * 4096
}

/// A driver of a controller with several I/O queues.
struct Driver {
    client: Client,
    memory: File,
    interrupts: Vec<EventFd>,
    /// Of the admin queue and of the I/O queues: submission tail, completion head and phase.
    queues: [(u32, u32, u32); QUEUES + 1],
    has_shadow: bool,
    /// The doorbells, if they may be mapped: the file of BAR 0.
    page: Option<File>,
    rung: u32,
}

impl Driver {
    fn connect(path: &Path) -> Self {
        let memory: OwnedFd = memfd_create("guest", MFdFlags::MFD_CLOEXEC).expect("memory");
        let memory = File::from(memory);
        memory.set_len(MEMORY).expect("memory of that size");
        let eventfd = || EventFd::from_flags(EfdFlags::EFD_NONBLOCK).expect("an eventfd");
        let mut driver = Driver {
            client: Client::connect(path).expect("the export listens"),
            memory,
            interrupts: (0..=QUEUES).map(|_| eventfd()).collect(),
            queues: [(0, 0, 1); QUEUES + 1],
            has_shadow: false,
            page: None,
            rung: 0,
        };
        let area = driver.client.mapped_area(BAR0).expect("a region");
        driver.page = area.map(|area| File::from(area.file));
        driver.map();
        for (vector, interrupt) in (0..).zip(&driver.interrupts) {
            let set = driver.client.set_interrupt(vector, interrupt.as_fd());
            set.expect("a vector of the controller");
        }
        driver.enable();
        driver
    }

    fn map(&mut self) {
        self.client.map(0, MEMORY, self.memory.as_fd()).expect("memory is mapped");
    }

    fn unmap(&mut self) {
        self.client.unmap(0, MEMORY).expect("memory is unmapped");
    }

    fn reset(&mut self) {
        self.client.reset().expect("the device is reset");
    }

    /// Brings the controller up after a reset.
    fn enable(&mut self) {
        self.queues = [(0, 0, 1); QUEUES + 1];
        self.has_shadow = false;
        (0..=QUEUES as u64).for_each(|n| self.put((n << 16) + COMPLETIONS, &[0; 0x1000]));
        self.put(SHADOW, &[0; 0x2000]);
        let (asq, acq) = (SUBMISSIONS as u32, COMPLETIONS as u32);
        let sizes = (ENTRIES - 1) << 16 | (ENTRIES - 1);
        for (register, value) in
            [(0x24, sizes), (0x28, asq), (0x2c, 0), (0x30, acq), (0x34, 0), (0x14, 0x0046_0001)]
        {
            self.write(register, value);
        }
        // The end of a reset may come after the reply to it.
        let status = eventually("the controller is ready", || {
            let status = self.read(0x1c);
            (status != 0).then_some(status)
        });
        assert_eq!(status, 1, "the controller is ready");
    }

    fn read(&mut self, register: u64) -> u32 {
        self.client.read(BAR0, register).expect("a register")
    }

    fn write(&mut self, register: u64, value: u32) {
        self.write_to(BAR0, register, value);
    }

    fn write_to(&mut self, region: u32, register: u64, value: u32) {
        self.client.write(region, register, value).expect("a register");
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.write_all_at(bytes, at).expect("the guest's memory");
    }

    fn word(&self, at: u64) -> u32 {
        let mut bytes = [0; 4];
        self.memory.read_exact_at(&mut bytes, at).expect("the guest's memory");
        u32::from_le_bytes(bytes)
    }

    /// Writes a doorbell, or its shadow: the register only if the controller asks for it.
    fn ring(&mut self, at: u64, old: u32, new: u32) {
        if let Some(page) = &self.page {
            let written = page.write_all_at(&new.to_le_bytes(), 0x1000 + at);
            return written.expect("the page of doorbells");
        }
        if !self.has_shadow || at < 8 {
            return self.write(0x1000 + at, new);
        }
        self.put(SHADOW + at, &new.to_le_bytes());
        fence(Ordering::SeqCst);
        let event = self.word(EVENTS + at);
        if (new.wrapping_sub(event).wrapping_sub(1) as u16) < new.wrapping_sub(old) as u16 {
            self.rung += 1;
            self.write(0x1000 + at, new);
        }
    }

    /// Submits a command: opcode and number; namespace; first PRP, second PRP, dwords 10 to 12.
    fn submit(&mut self, queue: usize, head: u32, nsid: u32, prps: [u64; 2], dwords: [u32; 3]) {
        let tail = self.queues[queue].0;
        let prps = prps.map(u64::to_le_bytes).concat();
        let entry = [words(&[head, nsid, 0, 0, 0, 0]), prps, words(&dwords), vec![0; 12]].concat();
        let at = ((queue as u64) << 16) + SUBMISSIONS + 64 * u64::from(tail);
        self.put(at, &entry);
        let next = (tail + 1) % ENTRIES;
        self.queues[queue].0 = next;
        self.ring(8 * queue as u64, tail, next);
    }

    /// Takes a completion: the command's number, and the result.
    fn take(&mut self, queue: usize) -> Option<(u16, u32)> {
        let (_, head, phase) = self.queues[queue];
        let at = ((queue as u64) << 16) + COMPLETIONS + 16 * u64::from(head);
        let last = self.word(at + 12);
        if last >> 16 & 1 != phase {
            return None;
        }
        assert_eq!(last >> 17, 0, "status of command {}", last as u16);
        let next = (head + 1) % ENTRIES;
        self.queues[queue].1 = next;
        if next == 0 {
            self.queues[queue].2 ^= 1;
        }
        let result = self.word(at);
        self.ring(8 * queue as u64 + 4, head, next);
        Some((last as u16, result))
    }

    /// The next completion, which an interrupt announces.
    fn wait(&mut self, queue: usize) -> (u16, u32) {
        loop {
            if let Some(taken) = self.take(queue) {
                return taken;
            }
            let interrupt = &self.interrupts[queue];
            let mut fds = [PollFd::new(interrupt.as_fd(), PollFlags::POLLIN)];
            let polled = poll(&mut fds, PollTimeout::from(10_000u16));
            assert_eq!(polled, Ok(1), "an interrupt within 10 s");
            interrupt.read().expect("it was signalled");
        }
    }

    fn admin(&mut self, opcode: u32, prps: [u64; 2], dwords: [u32; 3]) {
        self.submit(0, opcode, 0, prps, dwords);
        self.wait(0);
    }

    /// Makes the I/O queues.
    fn start(&mut self, has_shadow: bool) {
        for n in 1..=QUEUES as u32 {
            let (queue, base) = ((ENTRIES - 1) << 16 | n, u64::from(n) << 16);
            self.admin(0x05, [base + COMPLETIONS, 0], [queue, n << 16 | 3, 0]);
            self.admin(0x01, [base + SUBMISSIONS, 0], [queue, n << 16 | 1, 0]);
        }
        if has_shadow {
            self.admin(0x7c, [SHADOW, EVENTS], [0; 3]);
            self.has_shadow = true;
        }
    }

    /// The next completion of any I/O queue, which an interrupt announces: the queue and the command's number.
    fn wait_any(&mut self) -> (usize, u16) {
        loop {
            for queue in 1..=QUEUES {
                if let Some((cid, _)) = self.take(queue) {
                    return (queue, cid);
                }
            }
            let interrupts = self.interrupts[1..].iter();
            let mut fds: Vec<_> =
                interrupts.map(|fd| PollFd::new(fd.as_fd(), PollFlags::POLLIN)).collect();
            let polled = poll(&mut fds, PollTimeout::from(10_000u16));
            assert!(polled.is_ok_and(|count| count > 0), "an interrupt within 10 s");
            for interrupt in &self.interrupts[1..] {
                // Those that were not signalled have nothing to read.
                let _ = interrupt.read();
            }
        }
    }

    /// Writes block n of each command's own and reads it back, again and again.
    fn load(&mut self, answered: &AtomicU32) {
        // By queue and command number: how many were answered, and whether one is under way.
        let mut done = [[0u32; DEPTH as usize]; QUEUES + 1];
        let mut under_way = [[false; DEPTH as usize]; QUEUES + 1];
        for (queue, under_way) in under_way.iter_mut().enumerate().skip(1) {
            for (cid, is_under_way) in (0..).zip(under_way) {
                self.next(queue, cid, 0);
                *is_under_way = true;
            }
        }
        for count in 1..=COMMANDS {
            let (queue, cid) = self.wait_any();
            let at = usize::from(cid);
            let is_expected = std::mem::take(&mut under_way[queue][at]);
            assert!(is_expected, "command {cid} of queue {queue} is answered once");
            let done = &mut done[queue][at];
            if *done % 2 == 1 {
                let read = self.word(data_of(queue, cid));
                assert_eq!(read, *done - 1, "what command {cid} of queue {queue} has written");
            }
            *done += 1;
            answered.store(count, Ordering::Release);
            if count + u32::from(DEPTH) * QUEUES as u32 <= COMMANDS {
                let number = *done;
                self.next(queue, cid, number);
                under_way[queue][at] = true;
            }
        }
        assert_eq!(under_way, [[false; DEPTH as usize]; QUEUES + 1]);
        assert!((1..=QUEUES).all(|queue| self.take(queue).is_none()));
    }

    /// Submits a write, or a read of what the command before has written.
    fn next(&mut self, queue: usize, cid: u16, number: u32) {
        let data = data_of(queue, cid);
        let opcode = if number.is_multiple_of(2) { 1 } else { 2 };
        let filling = if opcode == 1 { number } else { u32::MAX };
        self.put(data, &words(&[filling; 128]));
        let block = (queue as u32 - 1) * 1024 + u32::from(cid) * 32 + number / 2 % 32;
        self.submit(queue, opcode | u32::from(cid) << 16, 1, [data, 0], [block, 0, 0]);
    }

    /// Submits reads on all queues. What is not read is 0xee.
    fn read_everywhere(&mut self) {
        for queue in 1..=QUEUES {
            for cid in 0..DEPTH {
                let data = data_of(queue, cid);
                self.put(data, &[0xee; 512]);
                self.submit(queue, 2 | u32::from(cid) << 16, 1, [data, 0], [u32::from(cid), 0, 0]);
            }
        }
    }

    /// Everything in memory that a controller might write to.
    fn snapshot(&self) -> Vec<u8> {
        let mut bytes = vec![0; MEMORY as usize];
        self.memory.read_exact_at(&mut bytes, 0).expect("the guest's memory");
        bytes
    }
}

fn server(scratch: &Scratch, image: &Image, options: &str, more: &str) -> Server {
    let socket = scratch.path("pci.sock");
    let export = format!(
        "vfio-user-nvme,id=pci,node-name=disk,addr.type=unix,addr.path={},writable=on,num-queues={QUEUES},\
         iothread.0=io0,iothread.1=io1{more}",
        socket.display()
    );
    ServerCommand::new(scratch)
        .args(["--sandbox", "on"])
        .args(["--object", "iothread,id=io0", "--object", "iothread,id=io1"])
        .file("disk", image, options)
        .args(["--export", &export])
        .monitor("monitor")
        .start()
}

fn survives_upgrades(has_shadow: bool, more: &str) {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 2);
    let socket = scratch.path("pci.sock");
    let mut server = server(&scratch, &image, "discard=unmap", more);
    let mut driver = Driver::connect(&socket);
    driver.start(has_shadow);
    // Notices of changed namespaces, and a request for an event.
    driver.admin(0x09, [0; 2], [0x0b, 1 << 8, 0]);
    driver.submit(0, 0x0c | 77 << 16, 0, [0; 2], [0; 3]);
    let answered = AtomicU32::new(0);
    thread::scope(|scope| {
        let load = scope.spawn(|| driver.load(&answered));
        for begin in UPGRADES {
            eventually("commands are answered", || {
                let is_over = load.is_finished();
                (is_over || answered.load(Ordering::Acquire) >= begin).then_some(())
            });
            server.upgrade();
        }
    });
    assert_eq!(answered.into_inner(), COMMANDS);
    assert!(!has_shadow || driver.rung < COMMANDS, "the loop polls");
    assert_eq!(driver.read(0x1c), 1, "registers are served");
    let mut qmp = Qmp::connect(&server.socket("monitor"));
    qmp.execute("block_resize", json!({"node-name": "disk", "size": 3 << 20}));
    assert_eq!(driver.wait(0), (77, 0x0004_0002), "a namespace has changed");
    drop(driver);
    Driver::connect(&socket).start(has_shadow);
    server.stop();
}

#[test]
fn nvme_commands_survive_upgrades() {
    survives_upgrades(false, "");
}

#[test]
fn nvme_commands_by_shadow_doorbells_survive_upgrades() {
    survives_upgrades(true, "");
}

/// The driver's writes to its page reach each process, with polling off as well.
#[test]
fn nvme_commands_by_mapped_doorbells_survive_upgrades() {
    survives_upgrades(false, ",doorbells=mapped");
}

#[test]
fn nvme_commands_by_trapped_doorbells_survive_upgrades() {
    survives_upgrades(false, ",doorbells=trapped");
}

/// After the reply to a reset, or to unmapping, no thread writes to the guest's memory, and nothing that was begun before is
/// answered.
#[test]
fn resets_and_unmapping_under_load_end_all_commands() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 2);
    let socket = scratch.path("pci.sock");
    let server = server(&scratch, &image, "discard=unmap", "");
    let mut driver = Driver::connect(&socket);
    for round in 0..120 {
        driver.start(round % 2 == 1);
        driver.read_everywhere();
        match round % 4 {
            0 => driver.reset(),
            // Function level reset.
            3 => driver.write_to(CONFIG, 0x54, 1),
            1 => {
                driver.write(0x14, 0);
                eventually("the controller is down", || (driver.read(0x1c) == 0).then_some(()));
            }
            _ => driver.unmap(),
        }
        let before = driver.snapshot();
        driver.read(0x1c);
        assert!(driver.snapshot() == before, "round {round}: memory has changed");
        if round % 4 == 2 {
            driver.reset();
            driver.map();
        }
        assert!(driver.snapshot() == before, "round {round}: memory has changed");
        driver.enable();
    }
    driver.start(true);
    driver.load(&AtomicU32::new(0));
    let stats = Qmp::connect(&server.socket("monitor")).execute("x-query-export-stats", json!({}));
    for (queue, thread) in ["io0", "io1", "io0", "io1"].iter().enumerate() {
        let queue = &stats[0]["queues"][queue];
        assert_eq!(queue["iothread"], *thread);
        let read = &queue["requests"][0];
        assert_eq!(read["operation"], "read");
        assert!(read["done"].as_u64().is_some_and(|done| done > 0), "{queue}");
    }
    server.stop();
}

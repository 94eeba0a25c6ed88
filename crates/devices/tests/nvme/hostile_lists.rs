//! A guest that rewrites PRP lists while the controller reads them.
//!
//! Each command is carried out or refused. Pages that no list names stay as they are. Commands of another queue have
//! their data.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use event_loop::PollParams;
use fastrand::Rng;
use guest_memory::GuestMemory;

use crate::nvme::rig::*;

const PAGE: u64 = 4096;
/// Two pages of the first entries of lists, two pages of the entries that follow.
const LISTS: u64 = DATA;
const NEXT_LISTS: u64 = LISTS + 2 * PAGE;
/// Pages that lists name.
const TARGETS: u64 = 3 << 20;
const TARGET_PAGES: u64 = 256;
/// Pages that no list names, on both sides of those.
const BYSTANDERS: [u64; 2] = [TARGETS - (1 << 19), TARGETS + TARGET_PAGES * PAGE];
const BYSTANDER_BYTES: usize = 1 << 19;
const CANARY: u8 = 0xc5;
/// List and data of the other queue.
const HONEST_LIST: u64 = 6 << 20;
const HONEST: u64 = HONEST_LIST + PAGE;
const HONEST_PAGES: u64 = 4;
const HONEST_BLOCK: u64 = 2048;
/// Entries before the end of a page of [`LISTS`]; the last of them names a page of [`NEXT_LISTS`].
const FIRST_ENTRIES: u64 = 8;
const COMMANDS: u64 = 500;

struct Random(Rng);

impl Random {
    /// An entry, one of 40 of which is wrong. A mixture of the bytes of two entries is an address of [`TARGETS`] or wrong.
    fn entry(&mut self) -> u64 {
        let page = TARGETS + PAGE * self.0.u64(..TARGET_PAGES);
        match self.0.u64(..160) {
            0 => page | 1 << 40,
            1 => page + 8,
            2 => page | u64::MAX << 48,
            3 => MEMORY,
            _ => page,
        }
    }

    /// Rewrites an entry of a list, or the address of the page with the next entries.
    fn rewrite(&mut self, memory: &GuestMemory) {
        let list = PAGE * self.0.u64(..2);
        let (at, value) = match self.0.u64(..20) {
            0 => {
                let next = NEXT_LISTS + PAGE * self.0.u64(..2);
                let wrong = [next | 1 << 40, next + 16];
                let value =
                    if self.0.u64(..20) == 0 { wrong[self.0.u64(..2) as usize] } else { next };
                (LISTS + list + PAGE - 8, value)
            }
            1..8 => (LISTS + list + PAGE - 8 * (2 + self.0.u64(..FIRST_ENTRIES - 1)), self.entry()),
            _ => (NEXT_LISTS + list + 8 * self.0.u64(..64), self.entry()),
        };
        memory.write_bytes(at, &value.to_le_bytes()).unwrap();
    }
}

/// Has commands of queue 1 read the lists, and commands of queue 2 move data. Returns how many of the former were carried out.
fn run(rig: &mut Rig, random: &mut Random) -> u64 {
    let mut carried_out = 0;
    for n in 0..COMMANDS {
        for _ in 0..20 {
            random.rewrite(rig.memory.memory());
        }
        let list = LISTS + PAGE * random.0.u64(..2) + PAGE - 8 * FIRST_ENTRIES;
        let pages = FIRST_ENTRIES + 2 + random.0.u64(..30);
        let opcode = if random.0.u64(..2) == 0 { READ } else { WRITE };
        let hostile = io(opcode, 0, (8 * pages) as u32);
        let old = rig.tail(1);
        rig.submit(1, hostile.prps(TARGETS + PAGE * random.0.u64(..TARGET_PAGES), list));
        rig.ring(1, old);

        let data: Vec<u8> = (0..HONEST_PAGES * PAGE).map(|at| (at / 7 + n) as u8).collect();
        rig.put(HONEST, &data);
        let honest =
            |opcode| io(opcode, HONEST_BLOCK, (8 * HONEST_PAGES) as u32).prps(HONEST, HONEST_LIST);
        rig.ok(2, honest(WRITE));
        rig.put(HONEST, &vec![0; data.len()]);
        rig.ok(2, honest(READ));
        assert!(rig.bytes(HONEST, data.len()) == data, "command {n}");

        match rig.completed(1).status {
            0 => carried_out += 1,
            // Data transfer error; a PRP's offset is invalid.
            0x04 | 0x13 => {}
            other => panic!("command {n}: status {other:#x}"),
        }
    }
    carried_out
}

#[test]
fn lists_that_are_rewritten_under_way_harm_nothing_else() {
    let mut rig = Rig::on_threads(PollParams::default(), 1);
    rig.enable();
    (1..=2).for_each(|qid| rig.create(qid));
    for page in 1..HONEST_PAGES {
        rig.put(HONEST_LIST + 8 * (page - 1), &(HONEST + PAGE * page).to_le_bytes());
    }
    for at in BYSTANDERS {
        rig.put(at, &[CANARY; BYSTANDER_BYTES]);
    }
    let mut random = Random(Rng::with_seed(0x5eed));
    for _ in 0..5000 {
        random.rewrite(rig.memory.memory());
    }
    let is_over = AtomicBool::new(false);
    let memory = rig.memory.memory().clone();
    let carried_out = thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random(Rng::with_seed(0xbad));
            while !is_over.load(Ordering::Relaxed) {
                random.rewrite(&memory);
            }
        });
        // The other thread ends whether or not this one panics.
        let result =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(&mut rig, &mut random)));
        is_over.store(true, Ordering::Relaxed);
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    assert!((1..COMMANDS).contains(&carried_out), "{carried_out} of {COMMANDS}");
    for at in BYSTANDERS {
        assert!(rig.bytes(at, BYSTANDER_BYTES).iter().all(|byte| *byte == CANARY), "{at:#x}");
    }
    rig.ok(1, io(READ, 0, 1).prps(HONEST, 0));
}

//! Malformed states of a paused controller: a state is refused, or gives a controller that a driver can use.

use proptest::prelude::*;
use proptest::sample::Index;

use crate::nvme::rig::*;

/// A change of a state.
#[derive(Debug, Clone)]
enum Change {
    Word { at: Index, value: u64 },
    Add { at: Index, value: i8 },
    Flip { bit: Index },
    Copy { from: Index, to: Index },
    Remove { at: Index },
    Repeat { at: Index },
    Cut { len: Index },
}

/// What the driver does in the controller that was restored.
#[derive(Debug, Clone)]
enum Step {
    Doorbell {
        number: u64,
        value: u32,
    },
    Shadow {
        number: u64,
        value: u32,
    },
    Admin {
        opcode: u8,
        dword10: u32,
        dword11: u32,
    },
    Command {
        opcode: u8,
        first: u64,
        count: u32,
    },
    /// Another size of namespace 2.
    Resize {
        blocks: u64,
    },
    Turn,
}

fn word() -> impl Strategy<Value = u64> {
    prop_oneof![
        0..5u64,
        60..70u64,
        Just(1024),
        Just(4096),
        // The end of memory, and of all addresses.
        (0..5u64).prop_map(|pages| MEMORY - pages * 4096),
        (0..3u64).prop_map(|pages| (u64::MAX << 12) - pages * 4096),
        (0..64u32).prop_map(|bit| 1 << bit),
        (0..0x100_0000u64).prop_map(|at| at & !3),
        any::<u64>(),
    ]
}

fn change() -> impl Strategy<Value = Change> {
    let index = any::<Index>;
    prop_oneof![
        4 => (index(), word()).prop_map(|(at, value)| Change::Word { at, value }),
        4 => (index(), any::<i8>()).prop_map(|(at, value)| Change::Add { at, value }),
        2 => index().prop_map(|bit| Change::Flip { bit }),
        2 => (index(), index()).prop_map(|(from, to)| Change::Copy { from, to }),
        1 => index().prop_map(|at| Change::Remove { at }),
        1 => index().prop_map(|at| Change::Repeat { at }),
        1 => index().prop_map(|len| Change::Cut { len }),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let value = || prop_oneof![0..ENTRIES + 2, any::<u32>()];
    let opcode = prop_oneof![
        Just(0x00),
        Just(0x01),
        Just(0x02),
        Just(0x04),
        Just(0x05),
        Just(0x06),
        Just(0x08),
        Just(0x09),
        Just(0x0a),
        Just(0x0c),
        Just(0x7c)
    ];
    let dword = || prop_oneof![0..12u32, (0..5u32).prop_map(|qid| 0x3f_0000 | qid)];
    prop_oneof![
        (0..9u64, value()).prop_map(|(number, value)| Step::Doorbell { number, value }),
        (0..9u64, value()).prop_map(|(number, value)| Step::Shadow { number, value }),
        (opcode, dword(), dword()).prop_map(|(opcode, dword10, dword11)| Step::Admin {
            opcode,
            dword10,
            dword11
        }),
        (0..13u8, 0..2 * BLOCKS, 1..17u32).prop_map(|(opcode, first, count)| Step::Command {
            opcode,
            first,
            count
        }),
        (0..2 * BLOCKS).prop_map(|blocks| Step::Resize { blocks: blocks.max(1) }),
        Just(Step::Turn),
    ]
}

fn word_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[8 * at..8 * at + 8].try_into().unwrap())
}

fn put_word(bytes: &mut [u8], at: usize, value: u64) {
    bytes[8 * at..8 * at + 8].copy_from_slice(&value.to_le_bytes());
}

fn apply(bytes: &mut Vec<u8>, change: &Change) {
    let words = bytes.len() / 8;
    if words == 0 {
        return;
    }
    match change {
        Change::Word { at, value } => put_word(bytes, at.index(words), *value),
        Change::Add { at, value } => {
            let at = at.index(words);
            let value = word_at(bytes, at).wrapping_add_signed((*value).into());
            put_word(bytes, at, value);
        }
        Change::Flip { bit } => {
            let bit = bit.index(8 * bytes.len());
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        Change::Copy { from, to } => {
            let value = word_at(bytes, from.index(words));
            put_word(bytes, to.index(words), value);
        }
        Change::Remove { at } => {
            let at = 8 * at.index(words);
            bytes.drain(at..at + 8);
        }
        Change::Repeat { at } => {
            let at = 8 * at.index(words);
            let word: Vec<u8> = bytes[at..at + 8].to_vec();
            bytes.splice(at..at, word);
        }
        Change::Cut { len } => bytes.truncate(len.index(bytes.len())),
    }
}

/// Which valid state the changes begin with.
#[derive(Debug, Clone, Copy)]
enum Life {
    Off,
    Ready,
    Queues,
    Shadows,
    Full,
    ShutDown,
}

/// A controller in the middle of its life.
fn rig_in(life: Life) -> Rig {
    let mut rig = Rig::new(0);
    if matches!(life, Life::Off) {
        return rig;
    }
    rig.enable();
    if matches!(life, Life::Ready) {
        return rig;
    }
    rig.create(1);
    rig.create(3);
    if matches!(life, Life::Shadows | Life::Full) {
        rig.use_shadows();
    }
    rig.ok(1, io(WRITE, 0, 8));
    rig.ok(3, io(READ, 0, 8));
    // Events that wait for requests, and a changed namespace that the driver has not read.
    rig.ok(0, command(0x09).dword(10, 0x0b).dword(11, 1 << 8));
    rig.controller().set_geometry(1, &geometry(BLOCKS / 2));
    rig.write(0x1000 + 8 * 2, 1);
    for _ in 0..3 {
        let old = rig.tail(0);
        rig.submit(0, command(0x0c));
        rig.ring(0, old);
    }
    if matches!(life, Life::Full) {
        // The driver takes no completions: commands wait in the queue.
        for _ in 0..2 {
            let old = rig.tail(1);
            (0..ENTRIES - 2).for_each(|_| _ = rig.submit(1, io(READ, 0, 1)));
            rig.ring(1, old);
            rig.turn();
        }
    }
    if matches!(life, Life::ShutDown) {
        rig.write(CC, ENABLE | 1 << 14);
        rig.wait("it is shut down", |rig| rig.read(CSTS) & 0xc == 8);
    }
    rig
}

fn save(rig: &mut Rig) -> Vec<u8> {
    let controller = rig.controller.clone().unwrap();
    rig.event_loop.block_on(controller.pause()).unwrap().unwrap()
}

fn play(rig: &mut Rig, step: &Step) {
    match *step {
        Step::Doorbell { number, value } => rig.write(0x1000 + 4 * number, value),
        Step::Shadow { number, value } => {
            rig.memory.store_release(SHADOW + 4 * number, value).unwrap();
        }
        Step::Admin { opcode, dword10, dword11 } => {
            let old = rig.tail(0);
            let prps = if opcode == 0x7c { (SHADOW, EVENTS) } else { (DATA, DATA + 4096) };
            let admin = command(opcode).prps(prps.0, prps.1);
            rig.submit(0, admin.dword(10, dword10).dword(11, dword11));
            rig.ring(0, old);
        }
        Step::Command { opcode, first, count } => {
            let old = rig.tail(1);
            rig.submit(1, io(opcode, first, count));
            rig.ring(1, old);
        }
        Step::Resize { blocks } => rig.controller().set_geometry(1, &geometry(blocks)),
        Step::Turn => rig.turn(),
    }
}

/// A driver that keeps to the rules is served.
fn serves(rig: &mut Rig) {
    rig.enable();
    rig.create(1);
    // The controller takes values that were written before it knew the pages.
    rig.put(SHADOW, &[0; 4096]);
    rig.use_shadows();
    rig.ok(1, io(WRITE, 1, 8));
    rig.ok(1, io(READ, 1, 8));
    assert_eq!(rig.ok(0, command(0x0a).dword(10, 0x0b)), 0, "features are as after a reset");
}

fn run(life: Life, changes: &[Change], steps: &[Step]) {
    let mut before = rig_in(life);
    let mut bytes = save(&mut before);
    changes.iter().for_each(|change| apply(&mut bytes, change));

    let mut rig = Rig::new(0);
    rig.continue_driver_of(&before);
    let restored = match rig.controller().check(&bytes) {
        Ok(restored) => restored,
        // Unchanged states are valid.
        Err(error) => {
            assert!(!changes.is_empty(), "{error}");
            return serves(&mut rig);
        }
    };
    rig.controller().restore(restored);
    steps.iter().for_each(|step| play(&mut rig, step));
    rig.turn();
    // What was accepted can be handed over once more.
    let again = save(&mut rig);
    let restored = rig.controller().check(&again);
    assert!(restored.is_ok(), "{restored:?}");
    rig.controller().resume();
    rig.turn();
    // The driver's own reset.
    rig.write(CC, 0);
    rig.wait("it is down", |rig| rig.read(CSTS) & 1 == 0);
    serves(&mut rig);
}

fn life() -> impl Strategy<Value = Life> {
    prop_oneof![
        1 => Just(Life::Off),
        1 => Just(Life::Ready),
        2 => Just(Life::Queues),
        3 => Just(Life::Shadows),
        2 => Just(Life::Full),
        1 => Just(Life::ShutDown),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, max_shrink_iters: 3, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn a_malformed_state_is_refused_or_sound(
        life in life(),
        changes in prop::collection::vec(change(), 0..4),
        steps in prop::collection::vec(step(), 0..24),
    ) {
        run(life, &changes, &steps);
    }
}

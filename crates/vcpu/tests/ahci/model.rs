//! Random commands, many in parallel, with resets in between, compared with a vector of bytes.

use fastrand::Rng;
use vcpu::ahci::{Command, reg};

use crate::ahci::rig::*;

const SEEDS: u64 = 6;
const BATCHES: u64 = 40;

/// A command in flight, and its expected data.
struct Sent {
    slot: u8,
    from: usize,
    len: usize,
    pieces: Vec<(u64, u32)>,
    read: bool,
}

/// Cuts `len` bytes into pieces of any length in the slot's own memory.
fn pieces(random: &mut Rng, slot: u8, len: usize) -> Vec<(u64, u32)> {
    let (mut at, mut left, mut pieces) = (area(0).data(slot), len as u64, Vec::new());
    while left > 0 {
        let longest = left.min(2048 + random.u64(..30000));
        let n = if pieces.len() < 40 && random.u8(..3) > 0 { longest / 2 * 2 } else { left };
        let n = n.max(1);
        pieces.push((at, n as u32));
        at += n.next_multiple_of(2);
        left -= n;
    }
    pieces
}

fn run(seed: u64) {
    let mut random = Rng::with_seed(seed);
    let mut rig = Rig::new();
    let mut model = contents().clone();
    for _ in 0..BATCHES {
        let queued = random.bool();
        rig.disk().hold.set(random.bool());
        let (mut sent, mut slots, mut at) = (Vec::new(), 0u32, 0);
        // Ranges of one batch do not overlap, as their order is not defined.
        for slot in 0..1 + random.u64(..32) {
            let slot = slot as u8;
            at += random.usize(..64) * 512;
            let len = (1 + random.usize(..127)) * 512;
            let (from, write) = (at, random.bool());
            at += len;
            let (offset, bytes) = (from as u64, len as u32);
            let command = if queued {
                Command::queued(slot, write, offset, bytes)
            } else {
                Command::dma(write, offset, bytes)
            };
            let pieces = pieces(&mut random, slot, len);
            if write {
                let fill = random.u8(..);
                let mut done = from;
                for (addr, n) in &pieces {
                    let range = done..done + *n as usize;
                    done = range.end;
                    model[range.clone()].iter_mut().for_each(|b| *b = b.wrapping_add(fill) ^ 0x5a);
                    rig.write_memory(*addr, &model[range]);
                }
            }
            rig.port().prepare_prdt(slot, &command, &pieces).unwrap();
            sent.push(Sent { slot, from, len, pieces, read: !write });
            slots |= 1 << slot;
        }
        assert!(at <= DISK);
        // In one doorbell or several.
        let first = slots & random.u32(..);
        for part in [first, slots & !first] {
            if part != 0 {
                rig.port().ring(part);
            }
            if random.bool() {
                rig.turn();
            }
        }
        while rig.port().issued() != 0 {
            rig.turn();
            let held = rig.disk().held.borrow().len();
            if held > 1 {
                let other = random.usize(..held);
                rig.disk().held.borrow_mut().swap(0, other);
            }
            let count = if held == 0 { 0 } else { 1 + random.usize(..held) };
            rig.let_go(count);
            rig.port().poll().unwrap();
        }
        for Sent { from, len, pieces, .. } in sent.iter().filter(|sent| sent.read) {
            let got: Vec<u8> =
                pieces.iter().flat_map(|(at, n)| rig.read_memory(*at, *n as usize)).collect();
            assert!(got == model[*from..*from + *len], "seed {seed}, {len} bytes at {from}");
        }
        if random.u8(..4) == 0 {
            reset_in_flight(&mut rig, &mut random, &sent, queued);
        }
    }
    assert!(*rig.disk().bytes.borrow() == model, "seed {seed}");
}

/// Repeats the reads, and resets while they are in flight.
fn reset_in_flight(rig: &mut Rig, random: &mut Rng, sent: &[Sent], queued: bool) {
    rig.disk().hold.set(true);
    let reads = sent.iter().filter(|sent| sent.read);
    let slots = reads.fold(0, |slots, sent| slots | 1 << sent.slot);
    rig.port().ring(slots);
    rig.turn();
    let held = rig.disk().held.borrow().len();
    assert!(if queued { held == slots.count_ones() as usize } else { held <= 1 });
    rig.let_go(random.usize(..=held));
    rig.disk().hold.set(false);
    let cmd = rig.port().read(reg::PX_CMD);
    match random.u64(..3) {
        0 => rig.port().write(reg::PX_CMD, cmd & !reg::CMD_ST),
        1 => {
            rig.port().write(reg::PX_SCTL, 1);
            rig.port().write(reg::PX_SCTL, 0);
        }
        _ => rig.port().write_generic(reg::GHC, reg::GHC_AE | reg::GHC_HR),
    }
    let left = rig.disk().held.borrow().len();
    rig.let_go(left);
    rig.port().write_generic(reg::GHC, reg::GHC_AE | reg::GHC_IE);
    rig.port().start().unwrap();
}

#[test]
fn random_commands_match_a_model() {
    for seed in 0..SEEDS {
        run(seed);
    }
}

//! Servers that send anything: a property of [`ClientState`], also for fuzz targets.

use std::cell::RefCell;
use std::rc::Rc;

use event_loop::{AlignedBuf, IoBufs};
use nbd_wire::reply::ReplyMode;
use nix::errno::Errno;
#[cfg(test)]
use proptest::prelude::*;

use super::agreed::Agreed;
use super::state::{ClientState, Next, Violation};
use crate::request::{Op, Request, RequestOwner};

const SIZE: u64 = 1 << 20;
/// Bytes around the memory of each request, which must not change.
const GUARD: usize = 64;

#[derive(Default)]
struct Answers(RefCell<Vec<(u32, Result<(), Errno>)>>);

impl RequestOwner for Answers {
    fn complete(&self, tag: u32, result: Result<(), Errno>, _: IoBufs) {
        self.0.borrow_mut().push((tag, result));
    }
}

/// What happens next.
#[derive(Debug, Clone)]
enum Step {
    Submit {
        op: u8,
        sector: u64,
        sectors: u64,
    },
    /// All that is ready is sent, in pieces or not.
    Send,
    /// The server answers one of the commands that it has, by rules that it keeps or breaks.
    Answer {
        which: usize,
        how: u8,
        number: u64,
    },
    /// It sends this.
    Say(Vec<u8>),
}

#[cfg(test)]
fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0u8..7, 0..SIZE / 512, 1u64..64)
            .prop_map(|(op, sector, sectors)| Step::Submit { op, sector, sectors }),
        3 => Just(Step::Send),
        6 => (any::<usize>(), 0u8..16, any::<u64>())
            .prop_map(|(which, how, number)| Step::Answer { which, how, number }),
        1 => prop::collection::vec(any::<u8>(), 1..100).prop_map(Step::Say),
    ]
}

/// A connection with a server in the test's hands.
struct Rig {
    state: ClientState,
    mode: ReplyMode,
    answers: Rc<Answers>,
    memories: Vec<IoBufs>,
    submitted: u32,
    /// What the server was sent: cookie, command, offset, length.
    asked: Vec<(u64, u16, u64, u64)>,
}

impl Rig {
    fn new(mode: ReplyMode) -> Rig {
        let allocation = (mode != ReplyMode::Simple).then_some(7);
        let flags = 0x0fff & !nbd_wire::flag::READ_ONLY;
        let (minimum, preferred, maximum) = (512, 4096, 16 << 10);
        let agreed = Agreed { size: SIZE, flags, mode, allocation, minimum, preferred, maximum };
        let state = ClientState::new(agreed).unwrap();
        let (answers, memories) = (Rc::default(), Vec::new());
        Rig { state, mode, answers, memories, submitted: 0, asked: Vec::new() }
    }

    fn submit(&mut self, op: u8, sector: u64, sectors: u64) {
        let offset = sector * 512;
        let len = (sectors * 512).min(SIZE - offset);
        let zeroes = Op::WriteZeroes { may_unmap: true, no_fallback: true, fua: true };
        let (op, len, memory) = match op {
            0..3 => (Op::Read, len, len),
            3 => (Op::Write { fua: true }, len, len),
            4 => (Op::Flush, 0, 0),
            5 => (zeroes, len, 0),
            _ => (Op::BlockStatus, len, 4 * 16),
        };
        let whole = AlignedBuf::io_bufs(memory as usize + 2 * GUARD, 512).unwrap();
        let mut bufs = IoBufs::new();
        bufs.set_part(&whole, GUARD, memory as usize, 1);
        self.memories.push(whole);
        let to: Rc<dyn RequestOwner> = self.answers.clone();
        let offset = if op == Op::Flush { 0 } else { offset };
        let request = Request::new(op, offset, len, bufs, &to, self.submitted);
        self.submitted += 1;
        if let Some((request, result)) = self.state.submit(request) {
            request.complete(result);
        }
    }

    fn send(&mut self) {
        let mut list = IoBufs::new();
        self.state.gather(&mut list);
        let mut bytes = vec![0; list.len()];
        list.copy_out(0, &mut bytes);
        self.state.sent(&mut list);
        let extended = self.mode == ReplyMode::Extended;
        let mut at = 0;
        while let Some(header) = nbd_wire::request::RequestHeader::parse(&bytes[at..], extended) {
            let header = header.expect("what we send is right");
            at += if extended { 32 } else { 28 };
            at += if header.has_payload(extended) { header.len as usize } else { 0 };
            self.asked.push((header.cookie, header.command.number(), header.offset, header.len));
        }
        assert_eq!(at, bytes.len());
    }

    /// What a server might answer, right or wrong.
    fn answer(&mut self, which: usize, how: u8, number: u64) -> Vec<u8> {
        let Some(&(cookie, command, offset, len)) =
            self.asked.get(which.checked_rem(self.asked.len()).unwrap_or(0))
        else {
            return Vec::new();
        };
        let mut out = Vec::new();
        let mut chunk = |kind: u16, done: bool, payload: &[u8]| {
            let extended = self.mode == ReplyMode::Extended;
            let magic: u32 = if extended { 0x6e8a_278c } else { 0x668e_33ef };
            out.extend(magic.to_be_bytes());
            out.extend(u16::from(done).to_be_bytes());
            out.extend(kind.to_be_bytes());
            out.extend(cookie.to_be_bytes());
            if extended {
                out.extend(offset.to_be_bytes());
                out.extend((payload.len() as u64).to_be_bytes());
            } else {
                out.extend((payload.len() as u32).to_be_bytes());
            }
            out.extend(payload);
        };
        let data =
            |offset: u64, len: u64| [&offset.to_be_bytes()[..], &vec![0xee; len as usize]].concat();
        let hole = |offset: u64, len: u32| [&offset.to_be_bytes()[..], &len.to_be_bytes()].concat();
        let narrow = [7u32, len as u32, (number % 4) as u32].map(u32::to_be_bytes).concat();
        let wide = [0x7_0000_0001, len, number % 4].map(u64::to_be_bytes).concat();
        let status = if self.mode == ReplyMode::Extended { (6, wide) } else { (5, narrow) };
        let right = match command {
            0 => (1, data(offset, len)),
            7 => status.clone(),
            _ => (0, Vec::new()),
        };
        match how {
            _ if self.mode == ReplyMode::Simple => {
                out.extend(0x6744_6698u32.to_be_bytes());
                let error = if how < 3 { number as u32 % 120 } else { 0 };
                out.extend(error.to_be_bytes());
                out.extend(if how == 15 { number } else { cookie }.to_be_bytes());
                if command == 0 && error == 0 {
                    out.extend(data(0, len - 8));
                }
            }
            0..6 => chunk(right.0, true, &right.1),
            6 => {
                chunk(2, false, &hole(offset, (len / 2) as u32));
                chunk(1, true, &data(offset + len / 2, len - len / 2));
            }
            7 => chunk(0x8001, true, &[0, 0, 0, 28, 0, 0]),
            8 => chunk(0x8002, false, &[&[0, 0, 0, 5, 0, 1, b'x'][..], &[0; 8]].concat()),
            9 => chunk(1, number.is_multiple_of(2), &data(number, len.min(number % 1000))),
            10 => chunk(2, true, &hole(offset, number as u32)),
            11 => chunk(status.0, false, &status.1),
            12 => chunk(number as u16, true, &right.1),
            13 => chunk(0, number.is_multiple_of(2), &vec![0; (number % 3) as usize]),
            14 => chunk(1, false, &data(offset, 1)),
            _ => {
                chunk(right.0, true, &right.1);
                let at = (number % 32) as usize;
                if let Some(byte) = out.get_mut(at) {
                    *byte ^= 1 << (number % 8);
                }
            }
        }
        out
    }

    fn hear(&mut self, mut bytes: &[u8]) -> Result<(), Violation> {
        while !bytes.is_empty() {
            let mut list = IoBufs::new();
            self.state.input_memory(&mut list);
            assert!(!list.is_empty());
            // Any piece of it.
            let n = bytes.len().min(list.len()).min(1 + bytes.len() * 7 / 8);
            list.copy_in(0, &bytes[..n]);
            bytes = &bytes[n..];
            self.state.received(n, &mut list);
            self.take_answers()?;
        }
        Ok(())
    }

    fn take_answers(&mut self) -> Result<(), Violation> {
        loop {
            match self.state.next()? {
                Next::Complete(request, result) => request.complete(result),
                Next::Input => return Ok(()),
            }
        }
    }

    fn finish(mut self) {
        let mut list = IoBufs::new();
        self.state.disconnected(&mut list);
        while let Some(request) = self.state.next_failed() {
            request.complete(Err(Errno::EIO));
        }
        assert_eq!(self.state.requests(), 0);
        let mut tags: Vec<u32> = self.answers.0.borrow().iter().map(|(tag, _)| *tag).collect();
        tags.sort_unstable();
        let all: Vec<u32> = (0..self.submitted).collect();
        assert_eq!(tags, all, "each request is answered once");
        for memory in &self.memories {
            let mut bytes = vec![0; memory.len()];
            memory.copy_out(0, &mut bytes);
            let (before, after) = (&bytes[..GUARD], &bytes[bytes.len() - GUARD..]);
            assert!(before.iter().chain(after).all(|byte| *byte == 0));
        }
    }
}

fn run(mode: ReplyMode, steps: &[Step]) -> bool {
    let mut rig = Rig::new(mode);
    for step in steps {
        let bytes = match step {
            Step::Submit { op, sector, sectors } => {
                rig.submit(*op, *sector, *sectors);
                continue;
            }
            Step::Send => {
                rig.send();
                continue;
            }
            Step::Answer { which, how, number } => rig.answer(*which, *how, *number),
            Step::Say(bytes) => bytes.clone(),
        };
        if rig.hear(&bytes).is_err() {
            rig.finish();
            return false;
        }
    }
    rig.finish();
    true
}

/// Takes mode and steps from the bytes.
#[cfg(feature = "fuzzing")]
pub(crate) fn play(data: &[u8]) {
    let Some((&mode, mut rest)) = data.split_first() else { return };
    let mode = match mode % 3 {
        0 => ReplyMode::Simple,
        1 => ReplyMode::Structured,
        _ => ReplyMode::Extended,
    };
    let mut next = |len: usize| {
        let mut bytes = [0; 8];
        let (here, after) = rest.split_at(rest.len().min(len));
        bytes[..here.len()].copy_from_slice(here);
        rest = after;
        (!here.is_empty()).then(|| u64::from_le_bytes(bytes))
    };
    let mut steps = Vec::new();
    while let Some(kind) = next(1) {
        if steps.len() == 200 {
            break;
        }
        let mut number = |len| next(len).unwrap_or(0);
        steps.push(match kind % 8 {
            0 | 1 => Step::Submit {
                op: (number(1) % 7) as u8,
                sector: number(2) % (SIZE / 512),
                sectors: 1 + number(1) % 63,
            },
            2 => Step::Send,
            3..=6 => Step::Answer {
                which: number(1) as usize,
                how: (number(1) % 16) as u8,
                number: match kind >> 7 {
                    0 => number(1),
                    _ => number(8),
                },
            },
            _ => Step::Say((0..1 + number(1) % 64).map(|_| number(1) as u8).collect()),
        });
    }
    run(mode, &steps);
}

/// A server that says these bytes to a client that connects, and no more.
#[cfg(feature = "fuzzing")]
pub(crate) fn shake_hands(event_loop: &event_loop::EventLoop, bytes: &[u8]) {
    use std::io::Write;
    let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
    ours.set_nonblocking(true).expect("a socket");
    // More than a socket takes is no server's handshake.
    theirs.set_nonblocking(true).expect("a socket");
    let _ = theirs.write(bytes);
    theirs.shutdown(std::net::Shutdown::Write).expect("a socket");
    let done = Rc::<RefCell<Option<_>>>::default();
    let (out, on) = (done.clone(), event_loop.clone());
    event_loop.spawn(async move {
        out.replace(Some(super::connect::shake_hands(&on, ours.into(), "disk").await));
    });
    let mut turns = 0;
    while done.borrow().is_none() {
        event_loop.run_once(false).expect("it turns");
        turns += 1;
        assert!(turns < 100_000, "the handshake does not end");
    }
    match done.take() {
        Some(Ok(agreed)) => {
            assert!(agreed.minimum.is_power_of_two() && agreed.minimum <= 64 << 10);
            assert!(agreed.preferred.is_power_of_two() && agreed.preferred >= agreed.minimum);
            assert!(agreed.maximum >= agreed.minimum && agreed.maximum <= nbd_wire::MAX_PAYLOAD);
            assert_eq!(agreed.size % u64::from(agreed.minimum), 0);
            assert_eq!(agreed.maximum % agreed.minimum, 0);
            assert!(i64::try_from(agreed.size.next_multiple_of(512)).is_ok());
        }
        Some(Err(error)) => assert!(error.to_string().len() < 8192, "{error}"),
        None => {}
    }
}

#[cfg(test)]
proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn each_request_is_answered_once_for_any_server_input(
        mode in prop_oneof![
            Just(ReplyMode::Simple), Just(ReplyMode::Structured), Just(ReplyMode::Extended),
        ],
        steps in prop::collection::vec(step(), 1..60),
    ) {
        run(mode, &steps);
    }
}

/// The server of the property above keeps the rules as long as it is told to.
#[test]
fn right_answers_are_taken() {
    for mode in [ReplyMode::Simple, ReplyMode::Structured, ReplyMode::Extended] {
        for op in 0..7 {
            for how in [3, 6] {
                if op == 6 && mode == ReplyMode::Simple || how == 6 && op > 2 {
                    continue;
                }
                let mut rig = Rig::new(mode);
                // Four commands where data are concerned.
                rig.submit(op, 3, 127);
                for _ in 0..8 {
                    rig.send();
                    let bytes = rig.answer(0, how, 0);
                    rig.hear(&bytes).unwrap();
                    rig.asked.clear();
                }
                assert_eq!(*rig.answers.0.borrow(), [(0, Ok(()))], "{mode:?} {op}");
                rig.finish();
            }
        }
    }
}

#[test]
fn rules_that_matter() {
    let broken = |op, answer: &dyn Fn(&mut Rig) -> Vec<u8>| {
        let mut rig = Rig::new(ReplyMode::Structured);
        rig.submit(op, 0, 8);
        rig.send();
        let bytes = answer(&mut rig);
        let Err(Violation(rule)) = rig.hear(&bytes) else { panic!("taken") };
        rig.finish();
        rule
    };
    let chunk = |cookie: u64, kind: u16, len: u32, rest: &[u8]| {
        let (magic, done) = (0x668e_33efu32.to_be_bytes(), 1u16.to_be_bytes());
        let (kind, cookie, len) = (kind.to_be_bytes(), cookie.to_be_bytes(), len.to_be_bytes());
        [&magic[..], &done, &kind, &cookie, &len, rest].concat()
    };
    assert_eq!(broken(0, &|_| vec![0; 16]), "invalid magic of a reply");
    let nothing = broken(0, &|_| chunk(0x1234, 0, 0, &[]));
    assert_eq!(nothing, "a reply to nothing that was asked for");
    let lacking = broken(0, &|rig| chunk(rig.asked[0].0, 0, 0, &[]));
    assert_eq!(lacking, "the answer to a read lacks data");
    let outside =
        broken(0, &|rig| chunk(rig.asked[0].0, 1, 8 + 512, &(4096 - 511u64).to_be_bytes()));
    assert_eq!(outside, "data that were not asked for");
    let oversize = broken(0, &|rig| chunk(rig.asked[0].0, 1, 8 + 4097, &[]));
    assert!(oversize.contains("too long"), "{oversize}");
    let to_a_write = broken(3, &|rig| chunk(rig.asked[0].0, 1, 8 + 512, &[]));
    assert!(to_a_write.contains("does not fit"), "{to_a_write}");
    let endless = broken(0, &|rig| {
        let mut error = chunk(rig.asked[0].0, 0x8001, 6, &[0, 0, 0, 5, 0, 0]);
        // More follow, and more.
        error[5] = 0;
        error.repeat(17)
    });
    assert!(endless.contains("too long"), "{endless}");
}

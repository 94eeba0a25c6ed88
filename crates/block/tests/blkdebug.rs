//! Nodes with faults: which requests fail, how, and what of them reaches the node below.

use crate::common;

use block::NodeRegistry;
use block::options::*;
use block::request::Op;
use common::*;
use event_loop::ring::sim::{Faults, Sim};
use event_loop::{IoBufs, LoopConfig};
use nix::errno::Errno;

const SECTOR: usize = 512;
const WRITE: Op = Op::Write { fua: false };
const ZEROES: Op = Op::WriteZeroes { may_unmap: false, no_fallback: false, fua: false };
/// Bytes of the images here.
const SIZE: usize = 64 << 10;

/// An image, and a channel to it with faults.
struct Faulty {
    image: TempFile,
    rig: Rig,
}

fn options(image: &TempFile) -> BlkdebugOptions {
    let file = BlockdevOptions {
        node_name: None,
        discard: Discard::Unmap,
        ..blockdev("", file(&image.0, None))
    };
    BlkdebugOptions::new(BlockdevRef::Inline(Box::new(file)))
}

fn faulty(name: &str, change: impl FnOnce(&mut BlkdebugOptions)) -> Faulty {
    let image = TempFile::new(&tmpfs(), &format!("blkdebug-{name}"), SIZE);
    let mut options = options(&image);
    change(&mut options);
    let node =
        BlockdevOptions { discard: Discard::Unmap, ..blockdev("node", Driver::from(options)) };
    let node = NodeRegistry::new().open(&node).unwrap();
    Faulty { image, rig: Rig::new(node) }
}

fn with_rules(name: &str, rules: &[InjectError]) -> Faulty {
    faulty(name, |options| options.inject_error = rules.to_vec())
}

/// A rule that is active from the start.
fn rule(change: impl FnOnce(&mut InjectError)) -> InjectError {
    let mut rule = InjectError::new(Event::None);
    change(&mut rule);
    rule
}

impl Faulty {
    fn op(&mut self, op: Op, sector: usize, sectors: usize) -> Result<(), Errno> {
        let (offset, len) = ((sector * SECTOR) as u64, sectors * SECTOR);
        match op {
            Op::Read => self.rig.read(offset, len, 0).map(|_| ()),
            Op::Write { .. } => self.rig.write_op(op, offset, &vec![0xee; len], 0),
            Op::BlockStatus => {
                let tag = self.rig.submit(op, offset, len as u64, memory(64, 0));
                self.rig.wait(tag).0
            }
            _ => self.rig.op(op, offset, len as u64),
        }
    }

    /// One request of each kind, in the order of [`IoType::ALL`].
    fn all(&mut self) -> Vec<Result<(), Errno>> {
        let ops = [Op::Read, WRITE, ZEROES, Op::Discard];
        let mut results: Vec<_> = ops.into_iter().map(|op| self.op(op, 8, 8)).collect();
        results.push(self.op(Op::Flush, 0, 0));
        results.push(self.op(Op::BlockStatus, 8, 8));
        results
    }

    /// The sectors that were written by [`op`](Self::op).
    fn written(&self) -> Vec<usize> {
        let contents = self.image.contents();
        let sectors = contents.chunks(SECTOR).enumerate();
        sectors.filter(|(_, data)| data.iter().all(|byte| *byte == 0xee)).map(|(n, _)| n).collect()
    }
}

#[test]
fn without_rules_everything_passes() {
    let mut faulty = with_rules("plain", &[]);
    assert_eq!(faulty.all(), [Ok(()); 6]);
    assert_eq!(faulty.op(WRITE, 3, 2), Ok(()));
    assert_eq!(faulty.written(), [3, 4]);
    assert_eq!(faulty.rig.read(0, 512, 0).unwrap(), pattern(512));
}

#[test]
fn a_kind_of_requests_fails_and_the_others_do_not() {
    for (n, iotype) in IoType::ALL.iter().enumerate() {
        let rule = rule(|rule| rule.iotype = Some(*iotype));
        let mut expected = [Ok(()); 6];
        expected[n] = Err(Errno::EIO);
        assert_eq!(with_rules("kind", &[rule]).all(), expected, "{iotype:?}");
    }
    // As in QEMU: of all kinds, all but questions.
    let mut expected = [Err(Errno::ENOSPC); 6];
    expected[5] = Ok(());
    let all = rule(|rule| rule.errno = Some(Errno::ENOSPC));
    let mut faulty = with_rules("kinds", &[all]);
    assert_eq!(faulty.all(), expected);
    assert_eq!(faulty.image.contents(), pattern(SIZE), "nothing is carried out");
}

#[test]
fn an_event_makes_rules_active_until_the_next_that_has_some() {
    for (event, before, begins) in [
        (Event::ReadAio, WRITE, Op::Read),
        (Event::WriteAio, Op::Read, WRITE),
        (Event::Pwritev, Op::Read, WRITE),
        (Event::PwritevZero, WRITE, ZEROES),
        (Event::FlushToOs, WRITE, Op::Flush),
        (Event::FlushToDisk, WRITE, Op::Flush),
    ] {
        let mut faulty = with_rules("event", &[InjectError::new(event)]);
        let sectors = |op| if op == Op::Flush { 0 } else { 1 };
        assert_eq!(faulty.op(before, 0, sectors(before)), Ok(()), "{event:?}");
        assert_eq!(faulty.op(begins, 0, sectors(begins)), Err(Errno::EIO), "{event:?}");
        assert_eq!(faulty.op(before, 0, sectors(before)), Err(Errno::EIO), "{event:?}");
        assert_eq!(faulty.op(Op::Discard, 0, 1), Err(Errno::EIO), "{event:?}");
    }
    // The end of a request is one too, of which that request does not know yet.
    let mut faulty = with_rules("done", &[InjectError::new(Event::PwritevDone)]);
    assert_eq!(faulty.op(Op::Discard, 0, 1), Ok(()));
    assert_eq!(faulty.op(WRITE, 0, 1), Ok(()));
    assert_eq!(faulty.op(Op::Read, 0, 1), Err(Errno::EIO));

    let no_space = InjectError { errno: Some(Errno::ENOSPC), ..InjectError::new(Event::WriteAio) };
    let mut faulty = with_rules("replaced", &[InjectError::new(Event::ReadAio), no_space]);
    for _ in 0..2 {
        assert_eq!(faulty.op(WRITE, 0, 1), Err(Errno::ENOSPC));
        assert_eq!(faulty.op(Op::Discard, 0, 1), Err(Errno::ENOSPC));
        assert_eq!(faulty.op(Op::Read, 0, 1), Err(Errno::EIO));
        assert_eq!(faulty.op(Op::Discard, 0, 1), Err(Errno::EIO));
    }
}

#[test]
fn rules_follow_the_state_of_the_node() {
    let transition = |state| SetState { event: Event::WriteAio, state, new_state: state + 1 };
    let mut faulty = faulty("state", |options| {
        options.set_state = vec![transition(1), transition(2)];
        let second = InjectError { state: 2, ..InjectError::new(Event::WriteAio) };
        let third = InjectError {
            state: 3,
            errno: Some(Errno::ENOSPC),
            ..InjectError::new(Event::WriteAio)
        };
        options.inject_error = vec![second, third];
    });
    let results: Vec<_> = (0..4).map(|_| faulty.op(WRITE, 0, 1)).collect();
    let no_space = Err(Errno::ENOSPC);
    assert_eq!(results, [Ok(()), Err(Errno::EIO), no_space, no_space]);
    // A state that never comes.
    let mut faulty = with_rules("other", &[rule(|rule| rule.state = 2)]);
    assert_eq!(faulty.op(Op::Read, 0, 1), Ok(()));
    assert_eq!(with_rules("first", &[rule(|rule| rule.state = 1)]).all()[0], Err(Errno::EIO));
}

#[test]
fn requests_fail_that_touch_certain_sectors() {
    let rules = [
        rule(|rule| rule.sectors = Some((3, 1))),
        rule(|rule| (rule.sectors, rule.errno) = (Some((5, 2)), Some(Errno::ENOSPC))),
    ];
    let mut faulty = with_rules("sector", &rules);
    for (sector, count, expected) in [
        (0, 3, Ok(())),
        (0, 4, Err(Errno::EIO)),
        (3, 1, Err(Errno::EIO)),
        (4, 1, Ok(())),
        (4, 2, Err(Errno::ENOSPC)),
        (6, 1, Err(Errno::ENOSPC)),
        (7, 8, Ok(())),
        (0, 8, Err(Errno::EIO)),
    ] {
        assert_eq!(faulty.op(Op::Read, sector, count), expected, "{sector} {count}");
    }
    assert_eq!(faulty.op(Op::Flush, 0, 0), Ok(()));
}

#[test]
fn rules_end_when_they_have_struck_often_enough() {
    let mut faulty = with_rules("once", &[rule(|rule| rule.once = true)]);
    assert_eq!(faulty.op(Op::Read, 0, 1), Err(Errno::EIO));
    assert_eq!(faulty.op(Op::Read, 0, 1), Ok(()));
    // Nor does the event make it active again.
    let again = InjectError { count: 3, ..InjectError::new(Event::ReadAio) };
    let mut faulty = with_rules("count", &[again]);
    let failed = (0..10).filter(|_| faulty.op(Op::Read, 0, 1).is_err()).count();
    assert_eq!(failed, 3);
}

#[test]
fn random_faults_have_the_given_probability_and_depend_on_the_seed() {
    let results = |seed| {
        let mut faulty = faulty("chance", |options| {
            options.inject_error = vec![rule(|rule| rule.probability_ppm = 250_000)];
            options.seed = seed;
        });
        (0..2000).map(|_| faulty.op(Op::Read, 0, 1).is_err()).collect::<Vec<_>>()
    };
    let first = results(1);
    let failed = first.iter().filter(|failed| **failed).count();
    // Ten deviations away.
    assert!(failed.abs_diff(500) < 195, "{failed}");
    assert_eq!(results(1), first);
    assert_ne!(results(2), first);
    assert_eq!(with_rules("never", &[rule(|rule| rule.probability_ppm = 0)]).all(), [Ok(()); 6]);
}

#[test]
fn requests_are_late_and_then_fail_or_do_not() {
    const DELAY: u64 = 7_000_000_000;
    for errno in [None, Some(Errno::EIO)] {
        let null = NullOptions { size: 1 << 20, latency_ns: 0, read_zeroes: false };
        let null = BlockdevOptions { node_name: None, ..blockdev("", Driver::null_co(null)) };
        let mut options = BlkdebugOptions::new(BlockdevRef::Inline(Box::new(null)));
        options.inject_error =
            vec![rule(|rule| (rule.delay_ns, rule.errno, rule.immediately) = (DELAY, errno, true))];
        let node = blockdev("node", Driver::from(options));
        let node = NodeRegistry::new().open(&node).unwrap();
        let sim = Sim::new(1, Faults::default());
        let mut rig = Rig::on(sim.event_loop(LoopConfig::default()).unwrap(), node);
        let before = sim.now_ns();
        let tag = rig.submit(Op::Read, 0, 512, memory(512, 0));
        assert_eq!(rig.wait(tag).0, errno.map_or(Ok(()), Err));
        let late = sim.now_ns() - before;
        assert!((DELAY..DELAY + DELAY / 10).contains(&late), "{late}");
        // A loop that ends answers what is late.
        let tag = rig.submit(Op::Read, 0, 512, memory(512, 0));
        assert_eq!(rig.channel.in_flight(), 1);
        rig.event_loop.shut_down().unwrap();
        assert_eq!(rig.answer(tag).unwrap().0, Err(Errno::ECANCELED));
    }
}

#[test]
fn immediate_answers_come_only_with_the_option() {
    for immediately in [false, true] {
        let mut faulty = with_rules("now", &[rule(|rule| rule.immediately = immediately)]);
        let tag = faulty.rig.submit(Op::Read, 0, 512, memory(512, 0));
        assert_eq!(faulty.rig.answer(tag).is_some(), immediately);
        if !immediately {
            assert_eq!(faulty.rig.channel.in_flight(), 1);
            assert_eq!(faulty.rig.wait(tag).0, Err(Errno::EIO));
        }
        assert_eq!(faulty.rig.channel.in_flight(), 0);
    }
}

#[test]
fn short_requests_do_their_first_sectors_only() {
    let mut lengths = Vec::new();
    for seed in 0..20 {
        let mut faulty = faulty("short", |options| {
            options.seed = seed;
            let short = |rule: &mut InjectError| {
                (rule.effect, rule.errno, rule.once) = (Effect::Short, Some(Errno::ENOSPC), true);
            };
            options.inject_error = vec![rule(short)];
        });
        assert_eq!(faulty.op(WRITE, 8, 8), Err(Errno::ENOSPC));
        let written = faulty.written();
        assert_eq!(written, (8..8 + written.len()).collect::<Vec<_>>());
        assert!(written.len() < 8);
        lengths.push(written.len());
    }
    lengths.sort_unstable();
    lengths.dedup();
    assert!(lengths.len() > 3, "{lengths:?}");
}

#[test]
fn torn_writes_do_some_sectors_and_may_say_all() {
    let mut holes = 0;
    for (seed, errno) in (0..20).map(|seed| (seed, (seed % 2 == 0).then_some(Errno::EIO))) {
        let mut faulty = faulty("torn", |options| {
            options.seed = seed;
            options.inject_error = vec![rule(|rule| {
                (rule.effect, rule.errno) = (Effect::Torn, errno);
            })];
        });
        assert_eq!(faulty.op(WRITE, 8, 16), errno.map_or(Ok(()), Err));
        let written = faulty.written();
        assert!(written.len() < 16 && written.iter().all(|sector| (8..24).contains(sector)));
        let is_prefix = written.iter().enumerate().all(|(n, sector)| *sector == 8 + n);
        holes += usize::from(!is_prefix);
        // The rest is as it was.
        let (before, after) = (pattern(SIZE), faulty.image.contents());
        let sectors = before.chunks(SECTOR).zip(after.chunks(SECTOR)).enumerate();
        assert!(sectors.into_iter().all(|(n, (a, b))| a == b || written.contains(&n)));
    }
    assert!(holes > 10, "{holes}");
}

#[test]
fn lost_requests_are_said_to_be_done() {
    // What never reaches the node below does not fail there: it takes no writes.
    let image = TempFile::new(&tmpfs(), "blkdebug-lost", SIZE);
    let mut below = options(&image);
    below.inject_error = vec![rule(|_| {})];
    let below = BlockdevOptions { node_name: None, ..blockdev("", Driver::from(below)) };
    let mut options = BlkdebugOptions::new(BlockdevRef::Inline(Box::new(below)));
    let lost = |iotype| {
        rule(|rule| {
            (rule.effect, rule.errno, rule.iotype) = (Effect::Lost, None, Some(iotype));
        })
    };
    options.inject_error = vec![lost(IoType::Flush), lost(IoType::Write)];
    let node = NodeRegistry::new().open(&blockdev("node", Driver::from(options))).unwrap();
    let mut faulty = Faulty { image, rig: Rig::new(node) };
    assert_eq!(faulty.op(Op::Flush, 0, 0), Ok(()));
    assert_eq!(faulty.op(WRITE, 0, 8), Ok(()));
    assert_eq!(faulty.op(Op::Read, 0, 8), Err(Errno::EIO));
    assert_eq!(faulty.image.contents(), pattern(SIZE));
}

#[test]
fn long_requests_are_split_and_each_piece_is_judged() {
    let mut faulty = faulty("split", |options| {
        options.max_transfer = 4 * SECTOR as u64;
        options.max_discard = 8 * SECTOR as u64;
        options.opt_discard = 8 * SECTOR as u64;
        options.max_write_zero = 2 * SECTOR as u64;
        options.opt_write_zero = 2 * SECTOR as u64;
        options.inject_error = vec![rule(|rule| rule.sectors = Some((40, 1)))];
    });
    let data = pattern(SIZE);
    assert_eq!(faulty.rig.read(512, 30 * SECTOR, 0).unwrap(), data[512..31 * SECTOR]);
    // The pieces before have been written.
    assert_eq!(faulty.op(WRITE, 34, 12), Err(Errno::EIO));
    assert_eq!(faulty.written(), [34, 35, 36, 37]);
    assert_eq!(faulty.op(ZEROES, 1, 5), Ok(()));
    let contents = faulty.image.contents();
    assert_eq!(&contents[..SECTOR], &data[..SECTOR]);
    assert!(contents[SECTOR..6 * SECTOR].iter().all(|byte| *byte == 0));
    assert_eq!(&contents[6 * SECTOR..34 * SECTOR], &data[6 * SECTOR..34 * SECTOR]);
    // Whole multiples only.
    assert_eq!(faulty.op(Op::Discard, 9, 16), Ok(()));
    let contents = faulty.image.contents();
    assert_eq!(&contents[9 * SECTOR..16 * SECTOR], &data[9 * SECTOR..16 * SECTOR]);
    assert!(contents[16 * SECTOR..24 * SECTOR].iter().all(|byte| *byte == 0));
    assert_eq!(&contents[24 * SECTOR..25 * SECTOR], &data[24 * SECTOR..25 * SECTOR]);
}

#[test]
fn a_part_of_a_request_may_lie_in_several_segments() {
    let mut faulty = faulty("segments", |options| {
        options.max_transfer = 8 * SECTOR as u64;
        options.inject_error = vec![rule(|rule| rule.errno = None)];
    });
    // Segments of a sector and a half, of which no two lie side by side.
    let (len, each) = (24 * SECTOR, 3 * SECTOR / 2);
    let scattered = |data: &[u8]| {
        let all = filled(
            &data.chunks(each).flat_map(|part| [part, &[0; 8]].concat()).collect::<Vec<_>>(),
            0,
        );
        let mut bufs = IoBufs::new();
        for n in 0..len / each {
            assert_eq!(bufs.append_part(&all, n * (each + 8), each), each);
        }
        bufs
    };
    let data: Vec<u8> = pattern(len).into_iter().map(|byte| byte ^ 0x55).collect();
    let tag = faulty.rig.submit(WRITE, 4096, len as u64, scattered(&data));
    assert_eq!(faulty.rig.wait(tag).0, Ok(()));
    assert_eq!(faulty.image.contents()[4096..4096 + len], data);
    let tag = faulty.rig.submit(Op::Read, 4096, len as u64, scattered(&vec![0; len]));
    let (result, bufs) = faulty.rig.wait(tag);
    assert_eq!((result, bytes(&bufs)), (Ok(()), data));
}

#[test]
fn small_requests_become_whole_blocks() {
    // Who writes sector 9 reads its block, which fails.
    let mut faulty = faulty("align", |options| {
        options.align = 4096;
        let in_the_block = |rule: &mut InjectError| {
            (rule.sectors, rule.iotype) = (Some((15, 1)), Some(IoType::Read));
        };
        options.inject_error = vec![rule(in_the_block)];
    });
    assert_eq!(faulty.op(WRITE, 9, 1), Err(Errno::EIO));
    assert_eq!(faulty.op(WRITE, 1, 2), Ok(()));
    assert_eq!(faulty.written(), [1, 2]);
    let data = pattern(SIZE);
    assert_eq!(faulty.rig.read(3 * 512, 512, 0).unwrap(), data[3 * 512..4 * 512]);
    // Past the end there is nothing to make whole.
    assert_eq!(faulty.op(Op::Read, SIZE / 512, 1), Err(Errno::EIO));
}

#[test]
fn invalid_rules_are_refused() {
    let image = TempFile::new(&tmpfs(), "blkdebug-refused", SIZE + 512);
    let open = |change: fn(&mut BlkdebugOptions)| {
        let mut options = options(&image);
        change(&mut options);
        let opened = NodeRegistry::new().open(&blockdev("node", Driver::from(options)));
        opened.err().map(|error| error.to_string())
    };
    assert_eq!(open(|_| {}), None);
    let message = "Cannot meet constraints with align 4096";
    assert_eq!(open(|options| options.align = 4096).as_deref(), Some(message));
    let message = "Could not open '/nonexistent': No such file or directory";
    let opened = open(|options| options.config = Some("/nonexistent".into()));
    assert_eq!(opened.as_deref(), Some(message));
}

#[test]
fn a_file_may_have_the_rules() {
    let config = TempFile::new(&tmpfs(), "blkdebug-rules", 0);
    std::fs::write(&config.0, "[inject-error]\nevent = \"none\"\nsector = \"2\"\n").unwrap();
    let mut faulty = faulty("config", |options| options.config = Some(config.0.clone()));
    assert_eq!(faulty.op(Op::Read, 2, 1), Err(Errno::EIO));
    assert_eq!(faulty.op(Op::Read, 1, 1), Ok(()));
    let tag = faulty.rig.submit(Op::Flush, 0, 0, IoBufs::new());
    assert_eq!(faulty.rig.wait(tag).0, Ok(()));
}

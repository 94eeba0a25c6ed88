//! Policies on errors: reported, ignored, or held until a resume.

use crate::common;

use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use block::NodeRegistry;
use block::job::OnError;
use block::node::Channel;
use block::options::*;
use block::policy::{ErrorPolicy, IoError, IoStatus, with_policy};
use block::request::Op;
use common::*;
use event_loop::IoBufs;
use event_loop::mailbox::Receiver;
use nix::errno::Errno;

const WRITE: Op = Op::Write { fua: false };
const SIZE: usize = 64 << 10;

/// An image whose node fails according to rules, under a policy.
struct Export {
    image: TempFile,
    rig: Rig,
    /// The export's own channel; the channel of `rig` is a queue's.
    root: Rc<dyn Channel>,
    policy: Arc<ErrorPolicy>,
    errors: Receiver<IoError>,
}

fn export(name: &str, [rerror, werror]: [OnError; 2], rules: &[InjectError]) -> Export {
    let image = TempFile::new(&tmpfs(), &format!("policy-{name}"), SIZE);
    let file = BlockdevOptions { node_name: None, ..blockdev("", file(&image.0, None)) };
    let mut options = BlkdebugOptions::new(BlockdevRef::Inline(Box::new(file)));
    options.inject_error = rules.to_vec();
    let node = blockdev("node", Driver::from(options));
    let node = NodeRegistry::new().open(&node).unwrap();
    let (policy, errors) = ErrorPolicy::new(rerror, werror);
    let mut rig = Rig::new(with_policy(node, policy.clone()));
    let root = rig.channel.clone();
    rig.channel = root.for_queue().unwrap();
    Export { image, rig, root, policy, errors }
}

/// Requests of that kind fail, so many times.
fn fail(iotype: IoType, errno: Errno, count: u64) -> InjectError {
    InjectError { iotype: Some(iotype), errno: Some(errno), count, ..InjectError::new(Event::None) }
}

fn at_once(rule: InjectError) -> InjectError {
    InjectError { immediately: true, ..rule }
}

impl Export {
    /// The errors reported since the last call, without the node's name.
    fn told(&mut self) -> Vec<(bool, OnError, Errno)> {
        let mut told = Vec::new();
        let mut cx = Context::from_waker(Waker::noop());
        while let Poll::Ready(Some(error)) = pin!(self.errors.receive()).poll(&mut cx) {
            assert_eq!(error.node_name, "node");
            told.push((error.is_read(), error.action, error.errno));
        }
        told
    }

    fn write(&mut self, sector: u64, byte: u8) -> u32 {
        self.rig.submit(WRITE, sector * 512, 512, filled(&[byte; 512], 0))
    }

    fn resume(&self) {
        self.policy.resume(self.rig.event_loop.now_ns());
    }

    /// Turns the loop until the export is stopped.
    fn wait_for_stop(&self) {
        while !self.policy.is_stopped() {
            self.rig.event_loop.run_once(true).unwrap();
        }
    }
}

#[test]
fn an_error_is_reported_or_ignored_or_stops_the_export() {
    use OnError::{Enospc, Ignore, Report, Stop};
    for (n, (policy, errno, expected)) in [
        (Report, Errno::EIO, Report),
        (Report, Errno::ENOSPC, Report),
        (Ignore, Errno::EIO, Ignore),
        (Ignore, Errno::ENOSPC, Ignore),
        (Enospc, Errno::EIO, Report),
        (Enospc, Errno::ENOSPC, Stop),
        (Stop, Errno::EIO, Stop),
        (Stop, Errno::ENOSPC, Stop),
    ]
    .into_iter()
    .enumerate()
    {
        for (is_read, kind) in [(true, IoType::Read), (false, IoType::Write)] {
            // The other policy is another one.
            let other = if policy == Ignore { Report } else { Ignore };
            let policies = if is_read { [policy, other] } else { [other, policy] };
            let rules = [at_once(fail(kind, errno, 1))];
            let mut export = export(&format!("each-{n}-{is_read}"), policies, &rules);
            let tag = match is_read {
                true => export.rig.submit(Op::Read, 0, 512, filled(&[7; 512], 0)),
                false => export.write(0, 0xee),
            };
            // An error for the guest is reported by the device.
            let told = (expected != Report).then_some((is_read, expected, errno));
            assert_eq!(export.told(), Vec::from_iter(told));
            match expected {
                Report => assert_eq!(export.rig.answer(tag).unwrap().0, Err(errno)),
                Ignore => {
                    let (result, bufs) = export.rig.answer(tag).unwrap();
                    assert_eq!(result, Ok(()));
                    if is_read {
                        assert_eq!(bytes(&bufs), [0; 512], "zeroes, and nobody's memory");
                    }
                }
                Stop | Enospc => {
                    assert!(export.rig.answer(tag).is_none());
                    let no_space = errno == Errno::ENOSPC;
                    let status = if no_space { IoStatus::NoSpace } else { IoStatus::Failed };
                    assert_eq!(export.policy.status(), status);
                    export.resume();
                    let (result, bufs) = export.rig.wait(tag);
                    assert_eq!(result, Ok(()));
                    if is_read {
                        assert_eq!(bytes(&bufs), &pattern(SIZE)[..512]);
                    } else {
                        assert_eq!(export.image.contents()[..512], [0xee; 512]);
                    }
                }
            }
            assert_eq!(export.policy.status(), IoStatus::Ok);
        }
    }
}

#[test]
fn requests_after_an_error_are_held_and_repeated_in_order() {
    // Twice: the repeated request fails once more.
    let rules = [fail(IoType::Write, Errno::ENOSPC, 2)];
    let mut export = export("order", [OnError::Report, OnError::Enospc], &rules);
    let first = export.write(3, 1);
    export.wait_for_stop();
    assert_eq!(export.told(), [(false, OnError::Stop, Errno::ENOSPC)]);
    let mut tags = vec![first];
    tags.extend((2..10).map(|byte| export.write(3, byte)));
    let read = export.rig.submit(Op::Read, 0, 512, memory(512, 0));
    let flush = export.rig.submit(Op::Flush, 0, 0, IoBufs::new());
    export.rig.event_loop.run_once(false).unwrap();
    assert!(tags.iter().chain([&read, &flush]).all(|tag| export.rig.answer(*tag).is_none()));
    assert_eq!(export.rig.channel.in_flight(), 11);
    assert_eq!(export.image.contents(), pattern(SIZE), "none has begun");
    export.resume();
    while export.told().is_empty() {
        export.rig.event_loop.run_once(true).unwrap();
    }
    export.resume();
    for tag in tags {
        assert_eq!(export.rig.wait(tag).0, Ok(()));
    }
    assert_eq!(export.rig.wait(read).0, Ok(()));
    assert_eq!(export.rig.wait(flush).0, Ok(()));
    assert_eq!(export.rig.channel.in_flight(), 0);
    // A resume of a running export does nothing.
    export.resume();
    let tag = export.write(4, 5);
    assert_eq!(export.rig.wait(tag).0, Ok(()));
}

#[test]
fn an_export_stops_and_resumes_on_all_loops() {
    let rules = [at_once(fail(IoType::Write, Errno::EIO, 1))];
    let mut export = export("loops", [OnError::Stop; 2], &rules);
    let queue = export.root.for_queue().unwrap();
    let failed = export.write(0, 1);
    let before = std::mem::replace(&mut export.rig.channel, queue);
    let elsewhere = export.write(1, 2);
    assert!(export.rig.answer(failed).is_none() && export.rig.answer(elsewhere).is_none());
    assert_eq!((before.in_flight(), export.rig.channel.in_flight()), (1, 1));
    // The export's own flush does not wait.
    let of_queue = std::mem::replace(&mut export.rig.channel, export.root.clone());
    assert_eq!(export.rig.op(Op::Flush, 0, 0), Ok(()));
    export.rig.channel = of_queue;
    // One queue stops: its held requests are given up, those of the other queue are not.
    before.drain_begin();
    assert_eq!(export.rig.answer(failed).unwrap().0, Err(GIVEN_UP));
    assert_eq!(before.in_flight(), 0);
    before.drain_end();
    assert!(export.rig.answer(elsewhere).is_none());
    export.resume();
    assert_eq!(export.rig.wait(elsewhere).0, Ok(()));
    let contents = export.image.contents();
    assert_eq!(contents[..512], pattern(512), "given up is not done");
    assert_eq!(contents[512..1024], [2; 512]);
}

#[test]
fn a_request_that_fails_while_its_queue_stops_is_given_up() {
    let rules = [fail(IoType::Write, Errno::EIO, 0)];
    let mut export = export("stops", [OnError::Stop; 2], &rules);
    let tag = export.write(0, 1);
    export.rig.channel.drain_begin();
    assert_eq!(export.rig.wait(tag).0, Err(GIVEN_UP));
    assert_eq!(export.rig.channel.in_flight(), 0);
}

/// Requests that are held, and requests that fail later.
#[test]
fn only_abandoned_requests_are_released() {
    let rules = [at_once(fail(IoType::Write, Errno::EIO, 1)), fail(IoType::Read, Errno::EIO, 2)];
    let mut export = export("abandoned", [OnError::Stop; 2], &rules);
    let reads = [0, 0].map(|at| export.rig.submit(Op::Read, at, 512, memory(512, 0)));
    let writes = [1, 2].map(|byte| export.write(0, byte));
    assert!(export.policy.is_stopped());
    let abandoned = [reads[0], writes[1]];
    export.rig.channel.abandon(&|tag| abandoned.contains(&tag));
    assert_eq!(export.rig.answer(writes[1]).unwrap().0, Err(GIVEN_UP));
    assert_eq!(export.rig.wait(reads[0]).0, Err(GIVEN_UP));
    while export.root.in_flight() > 0 {
        export.rig.event_loop.run_once(true).unwrap();
    }
    assert_eq!(export.rig.channel.in_flight(), 2);
    assert!([reads[1], writes[0]].iter().all(|tag| export.rig.answer(*tag).is_none()));
    export.resume();
    assert_eq!(export.rig.wait(reads[1]).0, Ok(()));
    assert_eq!(export.rig.wait(writes[0]).0, Ok(()));
    assert_eq!(export.image.contents()[..512], [1; 512], "not what was given up");
}

#[test]
fn ignored_errors_are_reported_at_a_limited_rate() {
    let rules = [at_once(fail(IoType::Read, Errno::EIO, 0))];
    let mut export = export("flood", [OnError::Ignore, OnError::Stop], &rules);
    for _ in 0..100 {
        let tag = export.rig.submit(Op::Read, 0, 512, memory(512, 0));
        assert_eq!(export.rig.answer(tag).unwrap().0, Ok(()));
    }
    // Loop time stands still while the loop does not turn.
    assert_eq!(export.told(), [(true, OnError::Ignore, Errno::EIO)]);
}

#[test]
fn unsupported_operations_are_not_errors() {
    let rules = [at_once(fail(IoType::WriteZeroes, Errno::EOPNOTSUPP, 0))];
    let mut export = export("unsupported", [OnError::Stop; 2], &rules);
    let op = Op::WriteZeroes { may_unmap: false, no_fallback: true, fua: false };
    assert_eq!(export.rig.op(op, 0, 512), Err(Errno::EOPNOTSUPP));
    assert_eq!(export.told(), []);
}

//! Images over a disk that answers late, fails, or must not be used. The remains of a kill at that moment are
//! opened read-only, with a copy of the journals.

use std::fs;
use std::future::{Future, poll_fn};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Condvar;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::thread;
use std::time::Duration;

use event_loop::oneshot::Sender;
use event_loop::{AlignedBuf, EventLoop, IoBufs, LoopConfig};
use nix::errno::Errno;
use nix::unistd::geteuid;

use super::super::header::{DIRTY_AT, DIRTY_BIT};
use super::super::open::Children;
use super::super::{CreateQcow2, Journals, Opening, Qcow2Node, create_qcow2};
use super::*;
use crate::NodeRegistry;
use crate::inherited::{Inherited, OpenImage};
use crate::node::{BlockNode, Channel, Geometry, HeldState};
use crate::options::{
    Backing, BlockdevOptions, BlockdevRef, Discard, Driver, FileOptions, Locking, Qcow2Options,
    ThrottleOptions,
};
use crate::request::{Op, Request};
use crate::submit::submit;
use crate::throttle::{Limit, ThrottleGroup, ThrottleLimits};

const CLUSTER: u64 = 65536;
/// Offset of the mark.
const MARK: u64 = CLUSTER - 512;
const WRITE: Op = Op::Write { fua: false };
/// Longer than any operation takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// A folder with an image and journals, removed on drop.
struct Home(PathBuf);

impl Home {
    fn new(name: &str) -> Home {
        let name = format!("ringmill-let-go-{name}-{}", std::process::id());
        let home = Home(std::env::temp_dir().join(name));
        fs::create_dir(&home.0).unwrap();
        create_qcow2(&home.image(), &CreateQcow2::new(16 * CLUSTER)).unwrap();
        home
    }

    fn image(&self) -> PathBuf {
        self.0.join("disk.qcow2")
    }

    fn journals(&self) -> PathBuf {
        self.0.join("journals")
    }

    fn file(&self, locking: Locking) -> BlockdevOptions {
        let file = FileOptions { filename: self.image(), aio: None, locking };
        BlockdevOptions::new(Some("file"), Driver::file(file))
    }

    /// The first bytes of the image's first clusters, for a process with these journals.
    fn read_with<const N: usize>(&self, journals: &Path) -> [u8; N] {
        let file = BlockdevRef::Inline(Box::new(self.file(Locking::Off)));
        let options = BlockdevOptions::new(Some("disk"), Driver::from(qcow2(file)));
        let options = BlockdevOptions { read_only: true, ..options };
        let mut nodes = NodeRegistry::new().with_journals(journals).unwrap();
        let guest = Guest::new(nodes.open(&options).unwrap());
        std::array::from_fn(|cluster| guest.read(cluster as u64))
    }

    fn read<const N: usize>(&self) -> [u8; N] {
        self.read_with(&self.journals())
    }

    /// The same after a kill of the process at this moment.
    fn left<const N: usize>(&self) -> [u8; N] {
        let copies = self.0.join("copies");
        drop(Journals::in_folder(&copies, geteuid().as_raw()).unwrap());
        for entry in fs::read_dir(self.journals()).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), copies.join(entry.file_name())).unwrap();
        }
        self.read_with(&copies)
    }

    fn is_unmarked(&self) -> bool {
        let image = fs::read(self.image()).unwrap();
        let mark = &image[MARK as usize..CLUSTER as usize];
        image[DIRTY_AT] & DIRTY_BIT == 0 && mark.iter().all(|byte| *byte == 0)
    }

    /// Removes the journals. The process notices at the next commit.
    fn lose_journals(&self) {
        for entry in fs::read_dir(self.journals()).unwrap() {
            fs::remove_file(entry.unwrap().path()).unwrap();
        }
    }

    /// Whether the image has everything.
    fn is_closed(&self) -> bool {
        self.is_unmarked() && fs::read_dir(self.journals()).unwrap().next().is_none()
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn qcow2(file: BlockdevRef) -> Qcow2Options {
    Qcow2Options { file, backing: Backing::None, ..Qcow2Options::default() }
}

/// A filter that delays or fails a request of some kind.
struct Gate {
    below: Arc<dyn BlockNode>,
    next: Mutex<Option<(Kind, Fate)>>,
    /// Requests other than reads.
    changes: AtomicUsize,
    waiting: Mutex<Option<Sender<()>>>,
    came: Condvar,
}

/// Whether a request is of that kind.
type Kind = fn(&Request) -> bool;

#[derive(Clone, Copy)]
enum Fate {
    Waits,
    Fails,
}

impl Gate {
    /// Sets the fate of the next request of that kind.
    fn set(&self, kind: Kind, fate: Fate) {
        *lock(&self.next) = Some((kind, fate));
    }

    /// Waits for the delayed request to arrive.
    fn wait(&self) {
        let nobody = |waiting: &mut Option<_>| waiting.is_none();
        let waited = self.came.wait_timeout_while(lock(&self.waiting), PATIENCE, nobody).unwrap();
        assert!(!waited.1.timed_out(), "LOST: a request");
    }

    fn open(&self) {
        let waiting = lock(&self.waiting).take();
        waiting.unwrap().send(());
    }
}

impl BlockNode for Gate {
    fn name(&self) -> &str {
        "gate"
    }

    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn child(&self) -> Option<Arc<dyn BlockNode>> {
        Some(self.below.clone())
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let below = self.below.clone().open_channel(event_loop)?;
        Ok(Rc::new(Gated { gate: self, below, event_loop: event_loop.clone() }))
    }
}

struct Gated {
    gate: Arc<Gate>,
    below: Rc<dyn Channel>,
    event_loop: EventLoop,
}

impl Channel for Gated {
    fn submit(&self, request: Request) {
        if !request.op.only_reads() {
            self.gate.changes.fetch_add(1, Ordering::Relaxed);
        }
        let fate = lock(&self.gate.next).take_if(|(kind, _)| kind(&request));
        match fate.map(|(_, fate)| fate) {
            None => self.below.submit(request),
            Some(Fate::Fails) => request.complete(Err(Errno::EIO)),
            Some(Fate::Waits) => {
                let (open, opened) = oneshot::channel();
                *lock(&self.gate.waiting) = Some(open);
                self.gate.came.notify_all();
                let below = self.below.clone();
                self.event_loop.spawn(async move {
                    let _ = opened.await;
                    below.submit(request);
                });
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.below.in_flight()
    }

    fn drain_begin(&self) {
        self.below.drain_begin();
    }

    fn drain_end(&self) {
        self.below.drain_end();
    }
}

/// An image over such a node.
struct Disk {
    node: Arc<Qcow2Node>,
    gate: Arc<Gate>,
}

impl Disk {
    fn new(home: &Home) -> Disk {
        Disk::over(NodeRegistry::new().open(&home.file(Locking::Auto)).unwrap(), home)
    }

    fn over(below: Arc<dyn BlockNode>, home: &Home) -> Disk {
        let gate = Gate {
            below,
            next: Mutex::default(),
            changes: AtomicUsize::new(0),
            waiting: Mutex::default(),
            came: Condvar::new(),
        };
        Disk::on(Arc::new(gate), home, &mut Inherited::default())
    }

    fn on(gate: Arc<Gate>, home: &Home, inherited: &mut Inherited) -> Disk {
        let qcow2 = qcow2(BlockdevRef::Name("gate".into()));
        let options = BlockdevOptions::new(Some("disk"), Driver::from(qcow2.clone()));
        let options = BlockdevOptions { discard: Discard::Unmap, ..options };
        let journals = Journals::in_folder(&home.journals(), geteuid().as_raw()).unwrap();
        let node = Opening::begin(&options, gate.clone())
            .and_then(|opening| {
                let opening = opening.with_inherited(inherited);
                opening.finish(
                    "disk".into(),
                    &options,
                    &qcow2,
                    Children::default(),
                    None,
                    Some(&journals),
                )
            })
            .unwrap();
        Disk { node: Arc::new(node), gate }
    }

    /// The files for a process that takes the image over.
    fn handed_over(&self) -> Inherited {
        let OpenImage { path, fd, .. } = self.node.journal().unwrap();
        let mut inherited = Inherited::default();
        inherited.add(OpenImage { path, fd: fd.try_clone().unwrap(), lock: None });
        inherited
    }

    fn changes(&self) -> usize {
        self.gate.changes.load(Ordering::Relaxed)
    }

    fn release_for_handover(&self) -> crate::node::Released {
        self.node.clone().release_for_handover()
    }
}

type Pending<T> = Pin<Box<dyn Future<Output = T>>>;

/// A user of a disk on its own loop.
struct Guest {
    event_loop: EventLoop,
    channel: Rc<dyn Channel>,
}

impl Guest {
    fn new(node: Arc<dyn BlockNode>) -> Guest {
        let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
        let channel = node.open_channel(&event_loop).unwrap();
        Guest { event_loop, channel }
    }

    fn wait<T: 'static>(&self, what: impl Future<Output = T> + 'static) -> T {
        self.wait_for(Box::pin(what), PATIENCE).unwrap_or_else(|_| panic!("LOST: an answer"))
    }

    /// Returns the future again if it takes longer.
    fn wait_for<T: 'static>(&self, what: Pending<T>, limit: Duration) -> Result<T, Pending<T>> {
        let limit = self.event_loop.now_ns() + limit.as_nanos() as u64;
        let mut end = Box::pin(self.event_loop.sleep_until(limit));
        let mut what = Some(what);
        let either = poll_fn(move |cx| match what.as_mut().unwrap().as_mut().poll(cx) {
            Poll::Ready(done) => Poll::Ready(Ok(done)),
            Poll::Pending => end.as_mut().poll(cx).map(|()| Err(what.take().unwrap())),
        });
        self.event_loop.block_on(either).unwrap()
    }

    fn ask(&self, op: Op, cluster: u64, bufs: IoBufs) -> Pending<(Result<(), Errno>, IoBufs)> {
        let (offset, len) = (cluster * CLUSTER, bufs.len() as u64);
        let channel = self.channel.clone();
        Box::pin(async move { submit(&channel, op, offset, len, bufs).await })
    }

    fn write(&self, cluster: u64, byte: u8) {
        self.wait(self.ask(WRITE, cluster, sector(byte))).0.unwrap();
    }

    fn flush(&self) {
        self.wait(self.ask(Op::Flush, 0, IoBufs::new())).0.unwrap();
    }

    fn read(&self, cluster: u64) -> u8 {
        let (result, bufs) = self.wait(self.ask(Op::Read, cluster, sector(0)));
        let mut byte = [0];
        bufs.copy_out(0, &mut byte);
        result.map(|()| byte[0]).unwrap()
    }
}

fn sector(byte: u8) -> IoBufs {
    let mut bufs = AlignedBuf::io_bufs(512, 512).unwrap();
    bufs.copy_in(0, &[byte; 512]);
    bufs
}

fn flushes(request: &Request) -> bool {
    request.op == Op::Flush
}

fn writes_header(request: &Request) -> bool {
    matches!(request.op, Op::Write { .. }) && request.offset == 0
}

fn writes_mark(request: &Request) -> bool {
    matches!(request.op, Op::Write { .. }) && request.offset == MARK
}

/// Neither process uses the disk, and the new one knows everything that the old one has answered. Until the new one
/// serves, the old one can continue.
#[test]
fn an_image_goes_from_a_process_to_another_without_its_disk() {
    let home = Home::new("without");
    let disk = Disk::new(&home);
    let guest = Guest::new(disk.node.clone());
    guest.write(0, 1);
    guest.flush();
    guest.write(1, 2);
    for number in 0..2 {
        let before = disk.changes();
        guest.wait(disk.release_for_handover()).unwrap();
        assert!(!disk.node.image.is_whole());
        let next = Disk::on(disk.gate.clone(), &home, &mut disk.handed_over());
        let seen = Guest::new(next.node.clone());
        assert_eq!((seen.read(0), seen.read(1), seen.read(2)), (1, 2, 3 * number));
        drop((seen, next));
        assert_eq!(disk.changes(), before);
        guest.write(2, 3);
        assert_eq!(home.left(), [1, 2, 3]);
    }

    guest.wait(disk.release_for_handover()).unwrap();
    let mut inherited = disk.handed_over();
    let next = Disk::on(disk.gate.clone(), &home, &mut inherited);
    inherited.own();
    // Ends like a process, without closing anything.
    drop(guest);
    std::mem::forget(disk.node);
    let guest = Guest::new(next.node.clone());
    let before = next.changes();
    guest.write(3, 4);
    // Only the guest's own write reaches the disk.
    assert_eq!(next.changes(), before + 1);
    assert_eq!(home.left(), [1, 2, 3, 4]);
    // Afterwards the file has everything.
    guest.flush();
    home.lose_journals();
    assert_eq!(home.left(), [1, 2, 3, 4]);
    drop((guest, next));
    assert!(home.is_closed());
    assert_eq!(home.read(), [1, 2, 3, 4]);
}

/// Released clusters that the file does not have as free are not reused: the other process would not know.
#[test]
fn released_clusters_are_in_the_file_before_a_handover() {
    let home = Home::new("given-up");
    let disk = Disk::new(&home);
    let guest = Guest::new(disk.node.clone());
    (0..4).for_each(|cluster| guest.write(cluster, 1));
    guest.flush();
    let zeroes = AlignedBuf::io_bufs(2 * CLUSTER as usize, 512).unwrap();
    guest.wait(guest.ask(Op::Discard, 0, zeroes)).0.unwrap();
    assert!(disk.node.image.has_given_up());
    guest.wait(disk.release_for_handover()).unwrap();
    assert!(!disk.node.image.has_given_up());
    assert_eq!(home.left(), [0, 0, 1, 1]);
}

/// Neither a journal of another image is used, nor an image whose journal is gone.
#[test]
fn an_image_is_not_gone_on_with_without_its_journal() {
    let home = Home::new("other");
    let disk = Disk::new(&home);
    let guest = Guest::new(disk.node.clone());
    guest.write(0, 1);
    guest.wait(disk.release_for_handover()).unwrap();
    let options =
        BlockdevOptions::new(Some("next"), Driver::from(qcow2(BlockdevRef::Name("gate".into()))));
    let of_qcow2: &Qcow2Options = options.driver.downcast_ref().unwrap();
    let open = |inherited: &mut Inherited, journals: Option<&Journals>| {
        let opening = Opening::begin(&options, disk.gate.clone()).unwrap();
        let opening = opening.with_inherited(inherited);
        let opened =
            opening.finish("next".into(), &options, of_qcow2, Children::default(), None, journals);
        opened.err().unwrap().to_string()
    };
    let journals = Journals::in_folder(&home.journals(), geteuid().as_raw()).unwrap();
    let why = open(&mut Inherited::default(), Some(&journals));
    assert!(why.contains("another process has its journal"), "{why}");
    let why = open(&mut disk.handed_over(), None);
    assert!(why.contains("no use for the journal"), "{why}");
    guest.write(1, 2);
    assert_eq!(home.left(), [1, 2]);
}

/// The disk does not answer a flush, and the handover ends without it.
#[test]
fn an_image_stays_in_use_after_a_failed_handover() {
    let home = Home::new("vain");
    let disk = Disk::new(&home);
    let guest = Guest::new(disk.node.clone());
    guest.write(0, 1);
    home.lose_journals();
    disk.gate.set(flushes, Fate::Waits);
    let released = disk.release_for_handover();
    disk.gate.wait();
    drop(released);
    let again = guest.wait(disk.release_for_handover()).unwrap_err();
    assert_eq!(again.kind(), io::ErrorKind::ResourceBusy);
    guest.write(0, 2);
    assert_eq!(guest.read(0), 2);

    disk.gate.open();
    disk.node.letting_go.end();
    assert!(disk.node.image.is_whole() && home.is_unmarked());
    assert_eq!(home.left(), [2]);
    // This one fails too.
    guest.write(1, 3);
    assert!(!disk.node.image.is_whole());
    assert_eq!(home.left(), [2, 3]);
    guest.wait(disk.release_for_handover()).unwrap();
    assert!(disk.node.image.is_whole());
    drop((guest, disk));
    assert!(home.is_closed());
    assert_eq!(home.read(), [2, 3]);
}

/// The removal of the mark is in flight when the handover is given up.
#[test]
fn changes_during_the_removal_of_a_mark_are_kept() {
    let home = Home::new("mark");
    let disk = Disk::new(&home);
    let guest = Guest::new(disk.node.clone());
    guest.write(0, 1);
    guest.flush();
    home.lose_journals();
    disk.gate.set(writes_header, Fate::Waits);
    drop(disk.release_for_handover());
    disk.gate.wait();
    let write = guest.ask(WRITE, 1, sector(2));
    // The write is answered within this time or waits for the disk.
    let early = guest.wait_for(write, Duration::from_millis(300));
    disk.gate.open();
    early.unwrap_or_else(|write| guest.wait(write)).0.unwrap();
    disk.node.letting_go.end();
    assert_eq!(home.left(), [1, 2]);
    drop((guest, disk));
    assert!(home.is_closed());
}

/// The disk fails to remove the mark: the handover fails, and later uses of the image are right.
#[test]
fn a_failed_removal_of_a_mark_is_reported() {
    for goes_on in [false, true] {
        let home = Home::new("stays");
        let disk = Disk::new(&home);
        let guest = Guest::new(disk.node.clone());
        guest.write(0, 1);
        guest.flush();
        home.lose_journals();
        disk.gate.set(writes_mark, Fate::Fails);
        let failed = guest.wait(disk.release_for_handover()).unwrap_err();
        assert_eq!(failed.raw_os_error(), Some(Errno::EIO as i32));
        assert!(!disk.node.image.is_whole());
        assert_eq!(home.left(), [1, 0]);
        if goes_on {
            guest.write(1, 2);
            assert_eq!(home.left(), [1, 2]);
        }
        drop((guest, disk));
        assert!(home.is_closed());
    }
}

#[test]
fn closing_an_image_waits_for_an_unfinished_handover() {
    let home = Home::new("closed");
    let disk = Disk::new(&home);
    let guest = Guest::new(disk.node.clone());
    guest.write(0, 1);
    home.lose_journals();
    disk.gate.set(flushes, Fate::Waits);
    drop(disk.release_for_handover());
    disk.gate.wait();
    let gate = disk.gate.clone();
    let opened = thread::spawn(move || gate.open());
    drop((guest, disk));
    opened.join().unwrap();
    assert!(home.is_closed());
    assert_eq!(home.read(), [1]);
}

/// The limits of a throttle group do not apply to the writes of a handover.
#[test]
fn throttling_does_not_delay_a_handover() {
    let home = Home::new("limits");
    let group = ThrottleGroup::new(ThrottleLimits::default()).unwrap();
    let mut nodes = NodeRegistry::new();
    nodes.add_throttle_group("slow", group.clone());
    let file = BlockdevRef::Inline(Box::new(home.file(Locking::Auto)));
    let throttle = ThrottleOptions { throttle_group: "slow".into(), file };
    let throttle = BlockdevOptions::new(Some("slow"), Driver::from(throttle));
    let disk = Disk::over(nodes.open(&throttle).unwrap(), &home);
    let guest = Guest::new(disk.node.clone());
    guest.write(0, 1);
    home.lose_journals();
    // A sector takes as long as the handover may.
    let bps_total = Limit { average: 8, ..Limit::default() };
    group.set_limits(ThrottleLimits { bps_total, ..ThrottleLimits::default() }).unwrap();
    guest.wait(disk.release_for_handover()).unwrap();
    assert!(home.is_unmarked());
    drop((guest, disk));
    assert!(home.is_closed());
}

//! Compressed clusters: how often they are inflated, where, and that no reader gets an old one.

use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Barrier, mpsc};

use block::node::BlockNode;
use block::options::*;
use block::request::{Op, Request, RequestOwner};
use event_loop::{EventLoop, LoopConfig, ThreadPoolConfig};
use nix::errno::Errno;

use crate::common::{Answers, Rig, blockdev, bytes, file, filled, memory};
use crate::qcow2::image::{Folder, check, open, options, qemu_img};

const CLUSTER: usize = 64 << 10;
const PAGE: usize = 4096;

/// A compressed image of that many clusters, and its contents.
fn image(folder: &Folder, kind: &str, clusters: usize) -> Vec<u8> {
    let contents: Vec<u8> =
        (0..clusters * CLUSTER).map(|at| ((at / 31) ^ (at / 5003)) as u8).collect();
    std::fs::write(folder.path("start.raw"), &contents).unwrap();
    let kind = format!("cluster_size=64k,compression_type={kind}");
    let args = ["convert", "-q", "-c", "-f", "raw", "-O", "qcow2", "-o", &kind];
    qemu_img(folder, &[&args[..], &["start.raw", "disk.qcow2"]].concat());
    contents
}

/// An image of which compressed data can be read so often. Later reads fail.
fn readable(folder: &Folder, times: u32) -> Arc<dyn BlockNode> {
    let below =
        BlockdevOptions { node_name: None, ..blockdev("", file(&folder.path("disk.qcow2"), None)) };
    let mut faulty = BlkdebugOptions::new(BlockdevRef::Inline(Box::new(below)));
    let event = Event::ReadCompressed;
    faulty.set_state =
        (1..=times).map(|state| SetState { event, state, new_state: state + 1 }).collect();
    faulty.inject_error = vec![InjectError { state: times + 1, ..InjectError::new(event) }];
    let faulty = BlockdevOptions { node_name: None, ..blockdev("", Driver::from(faulty)) };
    let qcow2 =
        Qcow2Options { file: BlockdevRef::Inline(Box::new(faulty)), ..Qcow2Options::default() };
    open(&BlockdevOptions { read_only: true, ..blockdev("disk", Driver::from(qcow2)) })
}

#[test]
fn a_cluster_that_is_read_in_parts_is_inflated_once() {
    for kind in ["zlib", "zstd"] {
        let folder = Folder::new(&format!("inflated-parts-{kind}"));
        let contents = image(&folder, kind, 3);
        let mut rig = Rig::new(readable(&folder, 3));
        for at in (0..contents.len()).step_by(PAGE) {
            assert_eq!(rig.read(at as u64, PAGE, 0).unwrap(), &contents[at..at + PAGE], "{at}");
        }
        // Large reads, and such as begin and end within a cluster, use the same clusters.
        assert!(
            rig.read(512, contents.len() - 1024, 0).unwrap() == contents[512..contents.len() - 512]
        );
        drop(rig);
        // So many reads were needed.
        let mut rig = Rig::new(readable(&folder, 2));
        assert_eq!(rig.read(0, contents.len(), 0), Err(Errno::EIO));
    }
}

/// Also readers on different loops.
#[test]
fn readers_at_the_same_time_share_an_inflation() {
    let folder = Folder::new("inflated-shared");
    let contents = image(&folder, "zlib", 1);
    for _ in 0..20 {
        let node = readable(&folder, 1);
        let start = Barrier::new(2);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut rig = Rig::new(node.clone());
                    start.wait();
                    let read = |at| rig.submit(Op::Read, at as u64, PAGE as u64, memory(PAGE, 0));
                    let tags: Vec<_> = (0..CLUSTER).step_by(PAGE).map(read).collect();
                    for (tag, data) in tags.into_iter().zip(contents.chunks(PAGE)) {
                        let (result, bufs) = rig.wait(tag);
                        assert_eq!((result, bytes(&bufs).as_slice()), (Ok(()), data));
                    }
                });
            }
        });
    }
}

/// A loop that ends leaves the cluster to the other loops' readers.
#[test]
fn a_reader_that_ends_leaves_the_inflation_to_those_that_wait() {
    let folder = Folder::new("inflated-left");
    let contents = image(&folder, "zstd", 1);
    let node = readable(&folder, 2);
    let mut first = Rig::new(node.clone());
    first.submit(Op::Read, 0, PAGE as u64, memory(PAGE, 0));
    // Its task begins. Its loop does not turn any more, so the cluster never comes.
    first.event_loop.run_once(false).unwrap();
    let mut second = Rig::new(node);
    let tag = second.submit(Op::Read, 0, PAGE as u64, memory(PAGE, 0));
    for _ in 0..10 {
        second.event_loop.run_once(false).unwrap();
    }
    assert!(second.answer(tag).is_none(), "nothing inflates a second time beside the first");
    first.event_loop.shut_down().unwrap();
    let (result, bufs) = second.wait(tag);
    assert_eq!((result, bytes(&bufs).as_slice()), (Ok(()), &contents[..PAGE]));
}

/// While its pool is busy, a loop inflates nothing itself, and answers the requests of others.
#[test]
fn neighbours_do_not_wait_for_inflations() {
    let folder = Folder::new("inflated-neighbours");
    let contents = image(&folder, "zlib", 42);
    std::fs::write(folder.path("plain.raw"), &contents).unwrap();
    let thread_pool = ThreadPoolConfig { min: 0, max: 1 };
    let config = LoopConfig { thread_pool, ..LoopConfig::default() };
    let event_loop = EventLoop::new(config).unwrap();
    let (release, released) = mpsc::channel::<()>();
    let (begin, begun) = mpsc::channel();
    let busy = event_loop.offload(move || begin.send(()).is_ok() && released.recv().is_ok());
    // A computation could begin before it.
    while begun.try_recv().is_err() {
        event_loop.run_once(false).unwrap();
    }
    let mut reader = Rig::on(event_loop.clone(), readable(&folder, 42));
    let plain = blockdev("plain", file(&folder.path("plain.raw"), None));
    let mut neighbour = Rig::on(event_loop.clone(), open(&plain));
    let read = |n| reader.submit(Op::Read, (n * CLUSTER) as u64, 512, memory(512, 0));
    let tags: Vec<_> = (0..42).map(read).collect();
    for at in (0..contents.len()).step_by(CLUSTER) {
        assert!(neighbour.read(at as u64, PAGE, 0).unwrap() == contents[at..at + PAGE]);
    }
    assert!(!reader.has_answers(), "the loop inflates");
    release.send(()).unwrap();
    assert_eq!(event_loop.block_on(busy).unwrap(), Ok(true));
    for (n, tag) in tags.into_iter().enumerate() {
        let (result, bufs) = reader.wait(tag);
        assert_eq!(result, Ok(()));
        assert!(bytes(&bufs) == contents[n * CLUSTER..n * CLUSTER + 512]);
    }
}

/// A cluster that is written again gets new room, later that of other clusters: their places in the file, and so what
/// readers find inflated, have new data. Readers on another loop read meanwhile.
#[test]
fn no_reader_gets_what_was_at_a_place_before() {
    const CLUSTERS: usize = 6;
    /// Ends the readers, also when a check fails.
    struct Done<'a>(&'a AtomicBool);
    impl Drop for Done<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let folder = Folder::new("inflated-written");
    qemu_img(
        &folder,
        &["create", "-q", "-f", "qcow2", "-o", "cluster_size=16k", "disk.qcow2", "96k"],
    );
    let node = open(&options(&folder.path("disk.qcow2")));
    let len = node.geometry().size as usize / CLUSTERS;
    let mut random = fastrand::Rng::with_seed(7);
    // Each version of a cluster is compressed to 512 bytes, so places come again with the same length.
    let data = |cluster: usize, version: u16| -> Vec<u8> {
        let [high, low] = version.to_be_bytes();
        [cluster as u8, high, low, 1].repeat(len / 4)
    };
    let is_done = AtomicBool::new(false);
    let versions: [AtomicU16; CLUSTERS] = Default::default();
    let order = Ordering::SeqCst;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut rig = Rig::new(node.clone());
            let mut random = fastrand::Rng::with_seed(8);
            while !is_done.load(order) {
                let cluster = random.usize(..CLUSTERS);
                let before = versions[cluster].load(order);
                let found = rig.read((cluster * len) as u64, len, 0).unwrap();
                // A write that is under way may be seen.
                let after = versions[cluster].load(order) + 1;
                let version = u16::from_be_bytes([found[1], found[2]]);
                assert!((before..=after).contains(&version), "{version}: {before} to {after}");
                assert!(version == 0 || found == data(cluster, version), "torn");
            }
        });
        let _done = Done(&is_done);
        let mut rig = Rig::new(node.clone());
        let answers = Rc::<Answers>::default();
        let to = answers.clone() as Rc<dyn RequestOwner>;
        let mut plain = [false; CLUSTERS];
        for round in 0..500u32 {
            let cluster = random.usize(..CLUSTERS);
            let version = versions[cluster].load(order) + 1;
            let (offset, new) = ((cluster * len) as u64, data(cluster, version));
            // A write in place would let a reader see a part of it.
            plain[cluster] = !plain[cluster] && random.u8(..8) == 0;
            if plain[cluster] {
                rig.write(offset, &new, 0).unwrap();
            } else {
                let (write, bufs) = (Op::Write { fua: false }, filled(&new, 0));
                let request = Request::new(write, offset, len as u64, bufs, &to, round);
                rig.channel.submit(request.compressed());
                while answers.0.borrow().is_empty() {
                    rig.event_loop.run_once(true).unwrap();
                }
                assert_eq!(answers.0.borrow_mut().remove(&round).unwrap().0, Ok(()));
            }
            versions[cluster].store(version, order);
            // What was given up is used again after a flush.
            if random.bool() {
                rig.op(Op::Flush, 0, 0).unwrap();
            }
            for (cluster, version) in versions.iter().enumerate() {
                let version = version.load(order);
                let found = rig.read((cluster * len) as u64, len, 0).unwrap();
                let expected = if version == 0 { vec![0; len] } else { data(cluster, version) };
                assert!(found == expected, "round {round}, cluster {cluster}, version {version}");
            }
        }
    });
    drop(node);
    check(&folder, "disk.qcow2");
}

//! Nodes are opened and closed on other threads than the registry's.

use std::future::Future;
use std::path::Path;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::{io, thread};

use block::options::*;
use block::{Connections, NodeRegistry, OpenError, Threads};
use event_loop::sync::lock;
use event_loop::{EventLoop, LoopConfig};

use crate::qcow2::image::{Folder, options, qemu_img};

type Work = Box<dyn FnOnce() + Send>;

/// Threads that begin when the test says so.
#[derive(Clone, Default)]
struct Held(Arc<Mutex<Vec<Work>>>);

impl Held {
    fn threads(&self) -> Threads {
        let held = self.0.clone();
        Threads::new(move |work| {
            lock(&held).push(work);
            Ok(())
        })
    }

    /// Runs one thread to its end. `false`: none was started.
    fn run(&self) -> bool {
        let Some(work) = lock(&self.0).pop() else { return false };
        thread::spawn(work).join().unwrap();
        true
    }

    /// Completes the future, on a loop that is free while threads are held. Returns the number of threads.
    fn complete<T>(&self, event_loop: &EventLoop, future: impl Future<Output = T>) -> (T, usize) {
        let (mut future, mut count) = (pin!(future), 0);
        let mut context = Context::from_waker(Waker::noop());
        loop {
            if let Poll::Ready(result) = future.as_mut().poll(&mut context) {
                return (result, count);
            }
            match self.run() {
                true => count += 1,
                // The drain of users, on their loop.
                false => event_loop.block_on(async {}).unwrap(),
            }
        }
    }
}

fn image(folder: &Folder) -> BlockdevOptions {
    qemu_img(folder, &["create", "-q", "-f", "qcow2", "disk.qcow2", "1M"]);
    options(&folder.path("disk.qcow2"))
}

fn read_only(path: &Path) -> BlockdevOptions {
    let below = |options: &BlockdevOptions| match options.driver.children().first() {
        Some(child) => match child.node {
            BlockdevRef::Inline(file) => (**file).clone(),
            BlockdevRef::Name(_) => panic!("the file is inside"),
        },
        None => panic!("an image has a file"),
    };
    let mut options = BlockdevOptions { read_only: true, ..options(path) };
    let file = BlockdevOptions { read_only: true, ..below(&options) };
    assert!(options.driver.set_child("file", BlockdevRef::Inline(Box::new(file))));
    options
}

#[test]
fn no_node_is_opened_or_closed_on_the_registry_s_thread() {
    let folder = Folder::new("apart");
    let writable = image(&folder);
    let name = writable.node_name.clone().unwrap();
    let read_only = read_only(&folder.path("disk.qcow2"));
    let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
    let held = Held::default();
    let mut nodes = NodeRegistry::new().with_threads(held.threads());

    let opening = nodes.begin_opening(&read_only, Connections::default()).unwrap();
    // The registry is free meanwhile.
    nodes.open(&blockdev_null("other")).unwrap();
    let (opened, threads) = held.complete(&event_loop, opening.on_a_thread());
    assert_eq!((threads, nodes.node(&name).is_err()), (1, true));
    nodes.finish_opening(opened.unwrap()).unwrap();
    assert!(nodes.node(&name).unwrap().geometry().read_only);

    // The file, and the image.
    let (reopened, threads) = held.complete(&event_loop, nodes.reopen(&name, &writable));
    drop(reopened.unwrap());
    assert_eq!((threads, nodes.node(&name).unwrap().geometry().read_only), (2, false));
    let (reopened, threads) = held.complete(&event_loop, nodes.reopen(&name, &read_only));
    drop(reopened.unwrap());
    assert_eq!(threads, 2);
    let (changed, threads) = held.complete(&event_loop, nodes.make_writable(&name));
    changed.unwrap();
    assert_eq!((threads, nodes.node(&name).unwrap().geometry().read_only), (2, false));

    // To read an inactive node, and to open it again.
    let (changed, threads) = held.complete(&event_loop, nodes.inactivate(&event_loop, &name));
    changed.unwrap();
    assert!(threads > 0);
    let active = nodes.activate(&name, Connections::default());
    let (changed, threads) = held.complete(&event_loop, active);
    changed.unwrap();
    assert_eq!((threads, nodes.is_active(&name)), (1, true));

    let closed = nodes.remove_apart(&name).unwrap();
    assert_eq!(held.complete(&event_loop, closed).1, 1);
    nodes.forget_removed();
    assert_eq!(nodes.names().collect::<Vec<_>>(), ["other"]);

    let job = nodes.open_for_a_job("job", &writable, Connections::default());
    let (opened, threads) = held.complete(&event_loop, job);
    opened.unwrap();
    assert_eq!(threads, 1);
}

fn blockdev_null(name: &str) -> BlockdevOptions {
    let null = NullOptions { size: 4096, latency_ns: 0, read_zeroes: true };
    BlockdevOptions::new(Some(name), Driver::null_co(null))
}

/// Two nodes that are opened at once: names and images of both are known afterwards.
#[test]
fn two_nodes_are_opened_at_once() {
    let folder = Folder::new("apart-two");
    let one = image(&folder);
    let held = Held::default();
    let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
    let mut nodes = NodeRegistry::new().with_threads(held.threads());
    let second = BlockdevOptions { node_name: Some("second".into()), ..one.clone() };
    let openings = [&one, &second]
        .map(|options| nodes.begin_opening(options, Connections::default()).unwrap());
    let [first, second] = openings.map(|opening| {
        let (opened, _) = held.complete(&event_loop, opening.on_a_thread());
        nodes.finish_opening(opened.unwrap())
    });
    first.unwrap();
    // The first has the lock.
    assert!(second.unwrap_err().to_string().contains("lock"));
    let again = nodes.begin_opening(&one, Connections::default()).map(drop);
    assert!(again.unwrap_err().to_string().starts_with("Duplicate nodes"));
    let images: Vec<_> = nodes.images().map(|image| image.path).collect();
    assert!(images.contains(&folder.path("disk.qcow2")), "{images:?}");
    // Generated names differ: those of the file of each, and the next.
    let taken: Vec<_> = nodes.names().map(str::to_owned).collect();
    assert!(!taken.contains(&nodes.filter_name(None).unwrap()), "{taken:?}");
}

/// Without a thread, nothing changes.
#[test]
fn a_thread_that_cannot_be_started_is_an_error() {
    let folder = Folder::new("apart-none");
    let options = image(&folder);
    let name = options.node_name.clone().unwrap();
    let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
    let threads = Threads::new(|_| Err(io::ErrorKind::WouldBlock.into()));
    let mut nodes = NodeRegistry::new().with_threads(threads);
    let opening = nodes.begin_opening(&options, Connections::default()).unwrap();
    let failed = event_loop.block_on(opening.on_a_thread()).unwrap();
    let failed: OpenError = failed.err().unwrap();
    assert!(failed.to_string().starts_with("Could not start a thread"), "{failed}");
    // Opening and closing on this thread work.
    nodes.open(&options).unwrap();
    let closed = nodes.remove_apart(&name).unwrap();
    event_loop.block_on(closed).unwrap();
    nodes.forget_removed();
    nodes.open(&options).unwrap();
}

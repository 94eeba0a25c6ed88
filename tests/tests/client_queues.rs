//! Several queues at once from a client without a guest, with many requests in flight on each.

use integration::{BlkClient, Image, Request, Scratch, Segment, ServerCommand, pattern, request};

const QUEUES: usize = 4;
const DEPTH: usize = 32;
/// Blocks per slot of a queue.
const ROUNDS: usize = 32;

/// Writes every block of the image, each from its own slot of a queue, without ever waiting for more than
/// the next completion.
fn write_everything(binding: &str, iothreads: &[&str], file_options: &str) {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 16);
    let mut server = ServerCommand::new(&scratch).file("disk", &image, file_options);
    for id in iothreads {
        server = server.iothread(id);
    }
    let server = server.export("disk", &format!("num-queues={QUEUES},{binding}")).start();
    let mut client =
        BlkClient::connect(&server.socket("disk"), QUEUES, 128).expect("the export serves");

    // Per queue: which slot a request in flight belongs to, by the request's id.
    let mut slots = vec![[usize::MAX; 128]; QUEUES];
    let mut rounds = vec![[0; DEPTH]; QUEUES];
    let submit = |client: &mut BlkClient, queue: usize, slot: usize, round: usize| {
        let index = ((round * QUEUES + queue) * DEPTH + slot) as u64;
        let at = ((queue * DEPTH + slot) * pattern::BLOCK) as u64;
        client.put(at, &pattern::block(index, 1));
        let segments = vec![Segment { at, len: pattern::BLOCK, device_writes: false }];
        client.submit(queue, &Request { kind: request::OUT, sector: index * 8, segments })
    };
    for (queue, slots) in slots.iter_mut().enumerate() {
        for slot in 0..DEPTH {
            slots[usize::from(submit(&mut client, queue, slot, 0))] = slot;
        }
    }
    let mut left = QUEUES * DEPTH * ROUNDS;
    while left > 0 {
        for queue in 0..QUEUES {
            if rounds[queue].iter().all(|&round| round == ROUNDS) {
                continue;
            }
            let done = client.wait(queue).expect("completions");
            assert!(done.iter().all(|done| done.status == 0), "{done:?}");
            left -= done.len();
            // All of a batch are looked up before the first new request, which may take over an id.
            let free: Vec<_> = done.iter().map(|done| slots[queue][usize::from(done.id)]).collect();
            for slot in free {
                rounds[queue][slot] += 1;
                if rounds[queue][slot] < ROUNDS {
                    let id = submit(&mut client, queue, slot, rounds[queue][slot]);
                    slots[queue][usize::from(id)] = slot;
                }
            }
        }
    }
    for id in iothreads {
        assert!(server.sleeps(id) > 10, "{id} had nothing to do");
    }
    drop(client);
    server.stop();
    for index in 0..(QUEUES * DEPTH * ROUNDS) as u64 {
        let block = image.read(index * pattern::BLOCK as u64, pattern::BLOCK);
        assert_eq!(pattern::generation(index, &block), Ok(1));
    }
}

/// As QEMU's own back ends do: a front end that reconnects may have missed a completion.
#[test]
fn a_queue_is_notified_once_when_it_gets_its_eventfd() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let server = ServerCommand::new(&scratch)
        .file("disk", &image, "")
        .export("disk", "num-queues=2")
        .start();
    for _ in 0..3 {
        let client = BlkClient::connect(&server.socket("disk"), 2, 16).expect("a device");
        for queue in 0..2 {
            assert!(client.is_notified(queue).expect("an eventfd"), "queue {queue}");
        }
    }
    server.stop();
}

#[test]
fn on_the_main_loop() {
    write_everything("", &[], "aio=io_uring,cache.direct=on");
}

#[test]
fn on_one_iothread() {
    write_everything("iothread=io0", &["io0"], "aio=io_uring,cache.direct=on");
}

#[test]
fn on_two_iothreads() {
    let binding = "iothread.0=io0,iothread.1=io1";
    write_everything(binding, &["io0", "io1"], "aio=io_uring,cache.direct=on");
}

#[test]
fn on_the_thread_pool() {
    write_everything("iothread=io0", &["io0"], "aio=threads");
}

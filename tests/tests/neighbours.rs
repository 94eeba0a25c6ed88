//! Untrusted clients that break every rule, and their neighbours, which see no error and are served.

use hostile::{Attack, Running, Target};
use std::time::{Duration, Instant};

use integration::nbd::{RawNbd, client, nbd_export, nbd_server, nbds_uri};
use integration::tls::{Authority, NOW};
use integration::{BlkClient, Image, Scratch, ServerCommand, eventually, pattern};

/// Minimum number of an attack's actions.
const BLOWS: u64 = 20;
/// Rounds of each neighbour during an attack.
const ROUNDS: u64 = 30;

/// Time limit of all rounds. They take less than a second on an idle machine.
const LONGEST: Duration = Duration::from_secs(40);

/// The long form: a million connections, kicks, messages.
fn is_long() -> bool {
    std::env::var_os("RINGMILL_LONG").is_some()
}

/// Neighbours that write and read during an attack, with a time limit for each answer.
struct Neighbours {
    clients: [BlkClient; 2],
    nbd: Option<RawNbd>,
    generation: u64,
}

impl Neighbours {
    /// Waits until all set-up messages, with their descriptors, have arrived.
    fn new(mut clients: [BlkClient; 2], nbd: Option<RawNbd>) -> Self {
        for client in &mut clients {
            client.read(0, pattern::BLOCK);
        }
        Neighbours { clients, nbd, generation: 0 }
    }

    fn bear(&mut self, attack: Attack, running: &Running, blows: u64) {
        let begun = Instant::now();
        let mut done = 0;
        while done < ROUNDS || running.blows() < blows {
            done += 1;
            for client in &mut self.clients {
                let index = done % 1024;
                self.generation += 1;
                client.write(index * 8, &pattern::block(index, self.generation));
                let block = client.read(index * 8, pattern::BLOCK);
                assert_eq!(pattern::generation(index, &block), Ok(self.generation), "{attack:?}");
            }
            if let Some(nbd) = &mut self.nbd {
                const WRITE: u16 = 1;
                let (index, cookie) = (done % 1024, self.generation);
                nbd.request(WRITE, cookie, index * 4096, pattern::BLOCK as u32);
                nbd.send(&pattern::block(index, self.generation));
                assert_eq!(nbd.reply(), (0, cookie), "{attack:?}");
                nbd.request(0, cookie, index * 4096, pattern::BLOCK as u32);
                assert_eq!(nbd.reply(), (0, cookie), "{attack:?}");
                let block = nbd.take::<{ pattern::BLOCK }>();
                assert_eq!(pattern::generation(index, &block), Ok(self.generation), "{attack:?}");
            }
            assert!(is_long() || begun.elapsed() < LONGEST, "{attack:?}: {done} rounds");
        }
        println!("{attack:?}: {} blows, {done} rounds, {:?}", running.blows(), begun.elapsed());
    }
}

#[test]
fn neighbours_of_strangers_are_served() {
    let scratch = Scratch::new();
    let near = Image::filled(&scratch, "near.img", 4);
    let far = Image::filled(&scratch, "far.img", 4);
    let strange = Image::filled(&scratch, "strange.img", 4);
    let kind = Image::filled(&scratch, "kind.img", 4);
    let command = ServerCommand::new(&scratch)
        .iothread("io0")
        .iothread("io1")
        .monitor("monitor")
        .file("near", &near, "")
        .file("far", &far, "")
        .file("strange", &strange, "")
        .file("kind", &kind, "")
        .export("near", "iothread=io0")
        .export("far", "iothread=io1")
        .export("strange", "iothread=io0,num-queues=2");
    let command = nbd_server(command, &scratch, "");
    let command = nbd_export(command, "strange", ",name=hostile,iothread=io0");
    let command = command.arg("--export");
    let server =
        command.arg("type=nbd,id=kind,node-name=kind,name=kind,writable=on,iothread=io0").start();
    let target = Target {
        vhost_user: server.socket("strange"),
        nbd: scratch.path("nbd.sock"),
        nbd_tls: None,
        monitor: server.socket("monitor"),
        shared_tables: None,
    };
    let connect = |name: &str| BlkClient::connect(&server.socket(name), 1, 64).expect("a device");
    let nbd = RawNbd::go(&target.nbd, "kind");
    let mut neighbours = Neighbours::new(["near", "far"].map(connect), Some(nbd));
    let blows = if is_long() { 1_000_000 } else { BLOWS };
    let files = server.open_files();
    for &attack in
        Attack::ALL.iter().filter(|attack| !attack.is_over_tls() && attack.image().is_none())
    {
        let running = attack.begin(target.clone(), None).expect("a thread");
        neighbours.bear(attack, &running, blows);
        drop(running);
        // No trace of the attack is left, and the next client is served.
        let mut next = connect("strange");
        assert_eq!(next.read(0, pattern::BLOCK).len(), pattern::BLOCK, "{attack:?}");
        drop(next);
        eventually("descriptors to be closed", || (server.open_files() <= files).then_some(()));
    }
    drop(neighbours);
    eventually("memory to be given back", || (server.guest_mappings() == 0).then_some(()));
    server.stop();
}

#[test]
fn endless_tls_handshakes_do_not_block_others() {
    let scratch = Scratch::new();
    let authority = Authority::new(&scratch, "ca");
    let (creds, alice) = (authority.server("server", NOW), authority.client("alice", NOW));
    let [near, far, disk] =
        ["near", "far", "disk"].map(|name| Image::filled(&scratch, &format!("{name}.img"), 4));
    let object = format!("tls-creds-x509,id=tls0,endpoint=server,dir={}", creds.display());
    let command = ServerCommand::new(&scratch)
        .iothread("io0")
        .iothread("io1")
        .monitor("monitor")
        .arg("--object")
        .arg(object)
        .file("near", &near, "")
        .file("far", &far, "")
        .file("disk", &disk, "")
        .export("near", "iothread=io0")
        .export("far", "iothread=io1");
    // Fewer places than hostile handshakes.
    let options = ",tls-creds=tls0,max-connections=8,handshake-max-seconds=1";
    let command = nbd_server(command, &scratch, options);
    let server = nbd_export(command, "disk", ",iothread=io0").start();
    let target = Target {
        vhost_user: server.socket("near"),
        nbd: scratch.path("nbd.sock"),
        nbd_tls: Some(scratch.path("nbd.sock")),
        monitor: server.socket("monitor"),
        shared_tables: None,
    };
    let connect = |name: &str| BlkClient::connect(&server.socket(name), 1, 64).expect("a device");
    let mut neighbours = Neighbours::new(["near", "far"].map(connect), None);
    let (files, attack) = (server.open_files(), Attack::NbdTls);
    let running = attack.begin(target, None).expect("a thread");
    neighbours.bear(attack, &running, BLOWS);
    // The client waits for a place. The one second that it then has may be too short.
    let uri = nbds_uri(&scratch, "disk", &alice);
    let size = eventually("a place", || {
        let info = client(&scratch, "timeout", &["60", "nbdinfo", "--size", &uri]);
        info.status.success().then_some(info.stdout)
    });
    assert_eq!(size.trim_ascii(), b"4194304");
    drop(running);
    eventually("descriptors to be closed", || (server.open_files() <= files).then_some(()));
    drop(neighbours);
    server.stop();
}

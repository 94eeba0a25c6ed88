//! Strangers that break every rule, and their neighbours, who see no error and are served.

use hostile::{Attack, Target};
use integration::nbd::{nbd_export, nbd_server};
use integration::{BlkClient, Image, Scratch, ServerCommand, eventually, pattern};

/// What an attack has to have done before it counts.
const BLOWS: u64 = 20;
/// Rounds of a neighbour's under each attack.
const ROUNDS: u64 = 30;

#[test]
fn neighbours_of_strangers_are_served() {
    // The long form: a million connections, kicks, messages.
    let long = std::env::var_os("RINGMILL_LONG").is_some();
    let blows = if long { 1_000_000 } else { BLOWS };
    let scratch = Scratch::new();
    let near = Image::filled(&scratch, "near.img", 4);
    let far = Image::filled(&scratch, "far.img", 4);
    let strange = Image::filled(&scratch, "strange.img", 4);
    let command = ServerCommand::new(&scratch)
        .iothread("io0")
        .iothread("io1")
        .monitor("monitor")
        .file("near", &near, "")
        .file("far", &far, "")
        .file("strange", &strange, "")
        .export("near", "iothread=io0")
        .export("far", "iothread=io1")
        .export("strange", "iothread=io0,num-queues=2");
    let command = nbd_server(command, &scratch, "");
    let server = nbd_export(command, "strange", ",name=hostile,iothread=io0").start();
    let target = Target {
        vhost_user: server.socket("strange"),
        nbd: scratch.path("nbd.sock"),
        monitor: server.socket("monitor"),
    };
    let connect = |name: &str| BlkClient::connect(&server.socket(name), 1, 64).expect("a device");
    let mut neighbours = [connect("near"), connect("far")];
    let (files, mut generation) = (server.open_files(), 0);
    for &attack in Attack::ALL {
        let begun = std::time::Instant::now();
        let running = attack.begin(target.clone(), None).expect("a thread");
        let mut done = 0;
        while done < ROUNDS || running.blows() < blows {
            done += 1;
            for neighbour in &mut neighbours {
                let index = done % 1024;
                // Each waits for its answer, and not for ever.
                generation += 1;
                neighbour.write(index * 8, &pattern::block(index, generation));
                let block = neighbour.read(index * 8, pattern::BLOCK);
                assert_eq!(pattern::generation(index, &block), Ok(generation), "{attack:?}");
            }
        }
        println!("{attack:?}: {} blows, {done} rounds, {:?}", running.blows(), begun.elapsed());
        drop(running);
        // Nothing of it is left, and whoever comes next in its place is served.
        let mut next = connect("strange");
        assert_eq!(next.read(0, pattern::BLOCK).len(), pattern::BLOCK, "{attack:?}");
        drop(next);
        eventually("descriptors to be closed", || (server.open_files() <= files).then_some(()));
    }
    drop(neighbours);
    eventually("memory to be given back", || (server.guest_mappings() == 0).then_some(()));
    server.stop();
}

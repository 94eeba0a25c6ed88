//! A tenant that costs the others as much as it can. It has NBD connections, and an export on the I/O threads of all.
//!
//! It writes blindly and reads no answers. The other users of the world must not notice: their checks are its checks, and
//! [`World`] limits what a loop may begin between two calls of its ring.

use std::rc::Rc;

use exports::nbd::wire::client::encode_option;
use exports::nbd::wire::handshake_flag;
use exports::nbd::wire::option::code;
use exports::nbd::wire::request::{CommandType, RequestHeader};

use crate::client::Socket;
use crate::fds::Fds;
use crate::image::{Format, Image};
use crate::model::SECTOR;
use crate::world::World;

/// The name of its node and export.
pub(crate) const NAME: &str = "attacked";

/// Sectors of its disk, which is never written.
const SECTORS: u32 = 1 << 17;

/// Bytes of its requests: less than a share of an iteration.
const LEN: u32 = 256 << 10;

/// Requests that it sends at once. Without shares, a loop begins all of them in one iteration.
const FLOOD: u64 = 128;

/// Connections at once, at most. The server has places for more.
const CONNECTIONS: usize = 4;

/// Time between two attacks, nanoseconds.
const CALM_NS: u64 = 20_000_000;

/// The image of its export.
pub(crate) fn image(fds: &Rc<Fds>) -> Image {
    Image::new(fds, Format::Raw, SECTORS)
}

/// What it does with a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Attack {
    /// Requests as much as a connection takes, and reads nothing.
    Flood,
    /// Discards and zeroes a range, over and over.
    Zero,
    /// Begins a handshake, and is silent.
    Silence,
    /// Announces an option of 4 GiB.
    LongOption,
    /// Sends random bytes in place of a handshake.
    Rubbish,
    /// Sends random bytes in place of requests.
    RubbishRequests,
    /// Is gone at once.
    Leave,
}

const ALL: &[Attack] = &[
    Attack::Flood,
    Attack::Flood,
    Attack::Zero,
    Attack::Silence,
    Attack::LongOption,
    Attack::Rubbish,
    Attack::RubbishRequests,
    Attack::Leave,
];

/// The attacker's life. It ends when the users are done.
pub(crate) fn run(world: &Rc<World>) {
    let mut open: Vec<Rc<Socket>> = Vec::new();
    while !world.is_over() {
        let random = world.random();
        if open.len() >= CONNECTIONS || random.one_in(4) {
            open.clear();
        }
        if world.has_daemon() {
            let attack = random.pick(ALL);
            world.machine.say(|| format!("the attacker: {attack:?}"));
            world.coverage.attacks.one();
            let socket = Socket::connect(world);
            let is_open = begin(world, attack, &socket);
            if is_open && attack != Attack::Leave {
                open.push(socket);
            }
        }
        world.machine.sleep(random.between(CALM_NS / 10, CALM_NS));
    }
}

/// Sends an attack's bytes, as many as the server takes. Returns whether the connection is still there.
fn begin(world: &Rc<World>, attack: Attack, socket: &Socket) -> bool {
    let flags = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
    let mut handshake = u32::from(flags).to_be_bytes().to_vec();
    let mut requests = Vec::new();
    match attack {
        Attack::Flood => {
            for _ in 0..FLOOD {
                let sectors = LEN / SECTOR as u32;
                let first = world.random().below(u64::from(SECTORS - sectors));
                put(&mut requests, CommandType::Read, first * SECTOR as u64, LEN);
            }
        }
        Attack::Zero => {
            for nth in 0..FLOOD {
                let command =
                    if nth % 2 == 0 { CommandType::WriteZeroes } else { CommandType::Trim };
                put(&mut requests, command, 0, LEN);
            }
        }
        Attack::Silence => handshake.truncate(2),
        Attack::LongOption => {
            encode_option(code::GO, &[], &mut handshake);
            // The length is last.
            let at = handshake.len() - 4;
            handshake[at..].fill(0xff);
        }
        Attack::Rubbish => handshake = rubbish(world),
        Attack::RubbishRequests => requests = rubbish(world),
        Attack::Leave => {}
    }
    let is_served = matches!(attack, Attack::Flood | Attack::Zero | Attack::RubbishRequests);
    if is_served {
        encode_option(code::EXPORT_NAME, NAME.as_bytes(), &mut handshake);
    }
    if socket.send(&handshake, true).is_err() {
        return false;
    }
    if is_served {
        // The I/O thread has the connection after the handshake.
        world.machine.sleep(world.random().pick(&[0, 100_000]));
    }
    requests.is_empty() || socket.send(&requests, false).is_ok()
}

fn put(requests: &mut Vec<u8>, command: CommandType, offset: u64, len: u32) {
    let header = RequestHeader { flags: 0, command, cookie: 0, offset, len: len.into() };
    let (bytes, len) = header.encode(false);
    requests.extend(&bytes[..len]);
}

fn rubbish(world: &World) -> Vec<u8> {
    let random = world.random();
    let words = 0..random.between(1, 64);
    words.flat_map(|_| random.next().to_ne_bytes()).collect()
}

//! A network with latency: a relay of TCP connections that delays each byte, at full bandwidth.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// Bytes that are read at once.
const CHUNK: usize = 64 << 10;
/// Most chunks on their way in one direction: 64 MiB, which is 25 ms at 2.5 GiB/s.
const CHUNKS: usize = 1024;

/// Starts a relay to a local port, and returns the relay's port. The relay runs until the program ends.
pub(super) fn start(to: u16, latency: Duration) -> Result<u16> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).context("listening for the relay")?;
    let port = listener.local_addr().context("the relay's port")?.port();
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            if let Err(error) = relay(client, to, latency) {
                eprintln!("relay to port {to}: {error}");
            }
        }
    });
    Ok(port)
}

fn relay(client: TcpStream, to: u16, latency: Duration) -> io::Result<()> {
    // Connecting takes a round trip. The client's connection was there at once, so its first bytes are delayed for both.
    let connected = Instant::now() + latency;
    let server = TcpStream::connect(("127.0.0.1", to))?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    forward(client.try_clone()?, server.try_clone()?, latency / 2, connected);
    forward(server, client, latency / 2, connected);
    Ok(())
}

/// Forwards one direction, each chunk `delay` after its arrival.
fn forward(mut from: TcpStream, mut to: TcpStream, delay: Duration, connected: Instant) {
    let (sender, receiver) = sync_channel::<(Instant, Vec<u8>)>(CHUNKS);
    thread::spawn(move || {
        loop {
            let mut chunk = vec![0; CHUNK];
            let length = from.read(&mut chunk).unwrap_or(0);
            chunk.truncate(length);
            let due = Instant::now().max(connected) + delay;
            if length == 0 || sender.send((due, chunk)).is_err() {
                break;
            }
        }
    });
    thread::spawn(move || {
        for (due, chunk) in receiver {
            thread::sleep(due.saturating_duration_since(Instant::now()));
            if to.write_all(&chunk).is_err() {
                // Ends the other direction too.
                let _ = to.shutdown(Shutdown::Both);
                return;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_is_delayed_at_full_bandwidth() {
        const LATENCY: Duration = Duration::from_millis(200);
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = start(listener.local_addr().unwrap().port(), LATENCY).unwrap();
        let mut client = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let begin = Instant::now();
        let server = thread::spawn(move || {
            let (mut server, _) = listener.accept().unwrap();
            server.read_exact(&mut [0; 1]).unwrap();
            let data: Vec<u8> = (0..CHUNK as u32 * 256).map(|i| (i >> 8) as u8).collect();
            server.write_all(&data).unwrap();
            data
        });
        client.write_all(b"?").unwrap();
        let mut data = Vec::new();
        client.read_to_end(&mut data).unwrap();
        assert!(data == server.join().unwrap());
        // A round trip to connect, and one for the request.
        assert!(begin.elapsed() >= LATENCY * 2, "{:?}", begin.elapsed());
        // The delays of the chunks would add up to 25 s.
        assert!(begin.elapsed() < Duration::from_secs(12), "{:?}", begin.elapsed());
    }
}

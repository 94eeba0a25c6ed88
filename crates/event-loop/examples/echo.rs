//! An echo server: each connection is a task, each receive and send an operation of the ring.
//!
//!     cargo run -p ringmill-event-loop --example echo 127.0.0.1:7777

use std::io;
use std::net::TcpListener;

use event_loop::{EventLoop, IoThread, IoThreadConfig, LoopFile, Part};

/// Sends back what `client` sends, until it ends.
async fn echo(client: LoopFile) -> io::Result<()> {
    let mut buf = vec![0; 64 << 10];
    loop {
        let (len, bytes) = client.recv(buf).await?;
        if len == 0 {
            return Ok(());
        }
        buf = client.send_all(Part::new(bytes, 0..len)).await?.into_inner();
    }
}

/// Accepts on the calling thread and serves all connections on `thread`, until accepting fails.
fn serve(listener: &TcpListener, thread: &IoThread) -> io::Result<()> {
    for client in listener.incoming() {
        let client = client?;
        let serve = move |event_loop: &EventLoop| {
            let echo = echo(event_loop.file(client));
            event_loop.spawn(async { echo.await.unwrap_or_else(|error| eprintln!("{error}")) });
        };
        thread.handle().spawn(serve).map_err(io::Error::other)?;
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:7777".to_owned());
    let listener = TcpListener::bind(address)?;
    let thread = IoThread::spawn(IoThreadConfig::default())?;
    println!("{} on {}", listener.local_addr()?, thread.ring());
    Ok(serve(&listener, &thread)?)
}

#[test]
fn each_client_gets_back_what_it_sends() {
    use std::io::{Read, Write};
    use std::net::{Shutdown, TcpStream};

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // The test's process ends with this thread.
    std::thread::spawn(move || {
        let thread = IoThread::spawn(IoThreadConfig::default()).unwrap();
        serve(&listener, &thread).unwrap();
    });
    let clients: Vec<_> = (0..8u8)
        .map(|n| {
            std::thread::spawn(move || {
                let mut client = TcpStream::connect(address).unwrap();
                let message = vec![n; 1 << 20];
                let mut sender = client.try_clone().unwrap();
                let sent = message.clone();
                let sending = std::thread::spawn(move || {
                    sender.write_all(&sent).unwrap();
                    sender.shutdown(Shutdown::Write).unwrap();
                });
                let mut received = Vec::new();
                client.read_to_end(&mut received).unwrap();
                sending.join().unwrap();
                assert!(received == message, "client {n} got {} bytes", received.len());
            })
        })
        .collect();
    clients.into_iter().for_each(|client| client.join().unwrap());
}

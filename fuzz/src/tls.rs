//! Input of a TLS server: bytes of a hostile client before, within and after the handshake; files
//! with certificates, keys and revocation lists; names of allowed clients.
//!
//! A client of rustls takes part, and its bytes are changed on the way, so that inputs reach beyond
//! the first message. Changed bytes must never yield plaintext that the client did not send.

use std::sync::Arc;
use std::sync::OnceLock;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use tls::{
    Acceptor, Authorization, Endpoint, Format, MAX_EXPANSION, MAX_PLAIN, Policy, Progress, Rule,
    X509, X509Files,
};

use crate::input::Input;
use crate::world;

const FILES: [(&str, &[u8]); 4] = [
    ("ca-cert.pem", include_bytes!("../certs/ca-cert.pem")),
    ("ca-crl.pem", include_bytes!("../certs/ca-crl.pem")),
    ("server-cert.pem", include_bytes!("../certs/server-cert.pem")),
    ("server-key.pem", include_bytes!("../certs/server-key.pem")),
];
const CLIENT: (&[u8], &[u8]) =
    (include_bytes!("../certs/client-cert.pem"), include_bytes!("../certs/client-key.pem"));
/// What the client sends, again and again.
const WORDS: &[u8] = b"what the client says";

/// Runs one input. Its first byte selects the kind of the rest.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    match input.u8() % 4 {
        0 => raw(&mut input),
        1 => files(data),
        2 => names(data),
        how => changed(&mut input, how),
    }
}

fn load(files: &[(&str, Vec<u8>)], sanity_check: bool) -> Result<X509, tls::CredentialsError> {
    let dir = world::own_path("tls");
    std::fs::create_dir_all(&dir).expect("a folder");
    for (name, contents) in files {
        std::fs::write(dir.join(name), contents).expect("it is ours");
    }
    let endpoint = Endpoint::Server;
    X509::load(&X509Files { dir, endpoint, verify_peer: true, sanity_check }, Some(b"secret"))
}

fn acceptor() -> &'static Acceptor {
    static ACCEPTOR: OnceLock<Acceptor> = OnceLock::new();
    ACCEPTOR.get_or_init(|| {
        let files = FILES.map(|(name, contents)| (name, contents.to_vec()));
        let credentials = load(&files, true).expect("they are good");
        let list = Authorization::List {
            rules: vec![Rule {
                pattern: "O=ringmill,CN=cl*".into(),
                policy: Policy::Allow,
                format: Format::Glob,
            }],
            policy: Policy::Deny,
        };
        Acceptor::new(&credentials, Some(Arc::new(list))).expect("they fit")
    })
}

/// Gives bytes to the session. Returns plaintext and replies.
fn hear(session: &mut tls::Session, mut bytes: &[u8]) -> Result<(Vec<u8>, Vec<u8>), ()> {
    let (mut plain, mut out) = (Vec::new(), Vec::new());
    loop {
        let mut most = 0;
        let processed = session.process(&mut out, &mut |data| {
            most += data.len();
            plain.extend_from_slice(data);
        });
        assert!(most <= MAX_PLAIN, "more than a record at once");
        match processed {
            Ok(Progress::Data) => {}
            Ok(Progress::Closed) => return Ok((plain, out)),
            Ok(Progress::Input) => {
                let room = session.input();
                assert!(!room.is_empty(), "it asks for more, and has no room");
                if bytes.is_empty() {
                    return Ok((plain, out));
                }
                let n = room.len().min(bytes.len());
                room[..n].copy_from_slice(&bytes[..n]);
                session.received(n);
                bytes = &bytes[n..];
            }
            Err(error) => {
                assert!(!error.to_string().is_empty());
                // Nothing comes of it any more.
                assert!(session.process(&mut out, &mut |_| panic!("plaintext")).is_err());
                let mut room = [0; MAX_PLAIN + MAX_EXPANSION];
                assert!(session.encrypt(b"x", &mut room).is_err());
                return Err(());
            }
        }
    }
}

fn raw(input: &mut Input<'_>) {
    let mut session = acceptor().session().expect("randomness");
    let mut bytes = Vec::new();
    while !input.is_empty() {
        bytes.push(input.u8());
    }
    if let Ok((plain, _)) = hear(&mut session, &bytes) {
        assert!(plain.is_empty(), "plaintext without a handshake");
    }
}

fn client() -> ClientConnection {
    static CONFIG: OnceLock<Arc<ClientConfig>> = OnceLock::new();
    let config = CONFIG.get_or_init(|| {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(FILES[0].1).expect("good")).expect("good");
        let chain = vec![CertificateDer::from_pem_slice(CLIENT.0).expect("good")];
        let key = PrivateKeyDer::from_pem_slice(CLIENT.1).expect("good");
        let provider = rustls::crypto::ring::default_provider();
        let config = ClientConfig::builder_with_provider(Arc::new(provider))
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)
            .expect("they match");
        Arc::new(config)
    });
    let name = ServerName::try_from("localhost").expect("a name");
    ClientConnection::new(config.clone(), name).expect("randomness")
}

/// A client whose bytes are changed on their way: one change for each flight of messages.
fn changed(input: &mut Input<'_>, _: u8) {
    let (mut client, mut session) = (client(), acceptor().session().expect("randomness"));
    let mut said = Vec::new();
    let mut whole = true;
    let mut heard = Vec::new();
    for _ in 0..12 {
        let mut bytes = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut bytes).expect("a vector");
        }
        let before = bytes.clone();
        change(input, &mut bytes);
        whole &= before == bytes;
        let Ok((plain, mut out)) = hear(&mut session, &bytes) else {
            assert!(!whole, "what was not changed is refused");
            return;
        };
        heard.extend(plain);
        assert!(said.starts_with(&heard), "plaintext that nobody sent");
        if !session.is_handshaking() {
            let mut room = [0; MAX_PLAIN + MAX_EXPANSION];
            if let Ok(len) = session.encrypt(b"an answer", &mut room) {
                out.extend(&room[..len]);
            }
        }
        let mut rest = out.as_slice();
        while !rest.is_empty() {
            if client.read_tls(&mut rest).is_err() || client.process_new_packets().is_err() {
                return;
            }
        }
        if !client.is_handshaking() {
            let words = &WORDS[usize::from(input.u8()) % WORDS.len()..];
            said.extend_from_slice(words);
            std::io::Write::write_all(&mut client.writer(), words).expect("memory");
        }
    }
    assert!(!whole || !session.is_handshaking(), "a handshake that does not end");
}

fn change(input: &mut Input<'_>, bytes: &mut Vec<u8>) {
    if input.is_empty() || bytes.is_empty() {
        return;
    }
    let how = input.u8();
    let at = usize::from(input.u16()) % bytes.len();
    match how % 8 {
        0 => bytes[at] ^= 1 << (how >> 5),
        1 => bytes[at] = input.u8(),
        2 => bytes.truncate(at),
        3 => drop(bytes.drain(at..(at + usize::from(input.u8())).min(bytes.len()))),
        4 => bytes.insert(at, input.u8()),
        5 => {
            let again = bytes.clone();
            bytes.extend(again);
        }
        6 => bytes.splice(0..0, [22, 3, 3, 0, 4, 1, 0xff, 0xff, 0xff]).for_each(drop),
        _ => {}
    }
}

/// Credentials with a file changed: written over from a place on, cut, or as it is.
fn files(data: &[u8]) {
    let mut input = Input::new(&data[data.len().min(1)..]);
    let which = input.u8();
    let mut files: Vec<_> = FILES.iter().map(|(name, file)| (*name, file.to_vec())).collect();
    let file = &mut files[usize::from(which & 3)].1;
    let at = usize::from(input.u16()) % file.len();
    let mut patch = Vec::new();
    while !input.is_empty() {
        patch.push(input.u8());
    }
    match which >> 2 & 3 {
        0 => *file = patch,
        1 => {
            let end = (at + patch.len()).min(file.len());
            file.splice(at..end, patch).for_each(drop);
        }
        2 => file.truncate(at),
        _ => file.extend(patch),
    }
    match load(&files, which & 0x80 != 0) {
        Ok(credentials) => {
            if let Ok(acceptor) = Acceptor::new(&credentials, None) {
                let mut session = acceptor.session().expect("randomness");
                let _ = hear(&mut session, &[22, 3, 1, 0, 1, 1]);
            }
        }
        Err(error) => {
            let said = error.to_string();
            assert!((1..4096).contains(&said.len()), "{} bytes: {said}", said.len());
        }
    }
}

/// Patterns and names: the answer is that of a simple way to compare them.
fn names(data: &[u8]) {
    let text = String::from_utf8_lossy(&data[data.len().min(1)..]);
    let mut lines = text.split('\n').take(8);
    let name: String = lines.next().unwrap_or_default().chars().take(200).collect();
    let patterns: Vec<String> = lines.map(|line| line.chars().take(200).collect()).collect();
    let rule = |(n, pattern): (usize, &String)| Rule {
        pattern: pattern.clone(),
        policy: if n % 2 == 0 { Policy::Allow } else { Policy::Deny },
        format: Format::Glob,
    };
    let rules: Vec<_> = patterns.iter().enumerate().map(rule).collect();
    let list = Authorization::List { rules, policy: Policy::Deny };
    let first = patterns.iter().position(|pattern| fits(pattern, &name));
    assert_eq!(list.allows(&name), first.is_some_and(|n| n % 2 == 0), "{name:?} {patterns:?}");
}

/// By a table: whether the first i characters of the pattern fit the first j of the text.
fn fits(pattern: &str, text: &str) -> bool {
    let text: Vec<char> = text.chars().collect();
    let mut row = vec![false; text.len() + 1];
    row[0] = true;
    for wanted in pattern.chars() {
        let before = std::mem::take(&mut row);
        row = vec![false; text.len() + 1];
        row[0] = wanted == '*' && before[0];
        for j in 0..text.len() {
            row[j + 1] = match wanted {
                '*' => before[j + 1] || row[j],
                '?' => before[j],
                _ => before[j] && text[j] == wanted,
            };
        }
    }
    row[text.len()]
}

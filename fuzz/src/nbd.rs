//! A hostile NBD client: a handshake and requests taken from the bytes.
//!
//! First come options, each with a number, a length and that many bytes; once an export is chosen,
//! what is left is requests. TLS itself is rustls', which its authors fuzz.

use std::sync::Arc;

use exports::nbd::session::handshake::{ExportInfo, Negotiation, Next, Tls};
use exports::nbd::session::transmission::{Agreed, Command, Verdict};
use exports::nbd::wire::MAX_PAYLOAD;
use exports::nbd::wire::option::{HEADER_LEN, OptionHeader};
use exports::nbd::wire::reply::ReplyMode;
use exports::nbd::wire::request::{EXTENDED_HEADER_LEN, HEADER_LEN as REQUEST_LEN, RequestHeader};

use crate::input::Input;

const SIZE: u64 = 1 << 30;

/// Plays the client.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let header: [u8; HEADER_LEN] = input.array();
    let _ = OptionHeader::parse(&header);
    let disk = |name: &str, read_only| ExportInfo {
        name: name.into(),
        description: "a disk".into(),
        size: SIZE,
        read_only,
        multi_conn: true,
        preferred_block: 4096,
        allocation_depth: !read_only,
        bitmaps: vec!["b0".into(), "b1".into()],
    };
    let exports = [Arc::new(disk("", false)), Arc::new(disk("rom", true))];
    let flags = input.u8();
    // With TLS, nothing else goes before it.
    let mut plain = flags & 8 != 0;
    let mut negotiation = Negotiation::new(if plain { Tls::Required } else { Tls::Off });
    if negotiation.client_flags(u32::from(flags & 7)).is_err() {
        return;
    }
    let mut out = Vec::new();
    let agreed = loop {
        if input.is_empty() {
            return;
        }
        let (option, len) = (u32::from(input.u8()), usize::from(input.u8()));
        let data: Vec<u8> = (0..len).map(|_| input.u8()).collect();
        out.clear();
        match negotiation.option(option, &data, &exports, &mut out) {
            Ok(Next::StartTls) => {
                assert!(std::mem::take(&mut plain), "TLS begins once");
                assert_eq!(out.len(), 20);
            }
            Ok(Next::Transmission(index, agreed)) => {
                assert!(!plain, "without TLS");
                assert_eq!(agreed.read_only, exports[index].read_only);
                assert!(!out.is_empty());
                break agreed;
            }
            // Answered, and by no more than a few names.
            Ok(Next::Option | Next::Leave) => {
                assert!((20..1000).contains(&out.len()), "{} bytes", out.len());
                let name = out.windows(3).any(|bytes| bytes == b"rom");
                assert!(!(plain && name), "an export is named before TLS");
            }
            Err(_) => return,
        }
    };
    while !input.is_empty() {
        request(&agreed, &mut input);
    }
}

fn request(agreed: &Agreed, input: &mut Input<'_>) {
    let extended = agreed.mode == ReplyMode::Extended;
    let mut bytes: [u8; EXTENDED_HEADER_LEN] = input.array();
    let magic = if extended { 0x21e4_1c71u32 } else { 0x2560_9513 };
    // Nearly always that of a request.
    if bytes[0] != 0 {
        bytes[..4].copy_from_slice(&magic.to_be_bytes());
    }
    let len = if extended { EXTENDED_HEADER_LEN } else { REQUEST_LEN };
    assert_eq!(RequestHeader::parse(&bytes[..len - 1], extended).and_then(Result::ok), None);
    let Some(Ok(header)) = RequestHeader::parse(&bytes[..len], extended) else { return };
    let fits = |offset: u64, len: u64| {
        assert!(len > 0 && offset.checked_add(len).is_some_and(|end| end <= SIZE));
    };
    match agreed.judge(&header) {
        Verdict::Do(command) => match command {
            Command::Read { offset, len, in_chunks } => {
                assert!(len <= MAX_PAYLOAD);
                assert!(!in_chunks || agreed.mode != ReplyMode::Simple);
                fits(offset, len.into());
            }
            Command::Write { offset, len, .. } => {
                assert!(len <= MAX_PAYLOAD && !agreed.read_only);
                assert!(header.has_payload(extended));
                fits(offset, len.into());
            }
            Command::Trim { offset, len, .. } | Command::WriteZeroes { offset, len, .. } => {
                assert!(!agreed.read_only);
                fits(offset, len);
            }
            Command::Cache { offset, len } => fits(offset, len),
            Command::BlockStatus { offset, len, .. } => {
                assert!(agreed.contexts.allocation && agreed.mode != ReplyMode::Simple);
                fits(offset, len);
            }
            Command::Flush | Command::Nothing => {}
        },
        Verdict::Refuse { payload, .. } => assert!(payload <= MAX_PAYLOAD),
        Verdict::Disconnect | Verdict::TooLong => {}
    }
}

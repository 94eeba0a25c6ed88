//! NBD's messages: what is read of bytes, and which bytes are written.

use nbd_wire::option::{
    ClientOption, Contexts, InfoRequest, OptionError, OptionHeader, OptionReply, code,
};
use nbd_wire::reply::{Asked, NbdError, Reply, ReplyMode, encode_extent, extent_len};
use nbd_wire::request::{CommandType, RequestHeader, command_flag};
use nix::errno::Errno;
use proptest::prelude::*;

/// The bytes of a text in hexadecimal, blanks left out.
fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

#[test]
fn requests() {
    let compact = hex("25609513 0001 0001 0102030405060708 0000000000001000 00000200");
    let header = RequestHeader::parse(&compact, false).unwrap().unwrap();
    let expected = RequestHeader {
        flags: command_flag::FUA,
        command: CommandType::Write,
        cookie: 0x0102_0304_0506_0708,
        offset: 4096,
        len: 512,
    };
    assert_eq!(header, expected);
    assert!(header.has_payload(false) && header.has_payload(true));
    let extended = hex("21e41c71 0020 0007 0000000000000001 ffffffffffffffff 0000000100000000");
    let header = RequestHeader::parse(&extended, true).unwrap().unwrap();
    assert_eq!((header.command, header.len), (CommandType::BlockStatus, 1 << 32));
    assert!(header.has_payload(true) && !header.has_payload(false));
    // Cut short, there is none yet; of the other kind, there never is one.
    for len in 0..compact.len() {
        assert_eq!(RequestHeader::parse(&compact[..len], false), None);
    }
    assert!(RequestHeader::parse(&compact, true).unwrap().is_err());
    assert!(RequestHeader::parse(&extended, false).unwrap().is_err());
}

#[test]
fn replies() {
    let asked = Asked { cookie: 0x1122_3344_5566_7788, offset: 0x99 };
    let encoded = |reply: Reply, mode| {
        let (bytes, len) = reply.encode(mode, asked);
        bytes[..len].to_vec()
    };
    let data = Reply::Data { offset: 0x99, len: 0x200 };
    let status = Reply::Status { context: 3, count: 2 };
    let failed = Reply::Error(NbdError::NoSpc);
    let cookie = "1122334455667788";
    for (reply, mode, expected) in [
        (Reply::Done, ReplyMode::Simple, format!("67446698 00000000 {cookie}")),
        (data, ReplyMode::Simple, format!("67446698 00000000 {cookie}")),
        (failed, ReplyMode::Simple, format!("67446698 0000001c {cookie}")),
        (Reply::Done, ReplyMode::Structured, format!("668e33ef 0001 0000 {cookie} 00000000")),
        (
            data,
            ReplyMode::Structured,
            format!("668e33ef 0001 0001 {cookie} 00000208 0000000000000099"),
        ),
        (status, ReplyMode::Structured, format!("668e33ef 0001 0005 {cookie} 00000014 00000003")),
        (
            failed,
            ReplyMode::Structured,
            format!("668e33ef 0001 8001 {cookie} 00000006 0000001c 0000"),
        ),
        (
            data,
            ReplyMode::Extended,
            format!("6e8a278c 0001 0001 {cookie} {:016x} {:016x} {:016x}", 0x99, 0x208, 0x99),
        ),
        (
            status,
            ReplyMode::Extended,
            format!("6e8a278c 0001 0006 {cookie} {:016x} {:016x} 00000003 00000002", 0x99, 40),
        ),
        (
            failed,
            ReplyMode::Extended,
            format!("6e8a278c 0001 8001 {cookie} {:016x} {:016x} 0000001c 0000", 0x99, 6),
        ),
    ] {
        assert_eq!(encoded(reply, mode), hex(&expected), "{reply:?} {mode:?}");
    }
    assert_eq!(extent_len(ReplyMode::Structured), 8);
    let extent = encode_extent(ReplyMode::Structured, 0x1000, 3);
    assert_eq!(extent[..8], hex("00001000 00000003"));
    let extent = encode_extent(ReplyMode::Extended, 1 << 40, 3);
    assert_eq!(extent[..], hex("0000010000000000 0000000000000003"));
    // What does not fit ends at a block's end.
    let extent = encode_extent(ReplyMode::Structured, 1 << 40, 0);
    assert_eq!(u32::from_be_bytes(extent[..4].try_into().unwrap()) % 65536, 0);
}

#[test]
fn errors_are_those_that_the_protocol_has() {
    for (errno, error) in [
        (Errno::EROFS, NbdError::Perm),
        (Errno::EIO, NbdError::Io),
        (Errno::ENOSPC, NbdError::NoSpc),
        (Errno::EDQUOT, NbdError::NoSpc),
        (Errno::EFBIG, NbdError::NoSpc),
        (Errno::EOPNOTSUPP, NbdError::NotSup),
        (Errno::ENODEV, NbdError::Io),
    ] {
        assert_eq!(NbdError::from(errno), error);
    }
}

#[test]
fn options() {
    let header = OptionHeader::parse(b"IHAVEOPT\0\0\0\x07\0\0\x01\0");
    assert_eq!(header, Ok(OptionHeader { option: code::GO, len: 256 }));
    assert!(OptionHeader::parse(b"IHAVEOPTIHAVEOPT").is_ok());
    assert!(OptionHeader::parse(b"GET / HTTP/1.0\r\n").is_err());
    let go = b"\0\0\0\x03abc\0\x03\0\0\0\x03\0\x63";
    let expected = InfoRequest {
        name: "abc",
        wants_name: false,
        wants_description: false,
        wants_block_size: true,
    };
    assert_eq!(ClientOption::parse(code::GO, go), Ok(ClientOption::Go(expected)));
    let contexts = b"\0\0\0\x01n\0\0\0\x02\0\0\0\x05base:\0\0\0\0";
    let expected = Contexts { name: "n", queries: vec!["base:", ""] };
    assert_eq!(
        ClientOption::parse(code::LIST_META_CONTEXT, contexts),
        Ok(ClientOption::ListMetaContext(expected))
    );
    for (option, data) in [
        (code::LIST, &b"x"[..]),
        (code::STRUCTURED_REPLY, b"x"),
        (code::GO, b""),
        (code::GO, b"\0\0\0\x04abc\0\0"),
        (code::GO, b"\xff\xff\xff\xffabc\0\0"),
        (code::GO, b"\0\0\0\0\0\x01"),
        (code::GO, b"\0\0\0\0\0\0x"),
        (code::GO, b"\0\0\0\x01\0\0\0"),
        (code::GO, b"\0\0\0\x01\xff\0\0"),
        (code::SET_META_CONTEXT, b"\0\0\0\0\xff\xff\xff\xff\0\0\0\0"),
        (code::SET_META_CONTEXT, b"\0\0\0\0\0\0\0\0x"),
        (code::EXPORT_NAME, &[b'x'; 4097]),
    ] {
        assert!(ClientOption::parse(option, data).is_err(), "{option} {data:x?}");
    }
}

#[test]
fn option_replies() {
    let mut out = Vec::new();
    OptionReply::Server { name: "ab", description: "c" }.encode(code::LIST, &mut out);
    assert_eq!(out, hex("0003e889045565a9 00000003 00000002 00000007 00000002 6162 63"));
    out.clear();
    OptionReply::Export { size: 1 << 20, flags: 0x0103 }.encode(code::GO, &mut out);
    assert_eq!(out, hex("0003e889045565a9 00000007 00000003 0000000c 0000 0000000000100000 0103"));
    out.clear();
    OptionReply::Error(OptionError::Unknown, "no").encode(code::INFO, &mut out);
    assert_eq!(out, hex("0003e889045565a9 00000006 80000006 00000002 6e6f"));
}

proptest! {
    /// Whatever the bytes are, there is an answer and no panic.
    #[test]
    fn any_bytes_are_read(
        option in 0u32..13, data in prop::collection::vec(any::<u8>(), 0..80), extended in any::<bool>(),
    ) {
        let _ = ClientOption::parse(option, &data);
        let _ = RequestHeader::parse(&data, extended);
    }

    #[test]
    fn a_request_is_read_as_it_was_written(
        flags in any::<u16>(), command in 0u16..10, cookie in any::<u64>(), offset in any::<u64>(),
        len in any::<u64>(), extended in any::<bool>(),
    ) {
        let len = if extended { len } else { len >> 32 };
        let magic = if extended { 0x21e4_1c71u32 } else { 0x2560_9513 };
        let mut bytes = magic.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(command.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        match extended {
            true => bytes.extend(len.to_be_bytes()),
            false => bytes.extend((len as u32).to_be_bytes()),
        }
        let header = RequestHeader { flags, command: command.into(), cookie, offset, len };
        prop_assert_eq!(RequestHeader::parse(&bytes, extended), Some(Ok(header)));
    }
}

//! The NBD server's side of a handshake, and its judgement of requests, without a socket.

use std::sync::Arc;

use exports::nbd::session::handshake::{ExportInfo, HandshakeError, Negotiation, Next};
use exports::nbd::session::transmission::{Agreed, Command, Context, Contexts, Verdict};
use exports::nbd::wire::reply::{NbdError, ReplyMode};
use exports::nbd::wire::request::{CommandType, RequestHeader, command_flag};
use exports::nbd::wire::{MAX_PAYLOAD, flag, option::code};
use proptest::prelude::*;

const ACK: u32 = 1;
const SERVER: u32 = 2;
const INFO: u32 = 3;
const META_CONTEXT: u32 = 4;
const UNSUPPORTED: u32 = 0x8000_0001;
const POLICY: u32 = 0x8000_0002;
const INVALID: u32 = 0x8000_0003;
const UNKNOWN: u32 = 0x8000_0006;
const EXTENDED: u32 = 0x8000_000a;

fn exports() -> Vec<Arc<ExportInfo>> {
    let disk = ExportInfo {
        name: "disk".into(),
        description: String::new(),
        size: 1 << 20,
        read_only: false,
        multi_conn: true,
        preferred_block: 4096,
        allocation_depth: true,
        bitmaps: vec!["b0".into(), "b1".into()],
    };
    let rom = ExportInfo {
        name: "rom".into(),
        read_only: true,
        preferred_block: 4096,
        allocation_depth: false,
        bitmaps: Vec::new(),
        ..disk.clone()
    };
    vec![Arc::new(disk), Arc::new(rom)]
}

/// A handshake with the types of the replies to each option.
struct Client(Negotiation);

impl Client {
    fn new(flags: u32) -> Self {
        let mut negotiation = Negotiation::default();
        negotiation.client_flags(flags).unwrap();
        Client(negotiation)
    }

    fn option(&mut self, option: u32, data: &[u8]) -> (Vec<u32>, Result<Next, HandshakeError>) {
        let mut out = Vec::new();
        let next = self.0.option(option, data, &exports(), &mut out);
        let mut replies = Vec::new();
        let mut rest = &out[..];
        while option != code::EXPORT_NAME && !rest.is_empty() {
            let word = |at: usize| u32::from_be_bytes(rest[at..at + 4].try_into().unwrap());
            assert_eq!(
                (&rest[..8], word(8)),
                (&0x0003_e889_0455_65a9_u64.to_be_bytes()[..], option)
            );
            replies.push(word(12));
            rest = &rest[20 + word(16) as usize..];
        }
        (replies, next)
    }

    /// Replies to an option after which the next one may come.
    fn replies(&mut self, option: u32, data: &[u8]) -> Vec<u32> {
        let (replies, next) = self.option(option, data);
        assert_eq!(next, Ok(Next::Option));
        replies
    }

    fn go(&mut self, name: &str) -> (usize, Agreed) {
        let (replies, next) = self.option(code::GO, &info(name, &[3]));
        assert_eq!(replies, [INFO, INFO, ACK]);
        match next {
            Ok(Next::Transmission(index, agreed)) => (index, agreed),
            other => panic!("{other:?}"),
        }
    }
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}

fn info(name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut data = text(name);
    data.extend((wanted.len() as u16).to_be_bytes());
    wanted.iter().for_each(|wanted| data.extend(wanted.to_be_bytes()));
    data
}

fn contexts(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = text(name);
    data.extend((queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|query| data.extend(text(query)));
    data
}

#[test]
fn a_client_looks_round_and_goes() {
    let mut client = Client::new(3);
    assert_eq!(client.replies(code::LIST, b""), [SERVER, SERVER, ACK]);
    assert_eq!(client.replies(code::LIST, b"x"), [INVALID]);
    assert_eq!(client.replies(77, b"anything"), [UNSUPPORTED]);
    assert_eq!(client.replies(code::STARTTLS, b""), [POLICY]);
    assert_eq!(client.replies(code::INFO, &info("nobody", &[])), [UNKNOWN]);
    assert_eq!(client.replies(code::GO, &info("nobody", &[])), [UNKNOWN]);
    assert_eq!(client.replies(code::INFO, &info("disk", &[1, 2, 3])), [INFO, INFO, INFO, ACK]);
    assert_eq!(client.replies(code::INFO, b"\0"), [INVALID]);
    let (index, agreed) = client.go("rom");
    let expected = Agreed {
        size: 1 << 20,
        read_only: true,
        mode: ReplyMode::Simple,
        contexts: Contexts::default(),
    };
    assert_eq!((index, agreed), (1, expected));
    let (replies, next) = Client::new(3).option(code::ABORT, b"ignored");
    assert_eq!((replies, next), (vec![ACK], Ok(Next::Leave)));
}

#[test]
fn an_export_that_is_not_there_is_named_as_qsd_names_it() {
    let refused = |name: &str| {
        let mut out = Vec::new();
        let mut client = Negotiation::default();
        client.client_flags(3).unwrap();
        client.option(code::GO, &info(name, &[]), &exports(), &mut out).unwrap();
        String::from_utf8(out[20..].to_vec()).unwrap()
    };
    assert_eq!(refused("x"), "export 'x' not present");
    assert_eq!(refused(""), "export '' not present");
    let long = |len: usize| "a".repeat(len);
    assert_eq!(refused(&long(79)), format!("export '{}' not present", long(79)));
    assert_eq!(refused(&long(80)), format!("export '{}...' not present", long(80)));
    assert_eq!(refused(&long(4096)), format!("export '{}...' not present", long(80)));
    assert_eq!(refused(&"ä€".repeat(80)), format!("export '{}...' not present", "ä€".repeat(16)));
}

#[test]
fn requests_of_any_size_and_offset_are_accepted() {
    let agreed = Client::new(3).go("disk").1;
    let read = header(CommandType::Read, 0, 7, 700);
    let expected = Command::Read { offset: 7, len: 700, in_chunks: false };
    assert_eq!(agreed.judge(&read), Verdict::Do(expected));
}

#[test]
fn contexts_are_those_of_one_export_and_the_last_choice() {
    let mut client = Client::new(3);
    let all = contexts("disk", &["base:allocation"]);
    assert_eq!(client.replies(code::SET_META_CONTEXT, &all), [INVALID]);
    assert_eq!(client.replies(code::LIST_META_CONTEXT, &all), [INVALID]);
    assert_eq!(client.replies(code::STRUCTURED_REPLY, b""), [ACK]);
    for (queries, replies) in [
        (&[][..], &[META_CONTEXT, META_CONTEXT, META_CONTEXT, META_CONTEXT, ACK][..]),
        (&["base:"], &[META_CONTEXT, ACK]),
        (&["qemu:"], &[META_CONTEXT, META_CONTEXT, META_CONTEXT, ACK]),
        (&["qemu:dirty-bitmap:"], &[META_CONTEXT, META_CONTEXT, ACK]),
        (&["qemu:dirty-bitmap:b1", "qemu:dirty-bitmap:b2"], &[META_CONTEXT, ACK]),
        (&["qemu:allocation-depth"], &[META_CONTEXT, ACK]),
        (&["x:y", "base:allocation"], &[META_CONTEXT, ACK]),
        (&["x:y", "base:other", "qemu:x", "allocation-depth", "qemu:dirty-bitmap"], &[ACK]),
    ] {
        let queries = contexts("disk", queries);
        assert_eq!(client.replies(code::LIST_META_CONTEXT, &queries), replies);
    }
    assert_eq!(client.replies(code::LIST_META_CONTEXT, &contexts("nobody", &[])), [UNKNOWN]);
    assert_eq!(client.replies(code::LIST_META_CONTEXT, &contexts("rom", &[])), [META_CONTEXT, ACK]);
    let own = contexts("disk", &["qemu:dirty-bitmap:b1", "qemu:allocation-depth", "qemu:"]);
    assert_eq!(client.replies(code::SET_META_CONTEXT, &own), [META_CONTEXT, META_CONTEXT, ACK]);
    let chosen = Client(client.0.clone()).go("disk").1.contexts;
    assert_eq!(chosen, Contexts { allocation: false, depth: true, bitmaps: 0b10 });
    let ids: Vec<u32> = chosen.iter().map(Context::id).collect();
    assert_eq!((&ids[..], Contexts::of_ids(ids.iter().copied())), (&[1, 3][..], chosen));
    assert_eq!(Contexts::of_ids([66, u32::MAX]), Contexts::default());
    assert_eq!(client.replies(code::SET_META_CONTEXT, &contexts("disk", &["base:"])), [ACK]);
    assert_eq!(client.replies(code::SET_META_CONTEXT, &all), [META_CONTEXT, ACK]);
    assert!(!Client(client.0.clone()).go("rom").1.contexts.allocation, "chosen for another export");
    assert!(Client(client.0.clone()).go("disk").1.contexts.allocation);
    assert_eq!(client.replies(code::SET_META_CONTEXT, &contexts("nobody", &[])), [UNKNOWN]);
    assert!(!client.go("disk").1.contexts.allocation, "a failure undoes the choice before");
}

#[test]
fn extended_headers_take_precedence_and_nothing_is_agreed_on_twice() {
    let mut client = Client::new(3);
    assert_eq!(client.replies(code::STRUCTURED_REPLY, b""), [ACK]);
    assert_eq!(client.replies(code::STRUCTURED_REPLY, b""), [INVALID]);
    assert_eq!(client.replies(code::EXTENDED_HEADERS, b""), [ACK]);
    assert_eq!(client.replies(code::EXTENDED_HEADERS, b""), [INVALID]);
    assert_eq!(client.replies(code::STRUCTURED_REPLY, b""), [EXTENDED]);
    assert_eq!(Client(client.0.clone()).go("disk").1.mode, ReplyMode::Extended);
    let (_, next) = client.option(code::EXPORT_NAME, b"disk");
    assert!(matches!(next, Err(HandshakeError::Refused(_))));
}

#[test]
fn the_old_way_to_an_export() {
    for (flags, len) in [(1, 10 + 124), (3, 10), (0, 10 + 124), (2, 10)] {
        let mut out = Vec::new();
        let next = Client::new(flags).0.option(code::EXPORT_NAME, b"disk", &exports(), &mut out);
        assert!(matches!(next, Ok(Next::Transmission(0, _))), "{next:?}");
        assert_eq!((out.len(), &out[..8]), (len, &(1_u64 << 20).to_be_bytes()[..]));
        let flags = u16::from_be_bytes([out[8], out[9]]);
        assert_eq!(flags & (flag::SEND_DF | flag::READ_ONLY), 0);
    }
    let (_, next) = Client::new(3).option(code::EXPORT_NAME, b"nobody");
    assert!(matches!(next, Err(HandshakeError::Refused(_))));
    let (_, next) = Client::new(0).option(code::LIST, b"");
    assert_eq!(next, Err(HandshakeError::NotFixed(code::LIST)));
    assert_eq!(Negotiation::default().client_flags(4), Err(HandshakeError::Flags(4)));
}

fn agreed(mode: ReplyMode, read_only: bool) -> Agreed {
    Agreed {
        size: 1 << 30,
        read_only,
        mode,
        contexts: Contexts { allocation: true, ..Contexts::default() },
    }
}

fn header(command: CommandType, flags: u16, offset: u64, len: u64) -> RequestHeader {
    RequestHeader { flags, command, cookie: 1, offset, len }
}

#[test]
fn what_cannot_be_done_is_refused_with_the_right_error() {
    use CommandType::{BlockStatus, Cache, Flush, Read, Trim, Unknown, Write, WriteZeroes};
    let (simple, rest) = (ReplyMode::Simple, [ReplyMode::Structured, ReplyMode::Extended]);
    let end = 1 << 30;
    let refused = |agreed: Agreed, header| match agreed.judge(&header) {
        Verdict::Refuse { error, payload } => (error, payload),
        other => panic!("{header:?}: {other:?}"),
    };
    for mode in [simple].into_iter().chain(rest) {
        let (disk, rom) = (agreed(mode, false), agreed(mode, true));
        for (agreed, header, error, payload) in [
            (rom, header(Write, 0, 0, 512), NbdError::Perm, 512),
            (rom, header(Trim, 0, 0, 512), NbdError::Perm, 0),
            (rom, header(WriteZeroes, 0, 0, 512), NbdError::Perm, 0),
            (disk, header(Write, 0, end, 512), NbdError::NoSpc, 512),
            (disk, header(WriteZeroes, 0, end, 512), NbdError::NoSpc, 0),
            (disk, header(Read, 0, end, 512), NbdError::Inval, 0),
            (disk, header(Read, 0, u64::MAX - 511, 512), NbdError::Inval, 0),
            (disk, header(Trim, 0, end - 512, 1024), NbdError::Inval, 0),
            (disk, header(Cache, 0, end, 512), NbdError::Inval, 0),
            (disk, header(Read, command_flag::NO_HOLE, 0, 512), NbdError::Inval, 0),
            (disk, header(Write, command_flag::DF, 0, 512), NbdError::Inval, 512),
            (disk, header(Flush, 1 << 12, 0, 0), NbdError::Inval, 0),
            (disk, header(Unknown(99), 0, 0, 512), NbdError::Inval, 0),
            (disk, header(BlockStatus, 0, 0, 0), NbdError::Inval, 0),
        ] {
            assert_eq!(refused(agreed, header), (error, payload), "{mode:?} {header:?}");
        }
        let too_long = header(Read, 0, 0, u64::from(MAX_PAYLOAD) + 512);
        let error = if mode == simple { NbdError::Inval } else { NbdError::Overflow };
        assert_eq!(refused(disk, too_long).0, error);
        let too_long = header(Write, 0, 0, u64::from(MAX_PAYLOAD) + 512);
        assert_eq!(disk.judge(&too_long), Verdict::TooLong);
    }
    assert_eq!(
        refused(agreed(simple, false), header(Read, command_flag::DF, 0, 512)).0,
        NbdError::Inval
    );
    let without = Agreed { contexts: Contexts::default(), ..agreed(ReplyMode::Structured, false) };
    assert_eq!(refused(without, header(BlockStatus, 0, 0, 512)).0, NbdError::Inval);
    // A payload where there should be none is taken, and then refused.
    let extended = agreed(ReplyMode::Extended, false);
    let with_payload = header(Read, command_flag::PAYLOAD_LEN, 0, 512);
    assert_eq!(refused(extended, with_payload), (NbdError::Inval, 512));
}

#[test]
fn what_can_be_done_is() {
    use CommandType::{Disconnect, Flush, Read, Write, WriteZeroes};
    let disk = agreed(ReplyMode::Extended, false);
    let (offset, len) = (512, 1024);
    let doing = |header| match disk.judge(&header) {
        Verdict::Do(command) => command,
        other => panic!("{header:?}: {other:?}"),
    };
    for (flag, in_chunks) in [(0, true), (command_flag::DF, false)] {
        let read = Command::Read { offset, len: 1024, in_chunks };
        assert_eq!(doing(header(Read, command_flag::FUA | flag, offset, len)), read);
    }
    // QEMU 10.0 leaves the flag of the payload out.
    for flags in [command_flag::PAYLOAD_LEN, 0] {
        let write = Command::Write { offset, len: 1024, fua: false };
        assert_eq!(doing(header(Write, flags, offset, len)), write);
    }
    assert_eq!(
        doing(header(WriteZeroes, command_flag::NO_HOLE | command_flag::FUA, 0, 1 << 30)),
        Command::WriteZeroes {
            offset: 0,
            len: 1 << 30,
            may_unmap: false,
            fast_only: false,
            fua: true
        }
    );
    assert_eq!(doing(header(Flush, 0, 7, 7)), Command::Flush);
    assert_eq!(doing(header(Read, 0, 512, 0)), Command::Nothing);
    assert_eq!(disk.judge(&header(Disconnect, 0, 0, 0)), Verdict::Disconnect);
}

proptest! {
    /// What passes is in range, whatever was sent; and no payload is longer than what may be.
    #[test]
    fn no_request_that_passes_leaves_the_export(
        flags in 0u16..64, command in 0u16..10, offset in any::<u64>(), len in any::<u64>(),
        near in any::<bool>(), extended in any::<bool>(), size in 0u64..1 << 40,
    ) {
        let (offset, len) = if near { (offset % (size + 2), len % (size + 2)) } else { (offset, len) };
        let mode = if extended { ReplyMode::Extended } else { ReplyMode::Structured };
        let contexts = Contexts { depth: true, ..Contexts::default() };
        let agreed = Agreed { size, read_only: false, mode, contexts };
        let header = header(command.into(), flags, offset, len);
        match agreed.judge(&header) {
            Verdict::Do(Command::Read { offset, len, .. } | Command::Write { offset, len, .. }) => {
                prop_assert!(len > 0 && len <= MAX_PAYLOAD);
                prop_assert!(offset.checked_add(len.into()).is_some_and(|end| end <= size));
            }
            Verdict::Do(
                Command::Trim { offset, len, .. }
                | Command::WriteZeroes { offset, len, .. }
                | Command::Cache { offset, len }
                | Command::BlockStatus { offset, len, .. },
            ) => {
                prop_assert!(len > 0 && offset.checked_add(len).is_some_and(|end| end <= size));
            }
            Verdict::Refuse { payload, .. } => prop_assert!(payload <= MAX_PAYLOAD),
            _ => {}
        }
    }

    /// Whatever a client sends, it is answered or sent away.
    #[test]
    fn any_option_is_answered(
        flags in 0u32..4,
        options in prop::collection::vec((0u32..13, prop::collection::vec(any::<u8>(), 0..40)), 1..20),
    ) {
        let mut client = Client::new(flags);
        for (option, data) in options {
            let (replies, next) = client.option(option, &data);
            match next {
                Ok(Next::Option | Next::Leave) => prop_assert!(!replies.is_empty()),
                _ => break,
            }
        }
    }
}

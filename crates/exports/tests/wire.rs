//! The codec against the message layouts of the `vhost` crate, and against anything at all.

use std::mem::discriminant;
use std::os::fd::{AsRawFd, OwnedFd};

use exports::vhost_user::wire::{
    ConfigWrite, HEADER_LEN, Header, MAX_CONFIG, MAX_PAYLOAD, MAX_TABLE_REGIONS, Message, RegionId,
    Reply, Request, VringAddr, WireError, parse, request_name,
};
use nix::sys::eventfd::EventFd;
use proptest::prelude::*;
use vhost::vhost_user::message::{
    FrontendReq, VhostUserConfig, VhostUserConfigFlags, VhostUserMemory, VhostUserMemoryRegion,
    VhostUserSingleMemoryRegion, VhostUserU64, VhostUserVringAddr, VhostUserVringAddrFlags,
    VhostUserVringState,
};
use vm_memory::ByteValued;

fn fds(count: usize) -> Vec<OwnedFd> {
    (0..count).map(|_| EventFd::new().unwrap().into()).collect()
}

/// A whole message; `flags` beside the version.
fn message(code: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(code.to_ne_bytes());
    bytes.extend((1 | flags).to_ne_bytes());
    bytes.extend((payload.len() as u32).to_ne_bytes());
    bytes.extend(payload);
    bytes
}

fn parsed(request: FrontendReq, payload: &[u8], count: usize) -> Result<Message, WireError> {
    parse(&message(request.into(), 0, payload), fds(count)).map(|(_, message)| message)
}

fn body(value: &impl ByteValued) -> &[u8] {
    value.as_slice()
}

#[test]
fn requests_have_the_numbers_and_names_of_the_oracle() {
    for &request in Request::ALL {
        let theirs = FrontendReq::try_from(request as u32).unwrap();
        let name = format!("{theirs:?}");
        // Its names for regions are its own.
        assert_eq!(name, request.name(), "{request:?}");
    }
    assert_eq!(request_name(31), "GET_INFLIGHT_FD");
    assert_eq!(request_name(4711), "request 4711");
}

#[test]
fn headers() {
    let header = |code, flags, size: u32| {
        let mut bytes = message(code, flags, &[]);
        bytes[8..].copy_from_slice(&size.to_ne_bytes());
        Header::parse(bytes.try_into().unwrap())
    };
    let ok = Header { code: 1, need_reply: true, payload_len: 0 };
    assert_eq!(header(1, 8, 0), Ok(ok));
    assert_eq!(header(1, 0, 0), Ok(Header { need_reply: false, ..ok }));
    // A reply; version 3; a flag of no meaning.
    assert_eq!(header(1, 4, 0), Err(WireError::Flags(5)));
    assert_eq!(header(1, 2, 0), Err(WireError::Flags(3)));
    assert_eq!(header(1, 16, 0), Err(WireError::Flags(17)));
    let version_0 = [0; HEADER_LEN];
    assert_eq!(Header::parse(version_0), Err(WireError::Flags(0)));
    let longest = MAX_PAYLOAD as u32;
    assert_eq!(header(1, 0, longest).unwrap().payload_len, MAX_PAYLOAD);
    let len = MAX_PAYLOAD + 1;
    assert_eq!(header(1, 0, longest + 1), Err(WireError::PayloadTooLong { len }));
    let len = u32::MAX as usize;
    assert_eq!(header(1, 0, u32::MAX), Err(WireError::PayloadTooLong { len }));
}

/// The shortest payload of each request, and the number of its descriptors.
fn shortest(request: Request) -> (Vec<u8>, usize) {
    let words = |words: &[u32]| (words.iter().flat_map(|word| word.to_ne_bytes()).collect(), 0);
    match request {
        Request::GetFeatures
        | Request::GetProtocolFeatures
        | Request::GetQueueNum
        | Request::GetMaxMemSlots
        | Request::GetStatus
        | Request::SetOwner
        | Request::ResetOwner
        | Request::ResetDevice => words(&[]),
        Request::SetBackendReqFd | Request::SetLogFd => (vec![], 1),
        Request::SetFeatures
        | Request::SetProtocolFeatures
        | Request::SetStatus
        | Request::SetVringBase
        | Request::GetVringBase
        | Request::SetVringEnable
        | Request::SetMemTable => words(&[0; 2]),
        Request::SetVringNum => words(&[0, 4]),
        Request::SetVringKick | Request::SetVringCall | Request::SetVringErr => (vec![0; 8], 1),
        Request::GetConfig | Request::SetConfig => words(&[0; 3]),
        Request::SetLogBase => (vec![0; 16], 1),
        Request::GetInflightFd => words(&[0, 0, 0, 0, 4 << 16]),
        Request::SetInflightFd => (words(&[0, 0, 0, 0, 4 << 16]).0, 1),
        Request::AddMemReg => (vec![0; 40], 1),
        Request::SetVringAddr | Request::RemMemReg => words(&[0; 10]),
    }
}

#[test]
fn payloads_are_long_enough_and_what_follows_is_ignored() {
    for &request in Request::ALL {
        let (payload, count) = shortest(request);
        for len in 0..payload.len() {
            let error =
                Message::parse(request as u32, &payload[..len], fds(count)).expect_err("too short");
            let least = payload.len();
            assert_eq!(error, WireError::PayloadLength { len, least }, "{request:?}");
        }
        let got = Message::parse(request as u32, &payload, fds(count)).unwrap();
        for len in [payload.len() + 1, MAX_PAYLOAD] {
            let mut longer = payload.clone();
            longer.resize(len, 0xff);
            let padded = Message::parse(request as u32, &longer, fds(count)).unwrap();
            match padded {
                Message::GetInflightFd { num_queues: 0, queue_size: 4, payload_len } => {
                    assert_eq!(payload_len, len, "the reply is as long as the request");
                }
                _ if count == 0 => assert_eq!(format!("{padded:?}"), format!("{got:?}")),
                // Numbers of descriptors differ.
                _ => assert_eq!(discriminant(&padded), discriminant(&got)),
            }
        }
    }
}

/// SPDK's front end sends 256 bytes of configuration space, whatever the size.
#[test]
fn what_follows_the_written_configuration_is_not_written() {
    let config = VhostUserConfig::new(32, 1, VhostUserConfigFlags::empty());
    let payload = [body(&config), &[7; 1], &[9; 255]].concat();
    let written = parsed(FrontendReq::SET_CONFIG, &payload, 0).unwrap();
    let Message::SetConfig { offset: 32, data, writer: ConfigWrite::Driver } = &written else {
        panic!("{written:?}")
    };
    assert_eq!(data, &[7]);
    let read = parsed(FrontendReq::GET_CONFIG, &payload, 0).unwrap();
    assert!(matches!(read, Message::GetConfig { offset: 32, size: 1, flags: 0 }), "{read:?}");
}

#[test]
fn a_message_cut_short_or_with_something_after_it_is_none() {
    let bytes = message(2, 0, &[0; 8]);
    for len in 0..bytes.len() {
        let error = parse(&bytes[..len], Vec::new()).unwrap_err();
        assert!(matches!(error, WireError::PayloadLength { .. }), "{len}: {error}");
    }
    let more = [bytes.as_slice(), &[0]].concat();
    assert_eq!(parse(&more, Vec::new()).unwrap_err(), WireError::Surplus(1));
}

#[test]
fn fields_that_cannot_be_are_refused() {
    let state = |num| VhostUserVringState::new(0, num);
    let field = |result: Result<Message, WireError>| {
        let error = result.unwrap_err();
        assert!(matches!(error, WireError::Field { .. }), "{error}");
    };
    for num in [0, 3, 1000, 65536, u32::MAX] {
        field(parsed(FrontendReq::SET_VRING_NUM, body(&state(num)), 0));
    }
    field(parsed(FrontendReq::SET_VRING_BASE, body(&state(65536)), 0));
    field(parsed(FrontendReq::SET_VRING_ENABLE, body(&state(2)), 0));
    for value in [0x200, 1 << 63] {
        for request in
            [FrontendReq::SET_VRING_KICK, FrontendReq::SET_VRING_CALL, FrontendReq::SET_VRING_ERR]
        {
            field(parsed(request, body(&VhostUserU64 { value }), 1));
        }
    }
    field(parsed(FrontendReq::SET_STATUS, body(&VhostUserU64 { value: 0x100 }), 0));
    let addr = |desc, used, avail| {
        let flags = VhostUserVringAddrFlags::empty();
        VhostUserVringAddr::new(0, flags, desc, used, avail, 0)
    };
    for addr in [addr(4, 0, 0), addr(0, 2, 0), addr(0, 0, 1)] {
        field(parsed(FrontendReq::SET_VRING_ADDR, body(&addr), 0));
    }
    let mut unknown_flag = addr(0, 0, 0);
    unknown_flag.flags = 2;
    field(parsed(FrontendReq::SET_VRING_ADDR, body(&unknown_flag), 0));
    let many = VhostUserMemory::new(MAX_TABLE_REGIONS as u32 + 1);
    field(parsed(FrontendReq::SET_MEM_TABLE, body(&many), 1));
    field(parsed(FrontendReq::SET_MEM_TABLE, body(&VhostUserMemory::new(u32::MAX)), 1));
    // More than comes, and more than is taken.
    for (size, len) in [(5, 4), (u32::MAX, 4), (MAX_CONFIG as u32 + 1, MAX_CONFIG + 1)] {
        let config = VhostUserConfig::new(0, size, VhostUserConfigFlags::empty());
        let payload = [body(&config), &vec![0; len][..]].concat();
        field(parsed(FrontendReq::SET_CONFIG, &payload, 0));
        field(parsed(FrontendReq::GET_CONFIG, &payload, 0));
    }
    let config = VhostUserConfig::new(0, 1, VhostUserConfigFlags::LIVE_MIGRATION);
    field(parsed(FrontendReq::SET_CONFIG, &[body(&config), &[0]].concat(), 0));
}

#[test]
fn each_request_has_its_number_of_descriptors() {
    let wrong = |result: Result<Message, WireError>, got, wanted| {
        assert_eq!(result.unwrap_err(), WireError::Descriptors { got, wanted });
    };
    let index = VhostUserU64 { value: 7 };
    let polled = VhostUserU64 { value: 0x107 };
    for request in
        [FrontendReq::SET_VRING_KICK, FrontendReq::SET_VRING_CALL, FrontendReq::SET_VRING_ERR]
    {
        wrong(parsed(request, body(&index), 0), 0, 1);
        wrong(parsed(request, body(&index), 2), 2, 1);
        wrong(parsed(request, body(&polled), 1), 1, 0);
        parsed(request, body(&index), 1).unwrap();
        parsed(request, body(&polled), 0).unwrap();
    }
    wrong(parsed(FrontendReq::GET_FEATURES, &[], 1), 1, 0);
    wrong(parsed(FrontendReq::SET_BACKEND_REQ_FD, &[], 0), 0, 1);
    wrong(parsed(FrontendReq::SET_BACKEND_REQ_FD, &[], 2), 2, 1);
    parsed(FrontendReq::SET_BACKEND_REQ_FD, &[], 1).unwrap();
    let region = VhostUserSingleMemoryRegion::new(0, 4096, 0, 0);
    wrong(parsed(FrontendReq::ADD_MEM_REG, body(&region), 0), 0, 1);
    wrong(parsed(FrontendReq::ADD_MEM_REG, body(&region), 2), 2, 1);
    // One that comes by mistake is forgiven.
    parsed(FrontendReq::REM_MEM_REG, body(&region), 0).unwrap();
    parsed(FrontendReq::REM_MEM_REG, body(&region), 1).unwrap();
    wrong(parsed(FrontendReq::REM_MEM_REG, body(&region), 2), 1, 0);
    let one = VhostUserMemoryRegion::new(0, 4096, 0, 0);
    let table = [body(&VhostUserMemory::new(1)), body(&one)].concat();
    wrong(parsed(FrontendReq::SET_MEM_TABLE, &table, 0), 0, 1);
    wrong(parsed(FrontendReq::SET_MEM_TABLE, &table, 2), 2, 1);
}

/// That descriptors of refused messages are closed shows where their numbers are free again.
#[test]
fn descriptors_of_refused_messages_are_closed() {
    let (reader, writer) = nix::unistd::pipe().unwrap();
    let bytes = message(1, 0, &[]);
    parse(&bytes, vec![writer]).unwrap_err();
    // The pipe's last writer is gone: its end, not EAGAIN or a wait.
    assert_eq!(nix::unistd::read(&reader, &mut [0]), Ok(0));
}

/// Messages own descriptors, and so are not compared by themselves.
fn same(got: &Message, want: &Message) -> Result<(), TestCaseError> {
    prop_assert_eq!(format!("{got:?}"), format!("{want:?}"));
    Ok(())
}

proptest! {
    #[test]
    fn nothing_makes_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), count in 0..4) {
        let _ = parse(&bytes, fds(count as usize));
    }

    #[test]
    fn no_payload_of_a_request_makes_it_panic(
        code in 0u32..48,
        payload in prop::collection::vec(any::<u8>(), 0..300),
        count in 0..4,
    ) {
        let _ = parse(&message(code, 8, &payload), fds(count as usize));
    }

    #[test]
    fn numbers_are_those_of_the_oracle(value: u64) {
        for (request, want) in [
            (FrontendReq::SET_FEATURES, Message::SetFeatures(value)),
            (FrontendReq::SET_PROTOCOL_FEATURES, Message::SetProtocolFeatures(value)),
        ] {
            let got = parsed(request, body(&VhostUserU64 { value }), 0).unwrap();
            same(&got, &want)?;
        }
    }

    #[test]
    fn ring_states_are_those_of_the_oracle(index: u32, base: u16, log in 0u32..=15) {
        let state = VhostUserVringState::new(index, base.into());
        let got = parsed(FrontendReq::SET_VRING_BASE, body(&state), 0).unwrap();
        same(&got, &Message::SetVringBase { index, base })?;
        let got = parsed(FrontendReq::GET_VRING_BASE, body(&state), 0).unwrap();
        same(&got, &Message::GetVringBase { index })?;
        let state = VhostUserVringState::new(index, 1 << log);
        let got = parsed(FrontendReq::SET_VRING_NUM, body(&state), 0).unwrap();
        same(&got, &Message::SetVringNum { index, num: 1 << log })?;
        let state = VhostUserVringState::new(index, log & 1);
        let got = parsed(FrontendReq::SET_VRING_ENABLE, body(&state), 0).unwrap();
        same(&got, &Message::SetVringEnable { index, enable: log & 1 == 1 })?;
    }

    #[test]
    fn ring_addresses_are_those_of_the_oracle(
        index: u32, log: bool, desc: u64, used: u64, avail: u64, log_addr: u64,
    ) {
        let (desc, used, avail) = (desc & !7, used & !3, avail & !1);
        let flags = match log {
            true => VhostUserVringAddrFlags::VHOST_VRING_F_LOG,
            false => VhostUserVringAddrFlags::empty(),
        };
        let theirs = VhostUserVringAddr::new(index, flags, desc, used, avail, log_addr);
        let log = log.then_some(log_addr);
        match parsed(FrontendReq::SET_VRING_ADDR, body(&theirs), 0).unwrap() {
            Message::SetVringAddr { index: i, addr } => {
                prop_assert_eq!((i, addr), (index, VringAddr { desc, avail, used, log }));
            }
            other => prop_assert!(false, "{:?}", other),
        }
    }

    #[test]
    fn regions_are_those_of_the_oracle(
        fields in prop::collection::vec(any::<[u64; 4]>(), 1..=MAX_TABLE_REGIONS),
    ) {
        let mut payload = body(&VhostUserMemory::new(fields.len() as u32)).to_vec();
        for &[guest, size, user, offset] in &fields {
            payload.extend(body(&VhostUserMemoryRegion::new(guest, size, user, offset)));
        }
        let bytes = message(FrontendReq::SET_MEM_TABLE.into(), 0, &payload);
        let descriptors = fds(fields.len());
        let numbers: Vec<_> = descriptors.iter().map(|fd| fd.as_raw_fd()).collect();
        let (_, table) = parse(&bytes, descriptors).unwrap();
        let Message::SetMemTable(regions) = table else { panic!("{table:?}") };
        let got: Vec<_> = regions
            .iter()
            .map(|r| [r.guest_addr, r.size, r.user_addr, r.mmap_offset])
            .collect();
        prop_assert_eq!(&got, &fields);
        let got: Vec<_> = regions.iter().map(|r| r.fd.as_raw_fd()).collect();
        prop_assert_eq!(got, numbers);

        let [guest_addr, size, user_addr, offset] = fields[0];
        let one = VhostUserSingleMemoryRegion::new(guest_addr, size, user_addr, offset);
        match parsed(FrontendReq::ADD_MEM_REG, body(&one), 1).unwrap() {
            Message::AddMemReg(r) => {
                prop_assert_eq!([r.guest_addr, r.size, r.user_addr, r.mmap_offset], fields[0]);
            }
            other => prop_assert!(false, "{:?}", other),
        }
        match parsed(FrontendReq::REM_MEM_REG, body(&one), 0).unwrap() {
            Message::RemMemReg(id) => {
                prop_assert_eq!(id, RegionId { guest_addr, size, user_addr });
            }
            other => prop_assert!(false, "{:?}", other),
        }
    }

    #[test]
    fn config_space_is_that_of_the_oracle(
        offset: u32, bytes in prop::collection::vec(any::<u8>(), 0..=MAX_CONFIG),
    ) {
        let size = bytes.len() as u32;
        for (flags, want) in [
            (VhostUserConfigFlags::empty(), ConfigWrite::Driver),
            (VhostUserConfigFlags::WRITABLE, ConfigWrite::Migration),
        ] {
            let theirs = VhostUserConfig::new(offset, size, flags);
            let payload = [body(&theirs), &bytes].concat();
            match parsed(FrontendReq::SET_CONFIG, &payload, 0).unwrap() {
                Message::SetConfig { offset: o, data, writer } => {
                    prop_assert_eq!((o, &data, writer), (offset, &bytes, want));
                }
                other => prop_assert!(false, "{:?}", other),
            }
            match parsed(FrontendReq::GET_CONFIG, &payload, 0).unwrap() {
                Message::GetConfig { offset: o, size: s, flags: f } => {
                    prop_assert_eq!((o, s, f), (offset, size, flags.bits()));
                }
                other => prop_assert!(false, "{:?}", other),
            }
        }
    }

    #[test]
    fn replies_are_read_by_the_oracle(
        code: u32, value: u64, index: u32, num: u16, data in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        let split = |reply: Reply| {
            let bytes = reply.encode(code);
            let (header, payload) = bytes.split_at(HEADER_LEN);
            // Version 1 and the reply flag.
            let want = [code, 5, payload.len() as u32].map(u32::to_ne_bytes).concat();
            assert_eq!(header, want);
            payload.to_vec()
        };
        let payload = split(Reply::U64(value));
        prop_assert_eq!(VhostUserU64::from_slice(&payload).unwrap().value, value);
        let payload = split(Reply::VringState { index, num: num.into() });
        let state = VhostUserVringState::from_slice(&payload).unwrap();
        let (i, n) = (state.index, state.num);
        prop_assert_eq!((i, n), (index, num.into()));
        let payload = split(Reply::Config { offset: index, flags: 1, data: data.clone() });
        let (config, rest) = payload.split_at(12);
        let config = VhostUserConfig::from_slice(config).unwrap();
        let (o, s, f) = (config.offset, config.size, config.flags);
        prop_assert_eq!((o, s as usize, f), (index, data.len(), 1));
        prop_assert_eq!(rest, data);
        prop_assert_eq!(split(Reply::Nothing), Vec::<u8>::new());
    }
}

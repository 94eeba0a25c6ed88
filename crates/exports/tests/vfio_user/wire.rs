//! The codec: whatever bytes come, what is made of them is valid.

use exports::vfio_user::wire::{
    DmaMap, DmaRange, DmaUnmap, HEADER_LEN, Header, IrqAction, IrqData, MAX_DATA, MAX_PAYLOAD,
    Message, Reply, SetIrqs, WireError, parse,
};
use proptest::prelude::*;

use crate::vfio_user::client::{dma_map, dma_unmap, message, region, region_read, set_irqs, words};

fn parse_payload(command: u16, payload: &[u8]) -> Result<String, WireError> {
    let bytes = message(7, command, 0, payload);
    let (header, message) = parse(&bytes, Vec::new())?;
    assert_eq!((header.id, header.command, header.payload_len), (7, command, payload.len()));
    Ok(format!("{message:?}"))
}

#[test]
fn headers_that_are_none() {
    let header = |size: u32, flags: u32| {
        let mut bytes = message(1, 1, flags, &[]);
        bytes[4..8].copy_from_slice(&size.to_ne_bytes());
        Header::parse(bytes[..HEADER_LEN].try_into().unwrap())
    };
    let most = (HEADER_LEN + MAX_PAYLOAD) as u32;
    for size in [0, 15, most + 1, u32::MAX] {
        assert_eq!(header(size, 0), Err(WireError::Size(size)));
    }
    assert_eq!(
        header(most, 0x10).unwrap(),
        Header { id: 1, command: 1, no_reply: true, payload_len: MAX_PAYLOAD }
    );
    for flags in [1, 2, 0x21] {
        assert_eq!(header(16, flags), Err(WireError::NotCommand(flags)), "a reply is no command");
    }
}

/// Every prefix of a payload is refused, and what follows one too, except in structures with an `argsz`.
#[test]
fn payloads_have_their_lengths() {
    let writes = [1u64.to_ne_bytes().to_vec(), region(5, 0, &[0; 8])].concat();
    for (command, payload) in [
        (2, dma_map(0, 4096)),
        (3, dma_unmap(0, 4096)),
        (4, words(&[16, 0, 0, 0])),
        (5, words(&[32, 0, 1, 0, 0, 0, 0, 0])),
        (7, words(&[16, 0, 1, 0])),
        (8, set_irqs(0x21, 1, 0, 1)),
        (9, region_read(5, 0, 4)),
        (10, region(5, 0, &[1; 8])),
        (13, vec![]),
        (15, writes),
    ] {
        parse_payload(command, &payload).unwrap();
        for len in 0..payload.len() {
            parse_payload(command, &payload[..len]).expect_err("too short");
        }
        let longer = parse_payload(command, &[&payload[..], &[0]].concat());
        assert_eq!(longer.is_ok(), matches!(command, 2..=5 | 7 | 8), "{command}: {longer:?}");
    }
    // Versions end with a text, or without one.
    for (text, is_good) in [
        (&b""[..], true),
        (b"\0", true),
        (b"{}\0", true),
        (b"{}", false),
        (b"{\0}\0", false),
        (b"\xff\0", false),
    ] {
        assert_eq!(parse_payload(1, &[&[0; 4], text].concat()).is_ok(), is_good, "{text:?}");
    }
}

#[test]
fn interrupts_are_set_by_one_action_with_one_kind_of_data() {
    for flags in 0..128 {
        let kind = flags & 7;
        let action = flags & 0x38;
        let payload = match kind {
            2 => [set_irqs(flags, 1, 0, 2), vec![0, 1]].concat(),
            _ => set_irqs(flags, 1, 0, 2),
        };
        let is_good = matches!(kind, 1 | 2 | 4) && matches!(action, 8 | 16 | 32) && flags < 64;
        assert_eq!(parse_payload(8, &payload).is_ok(), is_good, "{flags:#x}");
    }
    assert!(parse_payload(8, &set_irqs(0x21, 1, u32::MAX, 1)).is_err());
}

proptest! {
    #[test]
    fn whatever_comes_is_refused_or_valid(
        command in 0u16..18,
        payload in prop::collection::vec(prop_oneof![Just(0u8), 0u8..40, any::<u8>()], 0..80),
    ) {
        let Ok(message) = Message::parse(command, &payload, Vec::new()) else { return Ok(()) };
        match message {
            Message::DmaMap(DmaMap { range, file, .. }) => {
                prop_assert!(file.is_none() && range.size() > 0 && range.end() > range.address());
            }
            Message::DmaUnmap(DmaUnmap { range: Some(range) }) => prop_assert!(range.size() > 0),
            Message::RegionRead(read) => prop_assert!(read.count <= MAX_DATA),
            Message::RegionWrite(write) => prop_assert!(write.data.len() <= MAX_DATA),
            Message::RegionWriteMulti(writes) => {
                prop_assert_eq!(writes.iter().count(), writes.len());
                prop_assert!(writes.iter().all(|write| write.data.len() <= 8));
            }
            Message::SetIrqs(SetIrqs { range, action, data, .. }) => {
                prop_assert!(range.start <= range.end);
                match data {
                    IrqData::Bool(bools) => prop_assert_eq!(bools.len(), range.len()),
                    IrqData::EventFds(fds) => prop_assert!(fds.is_empty()),
                    IrqData::None => {}
                }
                prop_assert!(matches!(action, IrqAction::Mask | IrqAction::Unmask | IrqAction::Trigger));
            }
            Message::DmaUnmap(DmaUnmap { range: None })
            | Message::Version { .. }
            | Message::DeviceInfo
            | Message::RegionInfo { .. }
            | Message::IrqInfo(_)
            | Message::Reset
            | Message::Feature
            | Message::Unknown(_) => {}
        }
    }

    #[test]
    fn ranges_do_not_wrap(address: u64, size: u64) {
        let range = DmaRange::new(address, size);
        prop_assert_eq!(range.is_ok(), size > 0 && address.checked_add(size).is_some());
        if let Ok(range) = range {
            prop_assert!(range.overlaps(&range) && range.contains(&range));
        }
    }

    #[test]
    fn replies_say_how_long_they_are(data in prop::collection::vec(any::<u8>(), 0..100), id: u16) {
        let header = Header { id, command: 9, no_reply: false, payload_len: 16 };
        let bytes = Reply::RegionData { region: 5, offset: 8, data: data.clone() }.encode(&header);
        prop_assert_eq!(bytes.len(), HEADER_LEN + 16 + data.len());
        let mut expected = message(id, 9, 1, &region(5, 8, &data));
        expected[8] = 1;
        prop_assert_eq!(bytes, expected);
    }
}

//! REPORT SUPPORTED OPERATION CODES (SPC-4, 6.35): all commands, and the significant bits of their CDBs.

use super::cdb::{
    READ_CAPACITY_16, REPORT_SUPPORTED_OPERATION_CODES, Reported,
    opcode::{
        INQUIRY, MAINTENANCE_IN, MODE_SELECT_6, MODE_SELECT_10, MODE_SENSE_6, MODE_SENSE_10,
        READ_6, READ_10, READ_12, READ_16, READ_CAPACITY_10, REPORT_LUNS, REQUEST_SENSE,
        SERVICE_ACTION_IN_16, START_STOP_UNIT, SYNCHRONIZE_CACHE_10, SYNCHRONIZE_CACHE_16,
        TEST_UNIT_READY, UNMAP, VERIFY_10, VERIFY_12, VERIFY_16, WRITE_6, WRITE_10, WRITE_12,
        WRITE_16, WRITE_AND_VERIFY_10, WRITE_AND_VERIFY_12, WRITE_AND_VERIFY_16, WRITE_SAME_10,
        WRITE_SAME_16,
    },
};
use super::sense::Sense;

/// A byte with all bits significant.
const F: u8 = 0xff;

/// CDB usage maps of all commands. The first byte is the operation code, the second has the service action of
/// operation codes with one.
#[rustfmt::skip]
const COMMANDS: [&[u8]; 31] = [
    &[TEST_UNIT_READY, 0, 0, 0, 0, 0],
    &[REQUEST_SENSE, 0x01, 0, 0, F, 0],
    &[READ_6, 0x1f, F, F, F, 0],
    &[WRITE_6, 0x1f, F, F, F, 0],
    &[INQUIRY, 0x01, F, F, F, 0],
    &[MODE_SELECT_6, 0x11, 0, 0, F, 0],
    &[MODE_SENSE_6, 0x08, F, F, F, 0],
    &[START_STOP_UNIT, 0x01, 0, 0, 0xf7, 0],
    &[READ_CAPACITY_10, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    &[READ_10, 0x18, F, F, F, F, 0, F, F, 0],
    &[WRITE_10, 0x18, F, F, F, F, 0, F, F, 0],
    &[WRITE_AND_VERIFY_10, 0x16, F, F, F, F, 0, F, F, 0],
    &[VERIFY_10, 0x16, F, F, F, F, 0, F, F, 0],
    &[SYNCHRONIZE_CACHE_10, 0x02, F, F, F, F, 0, F, F, 0],
    &[WRITE_SAME_10, 0x08, F, F, F, F, 0, F, F, 0],
    &[UNMAP, 0x01, 0, 0, 0, 0, 0, F, F, 0],
    &[MODE_SELECT_10, 0x11, 0, 0, 0, 0, 0, F, F, 0],
    &[MODE_SENSE_10, 0x18, F, F, 0, 0, 0, F, F, 0],
    &[READ_16, 0x18, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0],
    &[WRITE_16, 0x18, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0],
    &[WRITE_AND_VERIFY_16, 0x16, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0],
    &[VERIFY_16, 0x16, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0],
    &[SYNCHRONIZE_CACHE_16, 0x02, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0],
    &[WRITE_SAME_16, 0x09, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0],
    &[SERVICE_ACTION_IN_16, READ_CAPACITY_16, 0, 0, 0, 0, 0, 0, 0, 0, F, F, F, F, 0, 0],
    &[REPORT_LUNS, 0, F, 0, 0, 0, F, F, F, F, 0, 0],
    &[MAINTENANCE_IN, REPORT_SUPPORTED_OPERATION_CODES, 0x87, F, F, F, F, F, F, F, 0, 0],
    &[READ_12, 0x18, F, F, F, F, F, F, F, F, 0, 0],
    &[WRITE_12, 0x18, F, F, F, F, F, F, F, F, 0, 0],
    &[WRITE_AND_VERIFY_12, 0x16, F, F, F, F, F, F, F, F, 0, 0],
    &[VERIFY_12, 0x16, F, F, F, F, F, F, F, F, 0, 0],
];

/// The service action of a command, if its operation code has them.
fn action(usage: &[u8]) -> Option<u16> {
    match usage {
        [SERVICE_ACTION_IN_16 | MAINTENANCE_IN, action, ..] => Some((*action).into()),
        _ => None,
    }
}

/// A command timeouts descriptor without values (SPC-4, 6.35.4).
const TIMEOUTS: [u8; 12] = [0, 0x0a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// The data that the command returns.
pub(crate) fn report(what: Reported, timeouts: bool) -> Result<Vec<u8>, Sense> {
    let (code, wanted) = match what {
        Reported::All => return Ok(all(timeouts)),
        Reported::Opcode(code) => (code, None),
        Reported::Action(code, action) | Reported::Either(code, action) => (code, Some(action)),
    };
    let of_code = || COMMANDS.iter().copied().filter(move |usage| usage.first() == Some(&code));
    let has_actions = of_code().any(|usage| action(usage).is_some());
    let wrong_question = match what {
        Reported::Opcode(_) => has_actions,
        Reported::Action(..) => !has_actions && of_code().next().is_some(),
        Reported::All | Reported::Either(..) => false,
    };
    if wrong_question {
        return Err(Sense::invalid_field(2));
    }
    let found = of_code().find(|usage| match action(usage) {
        Some(action) => wanted == Some(action),
        // Without service actions, the requested one must be 0.
        None => wanted.is_none_or(|action| action == 0),
    });
    Ok(one(found, timeouts))
}

fn all(timeouts: bool) -> Vec<u8> {
    let mut data = vec![0; 4];
    for usage in COMMANDS {
        let [code, ..] = usage else { continue };
        let flags = u8::from(timeouts) << 1 | u8::from(action(usage).is_some());
        data.extend([*code, 0]);
        data.extend(action(usage).unwrap_or(0).to_be_bytes());
        data.extend([0, flags]);
        data.extend((usage.len() as u16).to_be_bytes());
        if timeouts {
            data.extend(TIMEOUTS);
        }
    }
    let len = (data.len() - 4) as u32;
    data[..4].copy_from_slice(&len.to_be_bytes());
    data
}

fn one(usage: Option<&[u8]>, timeouts: bool) -> Vec<u8> {
    let Some(usage) = usage else {
        // SUPPORT: not supported.
        return vec![0, 0x01, 0, 0];
    };
    // SUPPORT: as the standard says.
    let mut data = vec![0, u8::from(timeouts) << 7 | 0x03];
    data.extend((usage.len() as u16).to_be_bytes());
    data.extend(usage);
    if timeouts {
        data.extend(TIMEOUTS);
    }
    data
}

#[cfg(test)]
mod tests {
    use super::super::cdb::parse;
    use super::super::wire::CDB_SIZE;
    use super::*;

    /// A usage map with only byte `n` set to `value`.
    fn with(usage: &[u8], n: usize, value: u8) -> [u8; CDB_SIZE] {
        let mut cdb = [0; CDB_SIZE];
        cdb[0] = usage[0];
        if let Some(action) = action(usage) {
            cdb[1] = action as u8;
        }
        cdb[n] |= value;
        cdb
    }

    #[test]
    fn the_table_has_exactly_the_supported_commands() {
        for code in 0..=u8::MAX {
            let listed: Vec<_> = COMMANDS.iter().filter(|usage| usage[0] == code).collect();
            for service_action in 0..32u8 {
                let mut cdb = [0; CDB_SIZE];
                cdb[0] = code;
                cdb[1] = service_action;
                let known = match listed.as_slice() {
                    [] => false,
                    usages => usages.iter().any(|usage| {
                        action(usage).is_none_or(|action| action == u16::from(service_action))
                    }),
                };
                let refused = match parse(&cdb) {
                    Err(Sense::INVALID_OPCODE) => true,
                    // An operation code with service actions, but not this service action.
                    Err(sense) => {
                        sense == Sense::invalid_field(1)
                            && listed.iter().any(|usage| action(usage).is_some())
                    }
                    Ok(_) => false,
                };
                assert_eq!(known, !refused, "{code:#x} {service_action:#x}");
            }
        }
    }

    #[test]
    fn insignificant_bits_change_nothing() {
        for usage in COMMANDS {
            let plain = parse(&with(usage, 0, 0));
            for n in 1..usage.len() - 1 {
                if n == 1 && action(usage).is_some() {
                    continue;
                }
                for bit in 0..8 {
                    let cdb = with(usage, n, 1 << bit);
                    let counts = usage[n] & 1 << bit != 0;
                    let same = parse(&cdb) == plain;
                    // An insignificant bit is ignored or refused.
                    let refused = parse(&cdb) == Err(Sense::invalid_field(n as u16));
                    assert!(counts || same || refused, "{usage:x?} byte {n} bit {bit}");
                }
            }
        }
    }

    #[test]
    fn one_command_is_reported_by_its_usage_map() {
        let unmap = [0, 3, 0, 10, 0x42, 1, 0, 0, 0, 0, 0, F, F, 0];
        assert_eq!(report(Reported::Opcode(0x42), false).unwrap(), unmap);
        assert_eq!(report(Reported::Either(0x42, 0), false).unwrap(), unmap);
        let capacity = report(Reported::Action(0x9e, 0x10), true).unwrap();
        assert_eq!(capacity[..6], [0, 0x83, 0, 16, 0x9e, 0x10]);
        assert_eq!(capacity[20..], TIMEOUTS);
        assert_eq!(report(Reported::Opcode(0x5e), false).unwrap(), [0, 1, 0, 0], "reservations");
        assert_eq!(report(Reported::Action(0x9e, 0x11), false).unwrap(), [0, 1, 0, 0]);
        assert_eq!(report(Reported::Opcode(0x9e), false), Err(Sense::invalid_field(2)));
        assert_eq!(report(Reported::Action(0x42, 0), false), Err(Sense::invalid_field(2)));
    }

    #[test]
    fn all_commands_are_reported_in_descriptors_of_one_size() {
        for (timeouts, size) in [(false, 8), (true, 20)] {
            let data = report(Reported::All, timeouts).unwrap();
            assert_eq!(data.len(), 4 + size * COMMANDS.len());
            assert_eq!(data[..4], (data.len() as u32 - 4).to_be_bytes());
            let inquiry = data[4..].chunks(size).find(|d| d[0] == 0x12).unwrap();
            let flags = u8::from(timeouts) * 2;
            assert_eq!(inquiry[..8], [0x12, 0, 0, 0, 0, flags, 0, 6]);
        }
    }
}

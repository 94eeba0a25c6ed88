//! Random commands against a model of the disk.

use proptest::prelude::*;

use crate::scsi::rig::{BLOCKS, Rig};

#[derive(Debug, Clone)]
enum Step {
    Read { form: usize, lba: u32, count: u8 },
    Write { form: usize, lba: u32, count: u8, value: u8 },
    Same { lba: u32, count: u16, value: u8, unmap: bool },
    Unmap { lba: u32, count: u8 },
    Flush,
}

fn step() -> impl Strategy<Value = Step> {
    let lba = || prop_oneof![0..64u32, BLOCKS - 64..BLOCKS + 8];
    prop_oneof![
        (0..4usize, lba(), 1..64u8).prop_map(|(form, lba, count)| Step::Read { form, lba, count }),
        (0..4usize, lba(), 1..64u8, any::<u8>())
            .prop_map(|(form, lba, count, value)| Step::Write { form, lba, count, value }),
        (lba(), 1..1500u16, 0..3u8, any::<bool>())
            .prop_map(|(lba, count, value, unmap)| Step::Same { lba, count, value, unmap }),
        (lba(), 0..64u8).prop_map(|(lba, count)| Step::Unmap { lba, count }),
        Just(Step::Flush),
    ]
}

/// A read or write in one of its forms.
fn transfer(write: bool, form: usize, lba: u32, count: u8) -> Vec<u8> {
    let lba = lba.to_be_bytes();
    let code = [[0x08, 0x0a], [0x28, 0x2a], [0xa8, 0xaa], [0x88, 0x8a]][form][usize::from(write)];
    match form {
        0 => vec![code, lba[1], lba[2], lba[3], count, 0],
        1 => [&[code, 0][..], &lba, &[0, 0, count, 0]].concat(),
        2 => [&[code, 0][..], &lba, &[0, 0, 0, count, 0, 0]].concat(),
        _ => [&[code, 0, 0, 0, 0, 0][..], &lba, &[0, 0, 0, count, 0, 0]].concat(),
    }
}

fn run(steps: &[Step]) {
    let mut rig = Rig::new();
    let mut model = rig.disks[0].data.borrow().clone();
    let range = |lba: u32, count: u32| {
        (lba + count <= BLOCKS).then_some(lba as usize * 512..(lba + count) as usize * 512)
    };
    for step in steps {
        let (reply, range) = match *step {
            Step::Read { form, lba, count } => {
                let cdb = transfer(false, form, lba, count);
                let reply = rig.command(0, &cdb, &[], u32::from(count) * 512);
                let range = range(lba, count.into());
                if let Some(range) = range.clone() {
                    assert_eq!(reply.data, model[range], "{step:?}");
                }
                (reply, range)
            }
            Step::Write { form, lba, count, value } => {
                let cdb = transfer(true, form, lba, count);
                let reply = rig.command(0, &cdb, &vec![value; usize::from(count) * 512], 0);
                let range = range(lba, count.into());
                if let Some(range) = range.clone() {
                    model[range].fill(value);
                }
                (reply, range)
            }
            Step::Same { lba, count, value, unmap } => {
                let [high, low] = count.to_be_bytes();
                let flags = if unmap { 8 } else { 0 };
                let cdb = [&[0x41, flags][..], &lba.to_be_bytes(), &[0, high, low, 0]].concat();
                let reply = rig.command(0, &cdb, &[value; 512], 0);
                let range = range(lba, count.into());
                if let Some(range) = range.clone() {
                    model[range].fill(value);
                }
                (reply, range)
            }
            Step::Unmap { lba, count } => {
                let mut list = vec![0, 22, 0, 16, 0, 0, 0, 0];
                list.extend(u64::from(lba).to_be_bytes());
                list.extend(u32::from(count).to_be_bytes());
                list.extend([0; 4]);
                let reply = rig.command(0, &[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], &list, 0);
                let range = range(lba, count.into());
                if let Some(range) = range.clone() {
                    model[range].fill(0xdd);
                }
                (reply, range)
            }
            Step::Flush => (rig.command(0, &[0x35], &[], 0), Some(0..0)),
        };
        match range {
            Some(_) => assert_eq!((reply.response, reply.status), (0, 0), "{step:?}"),
            None => assert_eq!(reply.code(), (5, 0x21, 0), "{step:?}"),
        }
    }
    assert!(*rig.disks[0].data.borrow() == model, "the disk is another than the model");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn a_disk_has_the_data_written_to_it(steps in prop::collection::vec(step(), 1..60)) {
        run(&steps);
    }
}

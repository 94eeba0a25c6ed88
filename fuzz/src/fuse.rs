//! Requests of a kernel to a FUSE export, and what the export makes of each: steps that change the file, and
//! requests that are answered at once or go to the node.

use block::request::Op;
use exports::fuse::FileAttributes;
use exports::fuse::session::{Todo, judge};
use exports::fuse::wire::{Answer, Invalid, MAX_DATA, MAX_REQUEST, Message, OUT_HEADER};

use crate::input::Input;

/// The most requests of an input.
const REQUESTS: usize = 64;

/// Plays the kernel.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let flags = input.u8();
    let is = |bit: u8| flags & bit != 0;
    let size = u64::from(input.u8()) * 4096;
    let file = FileAttributes::new(size, 4096, is(1), is(2), is(4));
    for _ in 0..REQUESTS {
        if input.is_empty() {
            return;
        }
        let first: [u8; MAX_REQUEST] = input.array();
        // As long as the request says, most of the time.
        let said = u32::from_ne_bytes(first[..4].try_into().expect("four bytes")) as usize;
        let received = if input.u8() == 0 { usize::from(input.u8()) } else { said };
        let bytes = &first[..received.min(MAX_REQUEST)];
        match Message::parse(bytes, received) {
            Ok(message) => {
                assert_eq!(said, received);
                carry_out(message, &file, is(8));
            }
            Err(Invalid::Header) => {}
            Err(Invalid::Arguments { unique } | Invalid::Inode { unique }) => {
                let answer = Answer::Error(nix::errno::Errno::EINVAL).encode(unique);
                assert_eq!(answer.bytes().len(), OUT_HEADER);
            }
        }
    }
}

fn carry_out(message: Message, file: &FileAttributes, through: bool) {
    let mut grown = false;
    loop {
        match judge(message.request, file, through, grown) {
            Todo::Answer(answer) => return check(answer, message.unique),
            Todo::Nothing => return,
            Todo::Describe => {
                return check(Answer::Attributes(file.get(None)), message.unique);
            }
            Todo::Node { op, offset, len, then } => {
                let end = offset.checked_add(len).expect("a range");
                assert!(end <= file.size(), "{message:?}: {offset}+{len}");
                assert!(file.writable || op.only_reads(), "{message:?}");
                match op {
                    Op::Read | Op::Write { .. } => {
                        assert!(len > 0 && len <= u64::from(MAX_DATA), "{message:?}");
                    }
                    Op::Flush => assert_eq!(end, 0),
                    Op::WriteZeroes { .. } => assert!(len > 0),
                    Op::Discard | Op::BlockStatus => panic!("{message:?}: {op:?}"),
                }
                return check(then, message.unique);
            }
            Todo::Seek { offset, end, .. } => {
                assert!(offset < end && end == file.size(), "{message:?}");
                return;
            }
            Todo::Grow(size) => {
                assert!(file.writable && !grown, "{message:?}");
                assert!(size > file.size() && size.is_multiple_of(512), "{message:?}");
                assert!(i64::try_from(size).is_ok(), "{message:?}");
                file.set_size(size);
                grown = true;
            }
            Todo::Truncate(size, _) => {
                assert!(file.writable && size.is_multiple_of(512), "{message:?}");
                file.set_size(size);
                return;
            }
        }
    }
}

fn check(answer: Answer, unique: u64) {
    let data = match answer {
        Answer::Data(len) => len as usize,
        _ => 0,
    };
    let encoded = answer.encode(unique);
    let len = u32::from_ne_bytes(encoded.bytes()[..4].try_into().expect("four bytes"));
    assert_eq!(len as usize, encoded.bytes().len() + data, "{answer:?}");
}

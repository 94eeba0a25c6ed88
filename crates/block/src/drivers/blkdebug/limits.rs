//! How a request is taken apart on its way to the node below: what the options say of lengths and
//! multiples.

use std::ops::Range;

use crate::error::OpenError;
use crate::options::BlkdebugOptions;
use crate::request::Op;

/// Longest disk there is, bytes.
const LONGEST: u64 = i64::MAX as u64;

/// The limits of a node, bytes; none is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Limits {
    pub(super) align: u64,
    max_transfer: u64,
    opt_write_zero: u64,
    max_write_zero: u64,
    pub(super) opt_discard: u64,
    max_discard: u64,
}

/// What becomes of a piece of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    /// What was asked for.
    AsAsked,
    /// Zeroes are written as data.
    AsData,
    /// Nothing: it is a hint.
    NotAtAll,
}

impl Limits {
    /// Those of the options, on top of a node whose requests are multiples of `below`. The messages are
    /// QEMU's.
    pub(super) fn new(options: &BlkdebugOptions, below: u64) -> Result<Self, OpenError> {
        let constraint = |name: &str, value: u64, is_met: bool| match is_met {
            true => Ok(()),
            false => Err(OpenError::new(format!("Cannot meet constraints with {name} {value}"))),
        };
        let align = options.align;
        constraint("align", align, align == 0 || align.is_power_of_two() && align <= 1 << 20)?;
        let align = align.max(below).max(1);
        let multiple = |name: &str, value: u64, of: u64| {
            constraint(name, value, value <= LONGEST && value.is_multiple_of(of))
        };
        let BlkdebugOptions { max_transfer, opt_write_zero, max_write_zero, .. } = *options;
        let BlkdebugOptions { opt_discard, max_discard, .. } = *options;
        multiple("max-transfer", max_transfer, align)?;
        multiple("opt-write-zero", opt_write_zero, align)?;
        multiple("max-write-zero", max_write_zero, opt_write_zero.max(align))?;
        multiple("opt-discard", opt_discard, align)?;
        multiple("max-discard", max_discard, opt_discard.max(align))?;
        let or = |value, default| if value == 0 { default } else { value };
        Ok(Limits {
            align,
            max_transfer: or(max_transfer, LONGEST),
            opt_write_zero: or(opt_write_zero, 1),
            max_write_zero: or(max_write_zero, LONGEST),
            opt_discard: or(opt_discard, 1),
            max_discard: or(max_discard, LONGEST),
        })
    }

    /// The first piece of what is left of a request: where it ends, and what becomes of it.
    pub(super) fn first_piece(&self, op: Op, left: &Range<u64>) -> (u64, How) {
        let cut = |max: u64| left.end.min(left.start.saturating_add(max));
        let (unit, max, otherwise) = match op {
            Op::Read | Op::Write { .. } => return (cut(self.max_transfer), How::AsAsked),
            Op::Flush | Op::BlockStatus => return (left.end, How::AsAsked),
            Op::WriteZeroes { .. } => (self.opt_write_zero, self.max_write_zero, How::AsData),
            Op::Discard => (self.opt_discard, self.max_discard, How::NotAtAll),
        };
        let past = left.start % unit;
        if past != 0 {
            let end = cut(unit - past);
            return (end.min(cut(self.max_transfer)), otherwise);
        }
        let whole = left.end - left.end % unit;
        match whole > left.start {
            true => (whole.min(cut(max)), How::AsAsked),
            false => (cut(self.max_transfer), otherwise),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::BlockdevRef;

    fn options() -> BlkdebugOptions {
        BlkdebugOptions::new(BlockdevRef::Name("below".into()))
    }

    fn pieces(limits: &Limits, op: Op, range: Range<u64>) -> Vec<(u64, How)> {
        let (mut at, mut pieces) = (range.start, Vec::new());
        while at < range.end {
            let (end, how) = limits.first_piece(op, &(at..range.end));
            assert!(at < end && end <= range.end);
            pieces.push((end - at, how));
            at = end;
        }
        pieces
    }

    #[test]
    fn requests_are_cut_where_the_options_say() {
        use How::{AsAsked, AsData, NotAtAll};
        let options = BlkdebugOptions {
            max_transfer: 1536,
            opt_write_zero: 1000,
            max_write_zero: 3000,
            opt_discard: 4096,
            max_discard: 8192,
            ..options()
        };
        let limits = Limits::new(&options, 1).unwrap();
        let zeroes = Op::WriteZeroes { may_unmap: false, no_fallback: false, fua: false };
        for (op, range, expected) in [
            (Op::Read, 512..4096, vec![(1536, AsAsked), (1536, AsAsked), (512, AsAsked)]),
            (Op::Write { fua: true }, 0..1536, vec![(1536, AsAsked)]),
            (
                zeroes,
                500..7100,
                vec![(500, AsData), (3000, AsAsked), (3000, AsAsked), (100, AsData)],
            ),
            (zeroes, 10..20, vec![(10, AsData)]),
            (
                Op::Discard,
                512..16384,
                vec![
                    (1536, NotAtAll),
                    (1536, NotAtAll),
                    (512, NotAtAll),
                    (8192, AsAsked),
                    (4096, AsAsked),
                ],
            ),
            (Op::Discard, 4096..4608, vec![(512, NotAtAll)]),
        ] {
            assert_eq!(pieces(&limits, op, range.clone()), expected, "{op:?} {range:?}");
        }
        let none = Limits::new(&self::options(), 512).unwrap();
        for op in [Op::Read, zeroes, Op::Discard] {
            assert_eq!(pieces(&none, op, 512..1 << 40), [((1 << 40) - 512, AsAsked)]);
        }
    }

    #[test]
    fn limits_that_contradict_each_other_are_refused_as_qemu_does() {
        for (options, message) in [
            (BlkdebugOptions { align: 3, ..options() }, "align 3"),
            (BlkdebugOptions { align: 1 << 40, ..options() }, "align 1099511627776"),
            (BlkdebugOptions { max_transfer: 1000, ..options() }, "max-transfer 1000"),
            (
                BlkdebugOptions { max_discard: 5120, opt_discard: 4096, ..options() },
                "max-discard 5120",
            ),
            (
                BlkdebugOptions { align: 4096, opt_write_zero: 512, ..options() },
                "opt-write-zero 512",
            ),
        ] {
            let error = Limits::new(&options, 512).unwrap_err();
            assert_eq!(error.to_string(), format!("Cannot meet constraints with {message}"));
        }
    }
}

//! `detect-zeroes`: written zeroes become write-zeroes requests.

use crate::options::DetectZeroes;
use crate::request::{Op, Request};

/// Turns the request into write-zeroes if it writes nothing but zeroes. Its memory stays with it and
/// goes back with the answer.
pub(crate) fn detect_zeroes(mode: DetectZeroes, request: &mut Request) {
    let Op::Write { fua } = request.op else { return };
    let may_unmap = match mode {
        DetectZeroes::Off => return,
        DetectZeroes::On => false,
        DetectZeroes::Unmap => true,
    };
    if request.bufs.is_zero() {
        request.op = Op::WriteZeroes { may_unmap, no_fallback: false, fua };
    }
}

//! Handles a system call that is in no table: the call fails with EPERM, and the first one is logged.
//!
//! Instead of carrying the call out, the kernel raises SIGSYS on the calling thread. The handler logs the call
//! and sets its result. Signal-safety applies: no allocation, no lock.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::io;
use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::calls::{ALLOWED, DEADLY};

/// `SYS_SECCOMP`, the `si_code` of a signal that comes from a filter.
const FROM_FILTER: c_int = 1;

/// Calls that have been logged, a bit each.
static TOLD: [AtomicU64; 8] = [const { AtomicU64::new(0) }; 8];

/// `siginfo_t` of SIGSYS, as sigaction(2) has it.
#[repr(C)]
struct Info {
    signo: c_int,
    errno: c_int,
    code: c_int,
    padding: c_int,
    call_addr: *mut c_void,
    syscall: c_int,
    arch: u32,
}

/// Installs the handler.
pub(crate) fn handle() -> io::Result<()> {
    // SAFETY: the structure is plain old data, for which all zeroes are valid; the handler has the
    // signature that SA_SIGINFO wants, and does nothing that signal-safety(7) forbids.
    let result = unsafe {
        let mut action: libc::sigaction = mem::zeroed();
        action.sa_sigaction = on_refused as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_NODEFER;
        libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

extern "C" fn on_refused(_: c_int, info: *mut Info, context: *mut libc::ucontext_t) {
    // SAFETY: the kernel passes both, valid for the handler's time, as SA_SIGINFO says.
    let (info, context) = unsafe { (&*info, &mut *context) };
    if info.code != FROM_FILTER {
        return;
    }
    if !may_fail(info.syscall, context) {
        tell(info.syscall);
    }
    let result = libc::EPERM as i64;
    #[cfg(target_arch = "x86_64")]
    {
        context.uc_mcontext.gregs[libc::REG_RAX as usize] = -result;
    }
    #[cfg(target_arch = "aarch64")]
    {
        context.uc_mcontext.regs[0] = (-result).cast_unsigned();
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        let _ = (context, result);
    }
}

/// glibc's malloc reads this file before it returns a heap to the kernel. If that fails, it keeps the heap.
const OVERCOMMIT: &CStr = c"/proc/sys/vm/overcommit_memory";

/// Whether the caller expects that the call may fail.
fn may_fail(call: c_int, context: &libc::ucontext_t) -> bool {
    #[cfg(target_arch = "x86_64")]
    let path = context.uc_mcontext.gregs[libc::REG_RSI as usize] as *const c_char;
    #[cfg(target_arch = "aarch64")]
    let path = context.uc_mcontext.regs[1] as *const c_char;
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let path: *const c_char = std::ptr::null();
    if c_long::from(call) != libc::SYS_openat || path.is_null() {
        return false;
    }
    // SAFETY: the second argument of openat(2) is a path. Injected code that passes another number ends the
    // process by SIGSEGV.
    unsafe { libc::strcmp(path, OVERCOMMIT.as_ptr()) == 0 }
}

/// Logs the call, once.
fn tell(call: c_int) {
    let place = call.cast_unsigned() as usize;
    let Some(told) = TOLD.get(place / 64) else { return };
    let bit = 1 << (place % 64);
    if told.fetch_or(bit, Ordering::Relaxed) & bit != 0 {
        return;
    }
    let mut line = Line::default();
    line.add(b"sandbox: refused system call ");
    line.add_number(call.cast_unsigned());
    let known = ALLOWED.iter().flat_map(|row| row.calls).chain(DEADLY);
    if let Some((name, _)) = known.into_iter().find(|(_, number)| *number == call.into()) {
        line.add(b" (");
        line.add(name.strip_prefix("SYS_").unwrap_or(name).as_bytes());
        line.add(b")");
    }
    line.add(b" on thread ");
    let mut name = [0u8; 16];
    // SAFETY: PR_GET_NAME writes at most 16 bytes, with a zero at the end.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    line.add(name.split(|byte| *byte == 0).next().unwrap_or_default());
    line.add(b": please report it; --sandbox off does without\n");
    // SAFETY: the bytes live across the call. A failure to write has no other place to be reported.
    unsafe {
        let errno = *libc::__errno_location();
        libc::write(libc::STDERR_FILENO, line.text.as_ptr().cast(), line.len);
        *libc::__errno_location() = errno;
    }
}

/// A line of text of fixed size. Longer text is cut.
struct Line {
    text: [u8; 160],
    len: usize,
}

impl Default for Line {
    fn default() -> Self {
        Line { text: [0; 160], len: 0 }
    }
}

impl Line {
    fn add(&mut self, bytes: &[u8]) {
        for (place, byte) in self.text.iter_mut().skip(self.len).zip(bytes) {
            *place = *byte;
            self.len += 1;
        }
    }

    fn add_number(&mut self, number: u32) {
        let mut divisor = 1_000_000_000;
        while divisor > 1 && number / divisor == 0 {
            divisor /= 10;
        }
        while divisor > 0 {
            self.add(&[b'0' + (number / divisor % 10) as u8]);
            divisor /= 10;
        }
    }
}

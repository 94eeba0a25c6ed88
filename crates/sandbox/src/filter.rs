//! Compiles the tables to BPF programs.

#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::io;

use libc::c_long;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

use crate::calls::{ALLOWED, Arguments, DEADLY, DEADLY_HERE, MISSING, MISSING_HERE, Row, Who};

/// How a call outside the tables is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unknown {
    /// The call fails with EPERM and is logged, see [`refused`](crate::refused).
    Refused,
    /// The call is carried out, and the kernel's audit log records it.
    Logged,
}

type Rules = BTreeMap<c_long, Vec<SeccompRule>>;

fn target() -> Result<TargetArch, String> {
    std::env::consts::ARCH.try_into().map_err(|_| "not known for this architecture".to_owned())
}

fn program(rules: Rules, other: SeccompAction, on: SeccompAction) -> Result<BpfProgram, String> {
    let filter = SeccompFilter::new(rules, other, on, target()?).map_err(|e| e.to_string())?;
    filter.try_into().map_err(|e: seccompiler::BackendError| e.to_string())
}

/// The programs for all threads: calls that are answered with ENOSYS, and deadly calls.
pub(crate) fn common(unknown: Unknown) -> Result<Vec<BpfProgram>, String> {
    let every = |calls: &[(&str, c_long)]| -> Rules {
        calls.iter().map(|(_, number)| (*number, Vec::new())).collect()
    };
    let (mut deadly, mut missing) = (every(DEADLY), every(MISSING));
    deadly.append(&mut every(DEADLY_HERE));
    missing.append(&mut every(MISSING_HERE));
    let errno = SeccompAction::Errno(libc::ENOSYS.cast_unsigned());
    let mut programs = vec![program(missing, SeccompAction::Allow, errno)?];
    if unknown == Unknown::Refused {
        programs.push(program(deadly, SeccompAction::Allow, SeccompAction::KillProcess)?);
    }
    Ok(programs)
}

/// The program of a kind of thread, and how many calls it allows. `more`: a row beside the table's.
pub(crate) fn allowing(
    who: Who,
    unknown: Unknown,
    more: Option<&Row>,
) -> Result<(BpfProgram, usize), String> {
    let mut rules = Rules::new();
    for row in ALLOWED.iter().chain(more).filter(|row| row.who.includes(who)) {
        let rule = rule(row.arguments)?;
        for (_, number) in row.calls {
            rules.entry(*number).or_default().extend(rule.clone());
        }
    }
    // A row without conditions allows the call, whatever the conditions of other rows.
    for row in ALLOWED.iter().filter(|row| row.who.includes(who)) {
        if row.arguments == Arguments::Any {
            rules.extend(row.calls.iter().map(|(_, number)| (*number, Vec::new())));
        }
    }
    let allowed = rules.len();
    let other = match unknown {
        Unknown::Refused => SeccompAction::Trap,
        Unknown::Logged => SeccompAction::Log,
    };
    // Another program answers the calls of `MISSING` with an errno. The kernel takes the stricter of two
    // answers, and a trap would be stricter.
    rules.extend(MISSING.iter().chain(MISSING_HERE).map(|(_, number)| (*number, Vec::new())));
    Ok((program(rules, other, SeccompAction::Allow)?, allowed))
}

/// The rules of one row, of which one must match. `None`: any arguments.
fn rule(arguments: Arguments) -> Result<Vec<SeccompRule>, String> {
    let one = |index, operator, value| {
        SeccompCondition::new(index, SeccompCmpArgLen::Dword, operator, value)
            .and_then(|condition| SeccompRule::new(vec![condition]))
            .map_err(|error| error.to_string())
    };
    match arguments {
        Arguments::Any => Ok(Vec::new()),
        Arguments::OneOf(index, values) => {
            values.iter().map(|value| one(index, SeccompCmpOp::Eq, *value)).collect()
        }
        Arguments::Bits(index, mask, bits) => {
            Ok(vec![one(index, SeccompCmpOp::MaskedEq(mask), bits)?])
        }
        Arguments::OwnPid(index) => {
            Ok(vec![one(index, SeccompCmpOp::Eq, std::process::id().into())?])
        }
    }
}

/// Installs a program for the calling thread and its later children. It cannot be removed.
///
/// Kernels before 5.16 also enable the mitigation of speculative store bypass with a filter. The daemon runs no
/// foreign code, so a flag leaves that mitigation off.
pub(crate) fn install(program: &BpfProgram) -> io::Result<()> {
    let length =
        u16::try_from(program.len()).map_err(|_| io::Error::from_raw_os_error(libc::E2BIG))?;
    // The kernel only reads the program.
    let filter = program.as_ptr().cast::<libc::sock_filter>().cast_mut();
    let program = libc::sock_fprog { len: length, filter };
    // SAFETY: seccomp(2) reads `program` and as many instructions as it says, which live across the
    // call; seccompiler's instructions have the layout of the kernel's, as its own installing shows.
    let result = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW,
            &raw const program,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

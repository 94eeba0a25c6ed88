//! `give-sockets SOCKET... -- PROGRAM [ARGUMENT...]`: runs a program that is given sockets as a service manager
//! gives them, sd_listen_fds(3). A socket is `unix:NAME:PATH` or `tcp:NAME:ADDRESS:PORT`, both listening,
//! `stdin:NAME` what is standard input here, `pipe:NAME` the end of a pipe, which is none.

#![allow(unsafe_code)]

use std::env;
use std::error::Error;
use std::net::TcpListener;
use std::os::fd::{BorrowedFd, IntoRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::fcntl::{FcntlArg, fcntl};
use nix::unistd::dup2_raw;

/// Above all numbers that are given.
const ASIDE: i32 = 100;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let (mut names, mut sockets, mut others) = (Vec::new(), Vec::<OwnedFd>::new(), Vec::new());
    for argument in arguments.by_ref().take_while(|argument| argument != "--") {
        let mut parts = argument.splitn(3, ':');
        let mut part = || parts.next().ok_or("a part is missing");
        let (kind, name) = (part()?, part()?);
        sockets.push(match kind {
            "unix" => UnixListener::bind(part()?)?.into(),
            "tcp" => TcpListener::bind(part()?)?.into(),
            "stdin" => nix::unistd::dup(std::io::stdin())?,
            _ => {
                let (end, other) = std::io::pipe()?;
                others.push(other);
                end.into()
            }
        });
        names.push(name.to_owned());
    }
    // Out of the way first: a number may be that of another of them, or of what was inherited.
    let aside = |socket| fcntl(socket, FcntlArg::F_DUPFD_CLOEXEC(ASIDE));
    let copies: Vec<i32> = sockets.iter().map(aside).collect::<Result<_, _>>()?;
    drop((sockets, others));
    for (number, copy) in (3..ASIDE).zip(&copies) {
        // SAFETY: `copy` is open, and nothing in this program owns `number` any more.
        let given = unsafe { dup2_raw(BorrowedFd::borrow_raw(*copy), number)? };
        // Without close-on-exec, which dup2(2) leaves off.
        let _ = given.into_raw_fd();
    }
    let program = arguments.next().ok_or("no program")?;
    let mut command = Command::new(program);
    command.args(arguments).env("LISTEN_PID", std::process::id().to_string());
    command.env("LISTEN_FDS", copies.len().to_string()).env("LISTEN_FDNAMES", names.join(":"));
    Err(command.exec().into())
}

//! Describes how a run measures, so that it can be repeated.

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use super::client::Client;
use super::contender::{Contender, Node, Polling};
use super::fio::{self, Fio, Target};
use super::measure::{Bench, SETTLE};
use super::report::Described;
use super::rows::{Disk, Row, Work};
use crate::report::DEBUG;

/// Rounds, CPUs, the file.
pub(crate) fn describe(bench: &Bench, rounds: usize, size: u64) -> String {
    let bound = cpus([bench.client_cpu, bench.server_cpu]);
    let calls = match bench.count_syscalls {
        true => "system calls counted by perf",
        false => {
            "system calls not counted, since perf does not work here (Debian: linux-perf, as root)"
        }
    };
    format!(
        "Method: {rounds} round(s) of {:?} per server and row; {bound}; file of {} MiB, written with \
         random data; {calls}{DEBUG}",
        bench.run_time,
        size >> 20
    )
}

/// The CPUs of client and server.
pub(crate) fn cpus(cpus: [Option<usize>; 2]) -> String {
    match cpus {
        [Some(client), Some(server)] if client != server => {
            format!("client on CPU {client}, server on CPU {server}")
        }
        _ => "client and server share the CPUs, so that figures of both are mixed up".into(),
    }
}

/// The client of the load.
pub(crate) fn describe_client(bench: &Bench) -> String {
    match &bench.client {
        Client::Own => "Client: the load generator of `bench`".into(),
        Client::Fio(fio) => format!(
            "Client: {} with libblkio: `{}`, with `--runtime={}ms`, where latency and IOPS are taken \
             also `--ramp_time={}ms`. Idle servers and counted system calls: the load generator of \
             `bench`",
            fio.version,
            Fio::command_to_show(Target::Export("$SOCKETS/export0.sock".as_ref())),
            bench.run_time.as_millis(),
            bench.warm_up.as_millis()
        ),
    }
}

/// fio's options for each row, if fio is the client.
pub(crate) fn jobs(client: &Client, rows: &[Row]) -> Result<Vec<(String, String)>> {
    let loads = rows.iter().filter_map(|row| match (&row.work, client) {
        (Work::Load(load), Client::Fio(_)) => Some((&row.name, load)),
        _ => None,
    });
    loads.map(|(name, load)| Ok((name.clone(), fio::job(load)?.join(" ")))).collect()
}

/// The approximate duration of a run.
pub(crate) fn estimate(
    bench: &Bench,
    rows: &[Row],
    contenders: usize,
    rounds: usize,
    readers: usize,
) -> Duration {
    /// Duration of starting and ending a server and a client.
    const BETWEEN: Duration = Duration::from_millis(500);
    let (contenders, rounds) = (contenders as u32, rounds as u32);
    let once = bench.run_time + BETWEEN;
    let row = |row: &Row| match row.work {
        Work::Idle(_) => (SETTLE + once) * contenders * rounds,
        Work::Load(_) => {
            let counted = bench.run_time.min(Duration::from_secs(1)) + BETWEEN;
            let counted = if bench.count_syscalls { counted } else { Duration::ZERO };
            let readers = if row.limits { readers as u32 } else { 0 };
            let limits = once * (readers + u32::from(row.has_echo()));
            ((once + once + bench.warm_up) * contenders + limits) * rounds + counted * contenders
        }
    };
    rows.iter().map(row).sum()
}

/// A contender in words.
pub(crate) fn contender(bench: &Bench, contender: &Contender, rows: &[Row]) -> Described {
    Described {
        name: contender.name.clone(),
        version: contender.version.clone(),
        command: command_of(bench, contender, rows),
    }
}

/// The command of a contender, without machine-dependent paths.
fn command_of(bench: &Bench, contender: &Contender, rows: &[Row]) -> String {
    let node = match rows.iter().any(|row| row.disk == Disk::File) {
        true => Node::File(bench.data_file.clone()),
        false => Node::Null,
    };
    let setup = bench.setup(node, Polling::Off, 1, 1);
    let places = [(&*bench.directory, "$DIR"), (&*bench.sockets.0, "$SOCKETS")];
    command_to_show(&contender.command(&setup), &places)
}

/// A command with names in place of directories.
pub(crate) fn command_to_show(command: &[OsString], places: &[(&Path, &str)]) -> String {
    // The loader of another tree and its options precede the program.
    let loader = command.iter().position(|word| word == "--library-path").map_or(0, |at| at + 2);
    let show = |(i, word): (usize, &OsString)| match i {
        0 => Path::new(word).file_name().unwrap_or(word).to_string_lossy().into_owned(),
        _ => places.iter().fold(word.to_string_lossy().into_owned(), |word, (path, name)| {
            word.replace(&*path.to_string_lossy(), name)
        }),
    };
    command[loader..].iter().enumerate().map(show).collect::<Vec<_>>().join(" ")
}

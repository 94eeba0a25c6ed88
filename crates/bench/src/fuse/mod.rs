//! `bench fuse`: the FUSE export beside qemu-storage-daemon, nbdfuse and bare loops, contenders taking turns.

pub(crate) mod bare;
mod servers;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use nix::mount::{MntFlags, umount2};

use crate::host::{affinity, machine, syscalls};
use crate::load::Load;
use crate::load::queue::Op;
use crate::options::RunOptions;
use crate::peers::compare::{self, Comparison};
use crate::peers::contender::Contender;
use crate::peers::fio::{Fio, Target, Terms};
use crate::peers::measure::{LoadSample, fio_sample, make_directory};
use crate::peers::method;
use crate::peers::rows::load;
use crate::peers::server::Server;
use crate::peers::{build_ringmill, cpus};
use crate::report::{DEBUG, Section};

/// Bytes of the file.
const SIZE: u64 = 1 << 30;

struct Row {
    name: String,
    load: Load,
}

struct Bench {
    directory: PathBuf,
    mountpoint: PathBuf,
    fio: Fio,
    run_time: Duration,
    client_cpu: Option<usize>,
    server_cpu: Option<usize>,
    count_syscalls: bool,
}

/// Measures and reports. Fails if a contender could not be measured, not because of figures.
pub(crate) fn run(options: &RunOptions) -> Result<()> {
    let rounds = options.rounds(5);
    build_ringmill(&options.places)?;
    let mut names = options.contenders.clone();
    if names.is_empty() {
        names = servers::usual();
    }
    let contenders: Vec<Contender<PathBuf>> =
        names.iter().map(|name| servers::find(name, &options.places)).collect::<Result<_>>()?;
    let rows = compare::choose::<Bench>(rows(options.quick), options)?;
    let directory = make_directory(&options.directory)?;
    let [client_cpu, server_cpu] = cpus(options.client_cpu, options.server_cpu)?;
    let bench = Bench {
        mountpoint: directory.join("fuse.img"),
        directory,
        fio: Fio::of_machine()?,
        run_time: options.run_time(300, 2000),
        client_cpu,
        server_cpu,
        count_syscalls: syscalls::can_count(),
    };
    // This thread reads /proc during measurements, so keep it off the servers' CPU.
    if let Some(cpu) = client_cpu {
        affinity::bind_this_thread(cpu)?;
    }
    let results = bench.measure(rows, &contenders, rounds);
    let mut text = machine::describe(&bench.directory);
    text.push(bench.method(rounds));
    for contender in &contenders {
        let command = contender.command(&"fuse.img".into());
        let command: Vec<_> = command.iter().map(|word| word.display().to_string()).collect();
        text.push(format!("{}: {}: `{}`", contender.name, contender.version, command.join(" ")));
    }
    let tables = vec![compare::table::<Bench>(&contenders, &results, Some("qsd"))];
    Section { heading: String::new(), text, tables }.publish(options.json.as_deref())?;
    compare::check(&results, &options.directory)
}

fn rows(quick: bool) -> Vec<Row> {
    let row = |name: &str, op, depth, block_size| Row {
        name: name.into(),
        load: Load { op, depth, block_size, ..load() },
    };
    let mut rows = vec![
        row("randread depth 1", Op::Read, 1, 4096),
        row("randwrite depth 1", Op::Write, 1, 4096),
        row("randread depth 64", Op::Read, 64, 4096),
        row("randwrite depth 64", Op::Write, 64, 4096),
        row("randread 128k depth 16", Op::Read, 16, 128 << 10),
    ];
    if quick {
        rows.truncate(3);
    }
    rows
}

impl Comparison for Bench {
    type Row = Row;
    type Setup = PathBuf;

    fn name(row: &Row) -> &str {
        &row.name
    }

    fn sample(&self, contender: &Contender<PathBuf>, row: &Row) -> Result<LoadSample> {
        let server = self.start(contender)?;
        let target = Target::Mounted(&self.mountpoint);
        let sample = fio_sample(&self.fio, target, &row.load, self.terms(), server);
        self.unmount();
        sample
    }

    fn calls(&self, contender: &Contender<PathBuf>, row: &Row) -> Result<Option<f64>> {
        if !self.count_syscalls {
            return Ok(None);
        }
        let mut server = self.start(contender)?;
        let counter = syscalls::Counter::attach(server.pid(), &self.directory)?;
        let target = Target::Mounted(&self.mountpoint);
        let counted = self.fio.run(target, &row.load, self.terms(), || server.check())?;
        let calls = counter.detach()?;
        server.stop()?;
        self.unmount();
        Ok(Some(calls as f64 / counted.requests))
    }
}

impl Bench {
    fn terms(&self) -> Terms<'_> {
        let (run_time, cpu, directory) = (self.run_time, self.client_cpu, &*self.directory);
        // fio does not count requests of a ramp, but the server spends CPU time on them.
        Terms { ramp: Duration::ZERO, run_time, cpu, directory }
    }

    fn start(&self, contender: &Contender<PathBuf>) -> Result<Server> {
        self.unmount();
        fs::write(&self.mountpoint, "")?;
        let below = device(&self.mountpoint);
        let command = contender.command(&self.mountpoint);
        let mut server =
            Server::spawn(&contender.name, &command, &[], self.server_cpu, &self.directory)?;
        server.wait_until(|| Ok(device(&self.mountpoint).is_some_and(|is| Some(is) != below)))?;
        Ok(server)
    }

    /// Takes away the mount of a server that has ended, if there is one.
    fn unmount(&self) {
        let _ = umount2(&self.mountpoint, MntFlags::MNT_DETACH);
    }

    fn method(&self, rounds: usize) -> String {
        let cpus = method::cpus([self.client_cpu, self.server_cpu]);
        format!(
            "Method: {rounds} round(s) of {:?} per server and row; {cpus}; a file of 1 GiB that answers at once; polling off \
             in `unpolled` and qsd; CPU time is that of all of the server's processes. `bare` loops answer the same \
             messages and do nothing else: read and write of /dev/fuse, and FUSE over io_uring where the kernel has it \
             switched on. Client: {}: `{}`{DEBUG}",
            self.run_time,
            self.fio.version,
            Fio::command_to_show(Target::Mounted("fuse.img".as_ref()))
        )
    }
}

/// The file system's number and the file's size, once a server has mounted.
fn device(path: &Path) -> Option<(u64, bool)> {
    let metadata = fs::metadata(path).ok()?;
    Some((metadata.dev(), metadata.size() == SIZE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::compare::Measured;
    use crate::peers::fio::job;

    #[test]
    fn rows_are_loads_that_fio_takes() {
        for row in rows(false) {
            assert!(job(&row.load).is_ok(), "{}", row.name);
        }
        assert_eq!(rows(true).len(), 3);
    }

    #[test]
    fn ratios_are_to_qsd() {
        let contender = |name: &str| Contender {
            name: name.into(),
            version: String::new(),
            program: Vec::new(),
            options: |_: &PathBuf| Vec::new(),
        };
        let measured = |iops, cpu| Measured {
            rounds: vec![LoadSample { iops, cpu, switches: 1.0, latency: [1.0; 3] }],
            calls: Some(2.0),
            failed: None,
        };
        let results = [(rows(true).remove(0), vec![measured(30.0, 1.0), measured(20.0, 2.0)])];
        let contenders = [contender("ringmill"), contender("qsd")];
        let body = compare::table::<Bench>(&contenders, &results, Some("qsd")).body;
        assert_eq!([&body[0][4], &body[0][7]], ["1.50", "0.50"]);
        assert_eq!([&body[1][4], &body[1][7]], ["1.00", "1.00"]);
    }
}

//! `bench fuse`: the FUSE export beside qemu-storage-daemon, nbdfuse and a bare loop, contenders taking turns.

pub(crate) mod bare;

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use nix::mount::{MntFlags, umount2};

use crate::load::Load;
use crate::load::queue::Op;
use crate::options::Options;
use crate::peers::compare::{self, Comparison, Sample};
use crate::peers::contender::{Contender, quoted};
use crate::peers::fio::{Fio, Target};
use crate::peers::measure::{fio_calls, fio_sample};
use crate::peers::rows::load;
use crate::peers::server::Server;
use crate::report::Section;
use crate::session::Session;

/// Bytes of the file.
const SIZE: u64 = 1 << 30;
/// Names of the contenders.
const KNOWN: [&str; 5] = ["ringmill", "unpolled", "qsd", "nbdfuse", "bare"];

struct Row {
    name: String,
    load: Load,
}

struct Bench {
    session: Session,
    mountpoint: PathBuf,
    fio: Fio,
}

/// Measures and reports. Fails if a contender could not be measured, not because of figures.
pub(crate) fn run(options: &Options) -> Result<()> {
    let rows = options.choose(rows(options.quick()), |row| row.name.clone())?;
    let session = Session::new(options, 5, [300, 2000])?;
    let contenders = Contender::all(options, &KNOWN, 0)?;
    let mountpoint = session.directory.join("fuse.img");
    let bench = Bench { session, mountpoint, fio: Fio::of_machine("libaio")? };
    let session = &bench.session;
    let results = bench.measure(rows, &contenders, session.rounds, session.counts_syscalls);
    let mut text = session.machine.clone();
    text.push(session.method("per server and row"));
    text.push(format!(
        "A file of 1 GiB that answers at once; polling off in `unpolled` and qsd; CPU time is that of all of the server's \
         processes. The `bare` loop answers the same messages by read and write of /dev/fuse, and does nothing else. \
         Client: {}: `{}`",
        bench.fio.version,
        Fio::command_to_show(Target::Mounted("fuse.img".as_ref()))
    ));
    let describe = |of: &Contender| session.describe(of, &[command(of, "fuse.img".as_ref())]);
    text.extend(contenders.iter().map(describe));
    let qsd = contenders.iter().position(|contender| contender.key == "qsd");
    let tables = vec![compare::table::<Bench>(&contenders, &results, qsd)];
    Section { heading: String::new(), text, tables }.publish(options.path("json").as_deref())?;
    compare::check(&results, 0, &session.directory)
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

/// The command of a contender that serves a mount point.
fn command(contender: &Contender, file: &Path) -> Vec<OsString> {
    let shown = file.display().to_string();
    contender.command(match contender.key.as_str() {
        // nbdfuse serves an NBD export: here nbdkit's disk that reads as zeroes.
        "nbdfuse" => [&shown, "[", "nbdkit", "--exit-with-parent", "null", "1G", "]"]
            .map(String::from)
            .into(),
        "bare" => vec![shown],
        key => vec![
            "--object".into(),
            format!("iothread,id=io0{}", if key == "ringmill" { "" } else { ",poll-max-ns=0" }),
            "--blockdev".into(),
            "driver=null-co,node-name=disk,size=1073741824,read-zeroes=on".into(),
            "--export".into(),
            format!(
                "type=fuse,id=export,node-name=disk,mountpoint={},writable=on,iothread=io0",
                quoted(file)
            ),
        ],
    })
}

impl Comparison for Bench {
    type Row = Row;

    fn name(row: &Row) -> &str {
        &row.name
    }

    fn sample(&self, contender: &Contender, row: &Row) -> Result<Sample> {
        let target = Target::Mounted(&self.mountpoint);
        let server = self.start(contender)?;
        let sample = fio_sample(&self.fio, target, &row.load, self.session.terms(), server);
        self.unmount();
        sample
    }

    fn calls(&self, contender: &Contender, row: &Row) -> Result<f64> {
        let target = Target::Mounted(&self.mountpoint);
        let server = self.start(contender)?;
        let calls = fio_calls(&self.fio, target, &row.load, self.session.terms(), server);
        self.unmount();
        calls
    }
}

impl Bench {
    fn start(&self, contender: &Contender) -> Result<Server> {
        self.unmount();
        fs::write(&self.mountpoint, "")?;
        let below = device(&self.mountpoint);
        let command = command(contender, &self.mountpoint);
        let mut server = self.session.start(&contender.name, &command, &[])?;
        server.wait_until(|| Ok(device(&self.mountpoint).is_some_and(|is| Some(is) != below)))?;
        Ok(server)
    }

    /// Takes away the mount of a server that has ended, if there is one.
    fn unmount(&self) {
        let _ = umount2(&self.mountpoint, MntFlags::MNT_DETACH);
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
    use crate::peers::compare::{Figure, Measured};
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
            key: name.into(),
            name: name.into(),
            version: String::new(),
            program: Vec::new(),
        };
        let measured = |iops, cpu| Measured {
            rounds: vec![Sample::of(&[(Figure::Iops, iops), (Figure::Cpu, cpu)])],
            calls: Some(2.0),
            failed: None,
        };
        let results = vec![(rows(true).remove(0), vec![measured(30.0, 1.0), measured(20.0, 2.0)])];
        let contenders = [contender("ringmill"), contender("qsd")];
        let table = compare::table::<Bench>(&contenders, &results, Some(1));
        assert_eq!(table.head[11..13], ["IOPS x", "CPU x"]);
        assert_eq!(table.body[0][11..13], ["1.50", "0.50"]);
        assert_eq!(table.body[1][11..13], ["1.00", "1.00"]);
    }
}

//! Compares the NBD server with its peers: contenders alternate, row by row.

mod rows;
pub(crate) mod servers;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::host::data_file;
use crate::options::Options;
use crate::peers::compare::{self, Comparison, Figure, Measured, Results, Sample, ratio};
use crate::peers::contender::Contender;
use crate::peers::fio::{self, Fio, Target};
use crate::peers::measure::{fio_calls, fio_sample};
use crate::peers::server::Server;
use crate::report::{Section, Table};
use crate::session::Session;
use rows::{Disk, Row};
use servers::{Address, Serving};

/// Time limit of the server's part of the handshake.
const PATIENCE: Duration = Duration::from_secs(10);
/// Names of the contenders.
const KNOWN: [&str; 4] = ["ringmill", "unpolled", "qemu-nbd", "nbdkit"];

/// Settings common to all measurements of a run.
struct Bench {
    session: Session,
    direct: PathBuf,
    cached: PathBuf,
    fio: Fio,
}

/// Measures and reports. Fails if a contender could not be measured, not because of figures.
pub(crate) fn run(options: &Options) -> Result<()> {
    let rows = options.choose(rows::rows(options.quick()), |row| row.name.clone())?;
    let session = Session::new(options, 3, [200, 700])?;
    let contenders = Contender::all(options, &KNOWN, 0)?;
    let sizes = if options.quick() { [64 << 20, 32 << 20] } else { [512 << 20, 256 << 20] };
    let bench = Bench {
        direct: data_file::prepare(&session.directory, sizes[0])?,
        cached: data_file::prepare(&session.directory, sizes[1])?,
        fio: Fio::of_machine("nbd")?,
        session,
    };
    let session = &bench.session;
    let results = bench.measure(rows, &contenders, session.rounds, session.counts_syscalls);
    bench.report(&contenders, &results)?.publish(options.path("json").as_deref())?;
    compare::check(&results, 0, &session.directory)
}

impl Comparison for Bench {
    type Row = Row;

    fn name(row: &Row) -> &str {
        &row.name
    }

    fn sample(&self, contender: &Contender, row: &Row) -> Result<Sample> {
        let (server, address) = self.start(contender, row)?;
        fio_sample(&self.fio, Target::Nbd(&address.uri()), &row.load, self.session.terms(), server)
    }

    fn calls(&self, contender: &Contender, row: &Row) -> Result<f64> {
        let (server, address) = self.start(contender, row)?;
        fio_calls(&self.fio, Target::Nbd(&address.uri()), &row.load, self.session.terms(), server)
    }
}

impl Bench {
    fn start(&self, contender: &Contender, row: &Row) -> Result<(Server, Address)> {
        let mut serving = self.serving(row.disk);
        if row.tcp {
            serving.address = Address::Tcp(free_port()?);
        }
        match row.disk {
            Disk::Direct => data_file::drop_from_cache(&serving.file)?,
            Disk::Cached => data_file::bring_into_cache(&serving.file)?,
        }
        let sockets = match &serving.address {
            Address::Unix(path) => vec![path.clone()],
            Address::Tcp(_) => Vec::new(),
        };
        let command = servers::command(contender, &serving);
        let mut server = self.session.start(&contender.name, &command, &sockets)?;
        server.wait_until(|| Ok(is_served(&serving.address)))?;
        Ok((server, serving.address))
    }

    /// On a unix socket.
    fn serving(&self, disk: Disk) -> Serving {
        Serving {
            file: match disk {
                Disk::Direct => self.direct.clone(),
                Disk::Cached => self.cached.clone(),
            },
            direct: disk == Disk::Direct,
            address: Address::Unix(self.session.sockets.path("nbd.sock")),
        }
    }

    fn report(&self, contenders: &[Contender], results: &Results<Row>) -> Result<Section> {
        let session = &self.session;
        let mut text = session.machine.clone();
        text.push(session.method(
            "per server and row, CPU time being that of all of the server's process, in the same run as requests and latency",
        ));
        text.push(
            "Files, written with random data: `direct` is read and written past the page cache where \
             the server can (nbdkit's file plugin cannot), and dropped from the page cache before \
             each run; `cached` is in the page cache"
                .into(),
        );
        let shown = Target::Nbd("nbd+unix:///?socket=$SOCKETS/nbd.sock");
        text.push(format!("Client: {}: `{}`", self.fio.version, Fio::command_to_show(shown)));
        text.extend(contenders.iter().map(|contender| {
            let command = |disk| servers::command(contender, &self.serving(disk));
            session.describe(contender, &[Disk::Direct, Disk::Cached].map(command))
        }));
        let jobs = fio::jobs(results.iter().map(|(row, _)| (row.name.as_str(), &row.load)))?;
        let all = compare::table::<Self>(contenders, results, None);
        Ok(Section {
            heading: String::new(),
            text,
            tables: vec![ahead(contenders, results), all, jobs],
        })
    }
}

/// Whether a server offers the export without a name: it may listen before it has one.
pub(crate) fn is_served(address: &Address) -> bool {
    match address {
        Address::Unix(path) => UnixStream::connect(path).is_ok_and(|mut socket| {
            let _ = socket.set_read_timeout(Some(PATIENCE));
            greet(&mut socket).is_ok()
        }),
        Address::Tcp(port) => TcpStream::connect(("127.0.0.1", *port)).is_ok_and(|mut socket| {
            let _ = socket.set_read_timeout(Some(PATIENCE));
            greet(&mut socket).is_ok()
        }),
    }
}

/// Selects the export by `NBD_OPT_EXPORT_NAME`.
fn greet(socket: &mut (impl Read + Write)) -> Result<()> {
    const FIXED_NEWSTYLE_NO_ZEROES: u32 = 3;
    let mut greeting = [0; 18];
    socket.read_exact(&mut greeting).context("the server's greeting")?;
    ensure!(greeting.starts_with(b"NBDMAGICIHAVEOPT"), "no newstyle NBD server");
    let mut answer = Vec::from(FIXED_NEWSTYLE_NO_ZEROES.to_be_bytes());
    answer.extend(b"IHAVEOPT\0\0\0\x01\0\0\0\0");
    socket.write_all(&answer).context("the handshake")?;
    // Its size and flags.
    socket.read_exact(&mut [0; 10]).context("the export's size")
}

/// A TCP port without a listener a moment ago.
pub(crate) fn free_port() -> Result<u16> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).context("looking for a free port")?;
    Ok(listener.local_addr().context("looking for a free port")?.port())
}

/// Ratios of ringmill to each of the peers, row by row.
fn ahead(contenders: &[Contender], results: &Results<Row>) -> Table {
    let mut table = Table::new(&["load", "server"]);
    for peer in contenders.iter().filter(|contender| !contender.is_ringmill()) {
        table.head.extend([format!("IOPS x {}", peer.name), format!("CPU x {}", peer.name)]);
    }
    table.head.push("ahead in".into());
    for (row, measured) in results {
        let (own, peers): (Vec<_>, Vec<_>) =
            contenders.iter().zip(measured).partition(|(contender, _)| contender.is_ringmill());
        for (contender, own) in own {
            let mut line = vec![row.name.clone(), contender.name.clone()];
            for (_, peer) in &peers {
                line.extend([Figure::Iops, Figure::Cpu].map(|figure| ratio(own, peer, figure)));
            }
            let of_all =
                |is_ahead: &dyn Fn(&Measured) -> bool| peers.iter().all(|(_, p)| is_ahead(p));
            let iops = of_all(&|peer| own.median(Figure::Iops) > peer.median(Figure::Iops));
            let cpu = of_all(&|peer| own.median(Figure::Cpu) < peer.median(Figure::Cpu));
            let ahead = match (iops, cpu) {
                (true, true) => "both",
                (true, false) => "IOPS",
                (false, true) => "CPU",
                (false, false) => "neither",
            };
            line.push(ahead.into());
            table.row(line);
        }
    }
    table
}

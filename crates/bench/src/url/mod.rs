//! `bench url`: an image on a web server, at several latencies, beside qemu-storage-daemon's driver http, nbdkit's curl plugin
//! and curl.

mod nginx;
mod relay;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::host::{data_file, timed};
use crate::load::Load;
use crate::load::offsets::Order;
use crate::nbd::is_served;
use crate::nbd::servers::{Address, exporting, nbdkit_plugin, nbdkit_serving};
use crate::options::Options;
use crate::peers::compare::{self, Comparison, Figure, Sample};
use crate::peers::contender::{Contender, quoted};
use crate::peers::fio::{Fio, Target};
use crate::peers::measure::fio_sample;
use crate::peers::rows::load;
use crate::report::Section;
use crate::session::Session;
use nginx::Nginx;

/// Names of the contenders; the first is what others are compared with.
const KNOWN: [&str; 4] = ["qsd", "ringmill", "nbdkit", "curl"];
/// Round trips to the web server, in milliseconds.
const LATENCIES: [u64; 3] = [0, 10, 50];

struct Row {
    name: String,
    /// Which of [`LATENCIES`].
    latency: usize,
    load: Load,
}

struct Bench {
    session: Session,
    image: PathBuf,
    /// Bytes of the image.
    size: u64,
    /// The image's, by [`LATENCIES`].
    urls: Vec<String>,
    fio: Fio,
}

/// Measures and reports. Fails if a contender could not be measured, not because of figures.
pub(crate) fn run(options: &Options) -> Result<()> {
    let all = (0..LATENCIES.len()).flat_map(rows).collect();
    let rows = options.choose(all, |row| row.name.clone())?;
    let session = Session::new(options, 3, [500, 2000])?;
    let contenders = Contender::all(options, &KNOWN, 0)?;
    let size = if options.quick() { 32 << 20 } else { 256 << 20 };
    let image = data_file::prepare(&session.directory, size)?;
    let nginx = Nginx::start(&session)?;
    let name = image.file_name().context("the image's name")?.display().to_string();
    let url = |latency| -> Result<String> {
        let port = match latency {
            0 => nginx.port,
            _ => relay::start(nginx.port, Duration::from_millis(latency))?,
        };
        Ok(format!("http://127.0.0.1:{port}/{name}"))
    };
    let urls = LATENCIES.into_iter().map(url).collect::<Result<_>>()?;
    let bench = Bench { session, image, size, urls, fio: Fio::of_machine("nbd")? };
    let session = &bench.session;
    let results = bench.measure(rows, &contenders, session.rounds, false);
    let mut text = session.machine.clone();
    text.push(session.method(
        "per server and row, with the servers' default polling; CPU time is that of all of the server's process",
    ));
    text.push(format!(
        "Web server: {}, on the client's CPU, with {} MiB of random data in the page cache. At 0 ms clients connect to it \
         directly, else to a relay of this program on the same CPU. The relay delays each byte by half of the latency, and does \
         not limit the bandwidth: there is no slow start of TCP. curl reads the whole image by one request. Its CPU time is per 128 KiB",
        nginx.version,
        size >> 20,
    ));
    let shown = Target::Nbd("nbd+unix:///?socket=$SOCKETS/nbd.sock");
    text.push(format!("Client: {}: `{}`", bench.fio.version, Fio::command_to_show(shown)));
    let address = bench.address();
    let url = "http://127.0.0.1:PORT/IMAGE";
    text.extend(contenders.iter().map(|of| session.describe(of, &[command(of, url, &address)])));
    let figures = [Figure::Iops, Figure::Speed, Figure::Cpu, Figure::P50];
    let ratios = [Figure::Iops, Figure::Cpu];
    let what = ["load", "server"];
    let tables = vec![compare::selected::<Bench>(what, &contenders, &results, &figures, &ratios)];
    Section { heading: String::new(), text, tables }.publish(options.path("json").as_deref())?;
    compare::check(&results, 0, &session.directory)
}

fn rows(latency: usize) -> [Row; 4] {
    let row =
        |name, load| Row { name: format!("{} ms, {name}", LATENCIES[latency]), latency, load };
    let sequential =
        |depth| Load { order: Order::Sequential, block_size: 128 << 10, depth, ..load() };
    [
        row("read 128k depth 1", sequential(1)),
        row("read 128k depth 4", sequential(4)),
        row("randread depth 1", load()),
        row("randread depth 32", Load { depth: 32, ..load() }),
    ]
}

/// The command of a contender.
fn command(contender: &Contender, url: &str, address: &Address) -> Vec<OsString> {
    match contender.key.as_str() {
        "nbdkit" => {
            let plugin = vec![nbdkit_plugin(contender, "curl"), format!("url={url}")];
            contender.command(nbdkit_serving(plugin, address))
        }
        "curl" => contender.command(vec!["--silent", "--fail", "--output", "/dev/null", url]),
        _ => {
            let node = format!("driver=http,url={},read-only=on", quoted(url.as_ref()));
            // QEMU's driver http is a module.
            let modules = contender.libraries().map_or(Vec::new(), |libraries| {
                let variable = format!("QEMU_MODULE_DIR={}", libraries.join("qemu").display());
                vec!["env".into(), variable.into()]
            });
            [modules, contender.command(exporting(&node, address, "", ""))].concat()
        }
    }
}

impl Comparison for Bench {
    type Row = Row;

    fn name(row: &Row) -> &str {
        &row.name
    }

    fn sample(&self, contender: &Contender, row: &Row) -> Result<Sample> {
        data_file::bring_into_cache(&self.image)?;
        let address = self.address();
        let command = command(contender, &self.urls[row.latency], &address);
        let size = row.load.block_size as f64;
        let speed = |iops: f64| (Figure::Speed, iops * size / f64::from(1 << 20));
        if contender.key == "curl" {
            if row.load.order == Order::Random {
                return Ok(Sample::of(&[]));
            }
            let cost = timed::run(&command, self.session.cpus.server)?;
            let requests = self.size as f64 / size;
            let iops = requests / cost.seconds;
            let cpu = cost.cpu * 1e6 / requests;
            return Ok(Sample::of(&[(Figure::Iops, iops), speed(iops), (Figure::Cpu, cpu)]));
        }
        let socket = self.socket();
        let mut server = self.session.start(&contender.name, &command, &[socket])?;
        server.wait_until(|| Ok(is_served(&address)))?;
        let (target, terms) = (address.uri(), self.session.terms());
        let sample = fio_sample(&self.fio, Target::Nbd(&target), &row.load, terms, server)?;
        Ok(sample.with(&[Figure::Speed], &Sample::of(&[speed(sample[Figure::Iops])])))
    }
}

impl Bench {
    fn socket(&self) -> PathBuf {
        self.session.sockets.path("nbd.sock")
    }

    fn address(&self) -> Address {
        Address::Unix(self.socket())
    }
}

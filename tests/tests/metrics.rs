//! The daemon's counters over HTTP, read by Prometheus' client and parser, and over QMP.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use integration::{
    BlkClient, Image, PATIENCE, Port, Qmp, Scratch, Server, ServerCommand, client, eventually,
    request, tool,
};
use serde_json::{Value, json};

/// A daemon with metrics at `metrics.sock`, whose queue has served known requests.
struct Fixture {
    /// Dropped first, so that the server can end.
    blk: BlkClient,
    server: Server,
    scratch: Scratch,
}

impl Fixture {
    fn new() -> Self {
        let scratch = Scratch::new();
        let image = Image::filled(&scratch, "disk.img", 1);
        let server = ServerCommand::new(&scratch)
            .iothread("io0")
            .file("disk", &image, "discard=unmap")
            .export("disk", "iothread=io0")
            .monitor("qmp")
            .arg("--metrics")
            .arg(format!("addr.type=unix,addr.path={}", scratch.path("metrics.sock").display()))
            .start();
        let mut blk = BlkClient::connect(&server.socket("disk"), 1, 16).expect("it serves");
        for _ in 0..3 {
            blk.read(8, 4096);
        }
        blk.write(0, &[1; 512]);
        blk.write(1, &[1; 1024]);
        assert_eq!(blk.call(request::FLUSH, 0, &[], 0).status, 0);
        // 8 sectors from sector 16 on, twice.
        let range = [16u64.to_le_bytes(), 8u64.to_le_bytes()].concat();
        assert_eq!(blk.call(request::DISCARD, 0, &range, 0).status, 0);
        assert_eq!(blk.call(request::WRITE_ZEROES, 0, &range, 0).status, 0);
        // Beyond the end.
        assert_eq!(blk.call(request::IN, 1 << 40, &[], 512).status, 1);
        assert_eq!(blk.call(0x77, 0, &[], 0).status, 2);
        Fixture { blk, server, scratch }
    }

    fn stop(self) {
        drop(self.blk);
        self.server.stop();
    }

    fn metrics(&self) -> PathBuf {
        self.scratch.path("metrics.sock")
    }
}

const OPEN_METRICS: &str = "Accept: application/openmetrics-text";

fn curl(socket: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(tool("curl"));
    command.args(["--silent", "--show-error", "--max-time", "60"]);
    command.arg("--unix-socket").arg(socket).args(arguments);
    command.output().expect("curl runs")
}

/// The samples of a page by name and labels, with sorted labels: `name{a="b",c="d"}`.
fn samples(socket: &Path) -> BTreeMap<String, f64> {
    let page = curl(socket, &["--header", OPEN_METRICS, "--fail", "http://ringmill/metrics"]);
    assert!(page.status.success(), "{page:?}");
    // Debian's Python has the parser.
    let mut parser = Command::new("/usr/bin/python3")
        .arg(client("openmetrics.py"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("Python runs");
    let mut stdin = parser.stdin.take().expect("a pipe");
    stdin.write_all(&page.stdout).expect("Python reads");
    drop(stdin);
    let output = parser.wait_with_output().expect("Python ends");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&page.stdout));
    let list: Vec<(String, BTreeMap<String, String>, f64)> =
        serde_json::from_slice(&output.stdout).expect("JSON");
    let named = list.into_iter().map(|(name, labels, value)| {
        let labels: Vec<String> =
            labels.into_iter().map(|(label, value)| format!("{label}=\"{value}\"")).collect();
        (format!("{name}{{{}}}", labels.join(",")), value)
    });
    named.collect()
}

#[test]
fn prometheus_parser_reads_the_counters() {
    let fixture = Fixture::new();
    let queue = |name: &str, operation: &str| {
        let labels = format!("export=\"disk\",iothread=\"io0\",operation=\"{operation}\"");
        format!("ringmill_export_{name}_total{{{labels},queue=\"0\"}}")
    };
    // Counters are updated after the answer.
    let page = eventually("the last request in the metrics", || {
        let page = samples(&fixture.metrics());
        (page[&queue("invalid_requests", "other")] == 1.0).then_some(page)
    });
    for (operation, requests, bytes) in [
        ("read", 3.0, 12288.0),
        ("write", 2.0, 1536.0),
        ("flush", 1.0, 0.0),
        ("discard", 1.0, 4096.0),
        ("write-zeroes", 1.0, 4096.0),
        ("other", 0.0, 0.0),
    ] {
        assert_eq!(page[&queue("requests", operation)], requests, "{operation}");
        assert_eq!(page[&queue("transferred_bytes", operation)], bytes, "{operation}");
        assert_eq!(page[&queue("failed_requests", operation)], 0.0, "{operation}");
        let labels = format!("{{export=\"disk\",operation=\"{operation}\"}}");
        let name = "ringmill_export_request_duration_seconds";
        assert_eq!(page[&format!("{name}_count{labels}")], requests, "{operation}");
        let buckets: Vec<f64> = page
            .iter()
            .filter(|(sample, _)| {
                sample.starts_with(&format!("{name}_bucket"))
                    && sample.contains(&format!("operation=\"{operation}\""))
            })
            .map(|(_, count)| *count)
            .collect();
        assert_eq!(buckets.len(), 22, "{operation}");
        assert_eq!(buckets.iter().copied().fold(0.0, f64::max), requests, "{operation}");
    }
    assert_eq!(page[&queue("invalid_requests", "read")], 1.0);
    assert_eq!(
        page["ringmill_export_in_flight_requests{export=\"disk\",iothread=\"io0\",queue=\"0\"}"],
        0.0
    );
    assert_eq!(page["ringmill_export_connected{export=\"disk\"}"], 1.0);
    assert_eq!(
        page["ringmill_export_info{export=\"disk\",node=\"disk\",type=\"vhost-user-blk\"}"],
        1.0
    );
    let thread = |name: &str| page[&format!("ringmill_iothread_{name}{{iothread=\"io0\"}}")];
    assert!(thread("iterations_total") > 0.0 && thread("enters_total") > 0.0);
    assert!(thread("cpu_seconds_total") > 0.0);
    // The measured cost of a sleep.
    assert!((1e-6..1e-3).contains(&thread("poll_max_seconds")));
    assert!(page["process_resident_memory_bytes{}"] > 1e6);
    assert!(page["process_cpu_seconds_total{}"] > 0.0);
    fixture.stop();
}

#[test]
fn http_is_answered_as_its_standard_says() {
    let fixture = Fixture::new();
    let socket = fixture.metrics();
    let status = |arguments: &[&str]| {
        let mut all = vec!["--output", "/dev/null", "--write-out", "%{http_code} %{content_type}"];
        all.extend(arguments);
        String::from_utf8(curl(&socket, &all).stdout).expect("text")
    };
    let page = "200 text/plain; version=0.0.4; charset=utf-8";
    assert_eq!(status(&["http://x/metrics"]), page);
    assert_eq!(status(&["--http1.0", "http://x/metrics"]), page);
    assert_eq!(status(&["--head", "http://x/metrics"]), page);
    let page = "200 application/openmetrics-text; version=1.0.0; charset=utf-8";
    assert_eq!(status(&["--header", OPEN_METRICS, "http://x/metrics"]), page);
    assert!(status(&["http://x/"]).starts_with("404 "));
    assert!(status(&["--data", "x=y", "http://x/metrics"]).starts_with("405 "));
    let long = format!("X-Long: {}", "x".repeat(16 << 10));
    assert!(status(&["--header", &long, "http://x/metrics"]).starts_with("431 "));
    fixture.stop();
}

#[test]
fn a_taken_address_is_reported_and_a_free_one_serves() {
    let scratch = Scratch::new();
    let reserved = Port::new();
    let port = reserved.number();
    let taken = TcpListener::bind(("127.0.0.1", port)).expect("the port");
    let metrics = format!("addr.type=inet,addr.host=127.0.0.1,addr.port={port}");
    let (status, log) = ServerCommand::new(&scratch).arg("--metrics").arg(&metrics).run();
    assert!(!status.success());
    let wanted = format!("--metrics {metrics}: Failed to listen on '127.0.0.1:{port}': ");
    assert!(log.contains(&wanted), "{log}");
    drop(taken);
    // Another test's child may have inherited the port until it executes its program.
    let is_free = || TcpStream::connect(("127.0.0.1", port)).is_err();
    eventually("the port to be free", || is_free().then_some(()));
    let server = ServerCommand::new(&scratch).named("again").arg("--metrics").arg(&metrics).start();
    let url = format!("http://127.0.0.1:{port}/metrics");
    let page = Command::new(tool("curl")).args(["--silent", "--fail", &url]).output();
    let page = page.expect("curl runs");
    assert!(page.stdout.starts_with(b"# HELP ringmill_build_info "), "{page:?}");
    server.stop();
}

/// Many clients that send nothing, half a request or too much, and do not read.
#[test]
fn hostile_clients_do_not_block_the_metrics_and_cost_little() {
    let fixture = Fixture::new();
    let socket = fixture.metrics();
    let connect = || UnixStream::connect(&socket).expect("it listens");
    let resident = || samples(&socket)["process_resident_memory_bytes{}"];
    let before = resident();
    let mut idle = Vec::new();
    for round in 0..300 {
        let mut stream = connect();
        let said: &[u8] = match round % 5 {
            0 => b"",
            1 => b"GET /metrics HTTP/1.1\r\nHost: x\r\nX: ",
            2 => b"\0\0\0\0",
            3 => &[b'x'; 64 << 10],
            // A request whose answer is not read.
            _ => b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        };
        stream.set_write_timeout(Some(PATIENCE)).expect("a time limit");
        match stream.write_all(said) {
            Ok(()) => {}
            // The daemon has closed the connection.
            Err(error) => assert!(
                matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset),
                "{error}"
            ),
        }
        idle.push(stream);
    }
    // While all of them are connected.
    let grown = resident() - before;
    assert!(grown < 16e6, "{grown} bytes more for {} clients", idle.len());
    // All but the last few were closed.
    let mut first = idle.swap_remove(0);
    first.set_read_timeout(Some(PATIENCE)).expect("a time limit");
    assert_eq!(first.read(&mut [0; 1]).map_err(|error| error.kind()), Ok(0));
    drop(idle);
    // A slow client is closed at its time limit, even without a new connection.
    let mut slow = connect();
    slow.write_all(b"GET ").expect("it listens");
    slow.set_read_timeout(Some(PATIENCE)).expect("a time limit");
    slow.set_write_timeout(Some(Duration::from_secs(1))).expect("a time limit");
    assert_eq!(slow.read(&mut [0; 1]).map_err(|error| error.kind()), Ok(0));
    fixture.stop();
}

#[test]
fn qmp_has_the_counters() {
    let fixture = Fixture::new();
    let mut qmp = Qmp::connect(&fixture.server.socket("qmp"));
    let stats = eventually("the last request in the statistics", || {
        let mut stats = qmp.execute("query-blockstats", json!({}));
        let stats = stats[0].take();
        (stats["stats"]["invalid_rd_operations"] == 1 && stats["stats"]["unmap_bytes"] == 4096)
            .then_some(stats)
    });
    assert_eq!((&stats["qdev"], &stats["node-name"]), (&json!("disk"), &json!("disk")));
    for (name, value) in [
        ("rd_operations", 3),
        ("rd_bytes", 12288),
        // Including the write of zeroes.
        ("wr_operations", 3),
        ("wr_bytes", 1536 + 4096),
        ("flush_operations", 1),
        ("unmap_operations", 1),
        ("failed_rd_operations", 0),
        ("failed_wr_operations", 0),
        ("invalid_wr_operations", 0),
        ("zone_append_operations", 0),
    ] {
        assert_eq!(stats["stats"][name], value, "{name}");
    }
    assert!(stats["stats"]["rd_total_time_ns"].as_u64().is_some_and(|ns| ns > 0));
    assert!(stats["stats"]["idle_time_ns"].is_u64());
    let nodes = qmp.execute("query-blockstats", json!({"query-nodes": true}));
    assert_eq!(nodes[0]["node-name"], "disk");
    assert_eq!(nodes[0]["stats"]["rd_operations"], 3);

    let exports = qmp.execute("x-query-export-stats", json!({}));
    let queue = &exports[0]["queues"][0];
    assert_eq!((&queue["queue"], &queue["iothread"]), (&json!(0), &json!("io0")));
    assert_eq!(queue["in-flight"], 0);
    let read = &queue["requests"][0];
    assert_eq!((&read["operation"], &read["done"]), (&json!("read"), &json!(3)));
    let counts = read["latencies"].as_array().expect("a list").iter();
    assert_eq!(counts.map(|range| range["count"].as_u64().expect("a count")).sum::<u64>(), 3);
    let threads = qmp.execute("x-query-iothread-stats", json!({}));
    assert_eq!(threads[0]["id"], "io0");
    assert!(threads[0]["iterations"].as_u64().is_some_and(|n| n > 0));
    fixture.stop();
}

#[test]
fn latencies_are_counted_by_boundaries_while_enabled() {
    const SET: &str = "block-latency-histogram-set";
    let mut fixture = Fixture::new();
    let mut qmp = Qmp::connect(&fixture.server.socket("qmp"));
    let histogram = |qmp: &mut Qmp, name: &str| -> Value {
        qmp.execute("query-blockstats", json!({}))[0]["stats"][format!("{name}_latency_histogram")]
            .take()
    };
    assert_eq!(histogram(&mut qmp, "rd"), Value::Null);
    let hour = 3_600_000_000_000u64;
    qmp.execute(SET, json!({"id": "disk", "boundaries": [1, hour], "boundaries-write": [hour]}));
    assert_eq!(histogram(&mut qmp, "rd"), json!({"boundaries": [1, hour], "bins": [0, 0, 0]}));
    for _ in 0..5 {
        fixture.blk.read(0, 512);
    }
    fixture.blk.write(0, &[0; 512]);
    eventually("5 reads in the histogram", || {
        let counted = histogram(&mut qmp, "rd")["bins"].take();
        (counted == json!([0, 5, 0]) || counted == json!([5, 0, 0])).then_some(())
    });
    eventually("a write in the histogram", || {
        (histogram(&mut qmp, "wr")["bins"] == json!([1, 0])).then_some(())
    });
    // Only of one kind; the others stay.
    qmp.execute(SET, json!({"id": "disk", "boundaries-read": [7]}));
    assert_eq!(histogram(&mut qmp, "rd"), json!({"boundaries": [7], "bins": [0, 0]}));
    assert_eq!(histogram(&mut qmp, "wr")["bins"], json!([1, 0]));
    for wrong in [json!([]), json!([0]), json!([5, 5]), json!([9, 5])] {
        let why = qmp.refused(SET, json!({"id": "disk", "boundaries": wrong}));
        assert_eq!(why, "Device 'disk' set read boundaries fail");
    }
    assert_eq!(histogram(&mut qmp, "rd")["boundaries"], json!([7]));
    assert_eq!(qmp.refused(SET, json!({"id": "x"})), "Device 'x' not found");
    qmp.execute(SET, json!({"id": "disk"}));
    assert_eq!(histogram(&mut qmp, "rd"), Value::Null);
    assert_eq!(histogram(&mut qmp, "wr"), Value::Null);
    fixture.stop();
}

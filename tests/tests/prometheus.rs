//! `packaging/prometheus` with a real Prometheus and its `promtool`.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use integration::{
    BlkClient, Image, Port, Request, Scratch, Segment, Server, ServerCommand, eventually,
    repository, request, tied_command, tool,
};
use serde_json::Value;

fn packaged(file: &str) -> PathBuf {
    repository().join("packaging/prometheus").join(file)
}

/// A program of Debian's Prometheus package, which `scripts/setup-tests.sh` unpacks.
fn unpacked(name: &str) -> PathBuf {
    let path = repository().join("target/prometheus/usr/bin").join(name);
    assert!(path.is_file(), "{} does not exist: run scripts/setup-tests.sh", path.display());
    path
}

fn promtool(arguments: &[&str], input: &[u8]) -> Output {
    let mut command = Command::new(unpacked("promtool"));
    command.args(arguments).current_dir(packaged("."));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("promtool runs");
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin.write_all(input).expect("promtool reads");
    drop(stdin);
    child.wait_with_output().expect("promtool ends")
}

/// A daemon with a throttled disk, whose first write to sector 9 fails with ENOSPC.
struct Daemon {
    /// Dropped first, so that the daemon need not wait.
    blk: BlkClient,
    server: Server,
    port: Port,
}

impl Daemon {
    fn start(scratch: &Scratch) -> Self {
        let image = Image::filled(scratch, "disk.img", 1);
        let port = Port::new();
        let path = image.path().display();
        let faulty = format!(
            "driver=blkdebug,node-name=faulty,image.driver=file,image.filename={path},\
             inject-error.0.event=none,inject-error.0.iotype=write,inject-error.0.sector=9,\
             inject-error.0.errno=28,inject-error.0.once=on"
        );
        let address = format!("addr.type=inet,addr.host=127.0.0.1,addr.port={}", port.number());
        let server = ServerCommand::new(scratch)
            .iothread("io0")
            .args(["--object", "throttle-group,id=gold,limits.iops-total=100"])
            .args(["--blockdev", &faulty])
            .args(["--blockdev", "driver=throttle,node-name=disk,throttle-group=gold,file=faulty"])
            .export("disk", "iothread=io0,werror=enospc")
            .args(["--metrics", &address])
            .start();
        let blk = BlkClient::connect(&server.socket("disk"), 1, 64).expect("it serves");
        Daemon { blk, server, port }
    }

    fn page(&self, accept: &str) -> Vec<u8> {
        let url = format!("http://127.0.0.1:{}/metrics", self.port.number());
        let mut curl = Command::new(tool("curl"));
        curl.args(["--silent", "--fail", "--header", &format!("Accept:{accept}"), &url]);
        let output = curl.output().expect("curl runs");
        assert!(output.status.success(), "{output:?}");
        output.stdout
    }
}

#[test]
fn promtool_accepts_page_and_rules() {
    let scratch = Scratch::new();
    let mut daemon = Daemon::start(&scratch);
    daemon.blk.read(0, 4096);
    // curl omits an empty header.
    for accept in ["", "*/*", "text/plain;version=0.0.4"] {
        let page = daemon.page(accept);
        let output = promtool(&["check", "metrics"], &page);
        let said = [&output.stdout[..], &output.stderr].concat();
        assert!(output.status.success() && said.is_empty(), "{accept}: {output:?}");
    }
    let page = daemon.page("application/openmetrics-text; version=1.0.0");
    assert!(page.ends_with(b"# EOF\n"), "{}", String::from_utf8_lossy(&page));
    for arguments in [
        ["check", "config", "prometheus.yml"],
        ["check", "rules", "rules.yml"],
        ["test", "rules", "rules_test.yml"],
    ] {
        let output = promtool(&arguments, b"");
        assert!(output.status.success(), "{arguments:?}: {output:?}");
    }
    drop(daemon.blk);
    daemon.server.stop();
}

/// Each alert fires in a unit test.
#[test]
fn each_alert_is_tested() {
    let read = |file| fs::read_to_string(packaged(file)).expect("a packaged file");
    let (rules, tests) = (read("rules.yml"), read("rules_test.yml"));
    let documentation = fs::read_to_string(repository().join("docs/METRICS.md")).expect("METRICS");
    let alerts: Vec<&str> =
        rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(alerts.len() >= 7, "{alerts:?}");
    for alert in alerts {
        // A non-empty list: `exp_alerts: []` expects that the alert does not fire.
        let named = format!("- alertname: {alert}\n");
        let mut cases = tests.split(&named).skip(1);
        let fires = cases.any(|case| {
            let case = case.split("- alertname:").next().unwrap_or_default();
            case.contains("exp_alerts:\n")
        });
        assert!(fires, "no test in which {alert} fires");
        assert!(documentation.contains(&format!("`{alert}`")), "{alert} is not in docs/METRICS.md");
    }
}

/// A Prometheus that scrapes `daemon` every second. Killed when it is dropped.
struct Prometheus {
    process: Child,
    port: Port,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Prometheus {
    fn start(scratch: &Scratch, daemon: &Daemon) -> Self {
        let config = format!(
            "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\n\
             rule_files: ['{}']\n\
             scrape_configs: [{{job_name: ringmill, static_configs: [{{targets: ['127.0.0.1:{}']}}]}}]\n",
            packaged("rules.yml").display(),
            daemon.port.number()
        );
        fs::write(scratch.path("prometheus.yml"), config).expect("a file");
        let log = fs::File::create(scratch.path("prometheus.log")).expect("a file");
        let port = Port::new();
        let mut command = tied_command(&unpacked("prometheus"));
        command
            .arg(format!("--config.file={}", scratch.path("prometheus.yml").display()))
            .arg(format!("--storage.tsdb.path={}", scratch.path("tsdb").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{}", port.number()))
            .stdout(Stdio::null())
            .stderr(log);
        let process = command.spawn().expect("Prometheus runs");
        Prometheus { process, port }
    }

    /// Returns the answer of its API; `None` before it listens.
    fn ask(&self, path: &str, arguments: &[&str]) -> Option<Value> {
        let url = format!("http://127.0.0.1:{}/api/v1/{path}", self.port.number());
        let output = Command::new(tool("curl"))
            .args(["--silent", "--get", "--max-time", "60"])
            .args(arguments)
            .arg(&url)
            .output()
            .expect("curl runs");
        let answer: Value = serde_json::from_slice(&output.stdout).ok()?;
        assert_eq!(answer["status"], "success", "{path} {arguments:?}: {answer}");
        Some(answer["data"].clone())
    }

    /// Returns the result vector of `query`.
    fn query(&self, query: &str) -> Option<Vec<Value>> {
        let data = self.ask("query", &["--data-urlencode", &format!("query={query}")])?;
        data["result"].as_array().cloned()
    }
}

/// The names of metrics in an expression.
fn metrics(expression: &str) -> impl Iterator<Item = &str> {
    let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("ringmill_") || word.starts_with("process_"))
}

/// The expressions of the dashboard and its variables, with Grafana's values substituted.
fn expressions() -> Vec<(String, String)> {
    let text = fs::read_to_string(packaged("dashboard.json")).expect("the dashboard");
    let dashboard: Value = serde_json::from_str(&text).expect("JSON");
    let mut all = Vec::new();
    for panel in dashboard["panels"].as_array().expect("panels") {
        for target in panel["targets"].as_array().expect("targets") {
            let expression = target["expr"].as_str().expect("an expression");
            let expression =
                [("$__rate_interval", "10s"), ("$__range", "1m"), ("$job", "ringmill")]
                    .into_iter()
                    .chain([("$instance", ".*"), ("$export", ".*")])
                    .fold(expression.to_owned(), |text, (name, value)| text.replace(name, value));
            assert!(!expression.contains('$'), "{expression}");
            all.push((panel["title"].as_str().expect("a title").to_owned(), expression));
        }
    }
    assert!(all.len() > 15);
    all
}

#[test]
fn prometheus_reads_the_daemon_and_the_dashboard_has_data() {
    let scratch = Scratch::new();
    let mut daemon = Daemon::start(&scratch);
    let prometheus = Prometheus::start(&scratch, &daemon);
    let up = || prometheus.query("up{job=\"ringmill\"} == 1").filter(|list| !list.is_empty());
    eventually("a scrape", up);

    // Prometheus knows each metric of the page with its type and help.
    let known = prometheus.ask("metadata", &[]).expect("it answers");
    let page = String::from_utf8(daemon.page("*/*")).expect("text");
    for line in page.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, _) = line.split_once(' ').expect("a type");
        let name = name.trim_end_matches("_total").trim_end_matches("_info");
        assert!(known.get(name).is_some(), "{name}");
    }
    // The page has each metric that the dashboard and the rules name.
    let named: BTreeSet<&str> = page
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split(['{', ' ']).next())
        .collect();
    let expressions = expressions();
    let rules = fs::read_to_string(packaged("rules.yml")).expect("the rules");
    let all = expressions.iter().map(|(_, expression)| expression.as_str()).chain([&*rules]);
    for metric in all.flat_map(metrics) {
        assert!(named.contains(metric), "{metric} is no metric of the daemon");
    }

    // Every panel has data once requests are served, including requests delayed by the group.
    for (title, expression) in &expressions {
        eventually(&format!("data of panel {title}: {expression}"), || {
            for sector in 0..4 {
                daemon.blk.read(sector, 512);
                daemon.blk.write(sector, &[1; 512]);
            }
            prometheus.query(expression).filter(|list| !list.is_empty())
        });
    }
    let held = "ringmill_throttle_group_held_requests_total{group=\"gold\"} > 0";
    eventually("requests held by the throttle group", || {
        let segments = (0..16).map(|n| Segment { at: 4096 * n, len: 512, device_writes: true });
        for segment in segments {
            let segments = vec![segment];
            daemon.blk.submit(0, &Request { kind: request::IN, sector: 0, segments });
        }
        let mut answered = 0;
        while answered < 16 {
            answered += daemon.blk.wait(0).expect("it serves").len();
        }
        prometheus.query(held).filter(|list| !list.is_empty())
    });

    // A write without space stops the export, and the packaged rule fires.
    let firing = || {
        let alerts = prometheus.ask("alerts", &[])?["alerts"].take();
        let alerts = alerts.as_array().expect("a list").clone();
        let stopped = |alert: &Value| {
            alert["labels"]["alertname"] == "RingmillExportStopped" && alert["state"] == "firing"
        };
        alerts.into_iter().find(stopped)
    };
    assert_eq!(firing(), None);
    let segments = vec![Segment { at: 0, len: 512, device_writes: false }];
    daemon.blk.submit(0, &Request { kind: request::OUT, sector: 9, segments });
    let alert = eventually("the alert", firing);
    assert_eq!(alert["labels"]["export"], "disk");
    assert_eq!(alert["labels"]["severity"], "critical");
    drop(prometheus);
    drop(daemon.blk);
    daemon.server.stop();
}

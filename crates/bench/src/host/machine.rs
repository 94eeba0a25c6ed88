//! What machine this is, for the report.

use std::fs;
use std::path::Path;

/// Lines about the machine.
pub fn describe(directory: &Path) -> Vec<String> {
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    let virtual_machine = if cpuinfo("flags").is_some_and(|flags| flags.contains("hypervisor")) {
        ", in a virtual machine"
    } else {
        ""
    };
    vec![
        format!(
            "CPU: {} ({cpus} CPUs{virtual_machine})",
            cpuinfo("model name").unwrap_or("unknown".into())
        ),
        format!("Kernel: {}", read("/proc/sys/kernel/osrelease")),
        format!("File system of the file node: {}", file_system(directory)),
        load_average(),
    ]
}

/// The load average over one minute, and whether it speaks against the figures.
fn load_average() -> String {
    const QUIET: f64 = 0.5;
    let text = read("/proc/loadavg");
    let average = text.split_whitespace().next().unwrap_or("unknown");
    let verdict = match average.parse::<f64>() {
        Ok(average) if average <= QUIET => "",
        _ => ". PROVISIONAL: something else was running, measure again on a quiet machine",
    };
    format!("Load average before the run: {average}{verdict}")
}

fn read(path: &str) -> String {
    fs::read_to_string(path).map_or("unknown".into(), |text| text.trim().to_owned())
}

fn cpuinfo(key: &str) -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let value = text.lines().find(|line| line.starts_with(key))?.split_once(':')?.1;
    Some(value.trim().to_owned())
}

/// Type and device of the file system that holds `directory`.
fn file_system(directory: &Path) -> String {
    let directory = directory.canonicalize().unwrap_or(directory.to_owned());
    let mounts = read("/proc/self/mounts");
    mounts
        .lines()
        .filter_map(|line| {
            let mut fields = line.split(' ');
            let (device, at, kind) = (fields.next()?, fields.next()?, fields.next()?);
            directory.starts_with(at).then_some((at.len(), format!("{kind} on {device}")))
        })
        // The longest mount point that is a prefix; of several on it, the last one is seen.
        .max_by_key(|&(length, _)| length)
        .map_or("unknown".into(), |(_, description)| description)
}

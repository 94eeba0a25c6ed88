//! The kernel's version and its restrictions.

use std::fmt;
use std::fs;
use std::path::Path;

use nix::errno::Errno;

use super::ring::RingReport;
use super::row;

/// CAP_SYS_ADMIN of capabilities(7).
const CAP_SYS_ADMIN: u32 = 21;

/// Values from /proc.
pub(super) struct Kernel {
    release: Option<String>,
    /// `kernel.io_uring_disabled`: 0 allows all users, 1 privileged users, 2 none. `None` before
    /// Linux 6.6.
    io_uring_disabled: Option<u32>,
    /// `kernel.io_uring_group`: the group that may use io_uring at level 1; -1 for none.
    io_uring_group: Option<i64>,
    /// `Seccomp` of /proc/self/status: 0 none, 1 strict, 2 filter.
    seccomp: Option<u32>,
    seccomp_filters: Option<u32>,
    /// `CapEff` of /proc/self/status.
    capabilities: u64,
}

impl Kernel {
    pub(super) fn read(proc: &Path) -> Self {
        let read = |file: &str| fs::read_to_string(proc.join(file)).ok();
        let status = read("self/status").unwrap_or_default();
        let field = |name: &str| status_field(&status, name);
        Self {
            release: read("sys/kernel/osrelease").map(|text| text.trim().to_owned()),
            io_uring_disabled: read("sys/kernel/io_uring_disabled")
                .and_then(|t| t.trim().parse().ok()),
            io_uring_group: read("sys/kernel/io_uring_group").and_then(|t| t.trim().parse().ok()),
            seccomp: field("Seccomp").and_then(|text| text.parse().ok()),
            seccomp_filters: field("Seccomp_filters").and_then(|text| text.parse().ok()),
            capabilities: field("CapEff")
                .and_then(|text| u64::from_str_radix(text, 16).ok())
                .unwrap_or(0),
        }
    }

    fn has(&self, capability: u32) -> bool {
        self.capabilities & (1 << capability) != 0
    }

    /// The reason why io_uring is refused, if it can be found.
    pub(super) fn why_refused(&self, ring: &RingReport) -> Option<String> {
        let errno = ring.refused_altogether()?;
        Some(match (errno, self.io_uring_disabled, self.seccomp) {
            (Errno::EPERM, Some(2), _) => {
                "sysctl kernel.io_uring_disabled=2; 0 lets everybody use it".to_owned()
            }
            (Errno::EPERM, Some(1), _) if !self.has(CAP_SYS_ADMIN) => {
                "sysctl kernel.io_uring_disabled=1; be in the group kernel.io_uring_group, or \
                 have CAP_SYS_ADMIN"
                    .to_owned()
            }
            (_, _, Some(2)) => "a seccomp filter (a container's?), or a security module".to_owned(),
            (Errno::ENOSYS, _, _) => "a kernel without io_uring".to_owned(),
            (errno, _, _) => errno.desc().to_owned(),
        })
    }
}

/// The value of a line `Name:\tvalue`.
fn status_field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        row(f, "release", self.release.as_deref().unwrap_or("unknown"))?;
        let sysctl = match self.io_uring_disabled {
            None => "not there (Linux before 6.6): no restriction".to_owned(),
            Some(0) => "0: all processes may use io_uring".to_owned(),
            Some(1) => match self.io_uring_group {
                Some(group) if group >= 0 => {
                    format!(
                        "1: only group {group} and processes with CAP_SYS_ADMIN may use io_uring"
                    )
                }
                _ => "1: only processes with CAP_SYS_ADMIN may use io_uring".to_owned(),
            },
            Some(level) => format!("{level}: no process may use io_uring"),
        };
        row(f, "kernel.io_uring_disabled", &sysctl)?;
        let seccomp = match (self.seccomp, self.seccomp_filters) {
            (Some(0), _) => "none".to_owned(),
            (Some(1), _) => "strict".to_owned(),
            (Some(2), Some(filters)) => format!("filter ({filters} in force)"),
            (Some(2), None) => "filter".to_owned(),
            _ => "unknown".to_owned(),
        };
        row(f, "seccomp", &seccomp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proc(status: &str, disabled: Option<&str>) -> (Kernel, std::path::PathBuf) {
        let name = std::thread::current().name().unwrap_or("probe").replace("::", "-");
        let root = std::env::temp_dir().join(format!("ringmill-{}-{name}", std::process::id()));
        fs::create_dir_all(root.join("self")).expect("a directory");
        fs::create_dir_all(root.join("sys/kernel")).expect("a directory");
        fs::write(root.join("self/status"), status).expect("a file");
        fs::write(root.join("sys/kernel/osrelease"), "6.1.0-test\n").expect("a file");
        if let Some(level) = disabled {
            fs::write(root.join("sys/kernel/io_uring_disabled"), level).expect("a file");
            fs::write(root.join("sys/kernel/io_uring_group"), "42\n").expect("a file");
        }
        (Kernel::read(&root), root)
    }

    #[test]
    fn values_of_proc_are_read() {
        let status = "Name:\tx\nCapEff:\t0000000000004000\nSeccomp:\t2\nSeccomp_filters:\t3\n";
        let (kernel, root) = proc(status, Some("1\n"));
        let text = kernel.to_string();
        assert!(text.contains("6.1.0-test"), "{text}");
        assert!(text.contains("1: only group 42 and processes"), "{text}");
        assert!(text.contains("filter (3 in force)"), "{text}");
        let why = |errno| kernel.why_refused(&RingReport::refusing(errno)).expect("a reason");
        assert!(why(Errno::EPERM).contains("kernel.io_uring_disabled=1"));
        assert!(why(Errno::EACCES).contains("seccomp"));
        fs::remove_dir_all(root).expect("it goes");
    }

    #[test]
    fn old_kernels_have_no_sysctl() {
        let (kernel, root) = proc("CapEff:\t0\nSeccomp:\t0\n", None);
        let text = kernel.to_string();
        assert!(text.contains("no restriction") && text.contains("none"), "{text}");
        let why = kernel.why_refused(&RingReport::refusing(Errno::ENOSYS));
        assert_eq!(why.as_deref(), Some("a kernel without io_uring"));
        fs::remove_dir_all(root).expect("it goes");
    }
}

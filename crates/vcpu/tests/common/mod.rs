//! What tests of more than one file need.

use std::io::Write;

use vcpu::f1::VcpuKind;

/// Whether there are vCPUs of KVM's to be had. If not, says so where the tests' results are shown: a
/// test that could not run must not look like one that passed.
pub(crate) fn has_kvm() -> bool {
    let usable = VcpuKind::Kvm.usable();
    if let Err(why) = &usable {
        let thread = std::thread::current();
        let test = thread.name().unwrap_or("a test");
        let skipped = format!("\n*** NOT TESTED: vCPUs of KVM's ({test}): {why:#}. ***\n");
        // The test harness swallows what a passing test prints with the macros.
        let _ = std::io::stderr().lock().write_all(skipped.as_bytes());
    }
    usable.is_ok()
}

//! What tests of more than one file need.

use std::io::Write;

/// Whether there are vCPUs of KVM's to be had. If not, says so where the tests' results are shown: a
/// test that could not run must not look like one that passed.
pub(crate) fn has_kvm() -> bool {
    #[cfg(target_arch = "x86_64")]
    let missing = vcpu::kvm::usable().err().map(|why| why.to_string());
    #[cfg(not(target_arch = "x86_64"))]
    let missing = Some("they are there on x86-64 only");
    if let Some(why) = &missing {
        let thread = std::thread::current();
        let test = thread.name().unwrap_or("a test");
        let skipped = format!("\n*** NOT TESTED: vCPUs of KVM's ({test}): {why}. ***\n");
        // The test harness swallows what a passing test prints with the macros.
        let _ = std::io::stderr().lock().write_all(skipped.as_bytes());
    }
    missing.is_none()
}

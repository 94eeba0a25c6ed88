//! What tests of more than one file need.

use test_requirements::{Needs, untested};
use vcpu::wake_ups::VcpuKind;

/// Whether there are vCPUs of KVM's to be had. If not, says so.
pub(crate) fn has_kvm() -> bool {
    let usable = VcpuKind::Kvm.usable();
    if let Err(why) = &usable {
        untested(Needs::Kvm, format_args!("{why:#}"));
    }
    usable.is_ok()
}

//! Guests without an operating system, for tests and benchmarks. Device models run on an I/O thread as in the daemon, and
//! a minimal driver acts as the guest.
//!
//! - [`machine`]: guest memory, I/O threads and a block node, in this process;
//! - [`virtio_blk`], [`ahci`], [`nvme`]: devices on the I/O threads, and their drivers;
//! - [`load`]: virtio-blk under load, queue depth N, one or more queues;
//! - [`one_thread`]: a virtio-blk queue and its device on one thread, to count the costs of requests;
//! - [`kvm`]: a KVM vCPU that runs a minimal driver, if KVM is available (x86-64);
//! - [`vfio_user`]: a client of devices in another process or thread;
//! - [`wake_ups`]: a workload that shows whether requests wait for an unrelated wake-up.

pub mod ahci;
pub mod clock;
#[cfg(target_arch = "x86_64")]
pub mod kvm;
pub mod load;
pub mod machine;
pub mod nvme;
pub mod one_thread;
pub mod submissions;
pub mod traffic;
pub mod vfio_user;
pub mod virtio_blk;
pub mod wake_ups;

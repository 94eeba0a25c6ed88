//! Guests without an operating system, for tests and benchmarks: device models run on an I/O thread
//! as they do in the daemon, and a driver of ours plays the guest at the other end.
//!
//! - [`machine`]: guest memory, I/O threads and a block node, in this process;
//! - [`virtio_blk`], [`ahci`]: devices on the I/O threads, and their drivers;
//! - [`load`]: virtio-blk under load, queue depth N, one or more queues;
//! - [`one_thread`]: a virtio-blk queue and its device on one thread, for counting what requests cost;
//! - [`kvm`]: a vCPU of KVM's that runs a driver of ours, where there is KVM (x86-64);
//! - [`f1`]: a workload whose requests wait for an unrelated wake-up, if they may.

pub mod ahci;
pub mod clock;
pub mod f1;
#[cfg(target_arch = "x86_64")]
pub mod kvm;
pub mod load;
pub mod machine;
pub mod one_thread;
pub mod submissions;
pub mod traffic;
pub mod virtio_blk;

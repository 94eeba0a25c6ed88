//! A KVM vCPU that runs a small program at privilege level 3.
//!
//! Nested KVM, as on virtual development machines, runs level 3 natively, and may emulate level 0. So the program gets
//! page tables and segments, I/O privilege level 3 to end itself with an OUT (HLT faults at level 3), and no interrupts.

#![allow(unsafe_code)]

pub mod payload;

use std::fmt;
use std::os::fd::{AsFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use guest_memory::{GuestMemory, MemoryView};
use kvm_bindings::{
    KVM_MAX_CPUID_ENTRIES, Msrs, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{Cap, IoEventAddress, Kvm, NoDatamatch, VcpuExit, VcpuFd, VmFd};
use nix::errno::Errno;
use vmm_sys_util::eventfd::EventFd;

use crate::clock;

/// Guest memory below this belongs to the vCPU: page tables, the program, its stack and parameters.
pub const RESERVED: u64 = 0x1_0000;
/// First address of device registers, in the second GiB.
pub const MMIO_BASE: u64 = 1 << 30;
/// Bytes of device registers.
pub const MMIO_SIZE: u64 = 1 << 21;

const PML4_AT: u64 = 0x1000;
const PDPT_AT: u64 = 0x2000;
const PD_AT: u64 = 0x3000;
const MMIO_PD_AT: u64 = 0x4000;
const PARAMS_AT: u64 = 0x5000;
const STACK_END: u64 = 0x7000;
const CODE_AT: u64 = 0x8000;

/// Page table bits: present, writable, user, and a page of 2 MiB.
const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const LARGE: u64 = 1 << 7;
/// Uncached, as registers are.
const UNCACHED: u64 = 1 << 4;
const LARGE_PAGE: u64 = 2 << 20;

const CR0_PE: u64 = 1 << 0;
const CR0_ET: u64 = 1 << 4;
const CR0_NE: u64 = 1 << 5;
const CR0_WP: u64 = 1 << 16;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const CR4_OSFXSR: u64 = 1 << 9;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
/// RFLAGS: the bit that is always set, and I/O privilege level 3.
const RFLAGS_IOPL3: u64 = (1 << 1) | (3 << 12);
const MSR_TSC: u32 = 0x10;

/// Device registers from the vCPU's side, on its thread.
pub trait Mmio {
    /// Reads `size` bytes (1 to 8) at `offset` from [`MMIO_BASE`].
    fn read(&self, offset: u64, size: usize) -> u64;
    /// Writes `size` bytes at `offset`.
    fn write(&self, offset: u64, size: usize, value: u64);
}

/// KVM cannot be used here.
#[derive(Debug)]
pub struct Unusable {
    call: &'static str,
    error: kvm_ioctls::Error,
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no KVM here: {} failed: {}", self.call, self.error)
    }
}

impl std::error::Error for Unusable {}

/// Checks whether this process can have virtual machines.
///
/// # Errors
///
/// `/dev/kvm` is missing, not accessible, or makes no machines.
pub fn usable() -> Result<(), Unusable> {
    open().map(drop)
}

fn open() -> Result<(Kvm, VmFd), Unusable> {
    let kvm = Kvm::new().map_err(|error| Unusable { call: "open(/dev/kvm)", error })?;
    let vm = kvm.create_vm().map_err(|error| Unusable { call: "KVM_CREATE_VM", error })?;
    Ok((kvm, vm))
}

/// A virtual machine with one vCPU.
pub struct Vcpu {
    vcpu: VcpuFd,
    vm: VmFd,
    memory: Arc<GuestMemory>,
}

impl Vcpu {
    /// Makes a machine with this memory, which begins at guest address 0 and is at most 1 GiB. Its first [`RESERVED`] bytes
    /// are overwritten.
    ///
    /// # Errors
    ///
    /// [`Unusable`], or the name of what failed later.
    pub fn new(memory: &Arc<GuestMemory>) -> Result<Vcpu> {
        let (kvm, vm) = open()?;
        ensure!(kvm.check_extension(Cap::Ioeventfd), "this KVM has no ioeventfds");
        for (slot, region) in (0..).zip(memory.regions()) {
            let end = region.guest_addr() + region.size();
            ensure!(end <= MMIO_BASE, "guest memory up to {end:#x}, beyond {MMIO_BASE:#x}");
            let region = kvm_userspace_memory_region {
                slot,
                flags: 0,
                guest_phys_addr: region.guest_addr(),
                memory_size: region.size(),
                userspace_addr: region.host().as_ptr() as u64,
            };
            // SAFETY: the region is mapped readable and writable for its size as long as the machine, which is dropped
            // before `memory`. No Rust reference to that memory exists, whatever the guest writes.
            unsafe { vm.set_user_memory_region(region) }.context("KVM_SET_USER_MEMORY_REGION")?;
        }
        let vcpu = vm.create_vcpu(0).context("KVM_CREATE_VCPU")?;
        let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES);
        vcpu.set_cpuid2(&cpuid.context("KVM_GET_SUPPORTED_CPUID")?).context("KVM_SET_CPUID2")?;
        write_page_tables(&MemoryView::new(memory.clone()))?;
        let mut sregs = vcpu.get_sregs().context("KVM_GET_SREGS")?;
        long_mode_level_3(&mut sregs);
        vcpu.set_sregs(&sregs).context("KVM_SET_SREGS")?;
        Ok(Vcpu { vcpu, vm, memory: memory.clone() })
    }

    /// Its memory.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Turns writes to guest address `addr` into signals of `eventfd`, inside KVM.
    ///
    /// # Errors
    ///
    /// KVM_IOEVENTFD.
    pub fn kick_by_eventfd(&self, addr: u64, eventfd: &OwnedFd) -> Result<()> {
        let copy = eventfd.as_fd().try_clone_to_owned().context("dup")?.into_raw_fd();
        // SAFETY: the descriptor was just duplicated and has no other owner.
        let eventfd = unsafe { EventFd::from_raw_fd(copy) };
        let addr = IoEventAddress::Mmio(addr);
        self.vm.register_ioevent(&eventfd, &addr, NoDatamatch).context("KVM_IOEVENTFD")
    }

    /// Returns the relation of the guest's time stamp counter to the monotonic clock.
    ///
    /// # Errors
    ///
    /// KVM does not report it.
    pub fn tsc(&self) -> Result<Tsc> {
        let khz = self.vcpu.get_tsc_khz().context("KVM_GET_TSC_KHZ")?;
        let entry = kvm_msr_entry { index: MSR_TSC, ..Default::default() };
        let mut msrs = Msrs::from_entries(&[entry]).context("making room for a MSR")?;
        let before = clock::now_ns();
        let read = self.vcpu.get_msrs(&mut msrs).context("KVM_GET_MSRS")?;
        let after = clock::now_ns();
        ensure!(read == 1 && khz > 0, "KVM does not tell the guest's time stamp counter");
        Ok(Tsc { khz, ticks: msrs.as_slice()[0].data, at_ns: before.midpoint(after) })
    }

    /// Runs the [`payload`] to its end. Returns its parameters as changed by the program.
    ///
    /// # Errors
    ///
    /// The guest made a forbidden access, or KVM failed.
    pub fn run(&mut self, params: payload::Params, mmio: &dyn Mmio) -> Result<payload::Params> {
        let view = MemoryView::new(self.memory.clone());
        let code = payload::code();
        ensure!(CODE_AT + code.len() as u64 <= RESERVED, "the program is too long");
        view.write_bytes(CODE_AT, code)?;
        view.write_bytes(PARAMS_AT, &params.to_bytes())?;
        let regs = kvm_regs {
            rip: CODE_AT,
            rdi: PARAMS_AT,
            rsp: STACK_END,
            rflags: RFLAGS_IOPL3,
            ..Default::default()
        };
        self.vcpu.set_regs(&regs).context("KVM_SET_REGS")?;
        self.run_to_exit(mmio)?;
        Ok(payload::Params::from_bytes(&view.read_array(PARAMS_AT)?))
    }

    fn run_to_exit(&mut self, mmio: &dyn Mmio) -> Result<()> {
        let offset = |addr: u64| {
            let offset = addr.checked_sub(MMIO_BASE).filter(|&offset| offset < MMIO_SIZE);
            offset.with_context(|| format!("the guest uses address {addr:#x}, which is nothing"))
        };
        loop {
            match self.vcpu.run() {
                Ok(VcpuExit::MmioRead(addr, data)) => {
                    let value = mmio.read(offset(addr)?, data.len()).to_le_bytes();
                    data.iter_mut().zip(value).for_each(|(byte, value)| *byte = value);
                }
                Ok(VcpuExit::MmioWrite(addr, data)) => {
                    let mut value = [0; 8];
                    value.iter_mut().zip(data).for_each(|(byte, data)| *byte = *data);
                    mmio.write(offset(addr)?, data.len(), u64::from_le_bytes(value));
                }
                Ok(VcpuExit::IoOut(payload::EXIT_PORT, _)) => return Ok(()),
                Ok(exit) => bail!("the guest stopped in a way it must not: {exit:?}"),
                Err(error) if error.errno() == Errno::EINTR as i32 => {}
                Err(error) => return Err(error).context("KVM_RUN"),
            }
        }
    }
}

/// A moment on two clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tsc {
    khz: u32,
    ticks: u64,
    at_ns: u64,
}

impl Tsc {
    /// Converts nanoseconds to ticks.
    pub fn ticks(&self, ns: u64) -> u64 {
        (u128::from(ns) * u128::from(self.khz) / 1_000_000) as u64
    }

    /// Converts the guest's `ticks` to the monotonic clock, nanoseconds.
    pub fn to_ns(&self, ticks: u64) -> u64 {
        let since = i128::from(ticks) - i128::from(self.ticks);
        (i128::from(self.at_ns) + since * 1_000_000 / i128::from(self.khz)) as u64
    }
}

/// Maps memory and registers one to one, all of it writable at level 3.
fn write_page_tables(view: &MemoryView) -> Result<()> {
    let table = PRESENT | WRITABLE | USER;
    let put = |at: u64, entry: u64| view.write_bytes(at, &entry.to_le_bytes());
    put(PML4_AT, PDPT_AT | table)?;
    put(PDPT_AT, PD_AT | table)?;
    put(PDPT_AT + 8, MMIO_PD_AT | table)?;
    for page in 0..MMIO_BASE / LARGE_PAGE {
        put(PD_AT + 8 * page, (page * LARGE_PAGE) | table | LARGE)?;
    }
    for page in 0..MMIO_SIZE.div_ceil(LARGE_PAGE) {
        let addr = MMIO_BASE + page * LARGE_PAGE;
        put(MMIO_PD_AT + 8 * page, addr | table | LARGE | UNCACHED)?;
    }
    Ok(())
}

fn long_mode_level_3(sregs: &mut kvm_sregs) {
    let segment = kvm_segment {
        base: 0,
        limit: u32::MAX,
        present: 1,
        dpl: 3,
        s: 1,
        g: 1,
        ..Default::default()
    };
    // Selectors of entries 6 and 5 of a segment table that does not exist, for level 3.
    let code = kvm_segment { selector: 0x33, type_: 0xb, l: 1, ..segment };
    let data = kvm_segment { selector: 0x2b, type_: 0x3, db: 1, ..segment };
    sregs.cs = code;
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.cr0 = CR0_PE | CR0_ET | CR0_NE | CR0_WP | CR0_PG;
    sregs.cr3 = PML4_AT;
    sregs.cr4 = CR4_PAE | CR4_OSFXSR;
    sregs.efer = EFER_LME | EFER_LMA;
}

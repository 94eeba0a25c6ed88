//! The guest's program: machine code at privilege level 3, without stack frames, operating system or interrupts. It
//! drives an AHCI port, a virtio-blk queue or an NVMe queue pair whose structures the host has written, and polls memory for completions.
//!
//! It is assembled into read-only data and copied into guest memory. It runs at any address.

#![allow(unsafe_code)]

use std::mem::offset_of;

use crate::virtio_blk::QueueArea;

/// The program's parameters and results, in guest memory: words of 64 bits.
macro_rules! params {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The program's parameters and results. Addresses are guest-physical, which equal virtual ones. Times are ticks
        /// of the guest's time stamp counter.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        #[repr(C)]
        pub struct Params {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Params {
            /// Encodes the parameters as in memory.
            pub fn to_bytes(self) -> Vec<u8> {
                [$(self.$name),*].into_iter().flat_map(u64::to_le_bytes).collect()
            }

            /// Decodes the parameters from memory.
            pub fn from_bytes(bytes: &[u8; size_of::<Params>()]) -> Params {
                let mut words = bytes.as_chunks().0.iter().copied().map(u64::from_le_bytes);
                let mut next = || words.next().unwrap_or_default();
                Params { $($name: next(),)* }
            }
        }
    };
}

params! {
    /// 0: AHCI, 1: virtio-blk, 2: NVMe.
    device,
    /// Number of batches, at least one.
    batches,
    /// Requests in a batch: 1 to 32 on AHCI, at most the queue's size on virtio-blk, less than it on NVMe.
    batch,
    /// Pause before a batch is submitted.
    pause_before,
    /// Pause after each completion.
    pause_after,
    /// Time limit of a completion.
    patience,
    /// First sector of the first request; other requests follow.
    lba,
    /// Sectors of a request.
    sectors,
    /// Address of the [`Record`]s, one per batch.
    records,
    /// Address of request 0. AHCI: its command FIS; virtio-blk: its header, with the status byte
    /// [`QueueArea::STATUS_AT`] bytes after it; NVMe: the submission queue, whose entries have their index as identifier.
    requests,
    /// Distance between requests, bytes.
    stride,
    /// Address that signals completions. AHCI: the Set Device Bits FIS; virtio-blk: the used ring; NVMe: the completion queue.
    completions,
    /// Address of the doorbell. AHCI: PxCI; virtio-blk: the kick; NVMe: the submission queue's, which the
    /// completion queue's follows.
    doorbell,
    /// AHCI: PxSACT.
    sact,
    /// AHCI: bits 31 to 24 are FEATURES 15:8 of the commands.
    features_high,
    /// virtio-blk: the available ring.
    avail,
    /// virtio-blk, NVMe: the queue's size, a power of two, less one.
    mask,
    /// NVMe: the shadow of the doorbell, or the doorbell in mapped memory.
    shadow,
    /// NVMe: the event index of the doorbell; 0: no register is written; [`ALWAYS`]: a register is written for each doorbell.
    events,
    /// NVMe: the data of entry 0; entries are a page apart.
    data,
    /// NVMe: 1 if each request's data begins with the number of its first sector.
    has_numbers,
    /// Result: number of kicks; NVMe: of writes to a doorbell's register.
    kicks,
    /// Result: one of the constants below.
    outcome,
}

/// [`Params::events`]: there is no event index, and each doorbell is a register write.
pub const ALWAYS: u64 = 1;

/// [`Params::outcome`]: not ended.
pub const RUNNING: u64 = 0;
/// [`Params::outcome`]: all requests succeeded.
pub const DONE: u64 = 1;
/// [`Params::outcome`]: a request failed.
pub const FAILED: u64 = 2;
/// [`Params::outcome`]: a completion took longer than [`Params::patience`].
pub const TIMED_OUT: u64 = 3;
/// [`Params::outcome`]: a completion has wrong data, is of no request, or of one that was completed before.
pub const WRONG: u64 = 4;

/// The port to which the program writes to end itself.
pub const EXIT_PORT: u16 = 0xf4;

/// When a batch was submitted and completed, ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// Just before its first doorbell.
    pub submitted: u64,
    /// After the pause for its last completion.
    pub done: u64,
}

impl Record {
    /// Bytes of a record.
    pub const SIZE: u64 = 16;

    /// Decodes a record from memory.
    pub fn from_bytes(bytes: [u8; 16]) -> Record {
        let both = u128::from_le_bytes(bytes);
        Record { submitted: both as u64, done: (both >> 64) as u64 }
    }
}

// rbx: the parameters; r12: batches left; r13: the record; r14: the next sector; r15: AHCI: commands
// outstanding, virtio-blk: the available index, NVMe: entries submitted; r11: virtio-blk: the used index, NVMe: entries
// completed.
std::arch::global_asm!(
    ".pushsection .rodata.vcpu_payload, \"a\", @progbits",
    ".balign 16",
    // Code elsewhere in the crate names both, from other object files.
    ".globl vcpu_payload_begin, vcpu_payload_end",
    ".hidden vcpu_payload_begin, vcpu_payload_end",
    "vcpu_payload_begin:",
    "    mov rbx, rdi",
    "    mov r12, [rbx + {batches}]",
    "    mov r13, [rbx + {records}]",
    "    mov r14, [rbx + {lba}]",
    "    xor r15d, r15d",
    "    xor r11d, r11d",
    // Each batch.
    ".Lvcpu_batch:",
    "    mov rdi, [rbx + {pause_before}]",
    "    call .Lvcpu_pause",
    "    rdtsc",
    "    shl rdx, 32",
    "    or rax, rdx",
    "    mov [r13], rax",
    "    xor ecx, ecx",
    "    cmp qword ptr [rbx + {device}], 1",
    "    je .Lvcpu_virtio",
    "    ja .Lvcpu_nvme",
    // ---- AHCI: for each command its sector, then its two registers.
    ".Lvcpu_ahci_command:",
    "    mov rax, rcx",
    "    imul rax, [rbx + {stride}]",
    "    add rax, [rbx + {requests}]",
    "    mov edx, r14d", // LBA 23:0, and DEVICE
    "    and edx, 0xffffff",
    "    or edx, 0x40000000",
    "    mov [rax + 4], edx",
    "    mov rdx, r14", // LBA 47:24, and FEATURES 15:8
    "    shr rdx, 24",
    "    and edx, 0xffffff",
    "    or edx, [rbx + {features_high}]",
    "    mov [rax + 8], edx",
    "    add r14, [rbx + {sectors}]",
    "    mov edx, 1",
    "    shl edx, cl",
    "    mov rax, [rbx + {sact}]",
    "    mov [rax], edx",
    "    mov rax, [rbx + {doorbell}]",
    "    mov [rax], edx",
    "    inc qword ptr [rbx + {kicks}]",
    "    inc ecx",
    "    cmp ecx, [rbx + {batch}]",
    "    jb .Lvcpu_ahci_command",
    "    mov r15d, 1",
    "    shl r15, cl",
    "    dec r15",
    // The FIS signals that a command has completed, PxSACT which one. The FIS is cleared before PxSACT is read, so that a
    // completion in between writes a new one.
    ".Lvcpu_ahci_wait:",
    "    mov r8, [rbx + {completions}]",
    "    call .Lvcpu_limit",
    ".Lvcpu_ahci_watch:",
    "    mov eax, [r8]",
    "    test eax, eax",
    "    jnz .Lvcpu_ahci_told",
    "    call .Lvcpu_look_at_clock",
    "    jmp .Lvcpu_ahci_watch",
    ".Lvcpu_ahci_told:",
    "    bt eax, 16", // ERR of its status
    "    jc .Lvcpu_failed",
    "    mov dword ptr [r8], 0",
    "    mov rax, [rbx + {sact}]",
    "    mov eax, [rax]",
    "    not eax",
    "    and eax, r15d",
    "    xor r15d, eax",
    "    mov r10d, eax",
    ".Lvcpu_ahci_completion:",
    "    test r10d, r10d",
    "    jz .Lvcpu_ahci_told_all",
    "    lea ecx, [r10 - 1]",
    "    and r10d, ecx",
    "    mov rdi, [rbx + {pause_after}]",
    "    call .Lvcpu_pause",
    "    jmp .Lvcpu_ahci_completion",
    ".Lvcpu_ahci_told_all:",
    "    test r15d, r15d",
    "    jnz .Lvcpu_ahci_wait",
    "    jmp .Lvcpu_batch_done",
    // ---- virtio-blk: only the sector of the chains changes.
    ".Lvcpu_virtio:",
    "    mov rax, rcx",
    "    imul rax, [rbx + {stride}]",
    "    add rax, [rbx + {requests}]",
    "    mov [rax + 8], r14",
    "    mov byte ptr [rax + {status_at}], 0xff",
    "    add r14, [rbx + {sectors}]",
    "    lea edx, [r15 + rcx]",
    "    and edx, [rbx + {mask}]",
    "    mov rax, [rbx + {avail}]",
    "    mov [rax + 2*rdx + 4], cx",
    "    inc ecx",
    "    cmp ecx, [rbx + {batch}]",
    "    jb .Lvcpu_virtio",
    "    mov r10d, r15d",
    "    add r15d, ecx",
    "    mov [rax + 2], r15w",
    "    mfence",
    // VIRTIO_F_EVENT_IDX: does the index pass the device's event?
    "    mov r8, [rbx + {completions}]",
    "    mov ecx, [rbx + {mask}]",
    "    movzx eax, word ptr [r8 + 8*rcx + 12]",
    "    mov edx, r15d",
    "    sub edx, eax",
    "    dec edx",
    "    movzx edx, dx",
    "    mov eax, r15d",
    "    sub eax, r10d",
    "    movzx eax, ax",
    "    cmp edx, eax",
    "    jae .Lvcpu_virtio_wait",
    "    mov rax, [rbx + {doorbell}]",
    "    mov word ptr [rax], 0",
    "    inc qword ptr [rbx + {kicks}]",
    ".Lvcpu_virtio_wait:",
    "    call .Lvcpu_limit",
    ".Lvcpu_virtio_watch:",
    "    mov ax, [r8 + 2]",
    "    cmp ax, r11w",
    "    jne .Lvcpu_virtio_completion",
    "    call .Lvcpu_look_at_clock",
    "    jmp .Lvcpu_virtio_watch",
    ".Lvcpu_virtio_completion:",
    "    mov ecx, r11d",
    "    and ecx, [rbx + {mask}]",
    "    mov eax, [r8 + 8*rcx + 4]",
    "    imul rax, [rbx + {stride}]",
    "    add rax, [rbx + {requests}]",
    "    cmp byte ptr [rax + {status_at}], 0",
    "    jne .Lvcpu_failed",
    "    inc r11d",
    "    mov rdi, [rbx + {pause_after}]",
    "    call .Lvcpu_pause",
    "    cmp r11w, r15w",
    "    jne .Lvcpu_virtio_wait",
    "    jmp .Lvcpu_batch_done",
    // ---- NVMe: only the sector of the entries changes. Data that was not read is all ones.
    ".Lvcpu_nvme:",
    "    lea eax, [r15 + rcx]",
    "    and eax, [rbx + {mask}]",
    "    mov rdx, rax",
    "    shl rdx, 12",
    "    add rdx, [rbx + {data}]",
    "    mov qword ptr [rdx], -1",
    "    shl rax, 6",
    "    add rax, [rbx + {requests}]",
    "    mov [rax + 40], r14", // SLBA
    "    add r14, [rbx + {sectors}]",
    "    inc ecx",
    "    cmp ecx, [rbx + {batch}]",
    "    jb .Lvcpu_nvme",
    "    mov r10d, r15d",
    "    add r15d, ecx",
    "    mov ecx, r15d",
    "    xor edi, edi",
    "    call .Lvcpu_nvme_ring",
    ".Lvcpu_nvme_wait:",
    "    call .Lvcpu_limit",
    "    mov r8d, r11d",
    "    and r8d, [rbx + {mask}]",
    "    shl r8, 4",
    "    add r8, [rbx + {completions}]",
    // The phase tag of new entries: 1 in even rounds of the queue.
    "    mov eax, [rbx + {mask}]",
    "    inc eax",
    "    xor r10d, r10d",
    "    test r11d, eax",
    "    setz r10b",
    ".Lvcpu_nvme_watch:",
    "    mov eax, [r8 + 12]",
    "    mov edx, eax",
    "    shr edx, 16",
    "    and edx, 1",
    "    cmp edx, r10d",
    "    je .Lvcpu_nvme_completion",
    "    call .Lvcpu_look_at_clock",
    "    jmp .Lvcpu_nvme_watch",
    ".Lvcpu_nvme_completion:",
    "    mov edx, eax",
    "    shr edx, 17", // status
    "    jnz .Lvcpu_failed",
    "    movzx eax, ax", // identifier
    "    cmp eax, [rbx + {mask}]",
    "    ja .Lvcpu_wrong",
    "    cmp qword ptr [rbx + {has_numbers}], 0",
    "    je .Lvcpu_nvme_take",
    "    mov r8, rax",
    "    shl r8, 12",
    "    add r8, [rbx + {data}]",
    "    shl rax, 6",
    "    add rax, [rbx + {requests}]",
    "    mov rdx, [r8]",
    "    cmp rdx, [rax + 40]",
    "    jne .Lvcpu_wrong",
    "    mov qword ptr [r8], -1", // A second completion would be wrong.
    ".Lvcpu_nvme_take:",
    "    mov r10d, r11d",
    "    inc r11d",
    "    mov ecx, r11d",
    "    mov edi, 4",
    "    call .Lvcpu_nvme_ring",
    "    mov rdi, [rbx + {pause_after}]",
    "    call .Lvcpu_pause",
    "    cmp r11d, r15d",
    "    jne .Lvcpu_nvme_wait",
    // ---- all
    ".Lvcpu_batch_done:",
    "    rdtsc",
    "    shl rdx, 32",
    "    or rax, rdx",
    "    mov [r13 + 8], rax",
    "    add r13, {record}",
    "    dec r12",
    "    jnz .Lvcpu_batch",
    "    mov eax, {done}",
    "    jmp .Lvcpu_end",
    ".Lvcpu_wrong:",
    "    mov eax, {wrong}",
    "    jmp .Lvcpu_end",
    ".Lvcpu_failed:",
    "    mov eax, {failed}",
    ".Lvcpu_end:",
    "    mov [rbx + {outcome}], rax",
    "    mov dx, {exit_port}",
    ".Lvcpu_exit:",
    "    out dx, al",
    "    jmp .Lvcpu_exit",
    // Writes a doorbell's shadow, rdi bytes from the submission queue's: r10d was the index, ecx is it. Writes the register if
    // the index passes the event index (NVM Express 2.0, section 5.7). The shadow is visible before the event index is read.
    ".Lvcpu_nvme_ring:",
    "    and r10d, [rbx + {mask}]",
    "    and ecx, [rbx + {mask}]",
    "    mov rdx, [rbx + {shadow}]",
    "    mov [rdx + rdi], ecx",
    "    mfence",
    "    mov rdx, [rbx + {events}]",
    "    test rdx, rdx",
    "    jz .Lvcpu_nvme_rung",
    "    cmp rdx, {always}",
    "    je .Lvcpu_nvme_register",
    "    mov eax, ecx",
    "    sub eax, [rdx + rdi]",
    "    dec eax",
    "    movzx eax, ax",
    "    mov edx, ecx",
    "    sub edx, r10d",
    "    movzx edx, dx",
    "    cmp eax, edx",
    "    jae .Lvcpu_nvme_rung",
    ".Lvcpu_nvme_register:",
    "    mov rdx, [rbx + {doorbell}]",
    "    mov [rdx + rdi], ecx",
    "    inc qword ptr [rbx + {kicks}]",
    ".Lvcpu_nvme_rung:",
    "    ret",
    // Waits rdi ticks.
    ".Lvcpu_pause:",
    "    rdtsc",
    "    shl rdx, 32",
    "    or rax, rdx",
    "    add rdi, rax",
    ".Lvcpu_pausing:",
    "    pause",
    "    rdtsc",
    "    shl rdx, 32",
    "    or rax, rdx",
    "    cmp rax, rdi",
    "    jb .Lvcpu_pausing",
    "    ret",
    // Sets r9 to the end of the time limit.
    ".Lvcpu_limit:",
    "    rdtsc",
    "    shl rdx, 32",
    "    or rax, rdx",
    "    add rax, [rbx + {patience}]",
    "    mov r9, rax",
    "    ret",
    // Ends the program after the time limit.
    ".Lvcpu_look_at_clock:",
    "    pause",
    "    rdtsc",
    "    shl rdx, 32",
    "    or rax, rdx",
    "    cmp rax, r9",
    "    mov eax, {timed_out}",
    "    ja .Lvcpu_end",
    "    ret",
    "vcpu_payload_end:",
    ".popsection",
    batches = const offset_of!(Params, batches),
    batch = const offset_of!(Params, batch),
    device = const offset_of!(Params, device),
    pause_before = const offset_of!(Params, pause_before),
    pause_after = const offset_of!(Params, pause_after),
    patience = const offset_of!(Params, patience),
    lba = const offset_of!(Params, lba),
    sectors = const offset_of!(Params, sectors),
    records = const offset_of!(Params, records),
    requests = const offset_of!(Params, requests),
    stride = const offset_of!(Params, stride),
    completions = const offset_of!(Params, completions),
    doorbell = const offset_of!(Params, doorbell),
    sact = const offset_of!(Params, sact),
    features_high = const offset_of!(Params, features_high),
    avail = const offset_of!(Params, avail),
    mask = const offset_of!(Params, mask),
    shadow = const offset_of!(Params, shadow),
    events = const offset_of!(Params, events),
    data = const offset_of!(Params, data),
    has_numbers = const offset_of!(Params, has_numbers),
    kicks = const offset_of!(Params, kicks),
    outcome = const offset_of!(Params, outcome),
    status_at = const QueueArea::STATUS_AT,
    record = const Record::SIZE,
    always = const ALWAYS,
    done = const DONE,
    failed = const FAILED,
    timed_out = const TIMED_OUT,
    wrong = const WRONG,
    exit_port = const EXIT_PORT,
);

/// Returns the program's machine code. Its entry point is the first byte, with the address of its [`Params`] in RDI and
/// the end of a stack of at least 64 bytes in RSP.
pub fn code() -> &'static [u8] {
    unsafe extern "C" {
        static vcpu_payload_begin: u8;
        static vcpu_payload_end: u8;
    }
    let (begin, end) = (&raw const vcpu_payload_begin, &raw const vcpu_payload_end);
    // SAFETY: both labels are in the section above, static read-only data, with `end` after `begin` and only bytes in
    // between.
    unsafe { std::slice::from_raw_parts(begin, end.addr() - begin.addr()) }
}

//! A static probe in the format of SystemTap's `<sys/sdt.h>`, which perf, bpftrace and gdb read. It is a
//! `nop` in the code, and a note with provider, name, the addresses of the nop and of the semaphore, and the
//! locations of the arguments
//! (<https://sourceware.org/systemtap/wiki/UserSpaceProbeImplementation>).

/// Places a probe. `$size` is an argument's size and sign in the notation of the note, `N@where`: `8` bytes,
/// negative if signed.
#[cfg(target_pointer_width = "64")]
#[doc(hidden)]
#[macro_export]
macro_rules! sdt {
    ($name:ident, $semaphore:path, $($size:expr => $value:expr),+) => {
        #[cfg(target_arch = "x86_64")]
        $crate::sdt!(@ [, att_syntax] $name, $semaphore, $($size => $value),+);
        #[cfg(not(target_arch = "x86_64"))]
        $crate::sdt!(@ [] $name, $semaphore, $($size => $value),+);
    };
    (@ [$($option:tt)*] $name:ident, $semaphore:path,
        $size:expr => $value:expr $(, $sizes:expr => $values:expr)*) => {
        // SAFETY: the only instruction is a nop; the rest goes to other sections of the object file. A tool
        // that replaces the nop preserves registers and memory.
        unsafe {
            ::std::arch::asm!(
                concat!(
                    "990: nop\n",
                    ".pushsection .note.stapsdt, \"?\", \"note\"\n",
                    ".balign 4\n",
                    ".4byte 992f-991f, 994f-993f, 3\n",
                    "991: .asciz \"stapsdt\"\n",
                    "992: .balign 4\n",
                    "993: .8byte 990b\n",
                    ".8byte _.stapsdt.base\n",
                    ".8byte {semaphore}\n",
                    ".asciz \"ringmill\"\n",
                    ".asciz \"", stringify!($name), "\"\n",
                    ".asciz \"", $size, "@{}", $(" ", $sizes, "@{}",)* "\"\n",
                    "994: .balign 4\n",
                    ".popsection\n",
                    // The offset of this symbol shows tools that the program was prelinked. It is in the code
                    // section, since perf assumes that it is near the nop. lld's segments differ in the
                    // distance of address and file offset.
                    ".ifndef _.stapsdt.base\n",
                    ".pushsection .stapsdt.base, \"axGR\", \"progbits\", .stapsdt.base, comdat\n",
                    ".weak _.stapsdt.base\n",
                    ".hidden _.stapsdt.base\n",
                    "_.stapsdt.base: .space 1\n",
                    ".size _.stapsdt.base, 1\n",
                    ".popsection\n",
                    ".endif",
                ),
                in(reg) $value,
                $(in(reg) $values,)*
                semaphore = sym $semaphore,
                options(readonly, nostack, preserves_flags $($option)*),
            )
        }
    };
}

/// No probe on these machines, where notes have another layout; only the log.
#[cfg(not(target_pointer_width = "64"))]
#[doc(hidden)]
#[macro_export]
macro_rules! sdt {
    ($name:ident, $semaphore:path, $($size:expr => $value:expr),+) => {
        let _ = ($($value,)+);
    };
}

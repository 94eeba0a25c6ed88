//! A static probe, in the form that SystemTap's `<sys/sdt.h>` gave it and that perf, bpftrace and gdb
//! read: a `nop` in the code, and a note with provider, name, the addresses of the nop and of the
//! semaphore, and where the arguments are (<https://sourceware.org/systemtap/wiki/UserSpaceProbeImplementation>).

/// Places a probe. `$size` is an argument's size and sign in the note's notation, which is `N@where`:
/// `8` bytes, negative when it has a sign.
#[cfg(target_pointer_width = "64")]
macro_rules! sdt {
    ($name:ident, $semaphore:path, $($size:expr => $value:expr),+) => {
        #[cfg(target_arch = "x86_64")]
        sdt!(@ [, att_syntax] $name, $semaphore, $($size => $value),+);
        #[cfg(not(target_arch = "x86_64"))]
        sdt!(@ [] $name, $semaphore, $($size => $value),+);
    };
    (@ [$($option:tt)*] $name:ident, $semaphore:path,
        $size:expr => $value:expr $(, $sizes:expr => $values:expr)*) => {
        // SAFETY: the only instruction is a nop; all else goes to other sections of the object file.
        // What a tool does when it takes the nop's place keeps registers and memory as they were.
        unsafe {
            std::arch::asm!(
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
                    // By how far this has moved a tool sees that the program was prelinked. It is
                    // among the code because perf takes it for near the nop: lld's segments differ
                    // in how far an address is from its offset in the file.
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

/// Only the log, where the notes would have another layout.
#[cfg(not(target_pointer_width = "64"))]
macro_rules! sdt {
    ($name:ident, $semaphore:path, $($size:expr => $value:expr),+) => {
        let _ = ($($value,)+);
    };
}

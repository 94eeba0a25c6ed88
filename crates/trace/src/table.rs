//! The macro of a table of events.

/// The meaning of a table's argument kinds: the parameter's type, its size and sign in a probe's note, the
/// word passed to the probe, and its format in the log.
#[doc(hidden)]
#[macro_export]
macro_rules! kind {
    (u64 type) => { u64 };
    (u64 size) => { "8" };
    (u64 word $value:ident) => { $value };
    (u64 shows) => { "{}" };
    (u64 shown $value:ident) => { $value };
    (u64 format) => { $crate::Format::Unsigned };

    (i64 type) => { i64 };
    (i64 size) => { "-8" };
    (i64 word $value:ident) => { $value };
    (i64 shows) => { "{}" };
    (i64 shown $value:ident) => { $value };
    (i64 format) => { $crate::Format::Signed };

    (hex shows) => { "{:#x}" };
    (hex format) => { $crate::Format::Hex };
    (hex $($what:tt)+) => { $crate::kind!(u64 $($what)+) };

    (text type) => { &::std::ffi::CStr };
    (text size) => { "8" };
    (text word $value:ident) => { $value.as_ptr() };
    (text shows) => { "{}" };
    (text shown $value:ident) => { $value.to_string_lossy() };
    (text format) => { $crate::Format::Text };
}

/// Defines events. A row is a help text, the event's name, and its arguments with their kinds: `u64`, `i64`, `hex`
/// (an address or a set of bits) or `text`.
///
/// A row defines a module of the event's name, which [`trace!`](crate::trace!) takes. The program's list of
/// events has the event without further ado. `docs/TRACING.md` has the same events for users; a test compares the two.
///
/// ```
/// trace::events! {
///     /// A tank is filled, up to `level`.
///     tank_filled(tank: text, level: u64);
/// }
/// trace::trace!(tank_filled(c"the left one", 7u64));
/// ```
#[macro_export]
macro_rules! events {
    ($($(#[doc = $help:literal])+ $name:ident($($arg:ident: $kind:ident),+);)+) => {$(
        $(#[doc = $help])+
        pub(crate) mod $name {
            use ::std::sync::atomic::{AtomicU16, Ordering};

            // SAFETY: a section of ordinary, writable data, with the conventional name. A static without
            // an initial value would be in .bss, where the kernel cannot find it.
            #[unsafe(link_section = ".probes")]
            static SEMAPHORE: AtomicU16 = AtomicU16::new(0);

            #[$crate::linkme::distributed_slice($crate::EVENTS)]
            #[linkme(crate = $crate::linkme)]
            static EVENT: $crate::Event = $crate::Event::new(
                stringify!($name),
                concat!($($help),+).trim_ascii(),
                &[$($crate::Arg { name: stringify!($arg), format: $crate::kind!($kind format) }),+],
                &SEMAPHORE,
            );

            #[inline(always)]
            pub(crate) fn is_enabled() -> bool {
                SEMAPHORE.load(Ordering::Relaxed) != 0
            }

            /// Out of line, so that there is one probe per event, whatever the number of its call sites.
            #[cold]
            #[inline(never)]
            pub(crate) fn fire($($arg: $crate::kind!($kind type)),+) {
                $crate::sdt!(
                    $name,
                    SEMAPHORE,
                    $($crate::kind!($kind size) => $crate::kind!($kind word $arg)),+
                );
                if EVENT.is_logged() {
                    $crate::write(format_args!(
                        concat!(
                            stringify!($name),
                            $(" ", stringify!($arg), " ", $crate::kind!($kind shows)),+
                        ),
                        $($crate::kind!($kind shown $arg)),+
                    ));
                }
            }
        }
    )+};
}

//! A loop as a source of GLib's main loop.
//!
//! A `GSource` of its own kind: its `prepare`, `check` and `dispatch` are those of the [`EventLoop`].
//! Callbacks of the context's other sources, and futures spawned on the context, may use the loop as
//! they like: what they submit goes out before the context waits.

#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::ffi::c_int;
use std::io;
use std::ptr;
use std::rc::Rc;
use std::thread::{self, ThreadId};

use glib::ffi;
use glib::translate::{IntoGlib, ToGlibPtr, from_glib_full};
use glib::{MainContext, Priority, Source};

use super::descriptor;
use crate::event_loop::EventLoop;

/// An [`EventLoop`] attached to a [`MainContext`], for as long as this lives.
///
/// Dropping it takes the loop off the context and leaves it as it is, to be turned by something else.
/// While it is attached nothing else is to turn it ([`EventLoop::run_once`], another context).
///
/// A context that some other thread iterates for once does not turn the loop (contract E3). A main
/// loop run by one of the loop's own callbacks does not either, as with most sources of GLib's; it
/// turns other loops on the same context.
///
/// Timers have the resolution of GLib's own, a millisecond, and are never early.
///
/// ```
/// use event_loop::foreign::glib::LoopSource;
/// use event_loop::{EventLoop, LoopConfig};
///
/// let event_loop = EventLoop::new(LoopConfig::default())?;
/// let handle = event_loop.handle();
/// event_loop.add_timer(event_loop.now_ns() + 1_000_000, move || handle.stop());
/// let main_loop = glib::MainLoop::new(Some(&glib::MainContext::new()), false);
/// let quit = main_loop.clone();
/// let _source = LoopSource::attach(
///     &event_loop,
///     &main_loop.context(),
///     glib::Priority::DEFAULT,
///     move |result| {
///         result.expect("the ring");
///         quit.quit();
///     },
/// )?;
/// main_loop.run();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "dropping it takes the loop off its context"]
pub struct LoopSource {
    source: Source,
    state: Rc<State>,
}

/// What the source's callbacks work on.
struct State {
    event_loop: EventLoop,
    /// GLib's name for the loop's descriptor among what it watches.
    tag: Cell<ffi::gpointer>,
    /// The context is iterated from within an iteration of the loop, which cannot turn then.
    blocked: Cell<bool>,
    /// What `prepare` failed with, for `dispatch` to end with.
    failed: RefCell<Option<io::Error>>,
    ended: RefCell<Option<Ended>>,
}

type Ended = Box<dyn FnOnce(io::Result<()>)>;

/// The source as GLib has it.
#[repr(C)]
struct RawSource {
    parent: ffi::GSource,
    /// The loop's; written before the source is attached, and not again.
    thread: ThreadId,
    /// The `LoopSource`'s, or null once that is gone. Touched by `thread` alone.
    state: *const State,
}

static FUNCS: ffi::GSourceFuncs = ffi::GSourceFuncs {
    prepare: Some(prepare),
    check: Some(check),
    dispatch: Some(dispatch),
    finalize: None,
    closure_callback: None,
    closure_marshal: None,
};

impl LoopSource {
    /// Attaches a loop to a context: the loop turns whenever the context is iterated on this thread.
    ///
    /// The source ends with [`stop`](crate::LoopHandle::stop), after it has finished or cancelled what
    /// was in flight, as [`EventLoop::run`] does (for that it blocks the thread), or with an error of
    /// the ring. `ended` is told which, once; not when the `LoopSource` is dropped before.
    ///
    /// As with any source, those of a higher priority (a smaller number) that are always ready starve
    /// it; those of the same one take turns with it.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](io::ErrorKind::Unsupported): the loop has no descriptor to watch
    /// (DEFER_TASKRUN), create it with [`RingFlags::BEST`](crate::RingFlags::BEST).
    /// [`ResourceBusy`](io::ErrorKind::ResourceBusy): another thread is iterating the context.
    pub fn attach(
        event_loop: &EventLoop,
        context: &MainContext,
        priority: Priority,
        ended: impl FnOnce(io::Result<()>) + 'static,
    ) -> io::Result<LoopSource> {
        let fd = descriptor(event_loop)?;
        let _owned = context.acquire().map_err(|_| {
            let why = "the GMainContext is another thread's: a loop is attached on its own thread";
            io::Error::new(io::ErrorKind::ResourceBusy, why)
        })?;
        let state = Rc::new(State {
            event_loop: event_loop.clone(),
            tag: Cell::new(ptr::null_mut()),
            blocked: Cell::new(false),
            failed: RefCell::new(None),
            ended: RefCell::new(Some(Box::new(ended))),
        });
        let handle = event_loop.handle();
        let size = size_of::<RawSource>() as u32;
        // SAFETY: GLib only reads `FUNCS`, which lives for ever, and allocates `size` zeroed bytes
        // for a struct that begins with its own; nobody else has seen it before it is attached. The
        // reference that `g_source_new` returns goes into `Source`.
        let source: Source = unsafe {
            let new = ffi::g_source_new((&raw const FUNCS).cast_mut(), size);
            let raw = new.cast::<RawSource>();
            (&raw mut (*raw).thread).write(thread::current().id());
            (&raw mut (*raw).state).write(Rc::as_ptr(&state));
            ffi::g_source_set_priority(new, priority.into_glib());
            ffi::g_source_set_name(new, handle.name().to_glib_none().0);
            // Else GLib takes the descriptor out of what it watches for the time of each dispatch, and
            // wakes itself up as it puts it back; `State::block` sees to the nested loops.
            ffi::g_source_set_can_recurse(new, ffi::GTRUE);
            state.tag.set(ffi::g_source_add_unix_fd(new, fd, ffi::G_IO_IN));
            from_glib_full(new)
        };
        source.attach(Some(context));
        Ok(LoopSource { source, state })
    }

    /// The source, to ask or change what GLib knows of it. Destroyed once the loop has ended.
    pub fn source(&self) -> &Source {
        &self.source
    }
}

impl Drop for LoopSource {
    fn drop(&mut self) {
        let source: *mut ffi::GSource = self.source.to_glib_none().0;
        // SAFETY: `attach` made it, as a `RawSource`, and we hold a reference. This is the loop's
        // thread, as a `LoopSource` is not `Send`.
        unsafe { (&raw mut (*source.cast::<RawSource>()).state).write(ptr::null()) };
        self.source.destroy();
        let ended = self.state.ended.take();
        drop(ended);
    }
}

/// The state of a source, on the loop's thread and while its `LoopSource` lives; kept alive meanwhile,
/// for its callbacks may drop that.
///
/// # Safety
///
/// `source` was made by [`LoopSource::attach`] and is alive, as those are that GLib calls back with.
unsafe fn state_of(source: *mut ffi::GSource) -> Option<Rc<State>> {
    let raw = source.cast::<RawSource>();
    // SAFETY: a live `RawSource`, whose `thread` nobody writes any more.
    if unsafe { (*raw).thread } != thread::current().id() {
        return None;
    }
    // SAFETY: the loop's thread alone reads and writes `state`, and this is it.
    let state = unsafe { (*raw).state };
    if state.is_null() {
        return None;
    }
    // SAFETY: not null, so the `LoopSource`, which is this thread's, holds a reference.
    unsafe {
        Rc::increment_strong_count(state);
        Some(Rc::from_raw(state))
    }
}

unsafe extern "C" fn prepare(source: *mut ffi::GSource, timeout: *mut c_int) -> ffi::gboolean {
    // SAFETY: called by GLib.
    let state = unsafe { state_of(source) };
    // By another thread: nothing to do.
    let wait = state.map_or(Some(None), |state| state.prepare(source));
    let timeout_ms = match wait {
        Some(Some(ns)) => c_int::try_from(ns.div_ceil(1_000_000)).unwrap_or(c_int::MAX),
        Some(None) => -1,
        None => 0,
    };
    // SAFETY: GLib passes a place for the milliseconds to wait at most.
    unsafe { *timeout = timeout_ms };
    wait.is_none().into_glib()
}

unsafe extern "C" fn check(source: *mut ffi::GSource) -> ffi::gboolean {
    // SAFETY: called by GLib.
    let state = unsafe { state_of(source) };
    state.is_some_and(|state| state.check()).into_glib()
}

unsafe extern "C" fn dispatch(
    source: *mut ffi::GSource,
    _callback: ffi::GSourceFunc,
    _data: ffi::gpointer,
) -> ffi::gboolean {
    // SAFETY: called by GLib.
    let state = unsafe { state_of(source) };
    // By another thread: it stays for its own.
    let stays = state.is_none_or(|state| state.dispatch());
    if stays { ffi::G_SOURCE_CONTINUE } else { ffi::G_SOURCE_REMOVE }
}

impl State {
    /// How long to wait, in nanoseconds (`Some(None)`: for ever); `None`: dispatch without waiting.
    fn prepare(&self, source: *mut ffi::GSource) -> Option<Option<u64>> {
        self.block(source, !self.event_loop.can_turn());
        if self.blocked.get() {
            return Some(None);
        }
        match self.event_loop.prepare() {
            Ok(Some(0)) => None,
            Ok(wait) => Some(wait),
            Err(error) => {
                self.failed.replace(Some(error));
                None
            }
        }
    }

    /// In a nested loop, has GLib watch the descriptor no more: it may be readable all the time.
    fn block(&self, source: *mut ffi::GSource, blocked: bool) {
        if self.blocked.replace(blocked) != blocked {
            let wanted = if blocked { 0 } else { ffi::G_IO_IN };
            // SAFETY: GLib's callbacks pass a live source, and the tag is of this one.
            unsafe { ffi::g_source_modify_unix_fd(source, self.tag.get(), wanted) };
        }
    }

    fn check(&self) -> bool {
        !self.blocked.get() && self.event_loop.check()
    }

    /// Whether the source stays.
    fn dispatch(&self) -> bool {
        if !self.event_loop.can_turn() {
            return true;
        }
        let failed = self.failed.take();
        let result = failed.map_or_else(|| self.event_loop.dispatch(), Err);
        if result.is_ok() && !self.event_loop.is_stopping() {
            return true;
        }
        // None: taken off its context by its own callback.
        let ended = self.ended.take();
        if let Some(ended) = ended {
            let shut_down = self.event_loop.shut_down();
            ended(result.and(shut_down));
        }
        false
    }
}

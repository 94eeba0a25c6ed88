//! A loop as a source of GLib's main loop.
//!
//! The `GSource` calls `prepare`, `check` and `dispatch` of the [`EventLoop`]. Callbacks of the
//! context's other sources, and futures spawned on the context, may use the loop freely: their operations
//! are submitted before the context waits.

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

/// Attaches an [`EventLoop`] to a [`MainContext`] for its lifetime.
///
/// Dropping it detaches the loop, which may then run elsewhere. While attached, the loop must not run
/// otherwise, by [`EventLoop::run_once`] or another context.
///
/// The loop does not run while another thread iterates the context, because only one thread may enter a ring. It does
/// not run in a main loop that one of its callbacks has started, as is usual for GLib sources. Other loops on the
/// context do.
///
/// Timers have GLib's resolution of a millisecond, and are never early.
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
    state: Rc<SourceState>,
}

/// State of the source's callbacks.
struct SourceState {
    event_loop: EventLoop,
    /// GLib's tag of the loop's descriptor.
    tag: Cell<ffi::gpointer>,
    /// The context is being iterated from within an iteration of the loop, which cannot run then.
    blocked: Cell<bool>,
    /// The error of `prepare`, which `dispatch` ends the source with.
    failed: RefCell<Option<io::Error>>,
    ended: RefCell<Option<Ended>>,
}

type Ended = Box<dyn FnOnce(io::Result<()>)>;

/// The source's memory layout for GLib.
#[repr(C)]
struct RawSource {
    parent: ffi::GSource,
    /// The loop's thread; written before the source is attached and never after.
    thread: ThreadId,
    /// The state of the `LoopSource`, or null after its end. Accessed only by `thread`.
    state: *const SourceState,
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
    /// Attaches a loop to a context.
    ///
    /// The loop then runs whenever this thread iterates the context.
    ///
    /// The source ends on [`stop`](crate::LoopHandle::stop) or with an error of the ring. On a stop it first
    /// finishes or cancels operations in flight, as [`EventLoop::run`] does, which blocks the thread.
    /// `ended` is called once with the result, unless the `LoopSource` is dropped before.
    ///
    /// GLib's priorities apply: sources of a higher priority (a smaller number) that are always ready starve
    /// the loop. Sources of the same priority alternate with it.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](io::ErrorKind::Unsupported): the loop has no descriptor to watch (DEFER_TASKRUN).
    /// Create it with [`RingFlags::BEST`](crate::RingFlags::BEST).
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
        let state = Rc::new(SourceState {
            event_loop: event_loop.clone(),
            tag: Cell::new(ptr::null_mut()),
            blocked: Cell::new(false),
            failed: RefCell::new(None),
            ended: RefCell::new(Some(Box::new(ended))),
        });
        let handle = event_loop.handle();
        let size = size_of::<RawSource>() as u32;
        // SAFETY: GLib only reads `FUNCS`, which is static, and allocates `size` zeroed bytes for a struct
        // that begins with its own. Nothing else accesses the source before it is attached. The reference
        // that `g_source_new` returns goes into `Source`.
        let source: Source = unsafe {
            let new = ffi::g_source_new((&raw const FUNCS).cast_mut(), size);
            let raw = new.cast::<RawSource>();
            (&raw mut (*raw).thread).write(thread::current().id());
            (&raw mut (*raw).state).write(Rc::as_ptr(&state));
            ffi::g_source_set_priority(new, priority.into_glib());
            ffi::g_source_set_name(new, handle.name().to_glib_none().0);
            // Otherwise GLib stops watching the descriptor during each dispatch, and wakes itself up when it
            // resumes. `SourceState::block` handles nested main loops instead.
            ffi::g_source_set_can_recurse(new, ffi::GTRUE);
            state.tag.set(ffi::g_source_add_unix_fd(new, fd, ffi::G_IO_IN));
            from_glib_full(new)
        };
        source.attach(Some(context));
        Ok(LoopSource { source, state })
    }

    /// Returns the GLib source, to change its properties.
    ///
    /// It is destroyed once the loop has ended.
    pub fn source(&self) -> &Source {
        &self.source
    }
}

impl Drop for LoopSource {
    fn drop(&mut self) {
        let source: *mut ffi::GSource = self.source.to_glib_none().0;
        // SAFETY: `attach` made it as a `RawSource`, and `self` holds a reference. The calling thread is the loop's
        // thread, as `LoopSource` is not `Send`.
        unsafe { (&raw mut (*source.cast::<RawSource>()).state).write(ptr::null()) };
        self.source.destroy();
        let ended = self.state.ended.take();
        drop(ended);
    }
}

/// Returns a source's state, if called on the loop's thread while the `LoopSource` lives. The reference
/// keeps the state alive if a callback drops the `LoopSource`.
///
/// # Safety
///
/// `source` was made by [`LoopSource::attach`] and is alive, which holds in GLib's callbacks.
unsafe fn state_of(source: *mut ffi::GSource) -> Option<Rc<SourceState>> {
    let raw = source.cast::<RawSource>();
    // SAFETY: a live `RawSource`. Its `thread` does not change any more.
    if unsafe { (*raw).thread } != thread::current().id() {
        return None;
    }
    // SAFETY: only the loop's thread accesses `state`, and this is it.
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
    // On another thread: nothing to do.
    let wait = state.map_or(Some(None), |state| state.prepare(source));
    let timeout_ms = match wait {
        Some(Some(ns)) => c_int::try_from(ns.div_ceil(1_000_000)).unwrap_or(c_int::MAX),
        Some(None) => -1,
        None => 0,
    };
    // SAFETY: GLib passes a pointer for the maximum wait in milliseconds.
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
    // On another thread: the source stays.
    let stays = state.is_none_or(|state| state.dispatch());
    if stays { ffi::G_SOURCE_CONTINUE } else { ffi::G_SOURCE_REMOVE }
}

impl SourceState {
    /// Returns how long to wait, nanoseconds (`Some(None)`: for ever). `None`: dispatch without waiting.
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

    /// Stops watching the descriptor in a nested main loop, in which it may stay readable.
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

    /// Returns whether the source stays attached.
    fn dispatch(&self) -> bool {
        if !self.event_loop.can_turn() {
            return true;
        }
        let failed = self.failed.take();
        let result = failed.map_or_else(|| self.event_loop.dispatch(), Err);
        if result.is_ok() && !self.event_loop.is_stopping() {
            return true;
        }
        // `None` if a callback has dropped the `LoopSource`.
        let ended = self.ended.take();
        if let Some(ended) = ended {
            let shut_down = self.event_loop.shut_down();
            ended(result.and(shut_down));
        }
        false
    }
}

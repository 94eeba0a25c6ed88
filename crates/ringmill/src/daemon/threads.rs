//! The I/O threads of a daemon, by id.

use std::task::Poll;

use control::IothreadOptions;
use event_loop::{
    Chosen, IoThread, IoThreadConfig, LoopConfig, LoopHandle, PollParams, ThreadPoolConfig,
};

use super::DaemonError;

/// The thread of exports that name none. Not an id that an option can have.
const DEFAULT: &str = "io";

/// The I/O threads: those that were asked for and, once an export needs it, the default one.
#[derive(Default)]
pub(crate) struct IoThreads {
    threads: Vec<(String, IoThread)>,
    default: Option<IoThread>,
}

impl IoThreads {
    /// Starts a thread as `--object iothread` asks for it.
    pub(crate) fn add(&mut self, options: &IothreadOptions) -> Result<(), DaemonError> {
        let thread = start(options)?;
        self.threads.push((options.id.clone(), thread));
        Ok(())
    }

    /// The loops of the threads named, or of the default one when none is.
    pub(crate) fn handles(&mut self, ids: &[String]) -> Result<Vec<LoopHandle>, DaemonError> {
        if ids.is_empty() {
            let default = match self.default.take() {
                Some(thread) => thread,
                None => start(&IothreadOptions { id: DEFAULT.into(), ..Default::default() })?,
            };
            return Ok(vec![self.default.insert(default).handle().clone()]);
        }
        ids.iter()
            .map(|id| {
                let found = self.threads.iter().find(|(name, _)| name == id);
                found
                    .map(|(_, thread)| thread.handle().clone())
                    .ok_or_else(|| DaemonError(format!("iothread \"{id}\" not found")))
            })
            .collect()
    }

    /// All loops.
    pub(crate) fn all(&self) -> Vec<LoopHandle> {
        self.iter().map(|(_, thread)| thread.handle().clone()).collect()
    }

    /// Waits until a thread has ended that nobody stopped.
    pub(crate) async fn first_end(&mut self) -> DaemonError {
        std::future::poll_fn(|cx| {
            let named = self.threads.iter_mut().map(|(id, thread)| (id.as_str(), thread));
            for (id, thread) in named.chain(self.default.iter_mut().map(|t| (DEFAULT, t))) {
                if let Poll::Ready(end) = thread.poll_end(cx) {
                    return Poll::Ready(DaemonError(format!("I/O thread \"{id}\": {end}")));
                }
            }
            Poll::Pending
        })
        .await
    }

    /// What each runs on.
    pub(crate) fn rings(&self) -> impl Iterator<Item = (&str, &Chosen)> {
        self.iter().map(|(id, thread)| (id, thread.ring()))
    }

    fn iter(&self) -> impl Iterator<Item = (&str, &IoThread)> {
        let named = self.threads.iter().map(|(id, thread)| (id.as_str(), thread));
        named.chain(self.default.iter().map(|thread| (DEFAULT, thread)))
    }
}

fn start(options: &IothreadOptions) -> Result<IoThread, DaemonError> {
    let small = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
    let defaults = LoopConfig::default();
    let config = IoThreadConfig {
        event_loop: LoopConfig {
            name: options.id.clone(),
            entries: match options.aio_max_batch {
                0 => defaults.entries,
                n => small(n).min(defaults.entries),
            },
            poll: PollParams {
                policy: options.poll_policy,
                max_ns: options.poll_max_ns,
                grow: small(options.poll_grow),
                shrink: small(options.poll_shrink),
                weight: options.poll_weight,
            },
            thread_pool: ThreadPoolConfig {
                min: options.thread_pool_min as usize,
                max: options.thread_pool_max as usize,
            },
            ..defaults
        },
        cpus: options.cpu_affinity.clone(),
        ..IoThreadConfig::default()
    };
    let thread = IoThread::spawn(config).map_err(DaemonError::with_advice)?;
    Ok(thread)
}

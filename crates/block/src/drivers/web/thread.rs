//! The thread that talks to web servers for all nodes of a process.
//!
//! It runs a Tokio runtime. A second kind of thread, started by it, resolves names. Both are confined as the thread
//! that connects `nbd` nodes.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::thread;

use event_loop::oneshot;
use tokio::runtime::Builder;
use tokio::sync::mpsc;

use super::node::Fetch;
use crate::error::OpenError;
use crate::registry::NodeRegistry;

/// The most threads that resolve names at the same time.
const RESOLVERS: usize = 4;

/// A way to the thread. The thread ends once the last one is dropped.
pub(super) struct Web {
    jobs: mpsc::UnboundedSender<Job>,
}

enum Job {
    Fetch(Fetch),
    Task(Pin<Box<dyn Future<Output = ()> + Send>>),
}

impl Web {
    /// Returns the thread of a daemon, started by its first node.
    pub(super) fn of(nodes: &NodeRegistry) -> Result<Arc<Web>, OpenError> {
        let birth = nodes.connector_birth().clone();
        nodes.services().shared(move || {
            let failed = |error| OpenError::new(format!("thread http: {error}"));
            let runtime = Builder::new_current_thread()
                .enable_all()
                .max_blocking_threads(RESOLVERS)
                .thread_name("http-resolve")
                .build()
                .map_err(failed)?;
            let (jobs, mut coming) = mpsc::unbounded_channel();
            let serve = move || {
                birth.call();
                runtime.block_on(async {
                    while let Some(job) = coming.recv().await {
                        match job {
                            Job::Fetch(fetch) => drop(tokio::spawn(fetch.run())),
                            Job::Task(task) => drop(tokio::spawn(task)),
                        }
                    }
                });
                // A name server may take its time.
                runtime.shutdown_background();
            };
            thread::Builder::new().name("http".into()).spawn(serve).map_err(failed)?;
            Ok(Web { jobs })
        })
    }

    /// Has a request carried out.
    pub(super) fn fetch(&self, fetch: Fetch) {
        // The thread ends with this value.
        let _ = self.jobs.send(Job::Fetch(fetch));
    }

    /// Has a task run on the thread. Returns its result.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, OpenError> {
        let (done, result) = oneshot::channel();
        let task = async move { done.send(task.await) };
        let _ = self.jobs.send(Job::Task(Box::pin(task)));
        result.await.map_err(|_| OpenError::new("thread http has ended"))
    }
}

//! The worker of a job that copies: a task on an I/O thread, and the task that receives its reports.

use std::io;
use std::sync::Arc;

use block::job::{Backup, Bitmap, Failure, Mirror, OnError, Report, Turns, Worker, WorkerConfig};
use event_loop::{EventLoop, LoopHandle, mailbox, oneshot};

use super::super::signal::Mailbox;
use super::super::{DaemonError, Message};

/// An order to a worker. When no more orders can come, it closes both nodes.
pub(super) enum Order {
    /// Begin to copy: the first order.
    Begin,
    /// After a mirror has ended: copy the rest, which does not change any more, and flush. If that fails, the mirror goes
    /// on, unless the reaction is [`OnError::Report`].
    Finish(oneshot::Sender<Result<(), (Failure, OnError)>>),
}

/// The task of a worker.
pub(super) enum Task {
    Backup(Backup, bool),
    Mirror(MirrorTask),
}

/// A mirror, or a commit of the topmost image.
pub(super) struct MirrorTask {
    /// The parts to copy.
    pub(super) dirty: Arc<Bitmap>,
    pub(super) turns: Arc<Turns>,
    /// Parts of the target that read as zeroes. `None`: unknown.
    pub(super) zero: Option<Arc<Bitmap>>,
    /// Data in images above this depth is to be copied, too.
    pub(super) above: Option<u32>,
}

/// Starts a worker on the loop. It opens both nodes and waits for [`Order::Begin`].
pub(super) async fn start(
    on: &LoopHandle,
    config: WorkerConfig,
    task: Task,
) -> Result<mailbox::Sender<Order>, DaemonError> {
    let (orders, to_worker) = mailbox::channel();
    let (opened, is_open) = oneshot::channel();
    let begin = move |event_loop: &EventLoop| match Worker::new(config, event_loop) {
        Ok(worker) => {
            opened.send(Ok(()));
            event_loop.spawn(run(worker, task, to_worker));
        }
        Err(error) => opened.send(Err(error)),
    };
    on.spawn(begin).map_err(DaemonError::new)?;
    let opened: Result<(), io::Error> = is_open.await.map_err(DaemonError::new)?;
    opened.map_err(DaemonError::new)?;
    Ok(orders)
}

async fn run(mut worker: Worker, task: Task, mut orders: mailbox::Receiver<Order>) {
    // Without the order, the job's transaction has failed.
    let Some(Order::Begin) = orders.receive().await else { return };
    match task {
        Task::Backup(backup, only_written) => {
            backup.run(&mut worker, only_written).await;
            // Keeps the nodes open until the job's end.
            orders.receive().await;
        }
        Task::Mirror(MirrorTask { dirty, turns, zero, above }) => {
            let mut mirror = Mirror::new(worker, dirty, turns).with_zero(zero);
            if let Some(depth) = above {
                mirror.find(depth).await;
            }
            mirror.run().await;
            while let Some(Order::Finish(done)) = orders.receive().await {
                let finished = mirror.finish().await;
                let goes_on = matches!(finished, Err((_, OnError::Ignore | OnError::Stop)));
                done.send(finished);
                if goes_on {
                    mirror.run().await;
                }
            }
        }
    }
}

/// Forwards a worker's reports to the daemon. The returned future completes when the worker has ended.
pub(super) fn listen(
    control: &EventLoop,
    serial: u64,
    mut reports: mailbox::Receiver<Report>,
    mailbox: Mailbox<Message>,
) -> oneshot::Receiver<()> {
    let (gone, is_gone) = oneshot::channel();
    control.spawn(async move {
        while let Some(report) = reports.receive().await {
            mailbox.push(Message::Job(serial, report));
        }
        gone.send(());
    });
    is_gone
}

//! The worker of a job that copies: a task on an I/O thread, and the task that listens to it.

use std::io;
use std::sync::Arc;

use block::job::{Backup, Bitmap, Failure, Mirror, Report, Worker, WorkerConfig};
use event_loop::{EventLoop, LoopHandle, mailbox, oneshot};

use super::super::signal::Mailbox;
use super::super::{DaemonError, Message};

/// What a worker is told once its copying has ended. It closes both nodes when it is told no more.
pub(super) enum Order {
    /// Copy the rest, which nobody changes any more, and flush.
    Finish(oneshot::Sender<Result<(), Failure>>),
}

/// What it is to do.
pub(super) enum Task {
    Backup(Backup, bool),
    Mirror(Arc<Bitmap>),
    /// A mirror of what is in images above the one of that depth.
    Commit(Arc<Bitmap>, u32),
}

/// Starts a worker on the loop.
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
    match task {
        Task::Backup(backup, only_written) => {
            backup.run(&mut worker, only_written).await;
            while let Some(Order::Finish(done)) = orders.receive().await {
                // It has been flushed.
                done.send(Ok(()));
            }
        }
        Task::Mirror(dirty) => run_mirror(Mirror::new(worker, dirty), orders).await,
        Task::Commit(dirty, depth) => {
            let mut mirror = Mirror::new(worker, dirty);
            mirror.find(depth).await;
            run_mirror(mirror, orders).await;
        }
    }
}

async fn run_mirror(mut mirror: Mirror, mut orders: mailbox::Receiver<Order>) {
    mirror.run().await;
    while let Some(Order::Finish(done)) = orders.receive().await {
        done.send(mirror.finish().await);
    }
}

/// Has the daemon told of what a worker reports. What is returned completes when the worker is gone.
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

//! `query-iothreads`.

use control::qmp::{Member, Reply, Returns};
use serde_json::{Value as Json, json};

use super::super::Command;
use crate::threads::Thread;

pub(super) static COMMAND: Command<(), Json> = Command {
    name: "query-iothreads",
    help: "list the I/O threads that --object and object-add have created",
    example: "",
    arguments: &[],
    returns: Returns::Data("one for each thread", Reply::List(&Reply::Object(IOTHREAD_INFO))),
    records: false,
    run: |daemon, ()| {
        Box::pin(async { Ok(daemon.threads.named().iter().map(iothread_info).collect()) })
    },
};

static IOTHREAD_INFO: &[Member] = &[
    Member::new("id", Reply::Text, "the thread's name"),
    Member::new("thread-id", Reply::Int, "its number in the system, as gettid(2) gives it"),
    Member::new("poll-max-ns", Reply::Int, "longest time to busy-poll, in nanoseconds; 0: never"),
    Member::new("poll-grow", Reply::Int, "factor by which a poll window grows; 0: the default"),
    Member::new("poll-shrink", Reply::Int, "divisor by which it shrinks; 0: the default"),
    Member::new("poll-weight", Reply::Int, "how slowly it follows intervals; 0: the default"),
    Member::new("aio-max-batch", Reply::Int, "most requests handed over at once; 0: any number"),
];

fn iothread_info(thread: &Thread) -> Json {
    let options = &thread.options;
    json!({
        "id": options.id,
        "thread-id": thread.tid.as_raw(),
        "poll-max-ns": thread.poll_max_ns(),
        "poll-grow": options.poll_grow,
        "poll-shrink": options.poll_shrink,
        "poll-weight": options.poll_weight,
        "aio-max-batch": options.aio_max_batch,
    })
}

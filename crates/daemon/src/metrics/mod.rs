//! `--metrics`: a page for Prometheus, over HTTP on the control loop.
//!
//! Every client that can connect gets the page. The server bounds the number of clients, the size
//! of a request's head, and the time per client. Building the page does not stop I/O: the page
//! reads counters that the I/O threads keep updating.

mod accept;
mod classic;
pub mod http;
mod text;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use event_loop::{EventLoop, oneshot, take_turns, until};
use exports::vhost_user::Listener;
use nix::errno::Errno;

use self::accept::Format;
use self::http::Asked;
use super::chardev::Stream;
use super::signal::Signal;
use super::statistics::Statistics;
use super::turn::Turn;

/// Most clients at the same time. A further client displaces the oldest one.
const MAX_CLIENTS: usize = 16;

/// Longest time per client, from accept to close, in nanoseconds.
const PATIENCE_NS: u64 = 10_000_000_000;

/// Requests the statistics.
pub(super) type Ask = dyn Fn(oneshot::Sender<Statistics>);

/// The server of the page.
pub(super) struct Server {
    pub(super) event_loop: EventLoop,
    pub(super) ask: Rc<Ask>,
    pub(super) turn: Rc<Turn>,
}

/// A connected client.
#[derive(Default)]
struct Client {
    sent_away: Cell<bool>,
    changed: Signal,
}

impl Server {
    /// Accepts clients and serves each of them in a task.
    pub(super) async fn run(self, listener: Listener) {
        let clients: Rc<RefCell<VecDeque<Rc<Client>>>> = Rc::default();
        self.turn.begun().await;
        loop {
            let socket = match self.turn.unless_over(listener.accept("metrics")).await {
                Ok(socket) => socket,
                Err(error) => {
                    log::error!("metrics: takes no more clients: accept failed: {error}");
                    return;
                }
            };
            let client = Rc::new(Client::default());
            let oldest = {
                let mut clients = clients.borrow_mut();
                let oldest = (clients.len() >= MAX_CLIENTS).then(|| clients.pop_front()).flatten();
                clients.push_back(client.clone());
                oldest
            };
            if let Some(oldest) = oldest {
                oldest.sent_away.set(true);
                oldest.changed.notify();
            }
            let (event_loop, ask, clients) =
                (self.event_loop.clone(), self.ask.clone(), clients.clone());
            self.event_loop.spawn(async move {
                let deadline = event_loop.sleep_until(event_loop.now_ns() + PATIENCE_NS);
                let sent_away = client.changed.until(|| client.sent_away.get().then_some(()));
                let served = until(serve(&event_loop, socket, &*ask), sent_away);
                // Debug level, because clients could otherwise fill the log.
                match until(served, deadline).await {
                    Ok(Ok(Ok(()))) => {}
                    Ok(Ok(Err(errno))) => log::debug!("metrics: client lost: {}", errno.desc()),
                    Ok(Err(())) => log::debug!("metrics: client sent away: there are too many"),
                    Err(()) => log::debug!("metrics: client sent away: it took too long"),
                }
                clients.borrow_mut().retain(|other| !Rc::ptr_eq(other, &client));
            });
            // Let the tasks of displaced clients end before the next accept.
            take_turns().await;
        }
    }
}

/// Answers one request.
async fn serve(event_loop: &EventLoop, socket: OwnedFd, ask: &Ask) -> Result<(), Errno> {
    let stream = Stream::of_socket(event_loop, socket);
    let mut head = Vec::new();
    let mut buf = [0; 1024];
    let asked = loop {
        let len = match stream.read(&mut buf).await? {
            0 => return Ok(()),
            len => len,
        };
        head.extend_from_slice(buf.get(..len).unwrap_or_default());
        if let Some(asked) = http::parse(&head) {
            break asked;
        }
        take_turns().await;
    };
    let answer = match asked {
        Asked::Refused(status) => http::refusal(status),
        Asked::Metrics { format, head_only } => {
            let (sender, statistics) = oneshot::channel();
            ask(sender);
            let page = statistics.await.ok().and_then(|statistics| text::encode(&statistics).ok());
            match page.map(|page| (format, page)) {
                Some((Format::OpenMetrics, page)) => {
                    http::page(text::CONTENT_TYPE, &page, head_only)
                }
                Some((Format::Classic, page)) => {
                    let page = classic::from_open_metrics(&page);
                    http::page(classic::CONTENT_TYPE, &page, head_only)
                }
                None => http::refusal(http::Status::Unavailable),
            }
        }
    };
    let mut rest = answer.as_bytes();
    while !rest.is_empty() {
        let len = stream.write(rest).await?;
        rest = rest.get(len..).unwrap_or_default();
    }
    stream.finish();
    // Read the rest of the client's data: a close with unread data sends a reset, which can destroy
    // the answer. Other tasks get their turn even if the client never stops sending.
    while stream.read(&mut buf).await? > 0 {
        take_turns().await;
    }
    Ok(())
}

//! The state of a connected client for a handover to another process, and the orders for that.
//!
//! Memory, interrupts and configuration space are messages of vfio-user itself, as the client would send them: the new
//! process parses and checks them like those. The state of the controller is the device's own.

#![forbid(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use event_loop::{mailbox, oneshot};
use guest_memory::GuestMemory;

use super::device::{Device, Restore};
use super::interrupts::{Interrupts, Unmasker};
use super::memory::Memory;
use super::session::{CONFIG, MessageResult, Session, SessionState};
use super::wire::message::number;
use super::wire::{Message, RegionWrite, command_name};
use crate::vhost_user::EventFd;
use crate::vhost_user::handover::Saved;

/// A client whose device is paused.
#[derive(Debug)]
pub struct SavedClient {
    /// The connection, between two messages.
    pub socket: OwnedFd,
    /// The messages that bring a new session to the same state.
    pub messages: Vec<Saved>,
    /// The state of the device.
    pub device: Vec<u8>,
}

/// A client of another process, with its state checked and its memory mapped.
pub(super) struct Prepared {
    pub(super) socket: OwnedFd,
    pub(super) session: SessionState,
    pub(super) memory: Memory,
    pub(super) mapped: Arc<GuestMemory>,
    /// By which the client unmasks the level interrupt.
    pub(super) unmasker: Option<EventFd>,
    pub(super) restore: Restore,
}

impl Prepared {
    /// Checks a client's state, and maps its memory. Sets its interrupts; the device sends none before it is restored.
    ///
    /// # Errors
    ///
    /// What is wrong.
    pub(super) fn new(
        device: &dyn Device,
        interrupts: &Arc<Interrupts>,
        client: SavedClient,
        max_memory: u64,
    ) -> Result<Self, String> {
        let SavedClient { socket, messages, device: state } = client;
        let restore = device.hands_over().check(&state)?;
        let mut session = Session::new(device, interrupts.clone());
        let (mut memory, mut mapped) = (Memory::new(max_memory), Arc::default());
        let (mut unmasker, mut has_area) = (None, false);
        for Saved { code, payload, mut fds } in messages {
            if code == u32::from(number::DEVICE_GET_REGION_INFO)
                && let Some(file) = fds.pop()
            {
                device.hands_over().adopt_mapped_area(file)?;
                has_area = true;
                continue;
            }
            let command = u16::try_from(code).map_err(|_| format!("command {code} is unknown"))?;
            let failed = |why: String| format!("{}: {why}", command_name(command));
            let message = Message::parse(command, &payload, fds);
            let message = message.map_err(|error| failed(error.to_string()))?;
            let is_state = match &message {
                Message::Version { .. } | Message::DmaMap(_) | Message::SetIrqs(_) => true,
                Message::RegionWrite(RegionWrite { region, .. }) => *region as usize == CONFIG,
                Message::DmaUnmap(_)
                | Message::DeviceInfo
                | Message::RegionInfo { .. }
                | Message::IrqInfo(_)
                | Message::RegionRead(_)
                | Message::RegionWriteMulti(_)
                | Message::Reset
                | Message::Feature
                | Message::Unknown(_) => false,
            };
            if !is_state {
                return Err(failed("not a part of a saved state".to_owned()));
            }
            match session.step(message).map_err(|errno| failed(errno.desc().to_owned()))? {
                MessageResult::Reply(_) | MessageResult::ReplyWith(..) => {}
                MessageResult::Map(map) => {
                    mapped = memory.map(map).map_err(|error| failed(error.to_string()))?;
                }
                MessageResult::Unmasker(Unmasker(fd)) => unmasker = fd,
                MessageResult::Unmap(_) | MessageResult::Settle(_) => {
                    return Err(failed("not a part of a saved state".to_owned()));
                }
            }
        }
        if !has_area
            && session.has_version()
            && device.mapped_area().is_ok_and(|area| area.is_some())
        {
            return Err("the area that the client has mapped is missing".to_owned());
        }
        Ok(Prepared { socket, session: session.into_state(), memory, mapped, unmasker, restore })
    }
}

/// A message of vfio-user.
pub(super) fn message(command: u16, payload: Vec<u8>, fd: Option<&OwnedFd>) -> io::Result<Saved> {
    let fds = fd.map(|fd| fd.as_fd().try_clone_to_owned()).transpose()?.into_iter().collect();
    Ok(Saved { code: command.into(), payload, fds })
}

/// The descriptor that the client was given for the part of a BAR that it may map. No client sends such a message.
pub(super) fn mapped_area(file: OwnedFd) -> Saved {
    let code = number::DEVICE_GET_REGION_INFO.into();
    Saved { code, payload: Vec::new(), fds: vec![file] }
}

/// The answer to an order.
pub(super) type Answer<T> = oneshot::Sender<Result<T, String>>;

/// An order to a server for a hand-over.
pub(super) enum Order {
    /// Receives no more messages and pauses the device; with `flush`, flushes. Answers with the client, if one is connected.
    Stop { flush: bool, answer: Answer<Option<SavedClient>> },
    /// Lets the device continue. Messages are still not received.
    Run(Answer<()>),
    /// Goes on as before the first order.
    Resume,
}

/// Sends an order; completes with its answer.
pub(super) fn ask<T: 'static, F: FnOnce(Answer<T>) -> Order>(
    orders: &mailbox::Sender<Order>,
    order: F,
) -> impl Future<Output = Result<T, String>> + use<T, F> {
    let (sender, answer) = oneshot::channel();
    // A server that has ended drops the sender, which fails the answer.
    let _ = orders.send(order(sender));
    async move { answer.await.map_err(|gone| gone.to_string())? }
}

//! What a kernel, and a driver behind it, say to a VDUSE export: messages, queues and ranges of memory.

use exports::vduse::wire::{Entry, MESSAGE, Message, Request, queue_info};

use crate::input::Input;

/// The most structures of an input.
const STRUCTURES: usize = 64;

/// Plays the kernel.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    for _ in 0..STRUCTURES {
        if input.is_empty() {
            return;
        }
        match input.u8() % 3 {
            0 => message(&input.array(), input.u8()),
            1 => queue(&input.array(), input.u8(), input.u8()),
            _ => range(&input.array()),
        }
    }
}

fn message(bytes: &[u8; MESSAGE], state: u8) {
    let message = Message::parse(bytes);
    assert_eq!(message.id.to_ne_bytes(), bytes[4..8]);
    for (state, result) in [(Some(state.into()), 0u32), (None, 1)] {
        let reply = message.reply(state);
        assert_eq!(reply.len(), MESSAGE);
        assert_eq!((&reply[..4], &reply[4..8]), (&bytes[4..8], &result.to_ne_bytes()[..]));
        // Only a queue's state follows.
        let (index, place) = match message.request {
            Request::QueueState { index } => (index, state.unwrap_or(0)),
            Request::SetStatus(_) | Request::UpdateIotlb | Request::Unknown(_) => (0, 0),
        };
        assert_eq!(
            (&reply[24..28], &reply[28..30]),
            (&index.to_ne_bytes()[..], &place.to_ne_bytes()[..])
        );
        assert!(reply[8..24].iter().chain(&reply[30..]).all(|byte| *byte == 0));
    }
}

fn queue(bytes: &[u8; 48], features: u8, max: u8) {
    let max = 1 << (max % 11);
    match queue_info(bytes, 5, u64::from(features) << 26, max) {
        Ok(None) => assert_eq!(bytes[40], 0),
        Ok(Some(config)) => {
            assert!(config.size.is_power_of_two() && config.size <= max);
            assert_eq!(
                (config.index, config.desc.to_ne_bytes()),
                (5, bytes[8..16].try_into().expect("8 bytes"))
            );
        }
        Err(error) => {
            assert!(error.num == 0 || error.num > max.into() || !error.num.is_power_of_two())
        }
    }
}

fn range(bytes: &[u8; 32]) {
    let Some(entry) = Entry::parse(bytes) else { return };
    let size = entry.size().expect("a size");
    assert!(size > 0 && entry.start.checked_add(size - 1) == Some(entry.last));
}

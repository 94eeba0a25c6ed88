//! Features (section 5.21.1): what the driver sets and gets.

use super::status::Status;
use crate::saved::{Invalid, Reader, Words};

/// Feature identifiers.
const ARBITRATION: u8 = 0x01;
const POWER_MANAGEMENT: u8 = 0x02;
const TEMPERATURE_THRESHOLD: u8 = 0x04;
const ERROR_RECOVERY: u8 = 0x05;
const VOLATILE_WRITE_CACHE: u8 = 0x06;
const NUMBER_OF_QUEUES: u8 = 0x07;
const INTERRUPT_COALESCING: u8 = 0x08;
const INTERRUPT_VECTOR: u8 = 0x09;
const WRITE_ATOMICITY: u8 = 0x0a;
const ASYNC_EVENTS: u8 = 0x0b;
const KEEP_ALIVE: u8 = 0x0f;
const HOST_BEHAVIOR: u8 = 0x16;

/// A feature that is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Feature {
    /// A value that is kept and has no effect here, by its place in [`Features::kept`].
    Kept(usize),
    PowerManagement,
    WriteCache,
    Queues,
    /// Configured per vector: there is no coalescing beyond that of batches, so nothing is kept.
    Vector,
    AsyncEvents,
    /// The timer is off: the controller has none (KAS is 0).
    KeepAlive,
    /// A page of zeroes: no behavior of the host is supported.
    HostBehavior,
}

/// The features of [`Feature::Kept`], with their values after a reset. Temperatures are in kelvins.
const KEPT: [(u8, u32); 5] = [
    (ARBITRATION, 0x07),
    (TEMPERATURE_THRESHOLD, WARNING_TEMPERATURE as u32),
    (ERROR_RECOVERY, 0),
    (INTERRUPT_COALESCING, 0),
    (WRITE_ATOMICITY, 0),
];

/// Where the composite temperature is a warning, and what it is, kelvins.
pub(crate) const WARNING_TEMPERATURE: u16 = 343;
pub(crate) const TEMPERATURE: u16 = 300;

/// SEL of Get Features.
const CURRENT: u32 = 0;
const DEFAULT: u32 = 1;
const SAVED: u32 = 2;
const CAPABILITIES: u32 = 3;
/// What can be changed; nothing can be saved, and nothing is of a namespace.
const CHANGEABLE: u32 = 1 << 2;

/// Dword 10 of Set Features: save.
const SAVE: u32 = 1 << 31;

/// Asynchronous event configuration: notices of changed namespaces.
const NAMESPACE_NOTICES: u32 = 1 << 8;
/// Those bits of it that are kept: critical warnings and notices.
const EVENTS_KEPT: u32 = 0xff | NAMESPACE_NOTICES;

/// What the driver has set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Features {
    kept: [u32; KEPT.len()],
    async_events: u32,
}

/// Which value of a feature is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Select {
    Current,
    Default,
}

impl Default for Features {
    fn default() -> Self {
        Features { kept: KEPT.map(|(_, default)| default), async_events: 0 }
    }
}

impl Feature {
    fn find(number: u8) -> Result<Self, Status> {
        if let Some(place) = KEPT.iter().position(|(kept, _)| *kept == number) {
            return Ok(Feature::Kept(place));
        }
        match number {
            POWER_MANAGEMENT => Ok(Feature::PowerManagement),
            VOLATILE_WRITE_CACHE => Ok(Feature::WriteCache),
            NUMBER_OF_QUEUES => Ok(Feature::Queues),
            INTERRUPT_VECTOR => Ok(Feature::Vector),
            ASYNC_EVENTS => Ok(Feature::AsyncEvents),
            KEEP_ALIVE => Ok(Feature::KeepAlive),
            HOST_BEHAVIOR => Ok(Feature::HostBehavior),
            _ => Err(Status::INVALID_FIELD),
        }
    }

    /// The feature of Set Features' dword 10.
    ///
    /// # Errors
    ///
    /// It is not known, or is to be saved.
    pub(crate) fn to_set(dword10: u32) -> Result<Self, Status> {
        let feature = Feature::find(dword10 as u8)?;
        if dword10 & SAVE != 0 { Err(Status::NOT_SAVEABLE) } else { Ok(feature) }
    }

    /// The feature of Get Features' dword 10, and which of its values; or the answer if it is what can be done to it.
    ///
    /// # Errors
    ///
    /// It is not known, or the value is of an unknown kind.
    pub(crate) fn to_get(dword10: u32) -> Result<Result<(Self, Select), u32>, Status> {
        let feature = Feature::find(dword10 as u8)?;
        match dword10 >> 8 & 7 {
            CURRENT => Ok(Ok((feature, Select::Current))),
            DEFAULT | SAVED => Ok(Ok((feature, Select::Default))),
            CAPABILITIES => Ok(Err(match feature {
                Feature::KeepAlive | Feature::HostBehavior => 0,
                Feature::Kept(_)
                | Feature::PowerManagement
                | Feature::WriteCache
                | Feature::Queues
                | Feature::Vector
                | Feature::AsyncEvents => CHANGEABLE,
            })),
            _ => Err(Status::INVALID_FIELD),
        }
    }
}

impl Features {
    /// Writes its state.
    pub(super) fn save(&self, words: &mut Words) {
        for value in self.kept.into_iter().chain([self.async_events]) {
            words.put(value);
        }
    }

    /// Reads what [`save`](Self::save) wrote.
    ///
    /// # Errors
    ///
    /// The words end early.
    pub(super) fn restored(words: &mut Reader<'_>) -> Result<Self, Invalid> {
        let mut features = Features::default();
        for value in &mut features.kept {
            *value = words.take()?;
        }
        features.set_async_events(words.take()?);
        Ok(features)
    }

    /// Keeps a value of [`Feature::Kept`].
    pub(crate) fn keep(&mut self, place: usize, value: u32) {
        if let Some(kept) = self.kept.get_mut(place) {
            *kept = value;
        }
    }

    /// Returns a value of [`Feature::Kept`].
    pub(crate) fn kept(&self, place: usize) -> u32 {
        self.kept.get(place).copied().unwrap_or_default()
    }

    /// Sets the asynchronous event configuration.
    pub(crate) fn set_async_events(&mut self, value: u32) {
        self.async_events = value & EVENTS_KEPT;
    }

    pub(crate) fn async_events(&self) -> u32 {
        self.async_events
    }

    /// Whether the driver wants to be told of changed namespaces.
    pub(crate) fn wants_namespace_notices(&self) -> bool {
        self.async_events & NAMESPACE_NOTICES != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_known_and_not_saved() {
        assert_eq!(Feature::to_set(0x06), Ok(Feature::WriteCache));
        assert_eq!(Feature::to_set(SAVE | 0x06), Err(Status::NOT_SAVEABLE));
        assert_eq!(Feature::to_set(0x10), Err(Status::INVALID_FIELD), "thermal management");
        assert_eq!(Feature::to_get(0x30f), Ok(Err(0)), "the keep alive timer cannot be changed");
        assert_eq!(Feature::to_get(0x307), Ok(Err(CHANGEABLE)));
        assert_eq!(Feature::to_get(0x407), Err(Status::INVALID_FIELD));
        let mut features = Features::default();
        assert!(!features.wants_namespace_notices());
        features.set_async_events(u32::MAX);
        assert_eq!((features.async_events(), features.wants_namespace_notices()), (0x1ff, true));
        let Ok(Feature::Kept(place)) = Feature::to_set(0x04) else { panic!("a threshold") };
        assert_eq!(features.kept(place), 343);
        features.keep(place, 7);
        assert_eq!(features.kept(place), 7);
    }
}

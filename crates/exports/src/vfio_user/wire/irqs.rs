//! DEVICE_SET_IRQS.

use std::ops::Range;
use std::os::fd::OwnedFd;

use super::WireError;
use super::message::Fields;

/// A change of interrupts.
#[derive(Debug)]
pub struct SetIrqs<'a> {
    /// The kind of interrupts: INTx, MSI, MSI-X and others.
    pub index: u32,
    /// The interrupts of that kind. Empty, with [`IrqAction::Trigger`] and no data: all eventfds are removed.
    pub range: Range<u32>,
    /// The action for each.
    pub action: IrqAction,
    /// The interrupts that it applies to, or their eventfds.
    pub data: IrqData<'a>,
}

/// An action on interrupts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IrqAction {
    /// Mask them.
    Mask,
    /// Unmask them.
    Unmask,
    /// With eventfds: signal these from now on. Otherwise: raise the interrupts.
    Trigger,
}

/// The data of an action.
#[derive(Debug)]
pub enum IrqData<'a> {
    /// None: the action applies to all.
    None,
    /// One byte for each: the action applies where it is not 0.
    Bool(&'a [u8]),
    /// One eventfd for each; an empty list removes the present ones.
    EventFds(Vec<OwnedFd>),
}

const DATA_NONE: u32 = 1 << 0;
const DATA_BOOL: u32 = 1 << 1;
const DATA_EVENTFD: u32 = 1 << 2;
const ACTION_MASK: u32 = 1 << 3;
const ACTION_UNMASK: u32 = 1 << 4;
const ACTION_TRIGGER: u32 = 1 << 5;

/// The payload that sets the eventfd of one interrupt.
pub(in super::super) fn set_eventfd(index: u32, at: u32) -> Vec<u8> {
    payload(DATA_EVENTFD | ACTION_TRIGGER, index, at)
}

/// The payload that sets the eventfd by which one interrupt is unmasked.
pub(in super::super) fn set_unmask_eventfd(index: u32, at: u32) -> Vec<u8> {
    payload(DATA_EVENTFD | ACTION_UNMASK, index, at)
}

/// The payload that masks one interrupt.
pub(in super::super) fn mask(index: u32, at: u32) -> Vec<u8> {
    payload(DATA_NONE | ACTION_MASK, index, at)
}

fn payload(flags: u32, index: u32, at: u32) -> Vec<u8> {
    [20, flags, index, at, 1].map(u32::to_ne_bytes).concat()
}

impl<'a> SetIrqs<'a> {
    pub(super) fn parse(mut fields: Fields<'a>, fds: Vec<OwnedFd>) -> Result<Self, WireError> {
        fields.skip(4)?;
        let (flags, index) = (fields.u32()?, fields.u32()?);
        let (start, count) = (fields.u32()?, fields.u32()?);
        let data = fields.rest();
        let Some(end) = start.checked_add(count) else {
            return Err(WireError::Range { address: start.into(), size: count.into() });
        };
        let (action, kind) = match flags & (ACTION_MASK | ACTION_UNMASK | ACTION_TRIGGER) {
            ACTION_MASK => (IrqAction::Mask, flags & !ACTION_MASK),
            ACTION_UNMASK => (IrqAction::Unmask, flags & !ACTION_UNMASK),
            ACTION_TRIGGER => (IrqAction::Trigger, flags & !ACTION_TRIGGER),
            _ => return Err(WireError::Flags(flags)),
        };
        let per_irq = match kind {
            DATA_BOOL => count as usize,
            DATA_NONE | DATA_EVENTFD => 0,
            _ => return Err(WireError::Flags(flags)),
        };
        let data = data.get(..per_irq).ok_or(WireError::Length(data.len()))?;
        let data = match kind {
            DATA_EVENTFD if fds.is_empty() || fds.len() == count as usize => IrqData::EventFds(fds),
            _ if !fds.is_empty() || kind == DATA_EVENTFD => {
                return Err(WireError::Descriptors(fds.len()));
            }
            DATA_BOOL => IrqData::Bool(data),
            _ => IrqData::None,
        };
        Ok(SetIrqs { index, range: start..end, action, data })
    }
}

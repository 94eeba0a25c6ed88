//! Changes of the passwords of an open image.

use ::options::place::OneOf;
use std::sync::Arc;
use std::time::Duration;

use ::options::table::{Field, Row, put};
use crypto::Secret;
use crypto::luks::{AddError, Header, SLOTS, iterations_for};

use super::new::MOST_TIME;
use super::slots::KeySlots;
use super::unlock::password;
use super::volume::Volume;
use crate::amend::{AmendContext, Amending};
use crate::error::OpenError;
use crate::node::BlockNode;

/// What `state` says of slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Active,
    Inactive,
}

/// A change of passwords: QEMU's `QCryptoBlockAmendOptionsLUKS`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct AmendLuks {
    state: Option<State>,
    new_secret: Option<String>,
    old_secret: Option<String>,
    keyslot: Option<i64>,
    /// `iter-time`, milliseconds.
    time: Option<i64>,
    secret: Option<String>,
}

impl AmendLuks {
    /// The options.
    pub(crate) const FIELDS: &'static [Field<AmendLuks>] = &[
        Row::required("state", "what becomes of key slots").at(&OneOf {
            at: |to: &mut AmendLuks| &mut to.state,
            words: &[
                ("active", State::Active, "a password is added"),
                ("inactive", State::Inactive, "passwords are erased"),
            ],
        }),
        Row::optional(
            "new-secret",
            "with state=active required, else not allowed",
            "the secret object with the password to add",
        )
        .text("<id>", |to, id| put(&mut to.new_secret, Some(id))),
        Row::optional(
            "old-secret",
            "the slot is erased whatever its password",
            "the secret object with the password to erase",
        )
        .text("<id>", |to, id| put(&mut to.old_secret, Some(id))),
        Row::optional(
            "keyslot",
            "the first free one, or all with old-secret",
            "the slot, from 0 to 7",
        )
        .int(i64::MIN..=i64::MAX, |to, slot| put(&mut to.keyslot, Some(slot))),
        Row::optional(
            "iter-time",
            "2000 with state=active, else not allowed",
            "milliseconds that deriving a key takes on this machine",
        )
        .int(0..=MOST_TIME, |to, time| put(&mut to.time, Some(time))),
        Row::optional(
            "secret",
            "the node's key-secret",
            "the secret object with a password that the image has",
        )
        .text("<id>", |to, id| put(&mut to.secret, Some(id))),
    ];

    /// Changes the passwords of the context's node. `place`: the node with the header. `key_secret`: the secret that the
    /// context's node was opened with; `name`: the option that names that secret.
    pub(crate) fn amend(
        self,
        context: &AmendContext<'_>,
        slots: Arc<KeySlots>,
        place: Arc<dyn BlockNode>,
        key_secret: Option<&str>,
        name: &str,
    ) -> Amending {
        let credentials = context.nodes.known_credentials();
        let find =
            |id: &Option<String>| id.as_deref().map(|id| password(credentials, Some(id), "secret"));
        let secrets = Secrets {
            new: find(&self.new_secret),
            old: find(&self.old_secret),
            known: password(credentials, self.secret.as_deref().or(key_secret), name),
        };
        let (force, on_thread) = (context.force, context.on_thread.clone());
        Box::pin(async move {
            if place.geometry().read_only {
                let why = format!("Block node '{}' is read-only", place.name());
                return Err(OpenError::new(why));
            }
            let work = move || {
                let _alone = slots.begin_change();
                let mut volume = Volume::new(place)?;
                volume.start = slots.start();
                let changed = self.change(&volume, secrets, force);
                // What the disk has, also after a part of the change.
                if let Ok(header) = volume.header() {
                    slots.set_header(header);
                }
                changed
            };
            on_thread(Box::new(work)).await
        })
    }

    fn change(&self, volume: &Volume, secrets: Secrets, force: bool) -> Result<(), OpenError> {
        let header = volume.header()?;
        match self.state {
            Some(State::Active) => self.activate(volume, header, secrets, force),
            Some(State::Inactive) => self.erase(volume, header, secrets, force),
            None => Ok(()),
        }
    }

    fn activate(
        &self,
        volume: &Volume,
        mut header: Header,
        secrets: Secrets,
        force: bool,
    ) -> Result<(), OpenError> {
        let Some(new) = secrets.new else {
            return refuse("'new-secret' is required to activate a keyslot");
        };
        if secrets.old.is_some() {
            return refuse("'old-secret' must not be given when activating keyslots");
        }
        let free = || (0..SLOTS).find(|index| !header.active().any(|active| active == *index));
        let index = match self.slot()? {
            Some(index) => index,
            None => free()
                .ok_or_else(|| OpenError::new("Can't add a keyslot - all keyslots are in use"))?,
        };
        let is_active = header.active().any(|active| active == index);
        if is_active && !force {
            return refuse(format!(
                "Refusing to overwrite active keyslot {index} - please erase it first"
            ));
        }
        let key = volume.unlock(&header, &secrets.known?)?;
        let new = new?;
        let time = Duration::from_millis(self.time.unwrap_or(2000).unsigned_abs());
        let iterations = iterations_for(header.hash, header.cipher.key_len(), time);
        let steps = match is_active {
            true => header.replace(index, &key, &new, iterations),
            false => header.activate(index, &key, &new, iterations),
        };
        volume.carry_out(steps.map_err(failed)?)
    }

    fn erase(
        &self,
        volume: &Volume,
        mut header: Header,
        secrets: Secrets,
        force: bool,
    ) -> Result<(), OpenError> {
        if secrets.new.is_some() {
            return refuse("'new-secret' must not be given when erasing keyslots");
        }
        if self.secret.is_some() {
            return refuse("'secret' must not be given when erasing keyslots");
        }
        if self.time.is_some() {
            return refuse("'iter-time' must not be given when erasing keyslots");
        }
        let old = secrets.old.transpose()?;
        let active: Vec<usize> = header.active().collect();
        let mut erased = Vec::new();
        if let Some(index) = self.slot()? {
            if let Some(old) = &old
                && volume.key(&header, index, old)?.is_none()
            {
                return refuse(format!(
                    "Given keyslot {index} doesn't contain the given old password for erase operation"
                ));
            }
            if !force && !active.contains(&index) {
                // The space is QEMU's.
                return refuse(format!("Given keyslot {index} is already erased (inactive) "));
            }
            if !force && active == [index] {
                return refuse(format!(
                    "Attempt to erase the only active keyslot {index} which will erase all the data in the image \
                     irreversibly - refusing operation"
                ));
            }
            erased.push(index);
        } else if let Some(old) = &old {
            for index in &active {
                if volume.key(&header, *index, old)?.is_some() {
                    erased.push(*index);
                }
            }
            if erased.is_empty() {
                return refuse("No keyslots match given (old) password for erase operation");
            }
            if !force && erased == active {
                return refuse(
                    "All the active keyslots match the (old) password that was given and erasing them will erase all \
                     the data in the image irreversibly - refusing operation",
                );
            }
        } else {
            return refuse(
                "To erase keyslot(s), either explicit keyslot index or the password currently contained in them must \
                 be given",
            );
        }
        for index in erased {
            volume.carry_out(header.erase(index).map_err(failed)?)?;
        }
        Ok(())
    }

    /// Returns `keyslot`, if it is given and there is such a slot.
    fn slot(&self) -> Result<Option<usize>, OpenError> {
        let Some(slot) = self.keyslot else { return Ok(None) };
        match usize::try_from(slot) {
            Ok(index) if index < SLOTS => Ok(Some(index)),
            Ok(_) | Err(_) => {
                let last = SLOTS - 1;
                refuse(format!("Invalid keyslot {slot} specified, must be between 0 and {last}"))
            }
        }
    }
}

/// The passwords, or why there are none: told when they are needed.
struct Secrets {
    new: Option<Result<Arc<Secret>, OpenError>>,
    old: Option<Result<Arc<Secret>, OpenError>>,
    known: Result<Arc<Secret>, OpenError>,
}

fn refuse<T>(why: impl Into<String>) -> Result<T, OpenError> {
    Err(OpenError::new(why.into()))
}

fn failed(error: AddError) -> OpenError {
    OpenError::new(format!("changing the LUKS header failed: {error}"))
}

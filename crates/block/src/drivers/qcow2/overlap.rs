//! `overlap-check`: which metadata QEMU protects from being written over. It is accepted in both of its forms.

use ::options::place::OneOf;
use ::options::shape::Shape;
use ::options::table::{self, Context, Field, Row};
use ::options::{OptionError, Value};

/// What was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverlapMode {
    /// Nothing is protected.
    None,
    /// What has a constant place.
    Constant,
    /// What QEMU has in memory: the default.
    Cached,
    /// Everything.
    All,
}

/// `overlap-check`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverlapCheck {
    /// The mode, or the dictionary's `template`.
    pub mode: Option<OverlapMode>,
    /// The dictionary's switches that were given, by name. `None`: a mode was given.
    pub flags: Option<Vec<(&'static str, bool)>>,
}

/// The modes' names.
const MODES: [(&str, OverlapMode); 4] = [
    ("none", OverlapMode::None),
    ("constant", OverlapMode::Constant),
    ("cached", OverlapMode::Cached),
    ("all", OverlapMode::All),
];

#[derive(Default)]
struct Draft {
    mode: Option<OverlapMode>,
    flags: Vec<(&'static str, bool)>,
}

static MODE: Field<Draft> = Row::optional("template", "`cached`", "what the other members change")
    .at(&OneOf {
        at: |draft: &mut Draft| &mut draft.mode,
        words: &[
            ("none", OverlapMode::None, "nothing"),
            ("constant", OverlapMode::Constant, "what has a constant place"),
            ("cached", OverlapMode::Cached, "all metadata but snapshots' L2 tables"),
            ("all", OverlapMode::All, "all metadata"),
        ],
    });

macro_rules! flag {
    ($name:literal, $help:literal) => {
        Row::optional($name, "as in the template", $help).bool(|draft: &mut Draft, on| {
            draft.flags.push(($name, on));
            Ok(())
        })
    };
}

static FLAGS: &[Field<Draft>] = &[
    flag!("main-header", "protect the header"),
    flag!("active-l1", "protect the L1 table"),
    flag!("active-l2", "protect L2 tables"),
    flag!("refcount-table", "protect the refcount table"),
    flag!("refcount-block", "protect refcount blocks"),
    flag!("snapshot-table", "protect the table of internal snapshots"),
    flag!("inactive-l1", "protect snapshots' L1 tables"),
    flag!("inactive-l2", "protect snapshots' L2 tables"),
    flag!("bitmap-directory", "protect the directory of dirty bitmaps"),
];

/// A mode, or a dictionary.
pub(super) fn shape() -> Shape {
    let mut members = vec![MODE.member()];
    members.extend(table::members(FLAGS));
    Shape::Either(vec![MODE.member().shape, Shape::Object(members)])
}

/// Reads it.
pub(super) fn read(value: Value, at: &Context) -> Result<OverlapCheck, OptionError> {
    let mut draft = Draft::default();
    match value {
        Value::Object(mut object) => {
            table::read(std::slice::from_ref(&MODE), &mut draft, &mut object, at)?;
            table::read(FLAGS, &mut draft, &mut object, at)?;
            let known = table::names(std::slice::from_ref(&MODE)).chain(table::names(FLAGS));
            table::refuse_rest(&object, at, "overlap-check", known)?;
            Ok(OverlapCheck { mode: draft.mode, flags: Some(draft.flags) })
        }
        Value::Text(word) => match MODES.iter().find(|(name, _)| *name == word) {
            Some((_, mode)) => Ok(OverlapCheck { mode: Some(*mode), flags: None }),
            None => {
                let known = MODES.iter().map(|(name, _)| *name);
                Err(table::not_accepted(at.whole(), at, &word, known))
            }
        },
        Value::Null | Value::Bool(_) | Value::Integer(_) | Value::Number(_) | Value::List(_) => {
            Err(OptionError::new("Invalid parameter type for 'overlap-check', expected: string"))
        }
    }
}

impl OverlapCheck {
    /// As it was given.
    pub(super) fn write(&self) -> Value {
        let name = |mode| MODES.iter().find(|(_, other)| *other == mode).map(|(name, _)| *name);
        let mode = self.mode.and_then(name);
        match &self.flags {
            None => mode.unwrap_or("cached").into(),
            Some(flags) => {
                let mode = mode.map(|mode| ("template".to_owned(), mode.into()));
                let flags = flags.iter().map(|(name, on)| ((*name).to_owned(), (*on).into()));
                Value::Object(mode.into_iter().chain(flags).collect())
            }
        }
    }

    /// What is done otherwise, if something else than the default was asked for.
    pub(super) fn sentence(&self) -> Option<&'static str> {
        let asks_for = |name| self.flags.iter().flatten().rev().find(|(flag, _)| *flag == name);
        let inactive = match (asks_for("inactive-l2"), self.mode) {
            (Some((_, on)), _) => *on,
            (None, mode) => mode == Some(OverlapMode::All),
        };
        let is_less = self.flags.iter().flatten().any(|(_, on)| !on);
        match self.mode {
            _ if inactive => Some(
                "overlap-check does not protect L2 tables of internal snapshots; ringmill check finds damage",
            ),
            Some(OverlapMode::None | OverlapMode::Constant) => Some(ALWAYS),
            None | Some(OverlapMode::Cached | OverlapMode::All) => is_less.then_some(ALWAYS),
        }
    }
}

/// For those who ask for less.
const ALWAYS: &str = "overlap-check protects all metadata but snapshots' L2 tables, whatever it is set to: this costs nothing";

#[cfg(test)]
mod tests {
    use ::options::value::Dialect;

    use super::*;

    fn read_text(text: &str) -> OverlapCheck {
        read(text.into(), &Context::new(Dialect::Json)).unwrap()
    }

    #[test]
    fn both_forms_are_read_and_written() {
        let object = |members: &[(&str, Value)]| {
            let members = members.iter().map(|(name, value)| ((*name).to_owned(), value.clone()));
            read(Value::Object(members.collect()), &Context::new(Dialect::Json))
        };
        let flags = object(&[("template", "all".into()), ("inactive-l2", false.into())]).unwrap();
        for check in [read_text("constant"), flags.clone(), object(&[]).unwrap()] {
            let again = read(check.write(), &Context::new(Dialect::Json)).unwrap();
            assert_eq!(again, check);
        }
        assert!(object(&[("nothing", true.into())]).is_err());
        assert!(object(&[("template", "some".into())]).is_err());
        assert_eq!(flags.sentence(), Some(ALWAYS));
        assert_eq!(read_text("cached").sentence(), None);
        assert!(read_text("all").sentence().unwrap().contains("snapshots"));
        assert_eq!(read_text("none").sentence(), Some(ALWAYS));
    }
}

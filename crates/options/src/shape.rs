//! What values may be, with no Rust type in it: for help texts, reference pages, schemas and shells.
//!
//! The tables that options are read by give their shapes; see [`Field::member`](crate::table::Field).

use std::ops::RangeInclusive;

use crate::table::Need;

/// What a value may be.
#[derive(Debug, Clone)]
pub enum Shape {
    /// Nothing: naming the option is all.
    Flag,
    /// `on` or `off`; in JSON, `true` or `false`.
    Bool,
    /// An integer in this range.
    Int(RangeInclusive<i64>),
    /// A number of bytes.
    Size,
    /// Text; how help texts write it: `<id>`.
    Text(&'static str),
    /// A path.
    Path,
    /// Any JSON value.
    Any,
    /// One of these words.
    Words(Vec<Word>),
    /// Any number of these; in `key=value` text, `name.0=…,name.1=…`. With what is to be said of one,
    /// in which `<n>` is its number; empty when that is what is said of all.
    List(Box<Shape>, &'static str),
    /// An object with these members.
    Object(Vec<Member>),
    /// An object that has further members by what one of them says.
    Union(Union),
    /// One of these, which JSON tells apart by its types.
    Either(Vec<Shape>),
    /// What has a name, and can lie in itself.
    Named(&'static str, fn() -> Union),
}

/// A member of an object.
#[derive(Debug, Clone)]
pub struct Member {
    /// Its name.
    pub name: &'static str,
    /// What it may be.
    pub shape: Shape,
    /// Whether it must be there, and what counts when it is not.
    pub need: Need,
    /// What it is for, in one sentence.
    pub help: &'static str,
}

/// A word that may be said, and what it means.
#[derive(Debug, Clone, Copy)]
pub struct Word {
    /// The word.
    pub name: &'static str,
    /// What it means.
    pub help: &'static str,
}

/// An object that has further members by what its member `tag` says.
#[derive(Debug, Clone)]
pub struct Union {
    /// The member's name.
    pub tag: &'static str,
    /// What it is for.
    pub help: &'static str,
    /// The members that are always there, `tag` aside.
    pub common: Vec<Member>,
    /// What may be said, and the members that it brings along.
    pub variants: Vec<Variant>,
}

/// A word that a tag may say.
#[derive(Debug, Clone)]
pub struct Variant {
    /// The word.
    pub name: &'static str,
    /// What it means.
    pub help: &'static str,
    /// The whole object, as `key=value` text; empty where what it lies in has an example.
    pub example: &'static str,
    /// The members that it brings along.
    pub members: Vec<Member>,
}

/// A line of a help text.
#[derive(Debug, Clone)]
pub struct Row {
    /// The full name: `cache.direct`.
    pub name: String,
    /// What it takes: `on|off`.
    pub value: String,
    /// Whether it must be there.
    pub need: Need,
    /// What it is for.
    pub help: String,
    /// What it may be.
    pub shape: Shape,
}

/// The lines for members, those of groups and structures spread out.
pub fn rows(members: &[Member]) -> Vec<Row> {
    members.iter().flat_map(Member::rows).collect()
}

impl Member {
    /// The lines for this one.
    pub fn rows(&self) -> Vec<Row> {
        let value = self.shape.meta();
        let own = (!value.is_empty() || matches!(self.shape, Shape::Flag)).then(|| Row {
            name: self.name.to_owned(),
            value,
            need: self.need,
            help: self.help.to_owned(),
            shape: self.shape.clone(),
        });
        let below = self.shape.below().into_iter();
        let below = below.map(|row| Row {
            name: format!("{}.{}", self.name, row.name),
            // One of a list that nothing more is to be said of.
            help: if row.help.is_empty() { self.help.to_owned() } else { row.help },
            ..row
        });
        own.into_iter().chain(below).collect()
    }
}

impl Union {
    /// Whether one of its objects can have a member of that name.
    pub fn has(&self, name: &str) -> bool {
        let variants = self.variants.iter().flat_map(|variant| &variant.members);
        name == self.tag || self.common.iter().chain(variants).any(|member| member.name == name)
    }

    /// The tag, as a member.
    pub fn tag(&self) -> Member {
        let words = self.variants.iter().map(|Variant { name, help, .. }| Word { name, help });
        let shape = Shape::Words(words.collect());
        Member { name: self.tag, shape, need: Need::Required, help: self.help }
    }
}

impl Shape {
    /// Whether an object of it can have a member of that name.
    pub fn has(&self, name: &str) -> bool {
        match self {
            Self::Object(members) => members.iter().any(|member| member.name == name),
            Self::Union(union) => union.has(name),
            _ => false,
        }
    }

    /// Whether it is an object, whichever.
    pub fn is_object(&self) -> bool {
        matches!(self, Self::Object(_) | Self::Union(_) | Self::Named(..))
    }

    /// How help texts write it; empty for what is written member by member only.
    pub fn meta(&self) -> String {
        match self {
            Self::Flag | Self::List(..) | Self::Object(_) | Self::Union(_) | Self::Named(..) => {
                String::new()
            }
            Self::Bool => "on|off".to_owned(),
            Self::Int(_) => "<int>".to_owned(),
            Self::Size => "<size>".to_owned(),
            Self::Text(meta) => (*meta).to_owned(),
            Self::Path => "<path>".to_owned(),
            Self::Any => "<value>".to_owned(),
            Self::Words(words) => words.iter().map(|word| word.name).collect::<Vec<_>>().join("|"),
            Self::Either(shapes) => {
                let metas = shapes.iter().map(Shape::meta).filter(|meta| !meta.is_empty());
                metas.collect::<Vec<_>>().join("|")
            }
        }
    }

    /// The lines for what lies below it, with names as they are there.
    fn below(&self) -> Vec<Row> {
        match self {
            Self::Object(members) => rows(members),
            Self::Either(shapes) => shapes.iter().flat_map(Shape::below).collect(),
            Self::List(item, help) => {
                let shape = (**item).clone();
                let is_named = matches!(shape, Self::Named(..));
                let item = Member { name: "<n>", shape, need: Need::Optional(""), help };
                let mut rows = item.rows();
                // The list's help says which options of the item are meant.
                if is_named && !help.is_empty() {
                    rows.iter_mut().for_each(|row| row.help = (*help).to_owned());
                }
                rows
            }
            Self::Union(union) => {
                let mut all = union.tag().rows();
                all.extend(rows(&union.common));
                for Variant { name, members, .. } in &union.variants {
                    let of = |row: Row| Row {
                        help: format!("{} ({} {name})", row.help, union.tag),
                        ..row
                    };
                    all.extend(rows(members).into_iter().map(of));
                }
                all
            }
            Self::Named(name, _) => vec![Row {
                name: "<option>".to_owned(),
                value: "<value>".to_owned(),
                need: Need::Optional(""),
                help: format!("options of a {name} defined in place"),
                shape: Shape::Any,
            }],
            _ => Vec::new(),
        }
    }
}

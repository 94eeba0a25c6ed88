//! The possible values of options without Rust types: for help texts, reference pages, schemas and shells.
//!
//! The tables of options produce the shapes; see [`Field::member`](crate::table::Field).

use std::ops::RangeInclusive;

use crate::table::Need;

/// The possible values of an option.
#[derive(Debug, Clone)]
pub enum Shape {
    /// No value: only the name is given.
    Flag,
    /// `on` or `off`; in JSON, `true` or `false`.
    Bool,
    /// An integer in this range.
    Int(RangeInclusive<i64>),
    /// A number of bytes.
    Size,
    /// Text, with its placeholder in help texts: `<id>`.
    Text(&'static str),
    /// A path.
    Path,
    /// Any JSON value.
    Any,
    /// One of these words.
    Words(Vec<Word>),
    /// A list of these; in `key=value` text, `name.0=…,name.1=…`. The text is the help of one item, in
    /// which `<n>` is its number; empty if the list's help is enough.
    List(Box<Shape>, &'static str),
    /// An object with these members.
    Object(Vec<Member>),
    /// An object with further members that depend on one of them.
    Union(Union),
    /// One of these, distinguished by their JSON types.
    Either(Vec<Shape>),
    /// A named union, which may contain itself.
    Named(&'static str, fn() -> Union),
}

/// A member of an object.
#[derive(Debug, Clone)]
pub struct Member {
    /// Its name.
    pub name: &'static str,
    /// Its possible values.
    pub shape: Shape,
    /// Whether it is required, and the default.
    pub need: Need,
    /// Its meaning in one sentence.
    pub help: &'static str,
}

/// An accepted word and its meaning.
#[derive(Debug, Clone, Copy)]
pub struct Word {
    /// The word.
    pub name: &'static str,
    /// Its meaning.
    pub help: &'static str,
}

/// An object with further members that depend on the member `tag`.
#[derive(Debug, Clone)]
pub struct Union {
    /// Name of the tag.
    pub tag: &'static str,
    /// Meaning of the tag.
    pub help: &'static str,
    /// Members of all variants, without `tag`.
    pub common: Vec<Member>,
    /// The variants.
    pub variants: Vec<Variant>,
}

/// A value of the tag.
#[derive(Debug, Clone)]
pub struct Variant {
    /// The word.
    pub name: &'static str,
    /// Its meaning.
    pub help: &'static str,
    /// An example of the whole object as `key=value` text; empty if the surrounding object has an example.
    pub example: &'static str,
    /// The members of this variant.
    pub members: Vec<Member>,
}

/// Stands for the number of a list's item.
const ITEM: &str = "<n>";

/// A line of a help text.
#[derive(Debug, Clone)]
pub struct Row {
    /// The full name: `cache.direct`.
    pub name: String,
    /// The placeholder of its value: `on|off`.
    pub value: String,
    /// Whether it is required, and the default.
    pub need: Need,
    /// Whether it belongs to a group that may be left out as a whole. Then `need` counts if the group is given.
    pub in_group: bool,
    /// Its meaning.
    pub help: String,
    /// Its possible values.
    pub shape: Shape,
}

impl Row {
    /// Returns when a required option is required: `required`, or with which group.
    pub fn required(&self) -> String {
        match self.name.rsplit_once('.') {
            Some((group, _)) if self.in_group => format!("required with `{group}`"),
            _ => "required".to_owned(),
        }
    }
}

/// Returns the lines for members; groups and structures are expanded.
pub fn rows(members: &[Member]) -> Vec<Row> {
    members.iter().flat_map(Member::rows).collect()
}

impl Member {
    /// Returns the lines for this member.
    pub fn rows(&self) -> Vec<Row> {
        let value = self.shape.meta();
        let own = (!value.is_empty() || matches!(self.shape, Shape::Flag)).then(|| Row {
            name: self.name.to_owned(),
            value,
            need: self.need,
            in_group: false,
            help: self.help.to_owned(),
            shape: self.shape.clone(),
        });
        let below = self.shape.below().into_iter();
        let below = below.map(|row| Row {
            name: format!("{}.{}", self.name, row.name),
            in_group: row.in_group
                || (self.need != Need::Required && self.shape.is_object() && self.name != ITEM),
            // An item of a list, without help text.
            help: if row.help.is_empty() { self.help.to_owned() } else { row.help },
            ..row
        });
        own.into_iter().chain(below).collect()
    }
}

impl Union {
    /// Returns whether one of its objects can have a member with that name.
    pub fn has(&self, name: &str) -> bool {
        let variants = self.variants.iter().flat_map(|variant| &variant.members);
        name == self.tag || self.common.iter().chain(variants).any(|member| member.name == name)
    }

    /// Returns the tag, as a member.
    pub fn tag(&self) -> Member {
        let words = self.variants.iter().map(|Variant { name, help, .. }| Word { name, help });
        let shape = Shape::Words(words.collect());
        Member { name: self.tag, shape, need: Need::Required, help: self.help }
    }
}

impl Shape {
    /// Returns whether an object of this union can have a member with that name.
    pub fn has(&self, name: &str) -> bool {
        match self {
            Self::Object(members) => members.iter().any(|member| member.name == name),
            Self::Union(union) => union.has(name),
            _ => false,
        }
    }

    /// Returns whether all values are objects.
    pub fn is_object(&self) -> bool {
        matches!(self, Self::Object(_) | Self::Union(_) | Self::Named(..))
    }

    /// Returns the placeholder in help texts.
    ///
    /// It is empty for shapes that are only given member by member.
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

    /// The lines for its members, with relative names.
    fn below(&self) -> Vec<Row> {
        match self {
            Self::Object(members) => rows(members),
            Self::Either(shapes) => shapes.iter().flat_map(Shape::below).collect(),
            Self::List(item, help) => {
                let shape = (**item).clone();
                let is_named = matches!(shape, Self::Named(..));
                let item = Member { name: ITEM, shape, need: Need::Optional(""), help };
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
                in_group: false,
                help: format!("options of a {name} defined in place"),
                shape: Shape::Any,
            }],
            _ => Vec::new(),
        }
    }
}

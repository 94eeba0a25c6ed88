//! `throttle-group`: limits shared by block nodes of the driver `throttle`.

use std::path::Path;

use block::throttle::ThrottleLimits;

use super::{ObjectOptions, ObjectType, Property, TypeRow, check_id};
use crate::error::OptionError;
use crate::table::{self, Context, Field, Row, Table, put};
use crate::value::{Dialect, Value};

/// `throttle-group`: limits that nodes refer to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ThrottleGroupOptions {
    /// `id`: its name.
    pub id: String,
    /// `limits`, and their other names such as `x-bps-total`.
    pub limits: ThrottleLimits,
}

impl ThrottleGroupOptions {
    /// Returns its visible properties.
    pub fn properties(&self) -> Vec<Property> {
        let limits = LIMITS.iter().map(|limit| (limit.name.to_owned(), limit.value(&self.limits)));
        let limits = Value::Object(limits.collect());
        let flat = FLAT.iter().map(|limit| Property {
            name: limit.name,
            kind: "int",
            value: limit.value(&self.limits),
        });
        [Property { name: "limits", kind: "ThrottleLimits", value: limits }]
            .into_iter()
            .chain(flat)
            .collect()
    }

    /// Returns the options with one property changed, for `qom-set`.
    ///
    /// Of `limits`, only the named ones change.
    ///
    /// # Errors
    ///
    /// The property does not exist, cannot change, or the value is invalid.
    pub fn with_property(&self, name: &str, value: Value) -> Result<Self, OptionError> {
        if FLAT.iter().any(|limit| limit.name == name) {
            return Err(OptionError::new("Property cannot be set after initialization"));
        }
        let field = FIELDS.iter().find(|field| field.name == name && name == "limits");
        let Some(field) = field else {
            return Err(OptionError::new(format!("Property 'throttle-group.{name}' not found")));
        };
        let mut changed = self.clone();
        field.set(&mut changed, value, &Context::new(Dialect::Json))?;
        changed.check()?;
        Ok(changed)
    }

    fn check(&self) -> table::Set {
        self.limits.check().map_err(|error| OptionError::new(error.to_string()))
    }
}

impl ObjectType for ThrottleGroupOptions {
    fn id(&self) -> &str {
        &self.id
    }

    fn type_name(&self) -> &'static str {
        "throttle-group"
    }

    fn path(&self) -> Option<&Path> {
        None
    }
}

pub(super) static THROTTLE_GROUP: TypeRow = TypeRow {
    name: "throttle-group",
    help: "limits on requests and bytes per second, for nodes of the driver throttle",
    example: "throttle-group,id=slow,limits.iops-total=500,limits.iops-total-max=5000,\
              limits.iops-total-max-length=60",
    parent: "object",
    table: &Table {
        fields: FIELDS,
        build: |group| {
            group.check()?;
            Ok(ObjectOptions::ThrottleGroup(Box::new(group)))
        },
    },
};

/// A value of the limits.
struct Number {
    name: &'static str,
    get: fn(&ThrottleLimits) -> u64,
}

impl Number {
    fn value(&self, limits: &ThrottleLimits) -> Value {
        Value::Integer((self.get)(limits).cast_signed())
    }
}

/// Any number: the check of the resulting limits reports errors.
const ANY: std::ops::RangeInclusive<i64> = i64::MIN..=i64::MAX;

type Set = fn(&mut ThrottleGroupOptions, i64) -> table::Set;

const fn number(
    name: &'static str,
    set: Set,
    default: &'static str,
    help: &'static str,
) -> Field<ThrottleGroupOptions> {
    Row::default(name, default, help).int(ANY, set)
}

fn rate(value: i64, into: &mut u64) -> table::Set {
    // A negative number becomes too large, and is refused as such.
    put(into, value.cast_unsigned())
}

fn seconds(name: &str, value: i64, into: &mut u32) -> table::Set {
    let refused = || {
        let most = u32::MAX;
        OptionError::new(format!("{name} value must be in the range [0, {most}]"))
    };
    put(into, u32::try_from(value).map_err(|_| refused())?)
}

fn not_negative(value: i64) -> Result<i64, OptionError> {
    match value {
        0.. => Ok(value),
        _ => Err(OptionError::new("Property values cannot be negative")),
    }
}

/// The options of each limit, in `limits` and on their own, and how they are printed.
macro_rules! limits {
    ($($name:literal $limit:ident $what:literal),* $(,)?) => {
        static LIMIT_FIELDS: &[Field<ThrottleGroupOptions>] = &[
            $(
                number(
                    $name,
                    |group, n| rate(n, &mut group.limits.$limit.average),
                    "0",
                    concat!($what, " per second; 0: any number"),
                ),
                number(
                    concat!($name, "-max"),
                    |group, n| rate(n, &mut group.limits.$limit.max),
                    "0",
                    concat!($what, " per second during a burst; 0: bursts of 100 ms' worth only"),
                ),
                number(
                    concat!($name, "-max-length"),
                    |group, n| {
                        let into = &mut group.limits.$limit.max_length;
                        seconds(concat!($name, "-max-length"), n, into)
                    },
                    "1",
                    "how long such a burst may last, in seconds; of one second it may come at once",
                ),
            )*
            number(
                "iops-size",
                |group, n| rate(n, &mut group.limits.iops_size),
                "0",
                SIZE_HELP,
            ),
        ];

        static FIELDS: &[Field<ThrottleGroupOptions>] = &[
            Row::required("id", "name of the group, for nodes to refer to")
                .text("<id>", |group, id| put(&mut group.id, check_id(id)?)),
            $(
                number(
                    concat!("x-", $name),
                    |group, n| rate(not_negative(n)?, &mut group.limits.$limit.average),
                    "0",
                    concat!("as limits.", $name),
                ),
                number(
                    concat!("x-", $name, "-max"),
                    |group, n| rate(not_negative(n)?, &mut group.limits.$limit.max),
                    "0",
                    concat!("as limits.", $name, "-max"),
                ),
                number(
                    concat!("x-", $name, "-max-length"),
                    |group, n| {
                        let into = &mut group.limits.$limit.max_length;
                        seconds(concat!("x-", $name, "-max-length"), not_negative(n)?, into)
                    },
                    "1",
                    concat!("as limits.", $name, "-max-length"),
                ),
            )*
            number(
                "x-iops-size",
                |group, n| rate(not_negative(n)?, &mut group.limits.iops_size),
                "0",
                "as limits.iops-size",
            ),
            Row::default(
                "limits",
                "",
                "what the group's nodes may do together; those of all requests exclude those of \
                 reads and of writes",
            )
            .group(LIMIT_FIELDS),
        ];

        limits!(@show LIMITS "" $($name $limit),*);
        limits!(@show FLAT "x-" $($name $limit),*);
    };
    (@show $list:ident $prefix:literal $($name:literal $limit:ident),*) => {
        static $list: &[Number] = &[
            $(
                Number { name: concat!($prefix, $name), get: |limits| limits.$limit.average },
                Number { name: concat!($prefix, $name, "-max"), get: |limits| limits.$limit.max },
                Number {
                    name: concat!($prefix, $name, "-max-length"),
                    get: |limits| limits.$limit.max_length.into(),
                },
            )*
            Number { name: concat!($prefix, "iops-size"), get: |limits| limits.iops_size },
        ];
    };
}

const SIZE_HELP: &str =
    "a larger request counts as several of so many bytes, not rounded; 0: each counts once";

limits! {
    "iops-total" iops_total "requests",
    "iops-read" iops_read "reads",
    "iops-write" iops_write "writes, discards and write-zeroes",
    "bps-total" bps_total "bytes",
    "bps-read" bps_read "bytes read",
    "bps-write" bps_write "bytes written, discarded or zeroed",
}

#[cfg(test)]
mod tests {
    use block::throttle::Limit;

    use super::*;

    fn object(json: serde_json::Value) -> Value {
        Value::from(json)
    }

    #[test]
    fn unnamed_limits_are_kept() {
        let group = ThrottleGroupOptions::default();
        let group = group
            .with_property("limits", object(serde_json::json!({"iops-total": 10})))
            .and_then(|g| g.with_property("limits", object(serde_json::json!({"bps-read": 20}))))
            .unwrap();
        let limit = |average| Limit { average, ..Limit::default() };
        let limits = ThrottleLimits {
            iops_total: limit(10),
            bps_read: limit(20),
            ..ThrottleLimits::default()
        };
        assert_eq!(group.limits, limits);
        let shown = group.properties();
        let find = |name: &str| shown.iter().find(|p| p.name == name).unwrap().value.clone();
        assert_eq!(find("x-iops-total"), Value::Integer(10));
        let Value::Object(shown) = find("limits") else { panic!("an object") };
        assert_eq!(shown.len(), 19);
        assert!(shown.contains(&("bps-read".into(), Value::Integer(20))));
        assert!(shown.contains(&("bps-read-max-length".into(), Value::Integer(1))));
    }

    #[test]
    fn refusals_have_qemus_words() {
        let group = ThrottleGroupOptions::default();
        let refused = |name: &str, value: serde_json::Value| {
            group.with_property(name, object(value)).unwrap_err().to_string()
        };
        assert_eq!(
            refused("x-iops-total", 5.into()),
            "Property cannot be set after initialization"
        );
        assert_eq!(
            refused("limits", serde_json::json!({"iops-total-max-length": 100_000_000_000i64})),
            "iops-total-max-length value must be in the range [0, 4294967295]"
        );
        assert_eq!(
            refused("limits", serde_json::json!({"iops-total": -1})),
            "bps/iops/max values must be within [0, 1000000000000000]"
        );
        assert_eq!(
            refused("limits", 5.into()),
            "Invalid parameter type for 'limits', expected: object"
        );
        assert_eq!(refused("nope", 5.into()), "Property 'throttle-group.nope' not found");
    }
}

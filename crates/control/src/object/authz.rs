//! `authz-simple` and `authz-list`: the authorization of clients.

use std::path::Path;

use tls::{Authorization, Format, Policy, Rule};

use super::{ObjectOptions, ObjectType, TypeRow, check_id};
use crate::place::OneOf;
use crate::shape::Shape;
use crate::table::{self, Field, Row, Table, put};

/// `authz-simple`, `authz-list`: the authorization of clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuthzOptions {
    /// `id`: its name.
    pub id: String,
    /// The rest.
    pub authorization: Authorization,
}

impl ObjectType for AuthzOptions {
    fn id(&self) -> &str {
        &self.id
    }

    fn type_name(&self) -> &'static str {
        match self.authorization {
            Authorization::Simple { .. } => "authz-simple",
            Authorization::List { .. } => "authz-list",
        }
    }

    fn path(&self) -> Option<&Path> {
        None
    }
}

pub(super) static AUTHZ_SIMPLE: TypeRow = TypeRow {
    name: "authz-simple",
    help: "admits one client by the name in its certificate",
    example: "authz-simple,id=auth0,identity=CN=host1",
    parent: "authz",
    table: &Table {
        fields: SIMPLE,
        build: |Simple { id, identity }| {
            let authorization = Authorization::Simple { identity };
            Ok(ObjectOptions::Authz(AuthzOptions { id, authorization }))
        },
    },
};

pub(super) static AUTHZ_LIST: TypeRow = TypeRow {
    name: "authz-list",
    help: "admits clients by the names in their certificates",
    example: "authz-list,id=auth1,rules.0.match=CN=host*,rules.0.format=glob,rules.0.policy=allow",
    parent: "authz",
    table: &Table {
        fields: LIST,
        build: |List { id, policy, rules }| {
            let authorization = Authorization::List { rules, policy };
            Ok(ObjectOptions::Authz(AuthzOptions { id, authorization }))
        },
    },
};

#[derive(Default)]
struct Simple {
    id: String,
    identity: String,
}

static SIMPLE: &[Field<Simple>] = &[
    Row::required("id", "name of the object, for tls-authz to refer to")
        .text("<id>", |authz, id| put(&mut authz.id, check_id(id)?)),
    Row::required(
        "identity",
        "distinguished name, in the certificate's order, such as C=GB,O=Example,CN=host1",
    )
    .text("<name>", |authz, name| put(&mut authz.identity, name)),
];

#[derive(Default)]
struct List {
    id: String,
    policy: Policy,
    rules: Vec<Rule>,
}

static LIST: &[Field<List>] = &[
    Row::required("id", "name of the object, for tls-authz to refer to")
        .text("<id>", |authz, id| put(&mut authz.id, check_id(id)?)),
    Row::default("policy", "deny", "what happens to clients that match no rule").at(&OneOf {
        at: |authz: &mut List| &mut authz.policy,
        words: &[
            ("deny", Policy::Deny, "they are refused"),
            ("allow", Policy::Allow, "they are admitted"),
        ],
    }),
    Row::optional("rules", "none", "").nested(
        || {
            let rule = Shape::Object(table::members(RULE));
            Shape::List(Box::new(rule), "rule number <n>, from 0; the first that fits decides")
        },
        |list, value, at| {
            let start =
                || Rule { pattern: String::new(), policy: Policy::Deny, format: Format::Exact };
            put(&mut list.rules, table::read_list(RULE, value, at, start)?)
        },
    ),
];

static RULE: &[Field<Rule>] = &[
    Row::required(
        "match",
        "distinguished name, in the certificate's order, such as C=GB,O=Example,CN=host1",
    )
    .text("<name>", |rule, name| put(&mut rule.pattern, name)),
    Row::required("policy", "what happens to clients of that name").at(&OneOf {
        at: |rule: &mut Rule| &mut rule.policy,
        words: &[
            ("deny", Policy::Deny, "clients of that name are refused"),
            ("allow", Policy::Allow, "clients of that name are admitted"),
        ],
    }),
    Row::default("format", "exact", "how names are compared").at(&OneOf {
        at: |rule: &mut Rule| &mut rule.format,
        words: &[
            ("exact", Format::Exact, "the name as it is"),
            ("glob", Format::Glob, "* is any text, ? any character"),
        ],
    }),
];

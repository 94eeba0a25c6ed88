//! `authz-simple` and `authz-list`: the authorization of clients.

use std::path::Path;

use tls::{Authorization, Format, Policy, Rule};

use super::{ObjectOptions, ObjectType, TypeRow, check_id};
use crate::shape::Shape;
use crate::table::{self, Choice, Field, Kind, Need, Table, put};

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
    Field {
        name: "id",
        kind: Kind::Text { meta: "<id>", set: |authz, id| put(&mut authz.id, check_id(id)?) },
        need: Need::Required,
        help: "name of the object, for tls-authz to refer to",
    },
    Field {
        name: "identity",
        kind: Kind::Text { meta: "<name>", set: |authz, name| put(&mut authz.identity, name) },
        need: Need::Required,
        help: "distinguished name, in the certificate's order, such as C=GB,O=Example,CN=host1",
    },
];

#[derive(Default)]
struct List {
    id: String,
    policy: Policy,
    rules: Vec<Rule>,
}

static LIST: &[Field<List>] = &[
    Field {
        name: "id",
        kind: Kind::Text { meta: "<id>", set: |authz, id| put(&mut authz.id, check_id(id)?) },
        need: Need::Required,
        help: "name of the object, for tls-authz to refer to",
    },
    Field {
        name: "policy",
        kind: Kind::Choice(&[
            Choice {
                name: "deny",
                help: "they are refused",
                set: |authz| put(&mut authz.policy, Policy::Deny),
            },
            Choice {
                name: "allow",
                help: "they are admitted",
                set: |authz| put(&mut authz.policy, Policy::Allow),
            },
        ]),
        need: Need::Default("deny"),
        help: "what happens to clients that match no rule",
    },
    Field {
        name: "rules",
        kind: Kind::Nested {
            shape: || {
                let rule = Shape::Object(table::members(RULE));
                Shape::List(Box::new(rule), "rule number <n>, from 0; the first that fits decides")
            },
            read: |list, value, at| {
                let start =
                    || Rule { pattern: String::new(), policy: Policy::Deny, format: Format::Exact };
                put(&mut list.rules, table::read_list(RULE, value, at, start)?)
            },
        },
        need: Need::Optional("none"),
        help: "",
    },
];

static RULE: &[Field<Rule>] = &[
    Field {
        name: "match",
        kind: Kind::Text { meta: "<name>", set: |rule, name| put(&mut rule.pattern, name) },
        need: Need::Required,
        help: "distinguished name, in the certificate's order, such as C=GB,O=Example,CN=host1",
    },
    Field {
        name: "policy",
        kind: Kind::Choice(&[
            Choice {
                name: "deny",
                help: "clients of that name are refused",
                set: |rule| put(&mut rule.policy, Policy::Deny),
            },
            Choice {
                name: "allow",
                help: "clients of that name are admitted",
                set: |rule| put(&mut rule.policy, Policy::Allow),
            },
        ]),
        need: Need::Required,
        help: "what happens to clients of that name",
    },
    Field {
        name: "format",
        kind: Kind::Choice(&[
            Choice {
                name: "exact",
                help: "the name as it is",
                set: |rule| put(&mut rule.format, Format::Exact),
            },
            Choice {
                name: "glob",
                help: "* is any text, ? any character",
                set: |rule| put(&mut rule.format, Format::Glob),
            },
        ]),
        need: Need::Default("exact"),
        help: "how names are compared",
    },
];

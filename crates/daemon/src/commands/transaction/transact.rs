//! `transaction`.

use control::qmp::Returns;
use options::OptionError;
use options::shape::{Shape, Variant};
use options::table::{self, Choice, Context, Field, Need, Row, put};
use options::value::Value;

use super::super::Command;
use super::actions::{self, Action, Undo};
use crate::Daemon;
use control::qmp::QmpError;

pub(super) static COMMAND: Command<Arguments> = Command {
    name: "transaction",
    help: "carry out several actions at the same moment of all disks, or none of them",
    example: r#"{"actions": [{"type": "block-dirty-bitmap-clear", "data": {"node": "disk0", "name": "b0"}},
        {"type": "blockdev-backup", "data": {"job-id": "j0", "device": "disk0", "target": "disk1", "sync": "full"}}]}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: true,
    run: |daemon, Arguments { actions, grouped }| {
        Box::pin(async move { daemon.transact(actions, grouped).await })
    },
};

#[derive(Default)]
pub(super) struct Arguments {
    actions: Vec<(&'static str, Action)>,
    grouped: bool,
}

static ARGUMENTS: &[Field<Arguments>] = &[
    Row::required("actions", "the actions, in the order in which they are carried out").nested(
        || {
            let variants = actions::KINDS.iter().map(|kind| Variant {
                name: kind.name,
                help: kind.help,
                example: "",
                members: vec![options::shape::Member {
                    name: "data",
                    shape: (kind.arguments)(),
                    need: Need::Required,
                    help: "as of the command of that name",
                }],
            });
            Shape::List(
                Box::new(Shape::Union(options::shape::Union {
                    tag: "type",
                    help: "what is done",
                    common: Vec::new(),
                    variants: variants.collect(),
                })),
                "action <n>",
            )
        },
        |to, value, at| {
            let Value::List(list) = value else {
                return Err(table::wrong_type(at.whole(), "array"));
            };
            let read = |(n, one)| action(one, &at.item(n));
            let all: Result<_, _> = list.into_iter().enumerate().map(read).collect();
            put(&mut to.actions, all?)
        },
    ),
    Row::optional("properties", "none", "of the transaction").group(&[Row::default(
        "completion-mode",
        "individual",
        "whether the jobs of the actions end together",
    )
    .choice(&[
        Choice::new("individual", "jobs end by themselves", |_| Ok(())),
        Choice::new("grouped", "jobs succeed together: if one fails, all are cancelled", |to| {
            put(&mut to.grouped, true)
        }),
    ])]),
];

fn action(value: Value, at: &Context) -> Result<(&'static str, Action), OptionError> {
    let names: Vec<&str> = actions::KINDS.iter().map(|kind| kind.name).collect();
    let (name, mut object) = table::take_type(value, at, &names)?;
    let Some(kind) = actions::KINDS.iter().find(|kind| kind.name == name) else {
        return Err(table::not_accepted("type", at, &name, names.into_iter()));
    };
    let data = match table::take(&mut object, "data") {
        Some(Value::Object(data)) => data,
        Some(_) => return Err(table::wrong_type(&at.full("data"), "object")),
        None => return Err(table::missing(&at.full("data"))),
    };
    table::refuse_rest(&object, at, "an action", ["type", "data"].into_iter())?;
    Ok((kind.name, (kind.read)(data, &at.below("data"))?))
}

impl Daemon {
    /// Executes all actions while no request of a user is in flight.
    ///
    /// If an action fails, the earlier actions are undone. Jobs run only after all actions have succeeded.
    /// `grouped`: the jobs end together.
    async fn transact(
        &mut self,
        actions: Vec<(&'static str, Action)>,
        grouped: bool,
    ) -> Result<(), QmpError> {
        let has_no_job = |(_, action): &&(_, Action)| !matches!(action, Action::Backup(_));
        if grouped && let Some((kind, _)) = actions.iter().find(has_no_job) {
            let why = "does not support transaction property completion-mode = grouped";
            return Err(QmpError::generic(format!("Action '{kind}' {why}")));
        }
        self.settle_bitmaps();
        // Held requests continue at the end, on the users' nodes at that time.
        let held = self.nodes.hold_all().await;
        let mut done = Vec::new();
        for (_, action) in actions {
            match self.act(action).await {
                Ok(undo) => done.push(undo),
                Err(error) => {
                    let _moving = self.agenda.moving();
                    for undo in done.into_iter().rev() {
                        self.undo(undo).await;
                    }
                    return Err(error);
                }
            }
        }
        if grouped {
            let jobs = done.iter().filter_map(|undo| match undo {
                Undo::CancelJob(serial) => Some(*serial),
                _ => None,
            });
            self.group_jobs(&jobs.collect::<Vec<_>>());
        }
        done.iter().for_each(|undo| self.commit(undo));
        drop(held);
        Ok(())
    }
}

//! An operator: sends QMP commands to a running daemon and checks the results.
//!
//! The operator knows the right result of each command: success, or an error, such as for a node in use. Copies of
//! disks are compared with what the guests wrote. A command may fail otherwise only after an operation of a ring
//! has failed.

mod chains;
mod copies;
mod lasting;
mod qmp;
mod refused;
mod restarts;
mod small;
mod upgrades;

use std::path::PathBuf;
use std::rc::Rc;

use serde_json::{Value as Json, json};

pub(crate) use self::qmp::{Gone, Qmp};
use self::upgrades::Inventory;
use crate::daemon::disk_name;
use crate::random::Random;
use crate::world::World;

/// The operator's life: connects, works, and connects again after the end of the daemon.
pub(crate) fn run(world: &Rc<World>) {
    let nodes = (0..world.disks()).map(disk_name).collect();
    let mut memory = Memory { serial: 0, nodes, known: None, kills: 0, chained: None };
    while !world.is_over() {
        if let Ok(qmp) = Qmp::connect(world) {
            let mut operator = Operator { world: world.clone(), qmp, memory };
            let ready = operator.after_restart().and_then(|()| operator.use_restarted());
            let worked = ready.and_then(|()| operator.work());
            if operator.qmp.has_changed() {
                operator.memory.known = None;
            }
            memory = operator.memory;
            if worked.is_ok() {
                return;
            }
        }
        world.machine.sleep(50_000);
    }
}

/// Sends `quit`.
pub(crate) fn quit(world: &Rc<World>) {
    if let Ok(mut qmp) = Qmp::connect(world) {
        if world.may_move() {
            // The operator may not have seen the last change.
            let _ = restarts::learn(world, &mut qmp);
        }
        // The connection may end before the answer.
        let _ = qmp.command("quit", json!({}));
    }
}

/// What the operator knows across connections.
struct Memory {
    /// Makes names unique.
    serial: u64,
    /// The node that serves each disk.
    nodes: Vec<String>,
    /// The configuration that the last daemon had, if no command has changed it since.
    known: Option<Inventory>,
    /// Number of killed daemons when the operator last looked.
    kills: u64,
    /// A disk with an overlay that is not yet committed or streamed.
    chained: Option<usize>,
}

/// What a job does to the images of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moving {
    Commit,
    Stream,
    Mirror,
}

struct Operator {
    world: Rc<World>,
    qmp: Qmp,
    memory: Memory,
}

impl Operator {
    fn random(&self) -> &Random {
        self.world.random()
    }

    /// Works until the run is over.
    fn work(&mut self) -> Result<(), Gone> {
        while !self.world.is_over() {
            // Slow worlds do not need more commands.
            let calm = 1 + self.memory.serial / 16;
            self.pause(20_000 * calm, 400_000 * calm);
            let disk = self.random().below(self.world.disks() as u64) as usize;
            // Chains, moves and bitmaps are what jobs on qcow2 images are about.
            let all = match (self.world.has_qcow2(), self.world.may_move()) {
                (true, true) => 36,
                (true, false) => 29,
                (false, _) => 22,
            };
            match self.random().below(all) {
                0..3 => self.limits()?,
                3..5 => self.grow(disk)?,
                5..9 => self.query()?,
                9..11 => self.bitmap(disk)?,
                11..13 => self.scratch(disk)?,
                13 => self.thread()?,
                14..16 => self.try_refused(disk)?,
                16 => self.backup(disk)?,
                17 | 18 => self.mirror(disk)?,
                19 => self.incremental(disk)?,
                20 => self.may_upgrade(2)?,
                22..27 => self.keep_bitmap(disk)?,
                27 | 28 => self.may_stop()?,
                29 => self.mirror(disk)?,
                30 => self.incremental(disk)?,
                _ if self.world.may_move() => self.snapshot(disk)?,
                _ => self.query()?,
            }
        }
        Ok(())
    }

    /// Sleeps for a time between `least` and `most` nanoseconds.
    fn pause(&self, least: u64, most: u64) {
        self.world.machine.sleep(self.random().between(least, most));
    }

    /// A new name that begins with `kind`.
    fn name(&mut self, kind: &str) -> String {
        self.memory.serial += 1;
        format!("{kind}{}", self.memory.serial)
    }

    /// The path of a file of the operator.
    fn path(&self, name: &str) -> PathBuf {
        self.world.folder().join(name)
    }

    /// Sends a command that must succeed.
    fn succeeds(&mut self, name: &str, arguments: Json) -> Result<Json, Gone> {
        let shown = arguments.to_string();
        match self.qmp.command(name, arguments)? {
            Ok(value) => Ok(value),
            Err(error) => self.world.fail(&format!("{name} {shown} fails: {error}")),
        }
    }

    /// Sends a command that may fail only after an operation has failed. Returns whether it succeeded.
    fn tries(&mut self, name: &str, arguments: Json) -> Result<bool, Gone> {
        let shown = arguments.to_string();
        let answer = self.qmp.command(name, arguments)?;
        if let Err(error) = &answer
            && !self.world.has_failed()
        {
            self.world.fail(&format!("{name} {shown} fails, and no operation has: {error}"));
        }
        Ok(answer.is_ok())
    }

    /// Sends a command that must be refused.
    fn is_refused(&mut self, name: &str, arguments: Json) -> Result<(), Gone> {
        let shown = arguments.to_string();
        if self.qmp.command(name, arguments)?.is_ok() {
            self.world.fail(&format!("{name} {shown} is not refused"));
        }
        self.world.coverage.refused_commands.one();
        Ok(())
    }
}

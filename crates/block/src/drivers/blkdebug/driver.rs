//! What a blkdebug node is to the rest of the daemon.

use std::path::Path;
use std::sync::Arc;

use ::options::{Object, Value};

use super::BlkdebugNode;
use super::options::BLKDEBUG;
use super::settings::{BlkdebugOptions, Effect, InjectError, SetState};
use crate::driver::{
    BlockDriver, ChildOption, Description, DriverKind, HandOver, Layer, Look, Members, Needs,
    NeverInactive, OpenContext,
};
use crate::error::OpenError;
use crate::node::BlockNode;
use crate::options::{BlockdevRef, write_object, write_path, write_ref};
use crate::permissions::ChildUse;

impl BlockDriver for BlkdebugOptions {
    fn kind(&self) -> &'static DriverKind {
        &BLKDEBUG
    }

    fn write(&self) -> Members {
        let BlkdebugOptions {
            image,
            config,
            align,
            max_transfer,
            opt_write_zero,
            max_write_zero,
            opt_discard,
            max_discard,
            inject_error,
            set_state,
            seed,
        } = self;
        let mut own = vec![
            ("image", write_ref(image)),
            ("align", (*align).into()),
            ("max-transfer", (*max_transfer).into()),
            ("opt-write-zero", (*opt_write_zero).into()),
            ("max-write-zero", (*max_write_zero).into()),
            ("opt-discard", (*opt_discard).into()),
            ("max-discard", (*max_discard).into()),
            ("inject-error", Value::List(inject_error.iter().map(rule).collect())),
            ("set-state", Value::List(set_state.iter().map(change_of_state).collect())),
            ("seed", (*seed).into()),
        ];
        own.extend(config.iter().map(|config| ("config", write_path(config))));
        own
    }

    fn children(&self) -> Vec<ChildOption<'_>> {
        vec![ChildOption { role: "image", used_as: ChildUse::Filtered, node: &self.image }]
    }

    fn set_child(&mut self, role: &str, child: BlockdevRef) -> bool {
        let is_image = role == "image";
        if is_image {
            self.image = child;
        }
        is_image
    }

    fn layer(&self) -> Layer {
        Layer::Filter
    }

    fn objects(&self) -> Vec<(&'static str, &str)> {
        Vec::new()
    }

    fn needs(&self) -> Needs<'_> {
        // The file is read again whenever the node becomes active.
        Needs { files: self.config.as_deref().into_iter().collect(), ..Needs::NONE }
    }

    fn hand_over(&self) -> HandOver {
        HandOver::AtOnce
    }

    fn look(&mut self, _look: Look) -> Result<(), NeverInactive> {
        Ok(())
    }

    fn describe(&self, _child: Option<&str>) -> Description {
        Description { filename: None, options: changed(self), specific: None }
    }

    fn local_file(&self) -> Option<&Path> {
        None
    }

    fn open(&self, node: &mut OpenContext<'_>) -> Result<Arc<dyn BlockNode>, OpenError> {
        let (name, child) = (node.name().to_owned(), node.child("image")?);
        Ok(Arc::new(BlkdebugNode::new(name, node.options(), self, child)?))
    }
}

fn rule(rule: &InjectError) -> Value {
    let InjectError {
        event,
        state,
        iotype,
        sectors,
        once,
        immediately,
        delay_ns,
        count,
        probability_ppm,
        effect,
        errno,
    } = rule;
    let effect = match effect {
        Effect::Error => "error",
        Effect::Lost => "lost",
        Effect::Short => "short",
        Effect::Torn => "torn",
    };
    let iotype = iotype.map(|iotype| ("iotype", iotype.name().into()));
    let sectors = sectors
        .map(|(sector, sectors)| [("sector", sector.into()), ("sectors", sectors.into())])
        .into_iter()
        .flatten();
    let others = [
        ("event", event.name().into()),
        ("state", (*state).into()),
        ("once", (*once).into()),
        ("immediately", (*immediately).into()),
        ("delay-ns", (*delay_ns).into()),
        ("count", (*count).into()),
        ("probability-ppm", (*probability_ppm).into()),
        ("effect", effect.into()),
        ("errno", errno.map_or(0, |errno| errno as i32).into()),
    ];
    write_object(others.into_iter().chain(iotype).chain(sectors))
}

fn change_of_state(SetState { event, state, new_state }: &SetState) -> Value {
    let members = [("event", event.name().into()), ("state", (*state).into())];
    write_object(members.into_iter().chain([("new_state", (*new_state).into())]))
}

/// The options that differ from the defaults.
fn changed(blkdebug: &BlkdebugOptions) -> Object {
    let mut options = Object::new();
    let mut put = |name: String, value: Value| options.push((name, value));
    if let Some(config) = &blkdebug.config {
        put("config".to_owned(), write_path(config));
    }
    let limits = [
        ("align", blkdebug.align),
        ("max-transfer", blkdebug.max_transfer),
        ("opt-write-zero", blkdebug.opt_write_zero),
        ("max-write-zero", blkdebug.max_write_zero),
        ("opt-discard", blkdebug.opt_discard),
        ("max-discard", blkdebug.max_discard),
        ("seed", blkdebug.seed),
    ];
    for (name, limit) in limits.into_iter().filter(|(_, limit)| *limit != 0) {
        put(name.to_owned(), limit.into());
    }
    for (n, rule) in blkdebug.inject_error.iter().enumerate() {
        put(format!("inject-error.{n}.event"), rule.event.name().into());
        if let Some((sector, _)) = rule.sectors {
            put(format!("inject-error.{n}.sector"), sector.into());
        }
        if let Some(iotype) = rule.iotype {
            put(format!("inject-error.{n}.iotype"), iotype.name().into());
        }
        if rule.errno != rule.effect.default_errno() {
            let errno = rule.errno.map_or(0, |errno| errno as i32);
            put(format!("inject-error.{n}.errno"), errno.into());
        }
    }
    for (n, rule) in blkdebug.set_state.iter().enumerate() {
        put(format!("set-state.{n}.event"), rule.event.name().into());
        put(format!("set-state.{n}.new_state"), rule.new_state.into());
    }
    options
}

//! What a blkdebug node is to the rest of the daemon.

use std::path::Path;
use std::sync::Arc;

use ::options::{Object, Value};

use super::BlkdebugNode;
use super::options::{BLKDEBUG, FIELDS};
use super::settings::BlkdebugOptions;
use crate::driver::{
    BlockDriver, Description, DriverKind, HandOver, Layer, Look, Needs, NeverInactive, NotReopened,
    OpenContext, Reopened, is_defined_anew,
};
use crate::error::OpenError;
use crate::node::BlockNode;
use crate::options::{BlockdevRef, write_options};
use crate::permissions::ChildUse;

impl BlockDriver for BlkdebugOptions {
    fn kind(&self) -> &'static DriverKind {
        &BLKDEBUG
    }

    fn write(&self) -> Object {
        write_options(FIELDS, self)
    }

    crate::children!(image: ChildUse::Filtered);

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
        let opened = self.node(node)?;
        node.keep(opened.rules.clone());
        Ok(Arc::new(opened))
    }

    fn check_reopen(&self, before: &dyn BlockDriver) -> Result<(), NotReopened> {
        let before: &Self = before.as_any().downcast_ref().ok_or(NotReopened::Unsupported)?;
        NotReopened::unless_kept(before, self)?;
        let is_other = match (&before.image, &self.image) {
            (BlockdevRef::Name(before), BlockdevRef::Name(after)) => before != after,
            (BlockdevRef::Name(_) | BlockdevRef::Inline(_), _) => false,
        };
        NotReopened::unless_same(&[
            ("image", is_other),
            ("image.driver", is_defined_anew(&before.image, &self.image)),
        ])
    }

    fn reopen(&self, node: &mut OpenContext<'_>) -> Result<Reopened, OpenError> {
        let mut opened = self.node(node)?;
        if let Some(rules) = node.kept() {
            opened = opened.with_rules(rules);
        }
        Ok(Reopened::anew(Arc::new(opened)))
    }
}

impl BlkdebugOptions {
    fn node(&self, node: &OpenContext<'_>) -> Result<BlkdebugNode, OpenError> {
        let (name, child) = (node.name().to_owned(), node.child("image")?);
        BlkdebugNode::new(name, node.options(), self, child)
    }
}

/// The options that differ from the defaults.
fn changed(blkdebug: &BlkdebugOptions) -> Object {
    let mut options = Object::new();
    let mut put = |name: String, value: Value| options.push((name, value));
    if let Some(config) = &blkdebug.config {
        put("config".to_owned(), ::options::place::write_path(config));
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

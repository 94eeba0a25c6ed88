//! Chains of images: as headers name them, and as the state file has the next daemon open them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value as Json;

use crate::daemon::disk_name;
use crate::image::Image;
use crate::oracle::Found;
use crate::world::World;

/// The configuration in a state file.
pub(crate) struct State {
    /// Options of nodes, by name.
    nodes: BTreeMap<String, Json>,
    /// The nodes that are exported, by the name of the export.
    exports: BTreeMap<String, String>,
}

impl State {
    /// Reads a state file. `None`: there is none, or no daemon has got as far as to write its configuration.
    fn read(path: &Path) -> Option<State> {
        let text = std::fs::read_to_string(path).ok()?;
        let state: Json = serde_json::from_str(&text).expect("JSON in the state file");
        let (mut nodes, mut exports) = (BTreeMap::new(), BTreeMap::new());
        for option in state["options"].as_array().into_iter().flatten() {
            let option = option.as_str().and_then(|option| option.split_once([' ', '=']));
            let Some((name, value)) = option else { continue };
            // Those that the operator adds are of no disk.
            let Ok(value) = serde_json::from_str::<Json>(value) else { continue };
            let text = |member: &str| value[member].as_str().map(str::to_owned);
            match name {
                "--blockdev" => nodes.extend(text("node-name").map(|name| (name, value))),
                "--export" => exports.extend(text("id").zip(text("node-name"))),
                _ => {}
            }
        }
        (!nodes.is_empty()).then_some(State { nodes, exports })
    }

    /// Whether it has a node of that name.
    pub(crate) fn has(&self, node: &str) -> bool {
        self.nodes.contains_key(node)
    }
}

impl World {
    /// The configuration that the next daemon begins with, if the state file has one.
    pub(crate) fn state(&self) -> Option<State> {
        State::read(&self.folder().join("state")).filter(|_| self.keeps_state())
    }

    /// The node that the next daemon exports as a disk.
    pub(crate) fn node_after_restart(&self, state: Option<&State>, disk: usize) -> String {
        let name = disk_name(disk);
        state.and_then(|state| state.exports.get(&name).cloned()).unwrap_or(name)
    }

    /// What an image has, with the backing images that headers name.
    pub(crate) fn found(&self, image: &Image) -> Result<Found, String> {
        let behind = match image.backing_name() {
            None => Vec::new(),
            Some(name) => {
                let below = self.image_at(Path::new(&name));
                let below =
                    below.ok_or_else(|| format!("the header names {name}, which is no image"))?;
                self.found(&below)?.contents
            }
        };
        image.found(&behind)
    }

    /// The contents of a node, with the images below it that the next daemon opens.
    pub(crate) fn contents_after_restart(
        &self,
        state: Option<&State>,
        node: &str,
    ) -> Result<Vec<u8>, String> {
        let options = state.and_then(|state| state.nodes.get(node));
        match (state, options) {
            (Some(state), Some(options)) => self.contents_by(state, options),
            _ => Ok(self.found(&self.image_of(node))?.contents),
        }
    }

    fn contents_by(&self, state: &State, options: &Json) -> Result<Vec<u8>, String> {
        let child = |name: &str| match &options[name] {
            Json::String(node) => state.nodes.get(node),
            Json::Null => None,
            inline => Some(inline),
        };
        let file = child("file");
        if options["driver"] == "throttle" {
            return self.contents_by(state, file.ok_or("a filter of no node")?);
        }
        let path = file.and_then(|file| file["filename"].as_str());
        let path = path.ok_or_else(|| format!("no file in {options}"))?;
        let image = self.image_at(Path::new(path));
        let image =
            image.ok_or_else(|| format!("the state file names {path}, which is no image"))?;
        let is_named = options.get("backing").is_some();
        match child("backing") {
            Some(below) => Ok(image.found(&self.contents_by(state, below)?)?.contents),
            None if is_named => Ok(image.found(&[])?.contents),
            None => Ok(self.found(&image)?.contents),
        }
    }

    /// The paths of all files that the next daemon opens.
    pub(crate) fn paths_after_restart(&self, state: Option<&State>) -> BTreeSet<String> {
        fn add(options: &Json, to: &mut BTreeSet<String>) {
            for (name, value) in options.as_object().into_iter().flatten() {
                match value {
                    Json::String(path) if name == "filename" => drop(to.insert(path.clone())),
                    inner => add(inner, to),
                }
            }
        }
        let mut paths = BTreeSet::new();
        let nodes = state.iter().flat_map(|state| state.nodes.values());
        nodes.for_each(|options| add(options, &mut paths));
        // Those that only headers name.
        let mut named: Vec<_> = paths.iter().cloned().collect();
        while let Some(path) = named.pop() {
            let below = self.image_at(Path::new(&path)).and_then(|image| image.backing_name());
            if let Some(below) = below.filter(|below| paths.insert(below.clone())) {
                named.push(below);
            }
        }
        paths
    }
}

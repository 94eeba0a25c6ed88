//! Making images.

use std::fmt::{self, Write as _};
use std::rc::Rc;

use block::{Blocking, CreateContext, Creating, NodeRegistry, OnThread, OpenError, drivers};
use event_loop::oneshot;
use options::table::{Context, look};
use options::value::Dialect;
use options::{Object, Value, keyval, scalar};

use crate::error::Error;
use crate::formats::{Known, find};
use crate::images::{Access, Images};
use crate::source::{Source, path_of};

/// An image to be made.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NewImage {
    /// Its file name, or a URL.
    pub name: String,
    /// Its format: `raw`, `qcow2` or `luks`.
    pub format: String,
    /// Bytes of the disk. `None`: as many as its backing file's.
    pub size: Option<u64>,
    /// Options of the format as `qemu-img` names them, each `name=value,…`.
    pub options: Vec<String>,
    /// The image that the new one is above: a name as the header has it, relative to the new image.
    pub backing: Option<String>,
    /// The format of that image.
    pub backing_format: Option<String>,
    /// That image is not looked at.
    pub trusts_backing: bool,
}

/// An image that can be made: its options fit together. `Display` is `qemu-img`'s line about it.
#[derive(Debug, Clone)]
pub struct Plan {
    name: String,
    format: &'static str,
    /// What was given and what has a default, in QEMU's order.
    options: Vec<(&'static Known, String)>,
    size: u64,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Formatting '{}', fmt={}", self.name, self.format)?;
        for (known, value) in &self.options {
            f.write_char(' ')?;
            write!(f, "{}={}", known.name, value.replace(',', ",,"))?;
        }
        Ok(())
    }
}

impl Plan {
    /// Returns the number of bytes of the disk.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the plan for an image of another name.
    #[must_use]
    pub fn in_place(self, name: String) -> Plan {
        Plan { name, ..self }
    }

    /// Returns whether the new image reads as zeroes: in a new file, and without a backing image.
    pub fn reads_as_zeroes(&self) -> bool {
        let is_allocated = self.option("preallocation").is_some_and(|kind| kind != "off");
        // Allocated clusters are decrypted, and a data file may have had contents before.
        let is_encrypted = self.option("encrypt.key-secret").is_some();
        self.option("backing_file").is_none_or(str::is_empty)
            && self.format != "luks"
            && !(is_allocated && is_encrypted)
            && self.option("data_file").is_none()
    }

    /// Returns the options by which the new image is opened, beside its file. Empty: its format alone.
    pub fn opened_with(&self) -> String {
        let secret = |name: &str| self.option(name).map(|id| id.replace(',', ",,"));
        match (secret("key-secret"), secret("encrypt.key-secret")) {
            (Some(id), _) => format!("driver=luks,key-secret={id}"),
            (None, Some(id)) => {
                format!("driver=qcow2,encrypt.format=luks,encrypt.key-secret={id}")
            }
            (None, None) => String::new(),
        }
    }

    /// Returns the value of an option.
    pub(crate) fn option(&self, name: &str) -> Option<&str> {
        self.options.iter().find(|(known, _)| known.name == name).map(|(_, value)| &**value)
    }
}

impl NewImage {
    /// The options in the order in which they were given.
    fn given(&self) -> Vec<(String, String)> {
        let mut given = Vec::new();
        for text in &self.options {
            let pairs = keyval::split(text).filter(|pair| !pair.is_empty());
            given.extend(pairs.map(|pair| match pair.split_once('=') {
                Some((name, value)) => (name.to_owned(), value.replace(",,", ",")),
                None => (pair.to_owned(), "on".to_owned()),
            }));
        }
        given
    }
}

impl Images {
    /// Checks what is known of a new image, and looks at its backing file. Nothing is made.
    ///
    /// # Errors
    ///
    /// An option is unknown or wrong, or the backing file cannot be opened.
    pub fn plan(&mut self, new: &NewImage) -> Result<Plan, Error> {
        self.plan_unnamed(new).map_err(|error| error.of(&new.name))
    }

    pub(crate) fn plan_unnamed(&mut self, new: &NewImage) -> Result<Plan, Error> {
        let format = find(&new.format)?;
        let mut given = new.given();
        let backing = [("backing_file", &new.backing), ("backing_fmt", &new.backing_format)];
        for (name, value) in backing {
            let Some(value) = value else { continue };
            if !format.options.iter().any(|known| known.name == name) {
                let what = if name == "backing_file" { "Backing file" } else { "Backing format" };
                let format = format.name;
                return Err(Error::new(format!("{what} not supported for file format '{format}'")));
            }
            given.push((name.to_owned(), value.clone()));
        }
        if let Some((name, _)) = given.iter().find(|(name, _)| format.find(name).is_none()) {
            return Err(Error::new(format!("Invalid parameter '{name}'")).with_hint(format.names()));
        }
        let value = |name: &str| given.iter().rev().find(|(known, _)| known == name);
        let value = |name: &str| value(name).map(|(_, value)| value.clone());
        let told = value("size").map(|text| {
            scalar::size(&text).ok_or_else(|| {
                Error::new("Parameter 'size' expects a non-negative number below 2^64")
            })
        });
        let mut size = new.size.map(Ok).or(told).transpose()?;
        let backing = value("backing_file").filter(|name| !name.is_empty());
        if let Some(name) = &backing
            && !(new.trusts_backing && size.is_some())
        {
            let format = value("backing_fmt");
            let of_backing = self.look_at_backing(&new.name, name, format.as_deref())?;
            size = size.or(Some(of_backing));
        }
        let Some(size) = size else {
            return Err(Error::new("Image creation needs a size parameter"));
        };
        if i64::try_from(size).is_err() {
            return Err(Error::new("Image size must be less than 8 EiB!"));
        }
        let options = format.options.iter().filter_map(|known| {
            let value = match known.name {
                "size" => Some(size.to_string()),
                name => value(name),
            };
            Some((known, known.shown(value)?))
        });
        let plan =
            Plan { name: new.name.clone(), format: format.name, options: options.collect(), size };
        for (known, value) in &plan.options {
            known.check(value)?;
        }
        Ok(plan)
    }

    /// Returns the size of a backing file. The errors are QEMU's.
    fn look_at_backing(
        &mut self,
        image: &str,
        name: &str,
        format: Option<&str>,
    ) -> Result<u64, Error> {
        if name == image {
            let why = "Error: Trying to create an image with the same filename as the backing file";
            return Err(Error::new(why));
        }
        let source = Source::beside(image, name, format.map(str::to_owned));
        let found = self.info(&source, &Access { force_share: true, ..Access::READ });
        let found = found.map_err(|error| {
            let message = error.message();
            // The name is said once.
            let prefix = format!("Could not open '{}': ", source.name);
            let message = match message.strip_prefix(&prefix) {
                Some(why) if why.starts_with(&prefix) => why,
                _ => message,
            };
            Error::new(message).with_hint("Could not open backing image.")
        })?;
        match format {
            Some(_) => Ok(found.virtual_size),
            None => Err(Error::new("Backing file specified without backing format")
                .with_hint(format!("Detected format of {}.", found.format))),
        }
    }

    /// Makes an image. A file that is there is emptied.
    ///
    /// # Errors
    ///
    /// The file cannot be made or is in use. A file that was not there before is removed.
    pub fn make(&mut self, plan: &Plan) -> Result<(), Error> {
        let is_new = path_of(&plan.name).is_some_and(|path| path.symlink_metadata().is_err());
        let made = self.make_unnamed(plan);
        if made.is_err()
            && is_new
            && let Some(path) = path_of(&plan.name)
        {
            let _ = std::fs::remove_file(path);
        }
        made.map_err(|error| error.of(&plan.name))
    }

    /// Checks and makes an image.
    ///
    /// # Errors
    ///
    /// As of [`plan`](Self::plan) and [`make`](Self::make).
    pub fn create(&mut self, new: &NewImage) -> Result<Plan, Error> {
        let plan = self.plan(new)?;
        self.make(&plan)?;
        Ok(plan)
    }

    fn make_unnamed(&mut self, plan: &Plan) -> Result<(), Error> {
        let (own, below): (Vec<_>, Vec<_>) =
            plan.options.iter().partition(|(known, _)| !known.is_of_file(plan.format));
        let size = if plan.format == "raw" { sectors(plan.size) } else { 0 };
        self.make_bytes(&plan.name, size, &below)?;
        if plan.format == "raw" {
            return Ok(());
        }
        let mut object = Object::new();
        for (known, value) in own {
            match known.name {
                // A disk has whole sectors.
                "size" => put(&mut object, known.to, sectors(plan.size).to_string().into()),
                _ => put(&mut object, known.to, known.written(value).into()),
            }
        }
        let file = self.open_bytes(&plan.name)?;
        put(&mut object, "file", file.as_str().into());
        let mut data_file = None;
        if let Some(name) = plan.option("data_file") {
            let is_there = path_of(name).is_some_and(|path| path.exists());
            if !is_there {
                self.make_bytes(name, 0, &[])?;
            }
            let node = self.open_bytes(name)?;
            options::table::take(&mut object, "data-file");
            put(&mut object, "data-file", node.as_str().into());
            data_file = Some((node, name.to_owned()));
        }
        let made = self.create_in(plan.format, object, data_file.clone());
        self.nodes.remove(&file)?;
        if let Some((node, _)) = data_file {
            self.nodes.remove(&node)?;
        }
        made
    }

    /// Makes the file of an image, or a Ceph image. A device stays as it is.
    fn make_bytes(
        &mut self,
        name: &str,
        size: u64,
        options: &[&(&'static Known, String)],
    ) -> Result<(), Error> {
        let given = match name.strip_prefix("json:") {
            Some(text) => Source::new(format!("json:{text}")).options()?.object,
            None => Source::new(name).options()?.object,
        };
        let file = match look(&given, "file") {
            Some(Value::Object(file)) => file.clone(),
            _ => given,
        };
        let driver = look(&file, "driver").and_then(Value::as_text).unwrap_or_default().to_owned();
        let mut object: Object = match driver.as_str() {
            "file" => file.into_iter().filter(|(name, _)| name == "filename").collect(),
            "rbd" => {
                let location = file.into_iter().filter(|(name, _)| name != "driver").collect();
                vec![("location".to_owned(), Value::Object(location))]
            }
            "host_device" => return self.check_room(name, size),
            _ => {
                let why = format!("Protocol driver '{driver}' does not support image creation");
                return Err(Error::new(why));
            }
        };
        put(&mut object, "size", size.to_string().into());
        for (known, value) in options {
            put(&mut object, known.to, known.written(value).into());
        }
        self.create_in(&driver, object, None)
    }

    /// Checks that a device has that many bytes.
    fn check_room(&mut self, name: &str, size: u64) -> Result<(), Error> {
        let node = self.open_bytes(name)?;
        let has = self.nodes.node(&node)?.geometry().size;
        self.nodes.remove(&node)?;
        match has < size {
            true => Err(Error::new(format!(
                "The image size is too large: the device has {has} bytes, and {size} are needed"
            ))),
            false => Ok(()),
        }
    }

    /// Opens the bytes of an image for writing. Returns the name of the node.
    pub(crate) fn open_bytes(&mut self, name: &str) -> Result<String, Error> {
        let given = Source::new(name).options()?;
        let file = match look(&given.object, "file") {
            Some(Value::Object(file)) => file.clone(),
            _ => given.object,
        };
        let name = format!("json:{}", Value::Object(file));
        let image = self.open(&Source::new(name), &Access::WRITE)?;
        // The registry keeps the node, and the image its lock, until it is removed.
        Ok(image.node_name)
    }

    /// Has a driver create an image.
    fn create_in(
        &mut self,
        driver: &str,
        object: Object,
        data_file: Option<(String, String)>,
    ) -> Result<(), Error> {
        let kind = drivers::all().find(|kind| kind.name == driver).and_then(|kind| kind.create);
        let kind = kind.ok_or_else(|| {
            Error::new(format!("Format driver '{driver}' does not support image creation"))
        })?;
        let at = Context::new(Dialect::Keyval);
        let owner = format!("driver '{driver}'");
        let image = kind.options.read(object, &at, &["driver"], &owner)?;
        let on_thread: OnThread = Rc::new(on_a_thread);
        let filename = |node: &str| match &data_file {
            Some((known, name)) if known == node => Ok(name.clone()),
            _ => Err(OpenError::new(format!("node '{node}' has no name for headers"))),
        };
        let creating = {
            let nodes: &NodeRegistry = &self.nodes;
            let context = CreateContext {
                event_loop: &self.event_loop,
                nodes,
                on_thread: &on_thread,
                filename: &filename,
            };
            image.create(&context)
        };
        Ok(self.block_on(creating)??)
    }
}

/// Rounds up to whole sectors.
fn sectors(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(512).unwrap_or(bytes)
}

/// Has blocking work done on a thread of its own.
fn on_a_thread(work: Blocking) -> Creating {
    let (done, is_done) = oneshot::channel();
    let thread = std::thread::Builder::new().name("create".into());
    let started = thread.spawn(move || done.send(work()));
    Box::pin(async move {
        started.map_err(|error| OpenError::io("starting a thread failed", &error))?;
        is_done.await.map_err(|_| OpenError::new("a thread has ended early"))?
    })
}

/// Puts a value at a dotted name.
fn put(object: &mut Object, name: &str, value: Value) {
    let Some((first, rest)) = name.split_once('.') else {
        object.push((name.to_owned(), value));
        return;
    };
    if !object.iter().any(|(known, _)| known == first) {
        object.push((first.to_owned(), Value::Object(Object::new())));
    }
    if let Some((_, Value::Object(inner))) = object.iter_mut().find(|(known, _)| known == first) {
        put(inner, rest, value);
    }
}

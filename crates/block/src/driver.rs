//! What a block driver is: the seam between a driver's folder and all that handles nodes.
//!
//! A driver is a [`DriverKind`] in the [list](crate::drivers) and a type of options that is a [`BlockDriver`]. Nothing
//! outside a driver's folder asks which driver a node has. What the answer would depend on is a method here, without a
//! default where a driver that says nothing would lose data or reach too far.

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;

pub use crate::amend::AmendKind;
use crate::connections::ConnectContext;
pub use crate::create::CreateKind;
use ::options::shape::Member;
use ::options::table::{self, Context, Field};
use ::options::value::scalars;
use ::options::{Object, OptionError, Value};

use crate::error::OpenError;
use crate::node::{BlockNode, ImageHeader};
use crate::options::{BlockdevRef, Inherited};
use crate::permissions::ChildUse;
pub use crate::registry::OpenContext;

/// A block driver as users name it: a line in the list of drivers.
pub struct DriverKind {
    /// Its name: the value of `driver`.
    pub name: &'static str,
    /// What it is for, in one line.
    pub help: &'static str,
    /// A whole `--blockdev` value, in which the nodes `disk0` and `disk1` may be referred to.
    pub example: &'static str,
    /// The options it has beside those of all drivers: an [`OptionTable`].
    pub options: &'static dyn ReadOptions,
    /// How images are created. `None`: they are not.
    pub create: Option<&'static CreateKind>,
    /// How open images are amended. `None`: they are not.
    pub amend: Option<&'static AmendKind>,
    /// The library that does the nodes' I/O. `None`: the event loop does it.
    pub library: Option<&'static ForeignLibrary>,
}

/// A library that does I/O by itself, on threads of its own.
///
/// [`library_birth`](crate::DriverServices::library_birth) confines the threads. The library connects to any TCP port,
/// and reads [`files`](Needs::files) of the nodes.
pub struct ForeignLibrary {
    /// Loads the library, while the process may still map code. Fails if the library is missing or too old.
    pub load: fn() -> Result<(), OpenError>,
    /// Further files and folders that the library reads.
    pub reads: &'static [&'static str],
}

/// A driver's own options, with the type that they are read into erased.
pub trait ReadOptions: Sync {
    /// Reads the options out of `object`, in which nothing else is left.
    ///
    /// # Errors
    ///
    /// An option is unknown, missing or wrong; in QSD's words.
    fn read(
        &self,
        object: Object,
        inherited: Inherited,
        at: &Context,
        driver: &str,
    ) -> Result<Driver, OptionError>;

    /// Returns what the options are.
    fn members(&self) -> Vec<Member>;
}

/// A driver's own options, and the driver made of them.
pub struct OptionTable<T: 'static> {
    /// The options.
    pub fields: &'static [Field<T>],
    /// Returns a draft in which nothing is given yet. A driver with children keeps what those inherit.
    pub start: fn(Inherited) -> T,
    /// Makes the driver of a draft. Fails if its values do not go together; the error says why, in QSD's words.
    pub build: fn(T) -> Result<Driver, OptionError>,
}

impl<T> ReadOptions for OptionTable<T> {
    fn read(
        &self,
        mut object: Object,
        inherited: Inherited,
        at: &Context,
        driver: &str,
    ) -> Result<Driver, OptionError> {
        let mut draft = (self.start)(inherited);
        table::read(self.fields, &mut draft, &mut object, at)?;
        let known = crate::options::common_names().chain(table::names(self.fields));
        table::refuse_rest(&object, at, &format!("driver '{driver}'"), known)?;
        (self.build)(draft)
    }

    fn members(&self) -> Vec<Member> {
        table::members(self.fields)
    }
}

/// A driver's options in a node's definition, and what the driver does with them.
///
/// The options' type has to be `Clone`, `PartialEq` and `Debug`: that makes it a [`DriverValue`].
pub trait BlockDriver: DriverValue {
    /// Returns the driver's line in the list.
    fn kind(&self) -> &'static DriverKind;

    /// Returns the options as text would give them.
    ///
    /// Reading them again gives the same value.
    fn write(&self) -> Object;

    /// Returns the children that the options name, in the order of opening.
    ///
    /// An image may name more.
    fn children(&self) -> Vec<ChildOption<'_>>;

    /// Puts a child in place of the one with that role.
    ///
    /// Returns `false` if there can be none.
    fn set_child(&mut self, role: &str, child: BlockdevRef) -> bool;

    /// Has the options name no child with that role.
    ///
    /// Returns `false` if there has to be one.
    fn remove_child(&mut self, _role: &str) -> bool {
        false
    }

    /// Returns where the node's bytes are.
    fn layer(&self) -> Layer;

    /// Returns the objects that the options refer to: each one's type and `id`.
    fn objects(&self) -> Vec<(&'static str, &str)>;

    /// Returns what the node reaches outside the process.
    ///
    /// The sandbox of a daemon without a monitor forbids everything else. A node uses the system calls of its event
    /// loop. A library that does its own I/O has [threads of its own](ForeignLibrary).
    fn needs(&self) -> Needs<'_>;

    /// Returns how written data reaches the process that takes over in an upgrade.
    fn hand_over(&self) -> HandOver;

    /// Changes the options so that the node takes no locks and writes nothing.
    ///
    /// Another process uses the image meanwhile.
    ///
    /// # Errors
    ///
    /// The driver's nodes cannot be inactive.
    fn look(&mut self, look: Look) -> Result<(), NeverInactive>;

    /// Returns QMP's description of the node.
    ///
    /// `child` is the file name of the first child, if it has one.
    fn describe(&self, child: Option<&str>) -> Description;

    /// Returns the file or block device of this host that holds the node's bytes.
    ///
    /// `None` unless the file holds them one to one.
    fn local_file(&self) -> Option<&Path>;

    /// Opens the node. The children that [`children`](Self::children) returns are open.
    ///
    /// # Errors
    ///
    /// In QEMU's words where QEMU has the error, with what to do about it as the hint.
    fn open(&self, node: &mut OpenContext<'_>) -> Result<Arc<dyn BlockNode>, OpenError>;

    /// Prepares the slow part of opening on a loop, without blocking the caller's.
    ///
    /// [`OpenContext::connection`] passes the result to [`open`](Self::open). `None`: opening takes no time.
    ///
    /// # Errors
    ///
    /// The future's error is that of opening.
    fn connect(&self, _context: &ConnectContext<'_>) -> Option<Connecting> {
        None
    }

    /// Checks that a node in use can change from the options `before` to these.
    ///
    /// # Errors
    ///
    /// An option cannot be changed, or, unless a driver says otherwise, no option can.
    fn check_reopen(&self, _before: &dyn BlockDriver) -> Result<(), NotReopened> {
        Err(NotReopened::Unsupported)
    }

    /// Opens a node to replace an open one, which serves requests meanwhile.
    ///
    /// # Errors
    ///
    /// As of [`open`](Self::open).
    fn reopen(&self, node: &mut OpenContext<'_>) -> Result<Reopened, OpenError> {
        Ok(Reopened::anew(self.open(node)?))
    }

    /// Reads what the image's header tells, without opening what the header names and without a password.
    ///
    /// `file` is the node of the image's bytes. `None`: the driver's images have no header.
    fn read_header(&self, _file: &Arc<dyn BlockNode>) -> Option<Result<ImageHeader, OpenError>> {
        None
    }

    /// Whether the open node has to [close its image](crate::node::HeldState::suspend_image) before this one opens it.
    ///
    /// Users are held meanwhile. The image stays the same: its files can get filters above them, and lose them.
    fn closes_to_reopen(&self) -> bool {
        false
    }
}

/// The result of [`BlockDriver::connect`].
pub type Connecting = Pin<Box<dyn Future<Output = Result<Box<dyn Any + Send>, OpenError>>>>;

/// A child that options name.
#[derive(Debug, Clone, Copy)]
pub struct ChildOption<'a> {
    /// The child's role, in QEMU's words: `file`, `backing`, ….
    pub role: &'static str,
    /// What the node uses it for, which decides the permissions.
    pub used_as: ChildUse,
    /// The child, by name or defined in place.
    pub node: &'a BlockdevRef,
}

/// Where a node's bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layer {
    /// The node is the lowest: it has no children.
    Storage,
    /// A part of the first child, or all of it.
    Window,
    /// The first child has them all, and shows through.
    Filter,
    /// In children, where metadata says. Writes may extend them, and the node writes when it is closed.
    Format,
}

/// The files, servers and libraries that a node reaches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needs<'a> {
    /// Files and devices of the host that are opened.
    pub files: Vec<&'a Path>,
    /// Unix sockets that are connected to.
    pub sockets: Vec<&'a Path>,
    /// TCP servers that are connected to: host and port number.
    pub servers: Vec<(&'a str, u16)>,
    /// Whether abstract unix sockets are connected to.
    pub abstract_sockets: bool,
    /// Whether vsock is connected to.
    pub vsock: bool,
    /// Whether the node keeps a journal, in the [folder](crate::NodeRegistry::with_journals) of all.
    pub journal: bool,
}

impl Needs<'_> {
    /// Nothing.
    pub const NONE: Needs<'static> = Needs {
        files: Vec::new(),
        sockets: Vec::new(),
        servers: Vec::new(),
        abstract_sockets: false,
        vsock: false,
        journal: false,
    };
}

/// Implements [`BlockDriver::children`] and [`BlockDriver::set_child`] of a driver with just these children in its options.
///
/// Each is `ROLE: ChildUse`, in the order of opening. The role is the name of the option's field.
#[macro_export]
macro_rules! children {
    ($($role:ident: $used_as:expr),*) => {
        fn children(&self) -> Vec<$crate::driver::ChildOption<'_>> {
            vec![$($crate::driver::ChildOption {
                role: stringify!($role),
                used_as: $used_as,
                node: &self.$role,
            }),*]
        }

        fn set_child(&mut self, role: &str, child: $crate::options::BlockdevRef) -> bool {
            $crate::driver::set_child(&mut [$((stringify!($role), &mut self.$role)),*], role, child)
        }
    };
}

/// Implements the methods of [`BlockDriver`] for a filter that has no more to say than its child.
///
/// Its options refer to no objects. A node reaches nothing outside the process, and keeps nothing that was written.
#[macro_export]
macro_rules! plain_filter {
    () => {
        fn layer(&self) -> $crate::driver::Layer {
            $crate::driver::Layer::Filter
        }

        fn objects(&self) -> Vec<(&'static str, &str)> {
            Vec::new()
        }

        fn needs(&self) -> $crate::driver::Needs<'_> {
            $crate::driver::Needs::NONE
        }

        fn hand_over(&self) -> $crate::driver::HandOver {
            $crate::driver::HandOver::AtOnce
        }

        fn look(
            &mut self,
            _look: $crate::driver::Look,
        ) -> Result<(), $crate::driver::NeverInactive> {
            Ok(())
        }

        fn describe(&self, _child: Option<&str>) -> $crate::driver::Description {
            $crate::driver::Description { filename: None, options: Vec::new(), specific: None }
        }

        fn local_file(&self) -> Option<&std::path::Path> {
            None
        }
    };
}

/// Puts a child in the place with its role. Returns `false` if there is none.
pub fn set_child(places: &mut [(&str, &mut BlockdevRef)], role: &str, child: BlockdevRef) -> bool {
    let place = places.iter_mut().find(|(name, _)| *name == role);
    place.map(|(_, place)| **place = child).is_some()
}

/// How a node's written data reaches the process that takes over in an upgrade.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandOver {
    /// With the children, or with what the kernel has: nothing that was answered is in this process alone.
    AtOnce,
    /// The same; the node holds requests back, and releases them when its queues stop.
    HoldsBack,
    /// Through a journal: flushed beforehand as far as time allows. The other process opens the node last. Such a
    /// node has a [`HeldState`](crate::node::HeldState) with a journal.
    Journal,
    /// Only a flush of this process makes what it has written durable: waited for.
    Flush,
    /// Not at all: no other process can open the node.
    Never,
}

/// The purpose of a look at an inactive node's image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// The geometry: images behind the image are left closed.
    Geometry,
    /// Reads.
    Contents,
}

/// The driver's nodes cannot be inactive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NeverInactive;

/// Why a node does not get other options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotReopened {
    /// This option would change.
    Option(String),
    /// This option would get its default value, because it is left out.
    Reset(String),
    /// The driver has no way to do it.
    Unsupported,
}

impl NotReopened {
    /// Fails if a child that was named is to be one that is defined in place.
    ///
    /// # Errors
    ///
    /// That is so.
    pub fn unless_defined_anew(
        before: &BlockdevRef,
        after: &BlockdevRef,
    ) -> Result<(), NotReopened> {
        NotReopened::unless_same(&[("file.driver", is_defined_anew(before, after))])
    }

    /// Fails with the first option that would change.
    ///
    /// # Errors
    ///
    /// One is `true`.
    pub fn unless_same(changed: &[(&str, bool)]) -> Result<(), NotReopened> {
        match changed.iter().find(|(_, changed)| *changed) {
            Some((option, _)) => Err(NotReopened::Option((*option).to_owned())),
            None => Ok(()),
        }
    }

    /// Fails if any of a driver's options would change, other than its children.
    ///
    /// # Errors
    ///
    /// One would.
    pub fn unless_kept(
        before: &dyn BlockDriver,
        after: &dyn BlockDriver,
    ) -> Result<(), NotReopened> {
        let (before, after) = (told(before), told(after));
        let is_left_out = |name: &String| !after.iter().any(|(other, _)| other == name);
        if let Some((name, _)) = before.iter().find(|(name, _)| is_left_out(name)) {
            return Err(NotReopened::Reset(name.clone()));
        }
        match after.into_iter().find(|option| !before.contains(option)) {
            Some((name, _)) => Err(NotReopened::Option(name)),
            None => Ok(()),
        }
    }
}

/// Whether a child that was named is to be one that is defined in place.
pub fn is_defined_anew(before: &BlockdevRef, after: &BlockdevRef) -> bool {
    matches!(before, BlockdevRef::Name(_)) && matches!(after, BlockdevRef::Inline(_))
}

/// A driver's options that differ from the defaults, without children, each under its full name.
fn told(driver: &dyn BlockDriver) -> Vec<(String, Value)> {
    let children: Vec<_> = driver.children().into_iter().map(|child| child.role).collect();
    let mut options = driver.write();
    options.retain(|(name, _)| !children.contains(&name.as_str()));
    let mut told = scalars(options);
    told.retain(|(_, value)| *value != Value::Text(String::new()));
    told
}

/// A node's description in QMP.
#[derive(Debug, Clone, PartialEq)]
pub struct Description {
    /// A text that stands for all options, such as a path. `None`: the options are given.
    pub filename: Option<String>,
    /// The options that decide what is read, without children and without defaults.
    pub options: Object,
    /// `format-specific` of `ImageInfo`.
    pub specific: Option<Object>,
}

/// The result of [`BlockDriver::reopen`].
pub struct Reopened {
    /// The node that takes the place of the open one. `None`: the open one has the new options.
    pub node: Option<Arc<dyn BlockNode>>,
    /// Called if the options are not to be changed after all.
    pub restore: Option<Box<dyn FnOnce() + Send>>,
}

impl Reopened {
    /// Another node takes the place of the open one.
    pub fn anew(node: Arc<dyn BlockNode>) -> Reopened {
        Reopened { node: Some(node), restore: None }
    }

    /// The open node has the new options.
    pub fn in_place(restore: impl FnOnce() + Send + 'static) -> Reopened {
        Reopened { node: None, restore: Some(Box::new(restore)) }
    }
}

/// What all types of options have in common.
///
/// Implemented for each that is `Clone`, `PartialEq` and `Debug`.
pub trait DriverValue: Any + fmt::Debug + Send + Sync {
    /// Returns a clone.
    fn boxed(&self) -> Box<dyn BlockDriver>;
    /// Returns whether the other value has the same type and is equal.
    fn is_same(&self, other: &dyn BlockDriver) -> bool;
    /// Returns the value for a downcast.
    fn as_any(&self) -> &dyn Any;
    /// Returns the value for a downcast.
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

impl<T: BlockDriver + Clone + PartialEq> DriverValue for T {
    fn boxed(&self) -> Box<dyn BlockDriver> {
        Box::new(self.clone())
    }

    fn is_same(&self, other: &dyn BlockDriver) -> bool {
        other.as_any().downcast_ref::<T>().is_some_and(|other| other == self)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

/// A driver with its own options, whichever it is.
pub struct Driver(Box<dyn BlockDriver>);

impl<T: BlockDriver> From<T> for Driver {
    fn from(driver: T) -> Driver {
        Driver(Box::new(driver))
    }
}

impl Driver {
    /// Returns the driver's options, if they are a `T`.
    pub fn downcast_ref<T: BlockDriver>(&self) -> Option<&T> {
        self.0.as_any().downcast_ref()
    }

    /// Returns the same, mutable.
    pub fn downcast_mut<T: BlockDriver>(&mut self) -> Option<&mut T> {
        self.0.as_any_mut().downcast_mut()
    }
}

impl Deref for Driver {
    type Target = dyn BlockDriver;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl DerefMut for Driver {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut *self.0
    }
}

impl Clone for Driver {
    fn clone(&self) -> Self {
        Driver(self.0.boxed())
    }
}

impl PartialEq for Driver {
    fn eq(&self, other: &Self) -> bool {
        self.0.is_same(&*other.0)
    }
}

impl Eq for Driver {}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

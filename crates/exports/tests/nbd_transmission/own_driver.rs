//! A block driver from outside the `block` crate: named in options, opened, and served over NBD.

use std::io;
use std::path::Path;
use std::process;
use std::rc::Rc;
use std::sync::Arc;

use block::driver::{
    BlockDriver, Description, DriverKind, HandOver, Layer, Look, Needs, NeverInactive, OpenContext,
    OptionTable,
};
use block::node::{BlockNode, Channel, Geometry};
use block::options::{BlockdevOptions, blockdev_option};
use block::request::{Op, Request};
use block::{NodeRegistry, OpenError, drivers};
use control::{Action, Command, parse_args};
use event_loop::EventLoop;
use event_loop::ring::setup::RingChoice;
use exports::nbd::NbdListen;
use nix::errno::Errno;
use options::Object;
use options::place::Int;
use options::table::{self, Field, Kind, Need};

use crate::nbd_transmission::rig::{READ, Rig, request};

/// `stripes`: a read-only disk of one sector of a byte, one of the next, and so on.
static STRIPES: DriverKind = DriverKind {
    name: "stripes",
    help: "sectors of one byte each, counted up",
    example: "stripes,node-name=n,sectors=8",
    options: &OptionTable {
        fields: FIELDS,
        start: |_| Stripes { sectors: 0, first: 0 },
        build: |stripes| Ok(stripes.into()),
    },
    create: None,
    amend: None,
    library: None,
};

static OWN: &[&DriverKind] = &[&STRIPES];

#[derive(Debug, Clone, PartialEq)]
struct Stripes {
    sectors: u64,
    first: u8,
}

static FIELDS: &[Field<Stripes>] = &[
    Field {
        name: "sectors",
        kind: Kind::At(&Int { min: 1, max: 1 << 20, at: |node: &mut Stripes| &mut node.sectors }),
        need: Need::Required,
        help: "size of the disk, in sectors",
    },
    Field {
        name: "first",
        kind: Kind::At(&Int { min: 0, max: 255, at: |node: &mut Stripes| &mut node.first }),
        need: Need::Default("0"),
        help: "byte of the first sector",
    },
];

impl BlockDriver for Stripes {
    fn kind(&self) -> &'static DriverKind {
        &STRIPES
    }

    fn write(&self) -> Object {
        table::write(FIELDS, &mut self.clone())
    }

    block::children!();

    fn layer(&self) -> Layer {
        Layer::Storage
    }

    fn objects(&self) -> Vec<(&'static str, &str)> {
        Vec::new()
    }

    fn needs(&self) -> Needs<'_> {
        Needs::NONE
    }

    fn hand_over(&self) -> HandOver {
        HandOver::AtOnce
    }

    fn look(&mut self, _look: Look) -> Result<(), NeverInactive> {
        Ok(())
    }

    fn describe(&self, _child: Option<&str>) -> Description {
        Description {
            filename: Some(format!("stripes:{}", self.sectors)),
            options: Vec::new(),
            specific: None,
        }
    }

    fn local_file(&self) -> Option<&Path> {
        None
    }

    fn open(&self, node: &mut OpenContext<'_>) -> Result<Arc<dyn BlockNode>, OpenError> {
        if !node.options().read_only {
            return Err(OpenError::new("stripes are never written")
                .with_hint("read-only=on opens such a node"));
        }
        Ok(Arc::new(StripesNode { name: node.name().to_owned(), stripes: self.clone() }))
    }
}

struct StripesNode {
    name: String,
    stripes: Stripes,
}

impl BlockNode for StripesNode {
    fn name(&self) -> &str {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.stripes.sectors * 512,
            read_only: true,
            physical_block_size: 512,
            request_alignment: 512,
            discard: false,
            discard_granularity: 512,
            write_zeroes: false,
            write_cache: false,
        }
    }

    fn open_channel(self: Arc<Self>, _event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        Ok(Rc::new(StripesChannel(self.stripes.clone())))
    }
}

struct StripesChannel(Stripes);

impl Channel for StripesChannel {
    fn submit(&self, mut request: Request) {
        match request.op {
            Op::Read if request.offset + request.len <= self.0.sectors * 512 => {
                for at in 0..request.len {
                    let sector = ((request.offset + at) / 512).to_le_bytes()[0];
                    let byte = self.0.first.wrapping_add(sector);
                    request.bufs.copy_in(at as usize, &[byte]);
                }
                request.complete(Ok(()));
            }
            Op::Read => request.complete(Err(Errno::EIO)),
            Op::Flush => request.complete(Ok(())),
            Op::BlockStatus => request.complete(Err(Errno::EOPNOTSUPP)),
            Op::Write { .. } | Op::Discard | Op::WriteZeroes { .. } => {
                request.complete(Err(Errno::EROFS));
            }
        }
    }

    fn in_flight(&self) -> usize {
        0
    }
}

/// The node that an option of the command line defines.
fn node(option: &str) -> BlockdevOptions {
    let argv = ["qemu-storage-daemon", "--blockdev", option].map(Into::into);
    let Ok(Command::StorageDaemon(mut command)) = parse_args(argv) else { panic!("{option}") };
    match command.steps.pop().map(|step| step.action) {
        Some(Action::Blockdev(node)) => node,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_driver_from_outside_is_named_opened_and_served() {
    drivers::add(OWN).unwrap();
    assert!(drivers::add(OWN).is_err());

    let argv = ["qemu-storage-daemon", "--blockdev", "stripes,help"].map(Into::into);
    let Ok(Command::Print(help)) = parse_args(argv) else { panic!() };
    assert!(help.contains("sectors") && help.contains("byte of the first sector"), "{help}");

    let on_raw = "raw,node-name=disk,read-only=on,offset=512,file.driver=stripes,\
                  file.sectors=8,file.first=7";
    let options = node(on_raw);
    let written = blockdev_option(&options);
    assert_eq!(node(written.strip_prefix("--blockdev ").unwrap()), options);

    let mut nodes = NodeRegistry::new();
    let refused = nodes.open(&node("stripes,node-name=n,sectors=1")).err().unwrap();
    assert_eq!(refused.to_string(), "stripes are never written");
    let disk = nodes.open(&options).unwrap();
    let described = nodes.describe(["disk"].into_iter());
    assert_eq!(described, [options]);

    let mut rig = Rig::new("stripes", RingChoice::default(), disk);
    let mut bytes = vec![0; 1024];
    rig.send(&request(READ, 1, 512, 1024));
    rig.takes_reply(1);
    rig.take(&mut bytes);
    assert_eq!((bytes[0], bytes[511], bytes[512], bytes[1023]), (9, 9, 10, 10));
    // The driver does not answer block status, which clients ask for.
    let scratch = tempfile::tempdir().unwrap();
    let path = |name: &str| scratch.path().join(name).display().to_string();
    let node = nodes.get("disk").unwrap();
    let _served = rig.serve(NbdListen::Unix(path("socket").into()), node);
    let uri = format!("nbd+unix:///disk?socket={}", path("socket"));
    let copies = [path("convert"), path("nbdcopy")];
    let from_raw = |command| ["qemu-img", command, "-f", "raw"];
    let client = |program: &[&str], rest: &[&str]| {
        let mut client = process::Command::new(program[0]);
        client.args(&program[1..]).args(rest);
        let output = rig.event_loop.offload(move || client.output());
        let output = rig.event_loop.block_on(output).unwrap().unwrap();
        let output = output.expect("installed by scripts/setup-tests.sh");
        assert!(output.status.success(), "{program:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let mapped = client(&from_raw("map"), &["--output=json", &uri]);
    assert!(
        mapped.contains(r#""length": 3584, "depth": 0, "present": true, "zero": false"#),
        "{mapped}"
    );
    let mapped = client(&["nbdinfo", "--map"], &[&uri]);
    assert_eq!(mapped.split_whitespace().collect::<Vec<_>>(), ["0", "3584", "0", "data"]);
    client(&from_raw("convert"), &["-O", "raw", &uri, &copies[0]]);
    client(&["nbdcopy"], &[&uri, &copies[1]]);
    let expected: Vec<u8> = (8..15).flat_map(|byte| [byte; 512]).collect();
    for copy in copies {
        assert!(std::fs::read(&copy).unwrap() == expected, "{copy}");
    }
}

//! The options that the inventory gives another process: as they were given, with what has changed since.

use block::options::{BlockdevOptions, BlockdevRef};
use control::{Action, Command, Inventory, Step, Value, parse_args};

fn steps(options: &[&str]) -> Vec<Step> {
    let words = ["ringmill", "storage-daemon"].iter().chain(options);
    match parse_args(words.map(Into::into)) {
        Ok(Command::StorageDaemon(options)) => options.steps,
        other => panic!("{other:?}"),
    }
}

fn inventory(steps: &[Step]) -> Inventory {
    steps
        .iter()
        .fold(Inventory::default(), |inventory, step| inventory.with(step).expect("it fits"))
}

/// Describes nodes as they were given.
fn describe(steps: &[Step]) -> impl Fn(Vec<&str>) -> Vec<BlockdevOptions> {
    let nodes = steps.iter().filter_map(|step| match &step.action {
        Action::Blockdev(node) => Some(node.clone()),
        _ => None,
    });
    let nodes: Vec<_> = nodes.collect();
    move |names| {
        let named = |name| nodes.iter().find(|node| node.node_name.as_deref() == Some(name));
        names.into_iter().filter_map(named).cloned().collect()
    }
}

const LINE: &[&str] = &[
    "--blockdev=file,node-name=f,filename=/f",
    "--object=iothread,id=io",
    "--nbd-server=addr.type=unix,addr.path=/s",
    "--chardev=socket,id=c,path=/c,server=on,wait=off",
    "--monitor=c",
    "--export=vhost-user-blk,id=v,node-name=f,addr.type=unix,addr.path=/v,iothread=io",
    "--blockdev=qcow2,node-name=q,file.driver=file,file.filename=/q",
    "--export=nbd,id=n,node-name=f",
    "--export=vhost-user-scsi,id=s,luns.0=f,luns.1=q,addr.type=unix,addr.path=/s2",
];

/// Each option comes after those that it refers to, of each kind in the order of the command line.
#[test]
fn the_command_line_makes_the_same_configuration() {
    let steps = steps(LINE);
    let line = inventory(&steps).command_line(describe(&steps)).expect("a command line");
    let (program, options) = line.split_first().expect("words");
    assert_eq!(program, "storage-daemon");
    let starts = ["--chardev", "--monitor", "--object", "--nbd-server", "--blockdev", "--blockdev"];
    let starts = starts.into_iter().chain(["--export"; 3]);
    let is_in_order = options.iter().filter(|word| word.starts_with("--")).zip(starts);
    assert!(is_in_order.clone().all(|(word, start)| word.starts_with(start)), "{options:?}");
    assert_eq!(is_in_order.count(), LINE.len());
}

/// Exports offer what is above their nodes now. An NBD export keeps the name that it has from its first node.
#[test]
fn exports_are_described_with_their_present_nodes() {
    let mut given = steps(LINE);
    given.extend(
        steps(&[
            LINE[0],
            "--blockdev=qcow2,node-name=above,file.driver=file,file.filename=/a,backing=f",
        ])
        .pop(),
    );
    let inventory = inventory(&given).with_overlay("f", "above").expect("it fits");
    assert_eq!(inventory.nodes_of("s"), ["above", "q"]);
    let options = inventory.configuration(describe(&given), |export| export != "v");
    let options = options.expect("options");
    let exports: Vec<_> = options.iter().filter(|option| option.starts_with("--export")).collect();
    let nbd = "--export=type=nbd,id=n,node-name=above,name=f";
    let scsi =
        "--export=type=vhost-user-scsi,id=s,luns.0=above,luns.1=q,addr.type=unix,addr.path=/s2";
    assert_eq!(exports, [nbd, scsi]);
}

/// `qom-set` lasts.
#[test]
fn objects_are_described_with_their_present_properties() {
    let given = steps(LINE);
    let mut inventory = inventory(&given);
    inventory.set_property("io", "poll-max-ns", Value::Integer(1));
    inventory.set_property("io", "poll-max-ns", Value::Integer(5000));
    let options = inventory.configuration(describe(&given), |_| true).expect("options");
    let object = options.iter().find(|option| option.starts_with("--object"));
    assert_eq!(object.expect("an object"), "--object=qom-type=iothread,id=io,poll-max-ns=5000");
    let gone = inventory.without_object("io").expect_err("an export uses it").to_string();
    assert!(gone.contains("in use"), "{gone}");
}

/// Names could stack nodes without end, and each takes stack.
#[test]
fn only_so_many_nodes_lie_on_one_another() {
    // As the stack of the control thread.
    let thread = std::thread::Builder::new().stack_size(8 << 20);
    thread.spawn(stack_nodes).expect("a thread").join().expect("it has room");
}

fn stack_nodes() {
    // So many nodes, one inside the other, on a node.
    let stack = |name: &str, nodes: usize, below: &str| {
        let raw: String = (1..nodes).map(|n| format!(",{}driver=raw", "file.".repeat(n))).collect();
        format!("--blockdev=raw,node-name={name}{raw},{}={below}", vec!["file"; nodes].join("."))
    };
    let null = ["a", "m"].map(|name| format!("--blockdev=null-co,node-name={name}"));
    let all =
        [&null[..], &[stack("b", 256, "a"), stack("c", 254, "b"), stack("d", 1, "c")]].concat();
    let with = |more: &[String]| {
        let words = ["ringmill", "storage-daemon"].map(str::to_owned);
        let words = [&words[..], &all, more].concat();
        match parse_args(words.iter().map(Into::into)) {
            Ok(Command::StorageDaemon(options)) => Ok(options.steps),
            Ok(other) => panic!("{other:?}"),
            Err(error) => Err(error.to_string()),
        }
    };
    let refused = |option: String| with(&[option]).expect_err("too many");
    let why = refused(stack("e", 1, "d"));
    assert!(why.contains("Too many nodes would lie on one another with node 'e'"), "{why}");
    assert!(refused(stack("e", 2, "c")).contains("'e'"));
    let steps = with(&[stack("o", 1, "m")]).expect("they fit");
    let inventory = inventory(&steps);
    // Above the node that gets another child there may be many as well.
    let reopened = |node: &str, below: &str| {
        let own = steps.iter().rev().find_map(|step| match &step.action {
            Action::Blockdev(own) if own.node_name.as_deref() == Some(node) => Some(own.clone()),
            _ => None,
        });
        let mut own = own.expect("the node");
        assert!(own.driver.set_child("file", BlockdevRef::Name(below.to_owned())));
        inventory.with_reopened(&own, &|_, _| None).map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(reopened("o", "c"), Ok(()));
    assert!(reopened("o", "d").expect_err("too many").contains("'o'"));
    assert!(reopened("d", "o").is_ok());
}

//! Which nodes are activated or inactivated with others, and which cannot be.

use control::{Command, Inventory, parse_args};

/// The inventory of a command line.
fn inventory(options: &[&str]) -> Inventory {
    let arguments = ["ringmill", "storage-daemon"].iter().chain(options).map(|word| word.into());
    match parse_args(arguments) {
        Ok(Command::StorageDaemon(options)) => {
            options.steps.iter().fold(Inventory::default(), |inventory, step| {
                inventory.with(step).unwrap_or_else(|error| panic!("{error}"))
            })
        }
        other => panic!("{other:?}"),
    }
}

fn change(
    inventory: &mut Inventory,
    name: Option<&str>,
    active: bool,
) -> Result<Vec<String>, String> {
    let (after, order) = inventory.with_active(name, active).map_err(|error| {
        // Without the hint.
        error.to_string().lines().next().unwrap_or_default().to_owned()
    })?;
    *inventory = after;
    Ok(order)
}

/// `top` and `side` lie on `base`; `inner` is defined inside `top`.
const NODES: [&str; 6] = [
    "--blockdev",
    "null-co,node-name=base",
    "--blockdev",
    "raw,node-name=side,file=base",
    "--blockdev",
    "throttle,node-name=top,throttle-group=g,file.driver=raw,file.node-name=inner,file.file=base",
];

#[test]
fn nodes_below_go_along_unless_others_need_them() {
    let mut inventory =
        inventory(&[&["--object", "throttle-group,id=g"], NODES.as_slice()].concat());
    assert_eq!(change(&mut inventory, Some("top"), false), Ok(vec!["top".to_owned()]));
    assert!(inventory.is_active("inner").is_err() && inventory.is_active("base").is_ok());
    let order = change(&mut inventory, Some("side"), false);
    assert_eq!(order, Ok(vec!["side".to_owned(), "base".to_owned()]));
    assert_eq!(change(&mut inventory, Some("side"), false), Ok(vec![]));
    // Children come first.
    let order = change(&mut inventory, Some("top"), true);
    assert_eq!(order, Ok(vec!["base".to_owned(), "top".to_owned()]));
    assert!(inventory.is_active("inner").is_ok() && inventory.is_active("side").is_err());
    let parent = "Node has active parent node";
    for below in ["base", "inner"] {
        assert_eq!(change(&mut inventory, Some(below), false), Err(parent.to_owned()));
    }
    assert_eq!(change(&mut inventory, None, true), Ok(vec!["side".to_owned()]));
    let all = change(&mut inventory, None, false).expect("nothing keeps them");
    assert_eq!(all.len(), 3, "{all:?}");
    assert_eq!(all.last().map(String::as_str), Some("base"));
    let missing = "Failed to find node with node-name='frob'";
    assert_eq!(change(&mut inventory, Some("frob"), true), Err(missing.to_owned()));
}

#[test]
fn exports_keep_their_nodes_active_unless_they_allow_it() {
    let server = ["--nbd-server", "addr.type=unix,addr.path=n"];
    let with = |export: &str| {
        inventory(
            &[server, ["--blockdev", "null-co,node-name=n,active=off"], ["--export", export]]
                .concat(),
        )
    };
    let with_more = |export: &str, more: [&str; 2]| {
        inventory(
            &[server, ["--blockdev", "null-co,node-name=n"], more, ["--export", export]].concat(),
        )
    };
    let refused = "Failed to inactivate node: Operation not permitted";
    for (export, active, kept) in [
        ("nbd,id=e,node-name=n,writable=on", true, true),
        ("nbd,id=e,node-name=n", true, false),
        ("nbd,id=e,node-name=n,writable=on,allow-inactive=on", false, false),
        ("vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path=s", true, true),
        (
            "vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path=s,allow-inactive=on",
            false,
            false,
        ),
    ] {
        let mut inventory = with(export);
        assert_eq!(inventory.is_active("n").is_ok(), active, "{export}");
        change(&mut inventory, Some("n"), true).expect("it can be");
        let off = change(&mut inventory, Some("n"), false);
        let wanted = if kept { Err(refused.to_owned()) } else { Ok(vec!["n".to_owned()]) };
        assert_eq!(off, wanted, "{export}");
        // A node above it does not inactivate it either.
        let above = ["--blockdev", "raw,node-name=above,file=n,read-only=on"];
        let mut inventory = with_more(export, above);
        let off = change(&mut inventory, Some("above"), false);
        assert_eq!(off.is_err(), kept, "{export}");
    }
}

/// The filter writes to its target by itself.
#[test]
fn a_node_that_copies_stays_active() {
    let nodes = [
        ["--blockdev", "null-co,node-name=disk"],
        ["--blockdev", "copy-before-write,node-name=copying,file=disk,target.driver=null-co"],
    ];
    let mut inventory = inventory(&nodes.concat());
    for (name, what) in [(Some("copying"), "node"), (None, "all nodes")] {
        let refused = format!("Failed to inactivate {what}: Operation not permitted");
        assert_eq!(change(&mut inventory, name, false), Err(refused));
    }
    assert!(inventory.is_active("copying").is_ok() && inventory.is_active("disk").is_ok());
}

//! Compares permissions over random graphs with an independent checker.

use proptest::prelude::*;

use super::*;

/// A node: whether it is writable, whether it is active, and its children with their uses.
type ModelNode = (bool, bool, Vec<(ChildUse, usize)>);

/// A graph whose edges lead from nodes to ones that were made before them.
#[derive(Debug, Clone, Default)]
struct Model {
    nodes: Vec<ModelNode>,
    users: Vec<(usize, Claim)>,
}

impl Model {
    fn names(&self) -> Vec<String> {
        (0..self.nodes.len()).map(|n| format!("n{n}")).collect()
    }

    fn check(&self) -> Result<(), Conflict> {
        let names = self.names();
        let nodes = self.nodes.iter().zip(&names).zip(0..).map(|((node, name), serial)| NodeUse {
            name,
            writable: node.0,
            active: node.1,
            force_share: false,
            serial,
        });
        let edges = self.nodes.iter().zip(&names).flat_map(|((_, _, below), parent)| {
            let names = &names;
            below.iter().map(move |&(used_as, child)| EdgeUse {
                parent,
                role: "child",
                child: &names[child],
                used_as,
            })
        });
        let users = self.users.iter().zip(1000..).map(|(&(node, claim), serial)| UserUse {
            node: &names[node],
            claim,
            serial,
            job: None,
        });
        check(nodes, edges, users)
    }

    /// Returns the graph without those edges and users that cause a conflict when they are added.
    fn granted(self) -> Model {
        let mut granted = Model::default();
        for node in self.nodes {
            granted.nodes.push(node);
            if granted.check().is_err() {
                granted.nodes.last_mut().unwrap().2.clear();
            }
        }
        for user in self.users {
            granted.users.push(user);
            if granted.check().is_err() {
                granted.users.pop();
            }
        }
        granted
    }

    /// Returns all claims on a node, by following every path upwards.
    fn claims_on(&self, node: usize) -> Vec<Claim> {
        let is_active = self.nodes[node].1;
        let own = self.users.iter().filter(|user| user.0 == node);
        let own = own.map(|user| if is_active { user.1 } else { Claim::NOTHING });
        let above =
            self.nodes.iter().enumerate().flat_map(|(parent, (writable, active, below))| {
                below.iter().filter(|(_, child)| *child == node).map(move |&(used_as, _)| {
                    let all = self.claims_on(parent).into_iter().fold(Claim::NOTHING, Claim::and);
                    if *active { used_as.claim(all, *writable) } else { Claim::NOTHING }
                })
            });
        own.chain(above).collect()
    }

    fn has_conflict(&self) -> bool {
        (0..self.nodes.len()).any(|node| {
            let claims = self.claims_on(node);
            claims.iter().enumerate().any(|(at, one)| {
                let mut others = claims.iter().enumerate().filter(|(other, _)| *other != at);
                others.any(|(_, other)| !one.shares.contains(other.takes))
            })
        })
    }

    /// Collects the nodes that a write to `node` may reach.
    fn written_through(&self, node: usize, into: &mut Vec<usize>) {
        into.push(node);
        for &(used_as, child) in &self.nodes[node].2 {
            if used_as != ChildUse::Backing {
                self.written_through(child, into);
            }
        }
    }
}

fn child_use() -> impl Strategy<Value = ChildUse> {
    prop::sample::select(vec![
        ChildUse::Filtered,
        ChildUse::Preallocated,
        ChildUse::Window,
        ChildUse::Metadata,
        ChildUse::Data,
        ChildUse::Backing,
        ChildUse::CopyBeforeWrite,
        ChildUse::CopyAndDiscard,
    ])
}

fn claim() -> impl Strategy<Value = Claim> {
    (0..16u8, 0..16u8).prop_map(|(takes, shares)| Claim {
        takes: Permissions(takes),
        // Always shares consistent reads and unchanged writes, as most users do.
        shares: Permissions(shares | 5),
    })
}

fn model() -> impl Strategy<Value = Model> {
    let node = (
        any::<bool>(),
        prop::bool::weighted(0.9),
        prop::collection::vec((child_use(), any::<prop::sample::Index>()), 0..3),
    );
    (
        prop::collection::vec(node, 1..8),
        prop::collection::vec((any::<prop::sample::Index>(), claim()), 0..6),
    )
        .prop_map(|(nodes, users)| {
            let mut model = Model::default();
            for (n, (writable, active, below)) in nodes.into_iter().enumerate() {
                let below = below.into_iter().filter(|_| n > 0);
                let below = below.map(|(used_as, child)| (used_as, child.index(n))).collect();
                model.nodes.push((writable, active, below));
            }
            let size = model.nodes.len();
            model.users =
                users.into_iter().map(|(node, claim)| (node.index(size), claim)).collect();
            model
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn permissions_are_granted_exactly_if_no_users_conflict(model in model()) {
        prop_assert_eq!(model.check().is_err(), model.has_conflict());
    }

    /// The purpose of permissions: only an image's own node writes to the image's metadata.
    #[test]
    fn an_image_that_is_granted_is_written_by_its_own_node_alone(model in model()) {
        let model = model.granted();
        for (format, (_, active, below)) in model.nodes.iter().enumerate() {
            for &(used_as, file) in below.iter().filter(|_| *active) {
                if used_as != ChildUse::Metadata {
                    continue;
                }
                for &(top, claim) in &model.users {
                    let writes = claim.takes.contains(Permissions::WRITE) && model.nodes[top].1;
                    let mut reached = Vec::new();
                    model.written_through(top, &mut reached);
                    let all_active = reached.iter().all(|&node| model.nodes[node].1);
                    let elsewhere = !reached.contains(&format);
                    prop_assert!(
                        !(writes && all_active && elsewhere && reached.contains(&file)),
                        "user of n{top} writes to n{file} below n{format}"
                    );
                }
            }
        }
    }
}

#[test]
fn names_both_users_in_qemus_words() {
    let (writable, active, force_share) = (true, true, false);
    let node = |name, serial| NodeUse { name, writable, active, force_share, serial };
    let edge = |parent| EdgeUse { parent, role: "file", child: "f", used_as: ChildUse::Metadata };
    let conflict = check([node("f", 0), node("a", 1), node("b", 2)], [edge("a"), edge("b")], []);
    assert_eq!(
        conflict.unwrap_err().to_string(),
        "Permission conflict on node 'f': permissions 'write, resize' are both required by node 'a' (uses node \
         'f' as 'file' child) and unshared by node 'b' (uses node 'f' as 'file' child)."
    );
    let claim = Claim::of_reader(true);
    let conflict = check(
        [node("f", 0), node("a", 1)],
        [edge("a")],
        [UserUse { node: "f", claim, serial: 2, job: None }],
    );
    assert_eq!(
        conflict.unwrap_err().to_string(),
        "Permission conflict on node 'f': permissions 'write' are both required by an unnamed block device (uses \
         node 'f' as 'root' child) and unshared by node 'a' (uses node 'f' as 'file' child)."
    );
}

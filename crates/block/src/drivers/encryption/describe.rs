//! Descriptions of LUKS volumes.

use ::options::{Object, Value};
use crypto::cipher::IvGenerator;
use crypto::luks::{Header, STRIPES, Slot};

/// QEMU's `QCryptoBlockInfoLUKS`.
pub(crate) fn specific(header: &Header) -> Object {
    let slot = |slot: &Slot| {
        let mut members: Vec<(&str, Value)> = vec![("active", slot.active.into())];
        if slot.active {
            let stripes = [("iters", u64::from(slot.iterations)), ("stripes", STRIPES as u64)];
            members.extend(stripes.map(|(name, number): (_, u64)| (name, number.into())));
        }
        members.push(("key-offset", header.stripes(slot).0.into()));
        object(members)
    };
    let (algorithm, mode, iv) = header.cipher.names();
    let mut members: Vec<(&str, Value)> = vec![
        ("cipher-alg", algorithm.into()),
        ("cipher-mode", mode.into()),
        ("ivgen-alg", iv.into()),
        ("hash-alg", header.hash.name().into()),
        ("detached-header", (header.payload_sector == 0).into()),
        ("payload-offset", header.payload().into()),
        ("master-key-iters", u64::from(header.digest_iterations).into()),
        ("uuid", header.uuid.as_str().into()),
        ("slots", Value::List(header.slots.iter().map(slot).collect())),
    ];
    if header.cipher.iv == IvGenerator::EssivSha256 {
        members.push(("ivgen-hash-alg", "sha256".into()));
    }
    members.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn object(members: Vec<(&str, Value)>) -> Value {
    Value::Object(members.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
}

//! The guest on a vCPU of KVM's, whichever its device.

use anyhow::{Result, bail};
use guest_memory::MemoryView;

use super::{RECORDS_AT, WakeUpConfig, patience};
use crate::kvm::payload::{self, Params, Record};
use crate::kvm::{Mmio, RESERVED, Vcpu};

const _: () = assert!(RECORDS_AT >= RESERVED);

/// Sectors of a request.
pub(super) fn sectors(config: &WakeUpConfig) -> u64 {
    u64::from(config.request_size / 512)
}

/// Runs the program of a KVM vCPU; what it left behind, and when each batch was submitted and done.
pub(super) fn run_payload(
    config: &WakeUpConfig,
    vcpu: &mut Vcpu,
    params: Params,
    mmio: &dyn Mmio,
) -> Result<(Params, Vec<(u64, u64)>)> {
    let tsc = vcpu.tsc()?;
    let params = Params {
        batches: config.batches(),
        batch: config.batch.into(),
        pause_before: tsc.ticks(config.pause_ns()),
        pause_after: tsc.ticks(config.pause_ns()),
        patience: tsc.ticks(patience(config).as_nanos() as u64),
        sectors: sectors(config),
        records: RECORDS_AT,
        ..params
    };
    let end = vcpu.run(params, mmio)?;
    match end.outcome {
        payload::DONE => {}
        payload::FAILED => bail!("a request of the guest's failed"),
        payload::TIMED_OUT => bail!("a request of the guest's was not answered in time"),
        payload::WRONG => bail!("a request of the guest's has wrong data, or was answered twice"),
        other => bail!("the guest ended with {other}, which means nothing"),
    }
    let view = MemoryView::new(vcpu.memory().clone());
    let record = |batch| {
        let record = Record::from_bytes(view.read_array(RECORDS_AT + batch * Record::SIZE)?);
        Ok((tsc.to_ns(record.submitted), tsc.to_ns(record.done)))
    };
    let records: Result<Vec<_>> = (0..config.batches()).map(record).collect();
    Ok((end, records?))
}

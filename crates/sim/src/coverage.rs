//! Counters of what has happened in a run: a fault or state that never occurs is not tested.

use std::cell::Cell;

macro_rules! counters {
    ($($name:ident $text:literal),* $(,)?) => {
        /// Counters of a run.
        #[derive(Debug, Default)]
        pub(crate) struct Coverage { $(pub(crate) $name: Count),* }

        impl Coverage {
            /// Returns all counters with their descriptions.
            pub(crate) fn all(&self) -> Vec<(&'static str, u64)> {
                vec![$(($text, self.$name.get())),*]
            }
        }

        /// Descriptions of the counters.
        #[expect(non_upper_case_globals, reason = "named as the counters")]
        mod text { $(#[allow(dead_code)] pub(super) const $name: &str = $text;)* }
    };
}

counters! {
    requests "requests answered",
    commands "QMP commands answered",
    qcow2 "requests answered on qcow2 images",
    qcow2_hard "of them, in worlds with kills or power cuts",
    refused_commands "QMP commands refused, as they must be",
    bitmaps "dirty bitmaps added and removed",
    bitmaps_kept "of them, persistent",
    exports "exports added and deleted over QMP",
    threads "I/O threads added and deleted over QMP",
    jobs "jobs that have ended",
    backups "backups compared with their disks",
    backups_beside "times that several backups of a disk ran side by side",
    incrementals "backups by a bitmap compared with their disks",
    mirrors "mirrors compared with their disks",
    pivots "disks replaced by their mirrors",
    snapshots "snapshots of disks in use",
    bitmaps_hard "dirty bitmaps of disks in worlds with kills or power cuts",
    moves_hard "commits, streams and mirrors of disks in worlds with kills",
    commits "snapshots committed",
    streams "snapshots streamed",
    reads "reads",
    writes "writes",
    flushes "flushes",
    zeroes "write-zeroes",
    discards "discards",
    ids "serial numbers or INQUIRY data asked for",
    scsi "SCSI commands",
    attentions "unit attentions",
    managed "SCSI task management functions",
    ended "SCSI commands that task management has ended",
    refused "requests that make no sense, refused",
    failed "requests that failed, as their operations did",
    kicks "kicks",
    spurious_kicks "kicks for nothing",
    kick_fds "kick eventfds replaced",
    lost_kicks "lost kicks: queue stopped, eventfd replaced, or no daemon",
    disabled_kicks "kicks of a disabled queue",
    unseen_kicks "kicks that a daemon has not seen before it was killed",
    suppressed "requests offered without a kick, as the queue was being served",
    interrupts "interrupts",
    raced "answers that came as the driver was about to sleep",
    full_queues "queues full",
    wrapped "ring indices that wrapped around",
    connections "connections made",
    gone "connections that ended with the daemon or the VMM",
    stopped_queues "queues stopped and started again",
    stopped_guests "guests stopped, all they had in flight answered",
    vanished "VMMs that vanished",
    resets "devices reset",
    memory_tables "memory tables set anew",
    plugged "memory plugged and unplugged",
    write_caches "write caches switched on or off",
    disabled "queues disabled for a while",
    calls "call eventfds replaced",
    limits "limits of a throttle group changed",
    resizes "disks made larger",
    upgrades_begun "upgrades begun",
    upgrades "daemons replaced by an upgrade",
    upgrades_killed "daemons killed in an upgrade",
    upgrades_refused "upgrades refused while a job was running",
    restarts "configurations compared after a restart with a state file",
    kills "daemons killed",
    cuts "power cuts",
    torn "sectors that a power cut could take back",
    recovered "qcow2 images recovered from the journal of a killed daemon",
    redone "requests under way as a daemon was killed",
    behind "queues started behind unanswered requests",
    lost "guests restarted because no record of requests in flight was left",
    forgotten "requests forgotten in a reset",
    ahci_commands "AHCI commands",
    ahci_queued "queued",
    ahci_doorbells "AHCI doorbells",
    ahci_starts "AHCI ports brought up",
    ahci_registers "AHCI registers written or read",
    ahci_pins "AHCI interrupts by the pin",
    ahci_lists "AHCI lists stopped and started",
    ahci_links "AHCI links reset",
    ahci_resets "AHCI controllers reset by a register",
    ahci_device_resets "AHCI controllers reset by a message",
    ahci_function_resets "AHCI controllers reset by their configuration space",
    ahci_unplugged "times that the memory with the data of an AHCI guest was unmapped",
    ahci_without_memory "AHCI ports recovered from that",
    ahci_vanished "VMMs that vanished with AHCI commands in flight",
    ahci_cut_short "VMMs with AHCI that left within a vfio-user message",
    ahci_upgrades "daemons replaced with AHCI commands in flight",
    ahci_kills "daemons killed with AHCI commands in flight",
    ahci_logs "logs of a failed queued command read",
    nvme_commands "NVMe commands",
    nvme_reads "NVMe reads",
    nvme_writes "NVMe writes",
    nvme_fua "NVMe writes with FUA",
    nvme_compared "NVMe compares and verifies",
    nvme_lists "NVMe commands with a PRP list",
    nvme_chained "NVMe PRP lists that go on in another page",
    nvme_admin "NVMe admin commands",
    nvme_registers "NVMe doorbells rung by a message",
    nvme_shadowed "NVMe doorbells rung in memory alone",
    nvme_multi "NVMe doorbells of no queue rung",
    nvme_errors "NVMe errors reported by an event",
    nvme_notices "NVMe namespaces looked at as an event has said that they have changed",
    nvme_resets "NVMe controllers disabled and enabled",
    nvme_device_resets "NVMe controllers reset by a message",
    nvme_function_resets "NVMe controllers reset by their configuration space",
    nvme_shut_downs "NVMe controllers shut down",
    nvme_requeued "NVMe queue pairs deleted and created",
    nvme_unplugged "times that the memory with the data of an NVMe guest was unmapped",
    nvme_without_memory "NVMe commands refused meanwhile",
    nvme_aborts "NVMe commands to be aborted",
    nvme_aborted "NVMe commands aborted",
    vfio_connections "vfio-user connections",
    vfio_pieces "times that a VMM sent part of a vfio-user message",
    nvme_vanished "VMMs that vanished with NVMe commands in flight",
    nvme_cut_short "VMMs with NVMe that left within a vfio-user message",
    nvme_upgrades "daemons replaced with NVMe commands in flight",
    nvme_kills "daemons killed with NVMe commands in flight",
    nbd_requests "NBD requests",
    nbd_connections "NBD connections",
    nbd_simple "with simple replies",
    nbd_structured "with structured replies",
    nbd_extended "with extended headers",
    nbd_refused "NBD options refused",
    nbd_broken_off "NBD handshakes broken off",
    nbd_statuses "NBD block status",
    nbd_fua "NBD writes and write-zeroes with FUA",
    nbd_crowded "times that an NBD client had more requests under way than the server takes",
    nbd_pieces "times that an NBD client sent part of something",
    nbd_full "times that an NBD client found no room in its socket",
    nbd_dawdled "times that an NBD client did not read for a while",
    nbd_left "NBD clients that left",
    nbd_left_early "NBD clients that left with requests under way",
    nbd_half_closed "NBD clients that sent no more, with requests under way",
    nbd_cut_short "NBD clients that left within a message",
    nbd_vanished "NBD clients that vanished with requests under way",
    nbd_nonsense "NBD clients that sent what is no request",
    nbd_too_long "NBD clients that announced too long a payload",
    nbd_unanswered "NBD requests left unanswered",
}

/// Counters that a run with only qcow2 images must raise.
pub(crate) const OF_QCOW2: &[&str] = &[
    text::qcow2,
    text::qcow2_hard,
    text::refused_commands,
    text::bitmaps,
    text::bitmaps_kept,
    text::bitmaps_hard,
    text::backups,
    text::backups_beside,
    text::incrementals,
    text::mirrors,
    text::pivots,
    text::snapshots,
    text::commits,
    text::streams,
    text::moves_hard,
    text::reads,
    text::writes,
    text::flushes,
    text::zeroes,
    text::discards,
    text::resizes,
    text::upgrades,
    text::upgrades_killed,
    text::restarts,
    text::kills,
    text::cuts,
    text::torn,
    text::recovered,
    text::redone,
];

/// One counter.
#[derive(Debug, Default)]
pub(crate) struct Count(Cell<u64>);

impl Count {
    pub(crate) fn add(&self, n: u64) {
        self.0.set(self.0.get() + n);
    }

    pub(crate) fn one(&self) {
        self.add(1);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.get()
    }
}

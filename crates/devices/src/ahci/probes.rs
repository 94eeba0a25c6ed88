//! Trace events of AHCI.

trace::events! {
    /// A register of an AHCI port is written, on the writer's thread.
    ahci_port_write(s: hex, port: u64, offset: hex, val: hex);
    /// An AHCI drive begins a command; `offset` and `bytes` are 0 if it has none.
    ahci_cmd_begin(s: hex, port: u64, slot: u64, op: text, offset: u64, bytes: u64);
    /// A command has ended, with the bits of its ATA error register, or -1 if it never got to the drive.
    ahci_cmd_end(s: hex, port: u64, slot: u64, error: i64);
}

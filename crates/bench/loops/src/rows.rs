//! The measured rows.

/// A row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Row {
    /// Two loops on two threads wake each other alternately; both sleep in between.
    Wake,
    /// A thread posts closures to a loop that is never idle.
    PostBusy,
    /// A thread posts closures to a loop that sleeps whenever it has none.
    PostIdle,
    /// This many tokens of a byte circulate in a ring of 100 socket pairs.
    Ring(usize),
    /// Timers armed and cancelled long before their deadline, with 10,000 others pending.
    TimerChurn,
    /// Timers armed, then fired, 20,000 at a time; per second of CPU time.
    TimerFire,
    /// Delay of a timer of 100 us.
    TimerLate,
    /// Tasks spawned on the loop's thread and joined, 100 at a time.
    Spawn,
    /// Two tasks wake each other alternately.
    Switch,
    /// 64 tasks yield.
    Yield,
    /// 4 KiB reads of a file, O_DIRECT, with this many in flight.
    FileRead(usize),
    /// 4 KiB reads of a block device in RAM, O_DIRECT, with this many in flight.
    RamRead(usize),
}

/// All rows, as reported.
pub(crate) const ROWS: [Row; 15] = [
    Row::Wake,
    Row::PostBusy,
    Row::PostIdle,
    Row::Ring(1),
    Row::Ring(50),
    Row::TimerChurn,
    Row::TimerFire,
    Row::TimerLate,
    Row::Spawn,
    Row::Switch,
    Row::Yield,
    Row::FileRead(1),
    Row::FileRead(64),
    Row::RamRead(1),
    Row::RamRead(64),
];

impl Row {
    /// Its name in the table and for `--rows`.
    pub(crate) fn name(self) -> String {
        match self {
            Row::Wake => "wake another thread's loop, p50".into(),
            Row::PostBusy => "post closures, loop busy".into(),
            Row::PostIdle => "post closures, loop sleepy".into(),
            Row::Ring(1) => "ring of 100 sockets, 1 token".into(),
            Row::Ring(tokens) => format!("ring of 100 sockets, {tokens} tokens"),
            Row::TimerChurn => "timers, arm and cancel".into(),
            Row::TimerFire => "timers, arm and fire".into(),
            Row::TimerLate => "timer of 100 us, lateness p50".into(),
            Row::Spawn => "tasks, spawn and join".into(),
            Row::Switch => "tasks, wake each other".into(),
            Row::Yield => "tasks, yield".into(),
            Row::FileRead(depth) => format!("4k reads, file, depth {depth}"),
            Row::RamRead(depth) => format!("4k reads, RAM device, depth {depth}"),
        }
    }

    /// The unit of its figures.
    pub(crate) fn unit(self) -> &'static str {
        match self {
            Row::Wake | Row::TimerLate => "us",
            Row::PostBusy | Row::PostIdle => "k calls/s",
            Row::Ring(_) => "k hops/s",
            Row::TimerChurn => "k timers/s",
            Row::TimerFire => "k/CPU-second",
            Row::Spawn => "k tasks/s",
            Row::Switch => "k switches/s",
            Row::Yield => "k yields/s",
            Row::FileRead(_) | Row::RamRead(_) => "k reads/s",
        }
    }

    /// Whether the figure is a time, so that less is better.
    pub(crate) fn less_is_better(self) -> bool {
        self.unit() == "us"
    }
}

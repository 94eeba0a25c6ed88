//! Loads for the simulator: who asks for what, when.

use vcpu::machine::SplitMix64;

/// Times, nanoseconds.
#[derive(Debug, Clone)]
pub(crate) enum Times {
    /// Always the same.
    Constant(u64),
    /// Anything between the two, alike.
    Uniform(u64, u64),
    /// Exponential, with this mean: what many independent users make together.
    Exponential(u64),
    /// The first, but one in so many draws on average the second.
    Mixed(Box<Times>, Box<Times>, u64),
    /// So many draws from the first, then one from the second.
    Bursts(u64, Box<Times>, Box<Times>),
}

/// Draws from [`Times`], the same for the same seed.
#[derive(Debug, Clone)]
pub(crate) struct Draws {
    times: Times,
    random: SplitMix64,
    drawn: u64,
}

impl Draws {
    /// Draws that begin anew.
    pub(crate) fn new(times: Times, seed: u64) -> Self {
        Draws { times, random: SplitMix64::new(seed), drawn: 0 }
    }

    /// The next time.
    pub(crate) fn next(&mut self) -> u64 {
        self.drawn += 1;
        draw(&self.times, &mut self.random, self.drawn)
    }
}

fn draw(times: &Times, random: &mut SplitMix64, drawn: u64) -> u64 {
    match times {
        Times::Constant(ns) => *ns,
        Times::Uniform(least, most) => least + random.next() % (most - least + 1),
        Times::Exponential(mean) => {
            // Between 0 and 1, neither included.
            let uniform = ((random.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
            (-uniform.ln() * *mean as f64) as u64
        }
        Times::Mixed(usual, other, every) => {
            let which = if random.next().is_multiple_of(*every) { other } else { usual };
            draw(which, random, drawn)
        }
        Times::Bursts(length, within, between) => {
            let which = if drawn.is_multiple_of(length + 1) { between } else { within };
            draw(which, random, drawn)
        }
    }
}

/// When a queue's requests come.
#[derive(Debug, Clone)]
pub(crate) enum Arrivals {
    /// By the clock, with these times between them, served or not.
    Open(Times),
    /// A guest keeps so many in flight, and thinks that long between an answer and the next request.
    Closed(u32, Times),
}

/// One queue and its disk.
#[derive(Debug, Clone)]
pub(crate) struct Queue {
    pub(crate) arrivals: Arrivals,
    /// How long the disk takes; `None` for one that answers at once.
    pub(crate) disk: Option<Times>,
}

/// A wait that was recorded: what came, and how soon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RecordedWait {
    pub(crate) gap_ns: u64,
    pub(crate) by_ring: bool,
    pub(crate) by_queue: bool,
    /// Operations are in flight afterwards.
    pub(crate) in_flight: bool,
}

/// What a loop has to do.
#[derive(Debug, Clone)]
pub(crate) enum Load {
    /// Queues, each with a model of its guest and its disk.
    Queues(Vec<Queue>),
    /// Waits one after the other, as they were recorded from a guest at a fixed depth: how soon the
    /// next event comes does not depend on how long the loop took.
    Recorded(Vec<RecordedWait>),
}

/// A load with a name.
#[derive(Debug, Clone)]
pub(crate) struct Trace {
    pub(crate) name: String,
    pub(crate) load: Load,
}

const US: u64 = 1_000;
const MS: u64 = 1_000_000;

/// Requests by the clock to a null node.
fn open(between: Times) -> Queue {
    Queue { arrivals: Arrivals::Open(between), disk: None }
}

/// A guest at a depth.
fn closed(depth: u32, disk: Times) -> Queue {
    let think = Times::Uniform(4 * US, 6 * US);
    Queue { arrivals: Arrivals::Closed(depth, think), disk: Some(disk) }
}

/// A disk with this mean, give or take a fifth.
fn disk(mean: u64) -> Times {
    Times::Uniform(mean - mean / 5, mean + mean / 5)
}

/// A disk with a cache: one in so many reads misses it.
fn cached(misses: u64) -> Times {
    Times::Mixed(Box::new(Times::Uniform(7 * US, 9 * US)), Box::new(disk(100 * US)), misses)
}

fn bursts(length: u64, within: Times, between: Times) -> Times {
    Times::Bursts(length, Box::new(within), Box::new(between))
}

/// A busy queue beside 99 that have a request every other second on average.
fn among_idle(busy: Queue) -> Vec<Queue> {
    let idle = Queue {
        arrivals: Arrivals::Open(Times::Exponential(2_000 * MS)),
        disk: Some(disk(100 * US)),
    };
    std::iter::once(busy).chain(std::iter::repeat_n(idle, 99)).collect()
}

/// The synthetic loads.
pub(crate) fn synthetic() -> Vec<Trace> {
    let by_clock = |per_second: u64| open(Times::Constant(1_000 * MS / per_second));
    let random = |per_second: u64| open(Times::Exponential(1_000 * MS / per_second));
    let on_disk = |queue: Queue| Queue { disk: Some(disk(100 * US)), ..queue };
    let null_guest = Queue { arrivals: Arrivals::Closed(1, Times::Constant(5 * US)), disk: None };
    let burst_guest = Queue {
        arrivals: Arrivals::Closed(
            1,
            bursts(100, Times::Constant(5 * US), Times::Exponential(5 * MS)),
        ),
        disk: Some(disk(10 * US)),
    };
    let short_bursts = bursts(32, Times::Exponential(3 * US), Times::Exponential(2 * MS));
    let long_bursts = bursts(8, Times::Exponential(10 * US), Times::Exponential(500 * US));
    let one = |name: &str, queue: Queue| (name.to_owned(), vec![queue]);
    let loads = [
        one("constant 20,000/s", by_clock(20_000)),
        one("constant 100,000/s", by_clock(100_000)),
        one("constant 200,000/s", by_clock(200_000)),
        one("constant, depth 1", null_guest),
        one("constant, 10 us disk, depth 1", closed(1, disk(10 * US))),
        one("constant, 10 us disk, depth 8", closed(8, disk(10 * US))),
        one("Poisson 2,000/s", random(2_000)),
        one("Poisson 20,000/s", random(20_000)),
        one("Poisson 100,000/s", random(100_000)),
        one("Poisson 200,000/s", random(200_000)),
        one("Poisson 50,000/s, 100 us disk", on_disk(random(50_000))),
        one("bursts of 32, 2 ms apart", open(short_bursts)),
        one("bursts of 8, 500 us apart, 100 us disk", on_disk(open(long_bursts))),
        one("bursts of 100, 10 us disk, depth 1", burst_guest),
        one("bimodal, 90% 8 us, depth 1", closed(1, cached(10))),
        one("bimodal, 75% 8 us, depth 1", closed(1, cached(4))),
        one("bimodal, 50% 8 us, depth 1", closed(1, cached(2))),
        one("bimodal, 75% 8 us, depth 4", closed(4, cached(4))),
        one("slow, 60 us disk, depth 1", closed(1, disk(60 * US))),
        one("slow, 100 us disk, depth 1", closed(1, disk(100 * US))),
        one("slow, 5 ms disk, depth 1", closed(1, disk(5 * MS))),
        one("slow, 100 us disk, depth 8", closed(8, disk(100 * US))),
        ("1 busy (100 us disk) and 99 idle".into(), among_idle(closed(1, disk(100 * US)))),
        ("1 busy (20,000/s) and 99 idle".into(), among_idle(random(20_000))),
    ];
    loads.into_iter().map(|(name, queues)| Trace { name, load: Load::Queues(queues) }).collect()
}

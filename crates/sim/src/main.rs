//! The daemon, simulated whole.
//!
//! Production loops, queues, devices, exports and block nodes, unchanged, over the simulated ring, all
//! on one thread with virtual time; simulated guests that check every byte they read against a
//! model; seeded faults. Any failure is seen again by its seed.

mod coverage;
mod daemon;
mod fds;
mod guest;
mod listener;
mod machine;
mod model;
mod plan;
mod random;
mod ring;
mod world;

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let (mut seed, mut seeds, mut requests, mut verbose) = (1, 1, None, false);
    while let Some(arg) = args.next() {
        let mut number = || args.next().and_then(|text| text.parse::<u64>().ok()).expect("a number");
        match arg.as_str() {
            "--seed" | "--first" => seed = number(),
            "--seeds" => seeds = number(),
            "--requests" => requests = Some(number()),
            "--verbose" => verbose = true,
            _ => return ExitCode::FAILURE,
        }
    }
    for seed in seed..seed + seeds {
        let plan = plan::Plan::new(seed, requests);
        let begin = std::time::Instant::now();
        let outcome = world::run(seed, &plan, verbose);
        println!("{seed}: {:?} {:x} {} ns {} steps", begin.elapsed(), outcome.trace, outcome.virtual_ns, outcome.steps);
        if verbose {
            for (text, n) in outcome.counted {
                println!("{n:>12} {text}");
            }
        }
    }
    ExitCode::SUCCESS
}

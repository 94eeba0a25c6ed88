//! The command line.

use lexopt::prelude::*;

/// The options of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Options {
    /// The first seed.
    pub(crate) first: u64,
    /// Number of seeds.
    pub(crate) seeds: u64,
    /// Distance of a seed from the one before.
    pub(crate) step: u64,
    /// Requests per seed, if not the default.
    pub(crate) requests: Option<u64>,
    /// Minimum number of answered requests over all seeds. Fewer is a failure.
    pub(crate) at_least: u64,
    /// Minimum number of answered QMP commands over all seeds. Fewer is a failure.
    pub(crate) commands: u64,
    /// Print every event.
    pub(crate) verbose: bool,
    /// Number of worker processes.
    pub(crate) jobs: usize,
    /// This process is a worker: it runs its seeds in turn and reports to its parent.
    pub(crate) worker: bool,
}

pub(crate) const HELP: &str = "\
Usage: sim [--seeds N] [--first S] [--step D] [--seed S] [--requests M]
           [--at-least N] [--commands-at-least N] [--jobs J] [--verbose]

Simulates the daemon, seed by seed, and checks all that its guests get.

  --seeds N     how many seeds (default 100)
  --first S     the first of them (default 1)
  --step D      the distance from one to the next (default 1); with --first 8
                --step 8, all disks are qcow2 images
  --seed S      this one only: what it did before, it does again
  --requests M  requests per seed
  --at-least N  fail if fewer requests than that are answered in all
  --commands-at-least N
                fail if fewer QMP commands than that are answered in all
  --jobs J      seeds at the same time (default: one per CPU)
  --verbose     say what happens
";

impl Options {
    /// Whether all disks of the seeds are qcow2 images.
    pub(crate) fn is_of_qcow2(&self) -> bool {
        self.first.is_multiple_of(8) && self.step.is_multiple_of(8)
    }

    /// Parses the process's arguments. Returns `None` for `--help`.
    pub(crate) fn from_args() -> Result<Option<Options>, lexopt::Error> {
        let mut options = Options {
            first: 1,
            seeds: 100,
            step: 1,
            requests: None,
            at_least: 0,
            commands: 0,
            verbose: false,
            jobs: std::thread::available_parallelism().map_or(1, usize::from),
            worker: false,
        };
        let mut args = lexopt::Parser::from_env();
        while let Some(arg) = args.next()? {
            match arg {
                Long("seeds") => options.seeds = args.value()?.parse()?,
                Long("first") => options.first = args.value()?.parse()?,
                Long("step") => options.step = args.value()?.parse::<u64>()?.max(1),
                Long("seed") => (options.first, options.seeds) = (args.value()?.parse()?, 1),
                Long("requests") => options.requests = Some(args.value()?.parse()?),
                Long("at-least") => options.at_least = args.value()?.parse()?,
                Long("jobs") => options.jobs = args.value()?.parse::<usize>()?.max(1),
                Long("commands-at-least") => options.commands = args.value()?.parse()?,
                Long("verbose") => options.verbose = true,
                Long("worker") => options.worker = true,
                Long("help") | Short('h') => return Ok(None),
                _ => return Err(arg.unexpected()),
            }
        }
        Ok(Some(options))
    }
}

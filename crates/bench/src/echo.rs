//! The bare echo: a thread that sleeps until it is kicked, reads or writes a block if told to, and
//! signals. What a server that sleeps can cost at least per request at depth 1: two or three system
//! calls and its wake-ups.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use nix::fcntl::OFlag;
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::bare::{Done, cpu_time};
use crate::host::affinity;
use crate::load::Load;
use crate::load::offsets::Offsets;
use crate::load::queue::Op;
use crate::session::Cpus;

/// `O_DIRECT` takes buffers that begin on a page.
const PAGE: usize = 4096;

/// Echoes for `run_time`, with a block of `file` transferred for each as `load` says, if there is one.
pub(crate) fn run(
    file: Option<&Path>,
    load: &Load,
    cpus: Cpus,
    run_time: Duration,
) -> Result<Done> {
    // Blocking: either side sleeps in its read.
    let eventfd = || EventFd::from_flags(EfdFlags::EFD_CLOEXEC).context("eventfd");
    let (kick, signal) = (eventfd()?, eventfd()?);
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            let served = serve(file, load, cpus.server, &kick, &signal, &ends);
            if served.is_err() {
                // Else the client would sleep for ever.
                ends.store(true, Ordering::SeqCst);
                let _ = signal.write(1);
            }
            served
        });
        let asked = ask(cpus.client, &kick, &signal, &ends, run_time);
        ends.store(true, Ordering::SeqCst);
        let _ = kick.write(1);
        let cpu = server.join().map_err(|_| anyhow!("the echo panicked"))??;
        let (requests, seconds) = asked?;
        Ok(Done { iops: requests / seconds, cpu: cpu.as_secs_f64() * 1e6 / requests })
    })
}

/// The client: how many requests were answered, in how many seconds.
fn ask(
    cpu: Option<usize>,
    kick: &EventFd,
    signal: &EventFd,
    ends: &AtomicBool,
    run_time: Duration,
) -> Result<(f64, f64)> {
    let mut requests = 0u64;
    let begin = Instant::now();
    affinity::while_bound_to(cpu, || {
        // At least once, however long this thread waits for a CPU: figures are per request.
        while (requests == 0 || begin.elapsed() < run_time) && !ends.load(Ordering::SeqCst) {
            kick.write(1).context("kicking")?;
            signal.read().context("waiting for a signal")?;
            requests += 1;
        }
        Ok(())
    })?;
    Ok((requests as f64, begin.elapsed().as_secs_f64()))
}

/// The server: the CPU time that it took.
fn serve(
    path: Option<&Path>,
    load: &Load,
    cpu: Option<usize>,
    kick: &EventFd,
    signal: &EventFd,
    ends: &AtomicBool,
) -> Result<Duration> {
    if let Some(cpu) = cpu {
        affinity::bind_this_thread(cpu)?;
    }
    let file = path.map(|path| {
        let direct = OFlag::O_DIRECT.bits();
        let file = OpenOptions::new().read(true).write(true).custom_flags(direct).open(path);
        file.with_context(|| format!("opening {}", path.display()))
    });
    let file = file.transpose()?;
    let size = file.as_ref().map(|file| file.metadata()).transpose()?.map_or(0, |data| data.len());
    let block_size = load.block_size as u64;
    let mut offsets = Offsets::new(load.order, (size / block_size).max(1), block_size, 0, 1);
    // Not zeroes: what is written is read again by others.
    let mut memory = vec![0xa5; load.block_size + PAGE];
    let start = memory.as_ptr().align_offset(PAGE);
    let block = &mut memory[start..start + load.block_size];
    let before = cpu_time()?;
    loop {
        kick.read().context("waiting for a kick")?;
        if ends.load(Ordering::SeqCst) {
            return Ok(cpu_time()?.saturating_sub(before));
        }
        match (&file, load.op) {
            (Some(file), Op::Read) => {
                file.read_exact_at(block, offsets.next_offset()).context("reading")
            }
            (Some(file), Op::Write) => {
                file.write_all_at(block, offsets.next_offset()).context("writing")
            }
            (None, _) => Ok(()),
        }?;
        signal.write(1).context("signalling")?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::data_file;
    use crate::peers::rows::load;

    #[test]
    fn echoes_are_counted_and_a_failed_echo_is_an_error() {
        let nowhere = Cpus { client: None, server: None };
        let times = [Duration::ZERO, Duration::from_millis(20)];
        let directory = std::env::current_exe()
            .unwrap()
            .with_file_name(format!("bench-echo-{}", std::process::id()));
        let file = data_file::prepare(&directory, 1 << 20).unwrap();
        for (file, op) in [(None, Op::Read), (Some(&*file), Op::Read), (Some(&*file), Op::Write)] {
            for time in times {
                let done = run(file, &Load { op, ..load() }, nowhere, time).unwrap();
                let is_counted = done.iops > 0.0 && done.cpu > 0.0 && done.cpu.is_finite();
                assert!(is_counted, "{op:?} {done:?}");
            }
        }
        std::fs::remove_dir_all(&directory).unwrap();
        assert!(run(Some(&file), &load(), nowhere, times[1]).is_err(), "no file");
    }
}

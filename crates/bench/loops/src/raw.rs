//! io_uring in a bare loop, with nothing between the row and the kernel: the upper limit.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use io_uring::{IoUring, opcode, squeue, types};

use crate::async_rows::{BEFORE_WAKE, buffer_size, open_direct, socket_ring, spin};
use crate::conditions::Conditions;
use crate::contenders::Contender;
use crate::meter::{Meter, median_us};
use crate::page::{PAGE_SIZE, Page};
use crate::rows::Row;
use bench::host::affinity::bind_this_thread;
use bench::load::offsets::{Offsets, Order};

/// Has no timers, tasks or closures.
pub(crate) const CONTENDER: Contender = Contender {
    name: "raw io_uring",
    settings: "`io-uring` 0.7, SINGLE_ISSUER, DEFER_TASKRUN, NO_SQARRAY; wakes by MSG_RING, sockets \
               by RECV and SEND, the file registered",
    measure,
};

fn measure(row: Row, conditions: &Conditions) -> Result<Option<f64>> {
    let meter = Meter::new(conditions.run_time);
    match row {
        Row::Wake => return wake(conditions).map(Some),
        Row::TimerLate => return timer_late(conditions).map(Some),
        Row::Ring(tokens) => ring(&meter, tokens)?,
        Row::FileRead(depth) => reads(&meter, &conditions.file, depth)?,
        Row::RamRead(depth) => reads(&meter, &conditions.device, depth)?,
        _ => return Ok(None),
    }
    Ok(Some(meter.thousands()))
}

fn set_up() -> Result<IoUring> {
    let mut builder = IoUring::builder();
    builder.setup_single_issuer().setup_defer_taskrun().setup_no_sqarray().setup_cqsize(4096);
    builder.build(256).context("io_uring_setup")
}

/// Queues an entry.
///
/// # Safety
///
/// The memory that the entry points to stays valid until its completion.
unsafe fn push(ring: &mut IoUring, entry: squeue::Entry) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { ring.submission().push(&entry) }.context("the submission queue is full")
}

/// A message with the data `data` for the ring `fd`, without a completion of its own.
fn message(fd: RawFd, data: u64) -> squeue::Entry {
    opcode::MsgRingData::new(types::Fd(fd), 0, data, None)
        .build()
        .flags(squeue::Flags::SKIP_SUCCESS)
}

fn wake(conditions: &Conditions) -> Result<f64> {
    let mut here = set_up()?;
    let here_fd = here.as_raw_fd();
    let (tell, told) = std::sync::mpsc::channel();
    let over = Arc::new(AtomicBool::new(false));
    let echo = {
        let (over, other_cpu) = (over.clone(), conditions.other_cpu);
        std::thread::spawn(move || -> Result<()> {
            bind_this_thread(other_cpu)?;
            let mut there = set_up()?;
            tell.send(there.as_raw_fd())?;
            loop {
                there.submit_and_wait(1)?;
                there.completion().for_each(drop);
                if over.load(Ordering::Relaxed) {
                    return Ok(());
                }
                // SAFETY: points to nothing.
                unsafe { push(&mut there, message(here_fd, 1))? };
            }
        })
    };
    let there_fd = told.recv().context("the other thread has failed")?;
    let begin = Instant::now();
    let mut times = Vec::new();
    while begin.elapsed() < conditions.run_time && !echo.is_finished() {
        spin(BEFORE_WAKE);
        let start = Instant::now();
        // SAFETY: points to nothing.
        unsafe { push(&mut here, message(there_fd, 1))? };
        here.submit_and_wait(1)?;
        ensure!(here.completion().all(|entry| entry.result() >= 0), "MSG_RING failed");
        times.push(start.elapsed() / 2);
    }
    over.store(true, Ordering::Relaxed);
    // SAFETY: points to nothing.
    unsafe { push(&mut here, message(there_fd, 1))? };
    here.submit()?;
    echo.join().map_err(|_| anyhow::anyhow!("the other thread panicked"))??;
    Ok(median_us(times))
}

fn timer_late(conditions: &Conditions) -> Result<f64> {
    let ring = set_up()?;
    let begin = Instant::now();
    let mut times = Vec::new();
    while begin.elapsed() < conditions.run_time {
        let deadline = Instant::now() + Duration::from_micros(100);
        let left = deadline.saturating_duration_since(Instant::now());
        let timespec = types::Timespec::from(left);
        let args = types::SubmitArgs::new().timespec(&timespec);
        match ring.submitter().submit_with_args(1, &args) {
            Err(error) if error.raw_os_error() == Some(libc::ETIME) => {}
            other => drop(other.context("waiting")?),
        }
        times.push(Instant::now().saturating_duration_since(deadline));
    }
    Ok(median_us(times))
}

fn ring(meter: &Meter, tokens: usize) -> Result<()> {
    /// Distinguishes the user data of a SEND from that of a RECV.
    const SEND: u64 = 1 << 32;
    let mut ring = set_up()?;
    let sockets = socket_ring()?;
    // Leaked, as operations in flight at the end may still write to it.
    let buffers = vec![[0u8; 64]; sockets.len()].leak();
    let receive = |i: usize, buffer: &mut [u8; 64]| {
        let fd = types::Fd(sockets[i].0.as_raw_fd());
        opcode::Recv::new(fd, buffer.as_mut_ptr(), buffer_size(tokens) as u32)
            .build()
            .user_data(i as u64)
    };
    for (i, buffer) in buffers.iter_mut().enumerate() {
        // SAFETY: the buffers stay where they are for ever, and only the kernel uses them.
        unsafe { push(&mut ring, receive(i, buffer))? };
    }
    for (_, writer) in &sockets[..tokens] {
        io::Write::write_all(&mut &*writer, b"t").context("sending a token")?;
    }
    let mut done = Vec::with_capacity(512);
    loop {
        ring.submit_and_wait(1)?;
        done.extend(ring.completion().map(|entry| (entry.user_data(), entry.result())));
        for (data, result) in done.drain(..) {
            let n = u32::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result))?;
            if data & SEND != 0 {
                // The buffer is free again.
                let i = (data & !SEND) as usize;
                // SAFETY: as above.
                unsafe { push(&mut ring, receive(i, &mut buffers[i]))? };
                continue;
            }
            if !meter.add(n.into()) {
                return Ok(());
            }
            let i = data as usize;
            let fd = types::Fd(sockets[i].1.as_raw_fd());
            let send = opcode::Send::new(fd, buffers[i].as_ptr(), n).build();
            // SAFETY: as above.
            unsafe { push(&mut ring, send.user_data(data | SEND))? };
        }
    }
}

fn reads(meter: &Meter, path: &std::path::Path, depth: usize) -> Result<()> {
    let (file, pages) = open_direct(path)?;
    // Leaked, as other reads are in flight when one fails.
    let memory = (0..depth).map(|_| Page::boxed()).collect::<Vec<_>>().leak();
    let mut ring = set_up()?;
    ring.submitter().register_files(&[file.as_raw_fd()]).context("registering a file")?;
    let mut offsets = Offsets::new(Order::Random, pages, PAGE_SIZE as u64, 0, 1);
    let mut read = |slot: usize, page: &mut Page| {
        opcode::Read::new(types::Fixed(0), page.0.as_mut_ptr(), PAGE_SIZE as u32)
            .offset(offsets.next_offset())
            .build()
            .user_data(slot as u64)
    };
    for (slot, page) in memory.iter_mut().enumerate() {
        // SAFETY: the pages stay where they are for ever, and only the kernel uses them.
        unsafe { push(&mut ring, read(slot, page))? };
    }
    let mut done = Vec::with_capacity(depth);
    let mut goes_on = true;
    let mut in_flight = depth;
    while in_flight > 0 {
        ring.submit_and_wait(1)?;
        done.extend(ring.completion().map(|entry| (entry.user_data(), entry.result())));
        for (slot, result) in done.drain(..) {
            ensure!(result == PAGE_SIZE as i32, "a read returned {result}");
            goes_on &= meter.add(1);
            in_flight -= 1;
            if goes_on {
                in_flight += 1;
                let slot = slot as usize;
                // SAFETY: as above.
                unsafe { push(&mut ring, read(slot, &mut memory[slot]))? };
            }
        }
    }
    Ok(())
}

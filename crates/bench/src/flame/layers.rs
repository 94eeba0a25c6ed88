//! Where time goes, by layer: what the flame graph shows, added up.

/// A layer, and the functions that show that a stack is in it: it is enough that one begins so. The first
/// layer that fits has the stack, so what lies deeper comes first.
const KERNEL: [(&str, &[&str]); 9] = [
    ("kernel: waking the guest (eventfd)", &["eventfd_write", "eventfd_signal"]),
    ("kernel: interrupts", &["asm_", "common_interrupt", "irq_"]),
    (
        "kernel: submission, disk's driver and doorbell",
        &["virtio_queue_rq", "nvme_queue_rq", "virtblk_"],
    ),
    ("kernel: submission, block layer", &["submit_bio", "blk_", "__blk_", "bio_"]),
    ("kernel: submission, file system", &["ext4_", "xfs_", "btrfs_", "iomap_", "blkdev_read"]),
    ("kernel: submission, io_uring", &["io_submit_sqes"]),
    (
        "kernel: completion",
        &["io_run_task_work", "tctx_task_work", "task_work_run", "__io_run_local"],
    ),
    ("kernel: going to sleep and waking up", &["schedule", "__schedule", "io_cqring_wait"]),
    ("kernel: system calls as such", &["entry_SYSCALL_64", "do_syscall_64", "el0t_64_sync"]),
];

const CRATES: [&str; 6] =
    ["devices::", "queue::", "guest_memory::", "block::", "event_loop::", "exports::"];

/// Time by layer, the most first.
pub(super) fn add_up<'a>(folded: impl Iterator<Item = &'a str>) -> Vec<(String, u64)> {
    let mut layers: Vec<(String, u64)> = Vec::new();
    for line in folded {
        let Some((stack, count)) = line.rsplit_once(' ') else { continue };
        let Ok(count) = count.parse::<u64>() else { continue };
        let layer = layer(stack);
        match layers.iter_mut().find(|(name, _)| *name == layer) {
            Some((_, sum)) => *sum += count,
            None => layers.push((layer, count)),
        }
    }
    layers.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    layers
}

/// The layer of a stack, its functions separated by semicolons, the innermost last.
fn layer(stack: &str) -> String {
    let frames = || stack.split(';').rev();
    let is_in = |starts: &[&str]| frames().any(|f| starts.iter().any(|start| f.starts_with(start)));
    if let Some((name, _)) = KERNEL.iter().find(|(_, starts)| is_in(starts)) {
        return (*name).to_owned();
    }
    // The innermost function of ours; what the compiler has put into another's is that one's.
    let ours = frames().find_map(|f| {
        let found = CRATES.iter().filter_map(|name| Some((f.find(name)?, name)));
        found.min().map(|(_, name)| name.trim_end_matches("::"))
    });
    format!("user space: {}", ours.unwrap_or("libraries"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacks_are_put_into_layers() {
        let ours = "io0;start_thread;event_loop::iteration::<impl event_loop::event_loop::EventLoop>::run_once";
        let call = format!("{ours};syscall;entry_SYSCALL_64_after_hwframe;do_syscall_64");
        let submit = format!("{call};__do_sys_io_uring_enter;io_submit_sqes;io_issue_sqe");
        let read = format!("{submit};ext4_file_read_iter;iomap_dio_rw");
        for (stack, expected) in [
            (ours.to_owned(), "user space: event_loop"),
            (
                format!(
                    "{ours};<block::drivers::file::channel::Inner as event_loop::op::IoTarget>::complete"
                ),
                "user space: block",
            ),
            (format!("{ours};memcpy"), "user space: event_loop"),
            ("io0;start_thread".into(), "user space: libraries"),
            (call.clone(), "kernel: system calls as such"),
            (submit.clone(), "kernel: submission, io_uring"),
            (read.clone(), "kernel: submission, file system"),
            (format!("{read};submit_bio_noacct"), "kernel: submission, block layer"),
            (
                format!("{read};submit_bio_noacct;blk_mq_submit_bio;virtio_queue_rq;vp_notify"),
                "kernel: submission, disk's driver and doorbell",
            ),
            (format!("{call};io_cqring_wait;io_run_task_work;io_rw_recycle"), "kernel: completion"),
            (format!("{call};io_cqring_wait;schedule"), "kernel: going to sleep and waking up"),
            (
                format!("{call};vfs_write;eventfd_write;__wake_up"),
                "kernel: waking the guest (eventfd)",
            ),
        ] {
            assert_eq!(layer(&stack), expected, "{stack}");
        }
    }

    #[test]
    fn time_is_added_up() {
        let lines = ["io0;schedule 3", "io0;block::a 2", "io0;x;schedule 4", "nonsense"];
        let sums = add_up(lines.into_iter());
        let (sleep, block) = ("kernel: going to sleep and waking up", "user space: block");
        assert_eq!(sums, [(sleep.to_owned(), 7), (block.to_owned(), 2)]);
    }
}

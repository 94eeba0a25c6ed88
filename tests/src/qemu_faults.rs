//! Faults of QEMU's own that end or stop a guest while it boots. The guest then boots again, see `Boot` in `guest.rs`.

/// Whether QEMU's stderr has an assertion that QEMU 10.0 fails at times: its TCG may carry out an access of one processor
/// in the wrong device while another one maps devices, as Linux does when it finds them. Seen once in some thousand boots.
pub(crate) fn is_known_assertion(stderr: &str) -> bool {
    let functions = ["msix_table_mmio_write", "iotlb_to_section"];
    functions.iter().any(|function| stderr.contains(&format!("{function}: Assertion `")))
}

/// Whether a console has the line of a kernel one of whose processors is idle and gets no interrupt of its timer. Such a
/// boot does not end. Seen once in some thousand boots.
pub(crate) fn has_lost_a_timer(console: &str) -> bool {
    console.contains("rcu_preempt kthread timer wakeup didn't happen for ")
}

#[cfg(test)]
mod tests {
    use super::{has_lost_a_timer, is_known_assertion};
    use crate::Guest;

    /// In QEMU's place: the first boot stalls, the second one runs the job.
    const STALLS_ONCE: &str = r#"
for argument; do
    case $argument in file:*/console) console=${argument#file:} ;; esac
done
if [ -e "$console" ]; then
    printf 'the job starts\nall is well\nexit status: 0\n'
    exit
fi
echo "rcu: rcu_preempt kthread timer wakeup didn't happen for 5251 jiffies!" >"$console"
exec sleep 1000
"#;

    #[test]
    fn a_guest_that_stalls_before_its_job_boots_again() {
        let mut guest = Guest::new();
        guest.qemu = ["/bin/sh", "-c", STALLS_ONCE, "qemu"].map(String::from).into();
        assert_eq!(guest.run("echo all is well\n"), ["all is well"]);
    }

    #[test]
    fn known_assertions_of_qemu_are_told_from_others() {
        let known = "qemu-system-x86_64: ../softmmu/physmem.c:2419: iotlb_to_section: Assertion `x' failed.\n";
        assert!(is_known_assertion(known));
        assert!(!is_known_assertion("qemu-system-x86_64: virtqueue_pop: Assertion `x' failed.\n"));
        assert!(!is_known_assertion(""));
    }

    #[test]
    fn a_lost_timer_is_told_from_other_stalls() {
        let lost = "[   23.577988] rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:\n\
            [   23.581815] rcu: rcu_preempt kthread timer wakeup didn't happen for 5251 jiffies! g-1147 f0x0 \
            RCU_GP_WAIT_FQS(5) ->state=0x402\n";
        assert!(has_lost_a_timer(lost));
        // A processor that computes, or a host that does not run it, is no lost timer.
        let busy = "[   23.577988] rcu: INFO: rcu_preempt self-detected stall on CPU\n";
        assert!(!has_lost_a_timer(busy));
        assert!(!has_lost_a_timer(""));
    }
}

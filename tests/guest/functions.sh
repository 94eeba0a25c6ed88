# What jobs of guests with fio have in common. It stands before each job, which may name another disk.
disk=vda

# The shell prefers busybox' own, which take three times as long, where they count most: a disk is compared by its sum.
md5sum() { /bin/md5sum "$@"; }
cmp() { /bin/cmp "$@"; }

# verify [OPTION...]: random writes with checksums to the first 4 MiB, which are verified now (--do_verify=1), or
# verification of what an earlier call has written (--verify_only=1), also in another guest.
verify() {
    fio --minimal --name=job --filename=/dev/$disk --direct=1 --ioengine=libaio --iodepth=16 --rw=randwrite --bs=16k \
        --size=4m --verify=crc32c --verify_fatal=1 --randseed=7 "$@" >/tmp/verify 2>&1 || {
        cat /tmp/verify
        exit 1
    }
}

# load [OPTION...]: starts random reads and writes, and returns when they are under way. They go to the second 16 MiB.
load() {
    fio --minimal --name=load --filename=/dev/$disk --direct=1 --ioengine=libaio --iodepth=32 --rw=randrw --bs=4k \
        --offset=16m --size=16m --time_based --runtime=600 "$@" >/dev/null 2>&1 &
    load=$!
    wait_for_requests 300
}

# wait_for_requests COUNT: returns when the disk has completed so many more; fails when the load, if there is one, has ended.
# It looks without running a program, which would take a processor from the load.
wait_for_requests() {
    local target completed
    count_completed
    target=$((completed + $1))
    until [ $completed -ge $target ]; do
        [ -z "${load-}" ] || kill -0 $load 2>/dev/null || {
            cat /tmp/checked
            exit 1
        }
        sleep 0.02
        count_completed
    done
}

# count_completed: sets `completed` to the number of reads and writes that the disk has completed.
count_completed() {
    local reads=0 writes=0
    read -r reads _ _ _ writes _ </sys/block/$disk/stat || :
    completed=$((reads + writes))
}

# checked_load JOBS [OPTION...]: starts as many jobs that write and read back with checksums, each in its own 4 MiB
# of the second 16 MiB, and returns when they are under way. They end with the first thing that is wrong. The requests
# are of very different sizes, and some are flushes, so that they are answered in another order than they are made.
checked_load() {
    jobs=$1
    shift
    fio --minimal --name=checked --filename=/dev/$disk --direct=1 --ioengine=libaio --iodepth=32 --rw=randwrite --fsync=16 \
        --bssplit=4k/80:256k/20 --numjobs="$jobs" --offset=16m --offset_increment=4m --size=4m --verify=crc32c --verify_fatal=1 \
        --verify_backlog=64 --loops=100000 "$@" >/tmp/checked 2>&1 &
    load=$!
    wait_for_requests 300
}

# end_checked_load: ends it, if nothing was wrong so far. fio's own status says that it was interrupted; the fifth
# field of each job's line is its first error.
end_checked_load() {
    running=no
    kill -INT $load && running=yes
    wait $load || true
    [ $running = yes ] && awk -F ';' '/;checked;/ { jobs++; errors += $5 } END { exit !jobs || errors }' /tmp/checked || {
        cat /tmp/checked
        exit 1
    }
}

# take_away_under_load DEVICE DRIVER [OPTION...]: three times each, takes the driver off the PCI device and the device off its
# bus, with requests in flight. The function is reset while it has no driver. What was written before is then verified.
take_away_under_load() {
    device=$1 driver=/sys/bus/pci/drivers/$2
    shift 2
    for round in 1 2 3 4 5 6; do
        load "$@"
        if [ $round -le 3 ]; then
            echo $device >$driver/unbind
        else
            echo 1 >/sys/bus/pci/devices/$device/remove
        fi
        wait $load && { echo 'fio did not notice'; exit 1; }
        load=
        [ ! -e /sys/block/$disk ]
        if [ $round -le 3 ]; then
            echo 1 >/sys/bus/pci/devices/$device/reset
            echo $device >$driver/bind
        else
            echo 1 >/sys/bus/pci/rescan
        fi
        until [ -b /dev/$disk ]; do sleep 0.1; done
        verify --verify_only=1
    done
}

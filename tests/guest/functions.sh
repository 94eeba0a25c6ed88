# What jobs of guests with fio have in common. It stands before each job.

# verify [OPTION...]: random writes with checksums to the first 8 MiB, which are verified now (--do_verify=1), or
# verification of what an earlier call has written (--verify_only=1), also in another guest.
verify() {
    fio --minimal --name=job --filename=/dev/vda --direct=1 --ioengine=libaio --iodepth=16 --rw=randwrite --bs=16k \
        --size=8m --verify=crc32c --verify_fatal=1 --randseed=7 "$@" >/tmp/verify 2>&1 || {
        cat /tmp/verify
        exit 1
    }
}

# load: starts random reads and writes, and returns when they are under way. They go to the second 16 MiB.
load() {
    fio --minimal --name=load --filename=/dev/vda --direct=1 --ioengine=libaio --iodepth=32 --rw=randrw --bs=4k \
        --offset=16m --size=16m --time_based --runtime=600 >/dev/null 2>&1 &
    load=$!
    wait_for_requests 300
}

# wait_for_requests COUNT: returns when the disk has completed so many more.
wait_for_requests() {
    target=$(($(requests) + $1))
    until [ "$(requests)" -ge $target ]; do :; done
}

requests() {
    awk '{ print $1 + $5 }' /sys/block/vda/stat
}

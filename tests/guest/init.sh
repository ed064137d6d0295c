#!/bin/busybox sh
# First process of the guest: mounts the host read-only, runs one command there, reports its exit code by port.
export PATH=/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
@MODULES@
OPTIONS=trans=virtio,version=9p2000.L,msize=512000
finish() {
    sync
    printf "$(printf '\\%03o' "$1")" | dd of=/dev/port bs=1 seek=244 conv=notrunc 2>/dev/null
    poweroff -f
}
mount -t 9p -o ro,$OPTIONS,cache=loose host /host || finish 71
mount -t proc proc /host/proc
mount -t sysfs sys /host/sys
mount -t devtmpfs dev /host/dev
mount --bind /host/tmp /under
for place in tmp run dev/shm mnt; do
    [ -d /host/$place ] || mkdir -p /host/$place
    mount -t tmpfs tmpfs /host/$place
done
mkdir -p /host/mnt/out
mount -t 9p -o $OPTIONS out /host/mnt/out || finish 72
while read -r place; do # a checkout or an interpreter below the host's /tmp
    mkdir -p "/host$place" && mount --bind "/under${place#/tmp}" "/host$place" || finish 73
done < /host/mnt/out/keep
mount -t cgroup2 cgroup2 /host/sys/fs/cgroup 2>/dev/null
ip link set lo up 2>/dev/null
export OUT=/mnt/out PYTHONDONTWRITEBYTECODE=1 PYTHONNOUSERSITE=1 HOME=/tmp TMPDIR=/tmp PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin
export OPENBLAS_NUM_THREADS=1 PYTEST_ENGRAM_GUEST=1
chroot /host /bin/sh /mnt/out/command.sh
finish $?

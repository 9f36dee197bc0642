#!/bin/sh
# Runs tests/sanitize/main.cpp on the CPU kernels built with AddressSanitizer + UndefinedBehaviorSanitizer, and with
# ThreadSanitizer, at the same time. The mistakes that it can make on purpose must be reported. Needs g++ alone.
set -eu
cd "$(dirname "$0")/.."
CXX=${CXX:-g++}
out=build/sanitize
mkdir -p $out
common="-std=c++17 -O1 -g1 -fno-math-errno -fno-trapping-math -Wno-psabi -Icsrc"
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1

# build NAME LINK FLAGS...
build() {
    name=$1 link=$2
    shift 2
    objects=
    for source in tests/sanitize/main.cpp csrc/cpu/*.cpp; do
        [ $source != csrc/cpu/bindings.cpp ] || continue
        object="$out/$name-$(basename $source .cpp).o"
        objects="$objects $object"
        $CXX $common -fopenmp "$@" -c $source -o $object
    done
    $CXX "$@" $link -pthread -Wl,--wrap=malloc,--wrap=free $objects -o $out/$name
}

# must_report NAME MISTAKE TEXT: the mistake is noticed, and by this.
must_report() {
    if $out/$1 "$2" >$out/$1-report 2>&1 || ! grep -Eq "$3" $out/$1-report; then
        cat $out/$1-report
        echo "$1: the mistake '$2' was not reported as '$3'"
        return 1
    fi
    echo "$1: '$2' is reported as it must be"
}

# With real vectors where the machine has them. AddressSanitizer sees null pointers and the ends of objects by itself, and its
# checks as calls compile twice as fast.
check_memory() {
    isa="-DPYL_ISA=baseline"
    if grep -qs avx2 /proc/cpuinfo && grep -qs fma /proc/cpuinfo; then isa="-DPYL_ISA=avx2 -mavx2 -mfma -mf16c"; fi
    build memory -fopenmp $isa -fsanitize=address,undefined -fno-sanitize=null,object-size -fno-sanitize-recover=all \
        --param asan-instrumentation-with-call-threshold=0
    echo "memory: built with $isa"
    $out/memory
    must_report memory write "AddressSanitizer: (heap-buffer-overflow|unknown-crash)"
    must_report memory read "AddressSanitizer: (heap-buffer-overflow|unknown-crash)"
    must_report memory masked_write "AddressSanitizer: SEGV"
    must_report memory masked_read "AddressSanitizer: SEGV"
    must_report memory align "misaligned address"
    must_report memory unwritten "not every byte is written"
}

# The baseline stores without intrinsics, which ThreadSanitizer does not see; main.cpp has threads that it understands, so this
# is linked without libgomp.
check_threads() {
    build threads "" -DPYL_ISA=baseline -DPYL_OWN_THREADS -fsanitize=thread
    $out/threads
    must_report threads race "ThreadSanitizer: data race"
}

(set -e; check_memory) >$out/memory.log 2>&1 &
memory=$!
(set -e; check_threads) >$out/threads.log 2>&1 &
threads=$!
failed=0
wait $memory || failed=1
wait $threads || failed=1
cat $out/memory.log $out/threads.log
exit $failed

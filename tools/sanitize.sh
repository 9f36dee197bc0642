#!/bin/sh
# Builds the CPU kernels of one instruction set with AddressSanitizer + UndefinedBehaviorSanitizer, and with ThreadSanitizer, and
# runs tests/sanitize/main.cpp on both. The mistakes that it can make on purpose must be reported. Needs g++ alone.
set -eu
cd "$(dirname "$0")/.."
CXX=${CXX:-g++}
out=build/sanitize
mkdir -p $out

isa="-DPYL_ISA=baseline"
if grep -qs avx2 /proc/cpuinfo && grep -qs fma /proc/cpuinfo; then isa="-DPYL_ISA=avx2 -mavx2 -mfma -mf16c"; fi
common="-std=c++17 -O1 -g1 -fopenmp -fno-math-errno -fno-trapping-math -Wno-psabi -Icsrc $isa"
# AddressSanitizer sees null pointers and the ends of objects; calls instead of inlined checks compile twice as fast.
memory="-fsanitize=address,undefined -fno-sanitize=null,object-size -fno-sanitize-recover=all --param asan-instrumentation-with-call-threshold=0"
# Without libgomp: main.cpp has threads that ThreadSanitizer understands.
threads="-fsanitize=thread -DPYL_OWN_THREADS"
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1

# build NAME LINK FLAGS...
build() {
    name=$1 link=$2
    shift 2
    for source in csrc/cpu/isa.cpp tests/sanitize/main.cpp; do
        $CXX $common "$@" -c $source -o "$out/$name-$(basename $source .cpp).o"
    done
    $CXX "$@" $link -pthread -Wl,--wrap=malloc,--wrap=free $out/$name-isa.o $out/$name-main.o -o $out/$name
}

# must_report PROGRAM MISTAKE TEXT: the mistake is noticed, and by this.
must_report() {
    if $out/$1 "$2" >$out/report 2>&1 || ! grep -Eq "$3" $out/report; then
        cat $out/report
        echo "$1: the mistake '$2' was not reported as '$3'" >&2
        exit 1
    fi
    echo "-- $1 reports '$2': $3"
}

echo "-- building $isa"
build memory -fopenmp $memory &
first=$!
build threads "" $threads
wait $first
$out/memory
must_report memory write "AddressSanitizer: (heap-buffer-overflow|unknown-crash)"
must_report memory read "AddressSanitizer: (heap-buffer-overflow|unknown-crash)"
must_report memory masked_write "AddressSanitizer: SEGV"
must_report memory masked_read "AddressSanitizer: SEGV"
must_report memory align "misaligned address"
must_report memory unwritten "not every byte is written"
$out/threads
must_report threads race "ThreadSanitizer: data race"

// Preloaded in front of libc: how many bytes have malloc, its relatives and anonymous mmap handed out and not yet got back?
// It sees what torch allocates and what a C++ kernel allocates past torch, in every thread.
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);
extern void __libc_free(void*);

static atomic_llong live, most, start;

static void count(long long bytes) {
  long long now = atomic_fetch_add(&live, bytes) + bytes, seen = atomic_load(&most);
  while (now > seen && !atomic_compare_exchange_weak(&most, &seen, now)) {
  }
}
static void* counted(void* p) {
  if (p) count((long long)malloc_usable_size(p));
  return p;
}

// Bytes are counted from here.
void counter_start(void) {
  atomic_store(&start, atomic_load(&live));
  atomic_store(&most, atomic_load(&live));
}
// The most that was held at one time since then, above what was held at the start.
long long counter_most(void) { return atomic_load(&most) - atomic_load(&start); }

void* malloc(size_t n) { return counted(__libc_malloc(n)); }
void* calloc(size_t n, size_t size) { return counted(__libc_calloc(n, size)); }
void* memalign(size_t align, size_t n) { return counted(__libc_memalign(align, n)); }
void* aligned_alloc(size_t align, size_t n) { return memalign(align, n); }
int posix_memalign(void** p, size_t align, size_t n) {
  void* got = memalign(align, n);
  if (got) *p = got;
  return got ? 0 : ENOMEM;
}
void free(void* p) {
  if (p) count(-(long long)malloc_usable_size(p));
  __libc_free(p);
}
void* realloc(void* p, size_t n) {
  long long before = p ? (long long)malloc_usable_size(p) : 0;
  void* got = __libc_realloc(p, n);
  if (got || n == 0) count(-before);
  return counted(got);
}

// Mappings that were counted; a part given back counts as that part.
static struct {
  uintptr_t begin, end;
} mapped[1024];
static atomic_flag busy = ATOMIC_FLAG_INIT;

void* mmap(void* at, size_t n, int protection, int flags, int file, off_t offset) {
  void* p = (void*)syscall(SYS_mmap, at, n, protection, flags, file, offset);
  if (p == MAP_FAILED || !(flags & MAP_ANONYMOUS) || !(protection & PROT_WRITE)) return p;
  while (atomic_flag_test_and_set(&busy)) {
  }
  for (size_t i = 0; i < sizeof mapped / sizeof *mapped; ++i) {
    if (mapped[i].begin != mapped[i].end) continue;
    mapped[i].begin = (uintptr_t)p, mapped[i].end = (uintptr_t)p + n;
    count((long long)n);
    break;
  }
  atomic_flag_clear(&busy);
  return p;
}
void* mmap64(void* at, size_t n, int protection, int flags, int file, off64_t offset) {
  return mmap(at, n, protection, flags, file, offset);
}
int munmap(void* p, size_t n) {
  uintptr_t begin = (uintptr_t)p, end = begin + n;
  while (atomic_flag_test_and_set(&busy)) {
  }
  for (size_t i = 0; i < sizeof mapped / sizeof *mapped; ++i) {
    uintptr_t from = mapped[i].begin > begin ? mapped[i].begin : begin, to = mapped[i].end < end ? mapped[i].end : end;
    if (from >= to) continue;
    count(-(long long)(to - from));
    if (from == mapped[i].begin) mapped[i].begin = to;
    else mapped[i].end = from;
  }
  atomic_flag_clear(&busy);
  return (int)syscall(SYS_munmap, p, n);
}

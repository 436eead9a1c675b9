/* A large gradient is fresh memory, whose small pages take longer to be had than the gradient itself (docs/performance.md). */

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

enum { LARGE_BYTES = 32 << 20 };

INLINE void ask_for_large_pages(const void *first, int64_t bytes)
{
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), start = ((uintptr_t)first + page - 1) & ~(page - 1);
    const uintptr_t end = ((uintptr_t)first + (uintptr_t)bytes) & ~(page - 1);
    if (bytes >= LARGE_BYTES)
        (void)madvise((void *)start, end - start, MADV_HUGEPAGE); /* a hint */
#else
    (void)first, (void)bytes;
#endif
}

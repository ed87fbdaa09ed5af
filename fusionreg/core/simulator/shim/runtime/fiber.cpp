// Context switch and stacks. One fiber per CUDA thread; a switch saves the callee-saved registers and nothing else.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "fiber.h"

#if defined(__x86_64__)
asm(R"(
.text
.globl frsim_switch
.hidden frsim_switch
.type frsim_switch, @function
frsim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmp *%rcx
.size frsim_switch, .-frsim_switch
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl frsim_switch
.hidden frsim_switch
.type frsim_switch, %function
frsim_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size frsim_switch, .-frsim_switch
)");
#else
#error "the simulator's context switch is written for x86-64 and aarch64"
#endif

namespace fr_sim {

void prepare(Fiber& f, void (*entry)()) {
  auto top = reinterpret_cast<uintptr_t>(f.stack_hi);
  // Stacks lie a power of two apart: without a stagger all their tops would fall into the same cache sets.
  top -= 192 * (f.tid % 61);
  top &= ~uintptr_t(63);
#if defined(__x86_64__)
  auto* sp = reinterpret_cast<void**>(top) - 8;   // six registers, the entry address, and the slot a call would have pushed
  for (int i = 0; i < 8; ++i) sp[i] = nullptr;
  sp[6] = reinterpret_cast<void*>(entry);
#else
  auto* sp = reinterpret_cast<void**>(top - 160);
  for (int i = 0; i < 20; ++i) sp[i] = nullptr;
  sp[11] = reinterpret_cast<void*>(entry);        // x30
#endif
  f.sp = sp;
}

namespace {
// Making a stack costs two system calls, and first touching it a page fault: later launches reuse what is there.
// A guard splits a mapping, of which a process may have 65,530: a larger pool has fewer guards than stacks.
constexpr u64 kGuards = 1 << 12;
constexpr u64 kKept = 1 << 15;   // idle stacks, of each of which some 8 KB were touched
struct Pool { char* base = nullptr; u64 count = 0, stride = 0; bool busy = false; };
std::mutex pools_mutex;
std::vector<Pool>& pools() { static auto* all = new std::vector<Pool>; return *all; }   // never freed: reused by later launches

template <class Keep> void drop_idle(Keep keep) {
  auto& all = pools();
  for (size_t i = all.size(); i-- > 0;) {
    if (all[i].busy || keep(all[i])) continue;
    munmap(all[i].base, all[i].count * all[i].stride);
    all.erase(all.begin() + long(i));
  }
}
}  // namespace

char* take_stacks(u64 count, u64 stride) {
  const u64 page = static_cast<u64>(sysconf(_SC_PAGESIZE));
  std::lock_guard<std::mutex> lock(pools_mutex);
  Pool* best = nullptr;
  for (auto& p : pools())
    if (!p.busy && p.stride == stride && p.count >= count && (!best || p.count < best->count)) best = &p;
  if (best) { best->busy = true; return best->base; }
  drop_idle([&](const Pool& p) { return p.stride != stride; });   // too small, and what is made now serves in their place
  u64 made = 256;
  while (made < count && made < kKept) made *= 2;
  made = std::max(made, count);
  void* base = mmap(nullptr, made * stride, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  auto* c = static_cast<char*>(base);
  const u64 apart = (made + kGuards - 1) / kGuards;
  for (u64 i = 0; i < made; i += apart) mprotect(c + i * stride, page, PROT_NONE);   // an overflow faults instead of corrupting a neighbour
  pools().push_back({c, made, stride, true});
  return c;
}

void give_stacks(char* base) {
  std::lock_guard<std::mutex> lock(pools_mutex);
  u64 idle = 0;
  for (auto& p : pools()) {
    if (p.base == base) p.busy = false;
    idle += p.busy ? 0 : p.count;
  }
  if (idle > kKept) drop_idle([&](const Pool& p) { return p.base == base && p.count <= kKept; });
}

}  // namespace fr_sim

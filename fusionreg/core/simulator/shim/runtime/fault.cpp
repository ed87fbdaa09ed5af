// Signals: a kernel's SIGSEGV, SIGFPE or endless loop becomes a report instead of the end of the process.
#include <csignal>
#include <pthread.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "checker.h"

namespace fr_sim {
namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
std::mutex installed_mutex;
int installed = 0;
struct sigaction previous[sizeof kSignals / sizeof kSignals[0]], previous_alarm;
thread_local char* alternate = nullptr;   // a signal on an overflowed fiber stack needs a stack of its own
thread_local stack_t previous_stack;

int watch_signal() { return SIGRTMIN + 6; }

u64 pc_of(const void* context) {
  auto* u = static_cast<const ucontext_t*>(context);
#if defined(__x86_64__)
  return u64(u->uc_mcontext.gregs[REG_RIP]);
#else
  return u64(u->uc_mcontext.pc);
#endif
}

void on_signal(int number, siginfo_t* info, void* context) {
  Fiber* f = self();
  if (!f) {   // not ours: the handler that was there before decides
    for (size_t i = 0; i < sizeof kSignals / sizeof kSignals[0]; ++i)
      if (kSignals[i] == number) {
        if (previous[i].sa_flags & SA_SIGINFO) return previous[i].sa_sigaction(number, info, context);
        sigaction(number, &previous[i], nullptr);
        return;
      }
    return;
  }
  const Site site{nullptr, 0, reinterpret_cast<void*>(pc_of(context) + 1)};   // callers subtract one from return addresses
  auto p = reinterpret_cast<u64>(info->si_addr);
  if (number == watch_signal()) fail_expired(site);
  if (number == SIGFPE) fail("arithmetic", site, "integer division by zero, or a quotient that does not fit");
  if (number == SIGILL || number == SIGTRAP) fail("trap", site, "the kernel executed a trap or ran past the end of a function");
  if (p >= u64(f->stack_lo) && p < u64(f->stack_lo) + 65536 && p < u64(f->stack_hi) - 8192)
    fail("stack", site, "a thread used more than %llu KiB of local memory", (unsigned long long)(f->stack_hi - f->stack_lo) >> 10);
  const Request& r = *f->worker->launch->request;
  long best = -1;
  long long best_distance = (1 << 28) + (1 << 20);
  for (u32 i = 0; i < r.n_buffers; ++i) {
    const long long before = (long long)(u64(r.buffers[i].base) - p), after = (long long)(p - u64(r.buffers[i].base) - r.buffers[i].bytes);
    const long long d = before > 0 ? before : after;
    if (d < best_distance) { best_distance = d; best = long(i); }
  }
  if (best < 0) fail("bounds", site, "an access to address 0x%llx, which no buffer is near", (unsigned long long)p);
  char text[96];
  std::snprintf(text, sizeof text, "an access outside of every buffer");
  fail_at_buffer("bounds", site, int(best), (long long)(p - u64(r.buffers[best].base)), 0, nullptr, text);
}

}  // namespace

void catch_faults(bool on) {
  if (on) {
    alternate = static_cast<char*>(std::malloc(65536));
    stack_t s{};
    s.ss_sp = alternate;
    s.ss_size = 65536;
    sigaltstack(&s, &previous_stack);
  }
  {
    std::lock_guard<std::mutex> lock(installed_mutex);
    const bool change = on ? installed++ == 0 : --installed == 0;
    if (change) {
      struct sigaction action{};
      action.sa_sigaction = on_signal;
      action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
      sigemptyset(&action.sa_mask);
      for (size_t i = 0; i < sizeof kSignals / sizeof kSignals[0]; ++i) {
        if (on) sigaction(kSignals[i], &action, &previous[i]);
        else sigaction(kSignals[i], &previous[i], nullptr);
      }
      if (on) sigaction(watch_signal(), &action, &previous_alarm);
      else sigaction(watch_signal(), &previous_alarm, nullptr);
    }
  }
  if (!on) {
    sigaltstack(&previous_stack, nullptr);
    std::free(alternate);
    alternate = nullptr;
  }
}

void watch(Launch& launch, std::atomic<bool>& done, unsigned long host_thread, u32 timeout_ms) {
  auto wait = [&done](u32 ms) {
    for (u32 waited = 0; waited < ms && !done; waited += 2) {
      timespec t{0, 2000000};
      nanosleep(&t, nullptr);
    }
  };
  wait(timeout_ms);
  launch.expired = true;   // seen at the next access or switch; the signal is for a loop that has neither
  wait(300);
  if (!done) pthread_kill(pthread_t(host_thread), watch_signal());
}

}  // namespace fr_sim

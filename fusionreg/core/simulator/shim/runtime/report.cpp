// How a fault leaves the launch: the first one is described in the Result, then every fiber is abandoned.
#include "checker.h"

namespace fr_sim {

void describe(Where& where, const Fiber* f, const Site& site) {
  std::memcpy(where.thread, f->thread, sizeof where.thread);
  std::memcpy(where.block, f->block, sizeof where.block);
  where.pc = reinterpret_cast<u64>(site.pc);
  where.line = site.line;
  std::snprintf(where.file, sizeof where.file, "%s", site.file ? site.file : "");
}

namespace {

bool record(Launch& l, const char* detector, const Fiber* f, const Site& site, const char* message) {
  std::lock_guard<std::mutex> lock(l.mutex);
  if (l.failed.exchange(true)) return false;
  Result& r = *l.result;
  r.failed = 1;
  std::snprintf(r.detector, sizeof r.detector, "%s", detector);
  std::snprintf(r.message, sizeof r.message, "%s", message);
  if (f && f->owner) {
    describe(r.at, f, site);
    r.has_at = 1;
    r.copy_image = reinterpret_cast<u64>(f->owner->copy->image);
  }
  return true;
}

const char* waits_for(const Fiber* f, char* text, size_t n) {
  static const char* const block_ops[] = {"__syncthreads", "__syncthreads_count", "__syncthreads_and", "__syncthreads_or"};
  switch (f->wait) {
    case Wait::Block: std::snprintf(text, n, "waiting at %s of line %d", block_ops[f->wait_op], f->site.line); break;
    case Wait::Warp:
      std::snprintf(text, n, "waiting at %s%s%.0d with mask 0x%08x", op_name(f->wait_op), f->site.line ? " of line " : "", f->site.line, f->wait_mask);
      break;
    case Wait::Warpgroup: std::snprintf(text, n, "waiting at wgmma.mma_async for the rest of its warpgroup"); break;
    case Wait::Named: std::snprintf(text, n, "waiting at named barrier %d", f->wait_op); break;
    case Wait::Cluster: std::snprintf(text, n, "waiting at the cluster barrier"); break;
    case Wait::Grid: std::snprintf(text, n, "waiting at the grid barrier"); break;
    case Wait::Spin: std::snprintf(text, n, "spinning for what never comes (an mbarrier phase, a flag, a lock)"); break;
    case Wait::None: std::snprintf(text, n, "%s", f->exited ? "exited" : "ready"); break;
  }
  return text;
}

}  // namespace

void fail(const char* detector, const Site& site, const char* format, ...) {
  char message[1024];
  va_list list;
  va_start(list, format);
  std::vsnprintf(message, sizeof message, format, list);
  va_end(list);
  Fiber* f = self();
  Worker& w = *f->worker;
  record(*w.launch, detector, f == &w.main ? nullptr : f, site, message);
  siglongjmp(w.on_fault, 1);
}

void report_deadlock(Worker& w) {
  // Threads grouped by what they do; the first block that is stuck stands for all.
  std::string text;
  const Fiber* first = nullptr;
  for (auto& b : w.blocks) {
    if (!b.live) continue;
    std::map<std::string, std::pair<u32, const Fiber*>> groups;
    for (u32 t = 0; t < b.threads; ++t) {
      char buffer[160];
      auto& g = groups[waits_for(&b.fibers[t], buffer, sizeof buffer)];
      if (!g.first++) g.second = &b.fibers[t];
    }
    char head[96];
    std::snprintf(head, sizeof head, "block (%u, %u, %u) cannot go on:", b.index[0], b.index[1], b.index[2]);
    text = head;
    for (auto& [what, g] : groups) {
      char line[256];
      std::snprintf(line, sizeof line, " %u thread%s %s, the first is (%u, %u, %u);", g.first, g.first == 1 ? "" : "s", what.c_str(), g.second->thread[0],
                    g.second->thread[1], g.second->thread[2]);
      text += line;
      if (!g.second->exited && (!first || g.second->wait == Wait::Warp)) first = g.second;
    }
    text.pop_back();
    break;
  }
  record(*w.launch, "deadlock", first, first ? first->site : Site{}, text.c_str());
  siglongjmp(w.on_fault, 1);
}

void fail_expired(const Site& site) {
  fail("timeout", site, "the launch did not end within %u ms", self()->worker->launch->request->timeout_ms);
}

void fail_at_buffer(const char* detector, const Site& site, int buffer, long long offset, u64 bytes, const Where* other, const char* message) {
  Fiber* f = self();
  Worker& w = *f->worker;
  if (record(*w.launch, detector, f, site, message)) {
    Result& r = *w.launch->result;
    r.buffer = buffer;
    r.offset = offset;
    r.bytes = bytes;
    if (other) { r.other = *other; r.has_other = 1; }
  }
  siglongjmp(w.on_fault, 1);
}

}  // namespace fr_sim

FRSIM_API void frsim_trap(const char* what, const char* file, int line) {
  fr_sim::fail("trap", fr_sim::Site{file, line, FRSIM_PC}, "%s", what);
}

#pragma once
#include "runtime.h"

namespace fr_sim {
void prepare(Fiber& f, void (*entry)());          // a fresh context that starts in entry
char* take_stacks(u64 count, u64 stride);         // null when the system has no memory
void give_stacks(char* base);
}  // namespace fr_sim

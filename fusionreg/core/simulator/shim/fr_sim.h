// Force-included before every unit that the simulator compiles (normally as a precompiled header).
// It reads NVIDIA's headers in host mode, then defines CUDA's language and library on the CPU.
#pragma once
#define FUSIONREG_SIM 1

// libstdc++ brings C++17's Bessel functions and their like with <math.h>, whose templates every unit would instantiate anew,
// precompiled header or not: a sixth of the time that a unit takes.
#include <cstddef>
#ifdef _GLIBCXX_USE_STD_SPEC_FUNCS
#undef _GLIBCXX_USE_STD_SPEC_FUNCS
#endif

#include <assert.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include <vector_functions.h>
#include <vector_types.h>

#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "fr_sim_api.h"
#include "fr_sim_model.h"

#undef __shared__
#undef __device__
#undef __host__
#undef __global__
#undef __constant__
#undef __managed__
#undef __grid_constant__
#undef __launch_bounds__
#undef __cluster_dims__
#undef __maxnreg__
#undef __forceinline__
#undef __noinline__
#undef __restrict__
#undef __align__
#undef __builtin_align__
#undef assert
#define __device__
#define __host__
#define __global__
#define __constant__
#define __managed__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __maxnreg__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
// Shared variables are the unit's .bss; every block that is resident at the same time runs its own loaded copy of the unit.
// (A section of their own would not do: gcc ignores the section attribute on static variables of templates. The driver refuses
// other uninitialised variables, and rewrites `extern __shared__ T name[];` to a pointer to frsim_dynamic. "used" keeps the
// compiler from folding a variable that nobody writes to zero.)
#define __shared__ static __attribute__((used))
#define FRSIM_HERE const char* file = __builtin_FILE(), int line = __builtin_LINE()

#include "fr_sim_execution.h"
#include "fr_sim_integer.h"
#include "fr_sim_math.h"
#include "fr_sim_half.h"
#include "fr_sim_atomic.h"
#include "fr_sim_device.h"

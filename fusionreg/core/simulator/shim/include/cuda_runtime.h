// Stands in for CUDA's: a unit needs nothing of the host API, and the language comes from fr_sim.h.
#pragma once

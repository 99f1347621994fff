// What the libraries of the null GPU share: which card it is, and what is counted. See README.md.
#pragma once
#include <cstddef>
#include <cstdlib>

// Counts a call under a kind, such as "kernel" or "sync", and a name. It is in libcudart.
extern "C" void null_gpu_count(const char* kind, const char* name);

struct Card {
  int capability;  // ten times the compute capability
  const char* name;
  double gib;
  int processors;
  int shared_memory;  // bytes that a block may ask for at most
  int threads;        // of a processor
};

constexpr Card CARDS[] = {
    {90, "NVIDIA H100 80GB HBM3", 79.1, 132, 232448, 2048}, {86, "NVIDIA GeForce RTX 3090", 23.6, 82, 101376, 1536},
    {80, "NVIDIA A100-SXM4-40GB", 39.5, 108, 166912, 2048}, {75, "Tesla T4", 14.6, 40, 65536, 1024},
    {70, "Tesla V100-SXM2-16GB", 15.8, 80, 98304, 2048},
};
constexpr int OLDEST_CODE = 75;  // the wheel of CUDA 13 has machine code for cards from here on
constexpr int CUDA = 13000;      // the version of its runtime, which the driver must have, too

inline double setting(const char* name, double otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atof(text) : otherwise;
}

inline const Card& card() {
  static const Card& chosen = []() -> const Card& {
    int capability = (int)setting("NULL_GPU_CAPABILITY", 90);
    for (const Card& one : CARDS)
      if (one.capability == capability) return one;
    std::abort();  // no such card: run.sh has checked it
  }();
  return chosen;
}

inline int driver_version() { return (int)setting("NULL_GPU_DRIVER", CUDA); }
inline int device_count() { return (int)setting("NULL_GPU_DEVICES", 1); }
inline bool refuses_graph(long number) {
  long first = (long)setting("NULL_GPU_REFUSES_GRAPHS", 0);
  return first && number >= first;
}
inline bool refuses_modules() { return setting("NULL_GPU_REFUSES_MODULES", 0) != 0; }
inline size_t memory() {
  static const size_t bytes = (size_t)(setting("NULL_GPU_GIB", card().gib) * (1ull << 30));
  return bytes;
}

// libcublasLt.so.13 of the null GPU: products are counted. (Its header needs files that no wheel has.)
#include "null_gpu.h"

#include <cstring>

constexpr size_t HEURISTIC = 96;  // bytes of a cublasLtMatmulHeuristicResult_t

static int make(void** handle) {
  *handle = calloc(1, 256);
  return 0;
}
static int destroy(void* handle) {
  free(handle);
  return 0;
}

extern "C" {
int cublasLtCreate(void** handle) { return make(handle); }
int cublasLtMatmulDescCreate(void** handle) { return make(handle); }
int cublasLtMatrixLayoutCreate(void** handle) { return make(handle); }
int cublasLtMatmulPreferenceCreate(void** handle) { return make(handle); }
int cublasLtDestroy(void* handle) { return destroy(handle); }
int cublasLtMatmulDescDestroy(void* handle) { return destroy(handle); }
int cublasLtMatrixLayoutDestroy(void* handle) { return destroy(handle); }
int cublasLtMatmulPreferenceDestroy(void* handle) { return destroy(handle); }

// One way to multiply, without a workspace.
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* found, int* count) {
  memset(found, 0, HEURISTIC);
  *count = 1;
  return 0;
}
int cublasLtMatmul() {
  null_gpu_count("product", "cublasLtMatmul");
  return 0;
}

const char* cublasLtGetStatusString(int) { return "an error of the null GPU's cuBLAS"; }
const char* cublasLtGetStatusName(int) { return "an error of the null GPU's cuBLAS"; }
size_t cublasLtGetVersion() { return 130100; }
}

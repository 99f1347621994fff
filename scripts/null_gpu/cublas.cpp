// libcublas.so.13 of the null GPU: products are counted.
#include "null_gpu.h"

#define PRODUCT(name) \
  int name() { null_gpu_count("product", #name); return 0; }

extern "C" {
int cublasCreate_v2(void** handle) {
  *handle = malloc(64);
  return 0;
}
int cublasDestroy_v2(void* handle) {
  free(handle);
  return 0;
}
int cublasGetVersion_v2(void*, int* version) {
  *version = 130100;
  return 0;
}
int cublasGetPointerMode_v2(void*, int* mode) {
  *mode = 0;
  return 0;
}
int cublasGetMathMode(void*, int* mode) {
  *mode = 0;
  return 0;
}
int cublasGetStream_v2(void*, void** stream) {
  *stream = nullptr;
  return 0;
}
const char* cublasGetStatusString(int) { return "an error of the null GPU's cuBLAS"; }
const char* cublasGetStatusName(int) { return "an error of the null GPU's cuBLAS"; }
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasSgemmBatched)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasDgemmBatched)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasDgemv_v2)
PRODUCT(cublasHgemm)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasDdot_v2)
PRODUCT(cublasDotEx)
}

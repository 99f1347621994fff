// libcuda.so.1 of the null GPU: what Triton and inductor load machine code and launch it with.
#define __CUDA_API_VERSION_INTERNAL  // the functions under the names that they have in the library
#include "null_gpu.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdio>
#include <mutex>
#include <string>
#include <unordered_map>

namespace {

std::mutex lock;
std::unordered_map<void*, std::string> functions;  // the names of the kernels in modules
CUcontext the_context = (CUcontext)64;

template <typename Handle>
Handle new_handle() {
  static size_t next = 1 << 20;
  std::lock_guard<std::mutex> held(lock);
  return (Handle)(next += 16);
}

CUresult load(CUmodule* module) {
  if (refuses_modules()) return CUDA_ERROR_NO_BINARY_FOR_GPU;
  *module = new_handle<CUmodule>();
  return CUDA_SUCCESS;
}

CUresult launch(CUfunction function) {
  std::string name;
  {
    std::lock_guard<std::mutex> held(lock);
    name = functions[function];
  }
  null_gpu_count("triton", name.c_str());
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

CUresult cuInit(unsigned) { return driver_version() < CUDA ? CUDA_ERROR_SYSTEM_DRIVER_MISMATCH : CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) {
  *version = driver_version();
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "an error of the null GPU's driver";
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** text) { return cuGetErrorString(error, text); }
CUresult cuGetProcAddress_v2(const char* name, void** found, int, cuuint64_t, CUdriverProcAddressQueryResult* result) {
  *found = dlsym(RTLD_DEFAULT, name);
  if (result) *result = *found ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// What CUPTI, the library of profilers, would be let in by: it sees no kernel here, and says so.
CUresult cuGetExportTable(const void** table, const CUuuid*) {
  *table = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}

// ---- devices and contexts -------------------------------------------------------------------------------------------

CUresult cuDeviceGetCount(int* count) { return (CUresult)cudaGetDeviceCount(count); }
CUresult cuDeviceGet(CUdevice* device, int index) {
  *device = index;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char* text, int size, CUdevice) {
  snprintf(text, size, "%s", card().name);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return (CUresult)cudaDeviceGetAttribute(value, (cudaDeviceAttr)attribute, device);  // they have the same numbers
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = the_context;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice* device) { return (CUresult)cudaGetDevice(device); }
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { return cuCtxGetCurrent(context); }
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void* found, CUpointer_attribute attribute, CUdeviceptr pointer) {
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr*)found = pointer;
  return CUDA_SUCCESS;
}

// ---- machine code ---------------------------------------------------------------------------------------------------

CUresult cuModuleLoad(CUmodule* module, const char*) { return load(module); }
CUresult cuModuleLoadData(CUmodule* module, const void*) { return load(module); }
CUresult cuModuleLoadDataEx(CUmodule* module, const void*, unsigned, CUjit_option*, void**) { return load(module); }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  *function = new_handle<CUfunction>();
  std::lock_guard<std::mutex> held(lock);
  functions[*function] = name;
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = 0;
  if (attribute == CU_FUNC_ATTRIBUTE_NUM_REGS) *value = 32;
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK) *value = 1024;
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
  *clusters = card().processors / 2;
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) {
  *blocks = 2;
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        CUstream, void**, void**) {
  return launch(function);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig*, CUfunction function, void**, void**) { return launch(function); }
CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                   unsigned, CUstream, void**) {
  return launch(function);
}
}

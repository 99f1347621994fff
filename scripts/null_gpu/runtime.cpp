// libcudart.so.13 of the null GPU: memory is the host's, copies are made, kernels are counted and do nothing.
#include "null_gpu.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>

namespace {

constexpr size_t TAKEN = 512ull << 20;      // bytes of a card that contexts take before anybody asks
constexpr size_t LARGEST = 16ull << 20;     // larger copies within a device and memsets need too much real memory
constexpr int MOST_DEVICES = 64;

std::mutex lock;
std::map<std::string, std::map<std::string, long>> counts;
std::unordered_map<const void*, const char*> kernels;  // the names of the kernels in torch's libraries
std::map<const char*, size_t> on_device, pinned;       // allocations, by their start
std::map<const char*, int> owners;                     // the device of each
size_t in_use[MOST_DEVICES];
thread_local int device = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t fail(cudaError_t error) { return last_error = error; }

void* map_memory(size_t bytes) {  // which takes no room before it is written
  return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

bool holds(const std::map<const char*, size_t>& allocations, const void* pointer) {
  auto next = allocations.upper_bound((const char*)pointer);
  if (next == allocations.begin()) return false;
  auto found = std::prev(next);
  return (const char*)pointer < found->first + found->second;
}

bool is_on_device(const void* pointer) {
  std::lock_guard<std::mutex> held(lock);
  return holds(on_device, pointer);
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> held(lock);
  return holds(pinned, pointer);
}

void copy(void* to, const void* from, size_t bytes) {
  bool onto_device = is_on_device(to), off_device = is_on_device(from);
  if (onto_device && off_device) {
    null_gpu_count("copy", "on the device");
    if (bytes > LARGEST) return;
  } else if (onto_device) {
    null_gpu_count(is_pinned(from) ? "copy" : "pageable copy", "to the device");  // the host waits for the second
  } else if (off_device) {
    null_gpu_count("copy", "to the host");
  }
  memmove(to, from, bytes);
}

// Machine code for cards older than the wheel's is not there.
cudaError_t launch(const void* kernel) {
  if (card().capability < OLDEST_CODE) return fail(cudaErrorNoKernelImageForDevice);
  const char* name = "?";
  {
    std::lock_guard<std::mutex> held(lock);
    auto found = kernels.find(kernel);
    if (found != kernels.end()) name = found->second;
  }
  null_gpu_count("kernel", name);
  return cudaSuccess;
}

template <typename Handle>
cudaError_t new_handle(Handle* handle) {
  static std::atomic<size_t> next{4096};
  *handle = (Handle)(next += 16);
  return cudaSuccess;
}

// The stream that is captured, if one is; whether nothing has broken that off; and how many have been.
std::atomic<cudaStream_t> captured{nullptr};
std::atomic<bool> capture_is_valid{true};
std::atomic<unsigned long long> captures{0};

// What waits for the device, or for the stream that is captured, ends the capture, as on a real device.
cudaError_t unless_captured(bool waits) {
  if (!captured || !waits) return cudaSuccess;
  capture_is_valid = false;
  return cudaErrorStreamCaptureUnsupported;
}

double milliseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

}  // namespace

extern "C" {

// ---- counts ---------------------------------------------------------------------------------------------------------

void null_gpu_count(const char* kind, const char* name) {
  static const std::string launched = "kernel product triton memset collective";
  std::lock_guard<std::mutex> held(lock);
  counts[kind][name]++;
  if (captured && launched.find(kind) != std::string::npos) counts["node"][kind]++;
}

// All counts since the process began, a line "kind\tname\tcount" each. The text is good until the next call.
const char* null_gpu_counts() {
  static std::string text;
  std::lock_guard<std::mutex> held(lock);
  text.clear();
  for (auto& [kind, of_kind] : counts)
    for (auto& [name, count] : of_kind) text += kind + "\t" + name + "\t" + std::to_string(count) + "\n";
  return text.c_str();
}

// ---- kernels, which torch's libraries register as they are loaded ---------------------------------------------------

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* kernel, char*, const char* name, int, void*, void*, void*, void*, int*) {
  std::lock_guard<std::mutex> held(lock);
  kernels[kernel] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 0; }

// What stands in <<<...>>> goes to the launch through these two.
struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
static thread_local Configuration pushed;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  pushed = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared = pushed.shared;
  *(void**)stream = pushed.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch((const void*)kernel);
}
cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) { return launch(kernel); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) { return launch(kernel); }
cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch(kernel);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  function(data);
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  memset(found, 0, sizeof *found);
  found->binaryVersion = found->ptxVersion = card().capability;
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->maxDynamicSharedSizeBytes = card().shared_memory;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute attribute, int value) {
  bool too_much = attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && value > card().shared_memory;
  return too_much ? fail(cudaErrorInvalidValue) : cudaSuccess;
}
cudaError_t cudaFuncGetName(const char** name, const void*) {
  *name = "";
  return cudaSuccess;
}
cudaError_t cudaGetFuncBySymbol(cudaFunction_t* function, const void* symbol) {
  *function = (cudaFunction_t)symbol;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t*) {
  *clusters = card().processors / 2;
  return cudaSuccess;
}

// ---- devices --------------------------------------------------------------------------------------------------------

cudaError_t cudaDriverGetVersion(int* version) {
  *version = driver_version();
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDA;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  if (driver_version() < CUDA) return fail(cudaErrorInsufficientDriver);
  *count = device_count();
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* current) {
  *current = device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int wanted) {
  if (wanted >= device_count()) return fail(cudaErrorInvalidDevice);
  device = wanted;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int of) {
  memset(found, 0, sizeof *found);
  snprintf(found->name, sizeof found->name, "%s", card().name);
  found->uuid.bytes[0] = (char)(of + 1);
  found->pciBusID = of + 1;
  found->major = card().capability / 10;
  found->minor = card().capability % 10;
  found->multiProcessorCount = card().processors;
  found->totalGlobalMem = memory();
  found->l2CacheSize = 50 << 20;
  found->memoryBusWidth = 5120;
  found->warpSize = 32;
  found->maxThreadsPerBlock = 1024;
  found->maxThreadsPerMultiProcessor = card().threads;
  found->maxBlocksPerMultiProcessor = 32;
  found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerBlockOptin = card().shared_memory;
  found->sharedMemPerMultiprocessor = card().shared_memory + 1024;
  found->textureAlignment = 512;
  found->asyncEngineCount = 3;
  found->unifiedAddressing = found->concurrentKernels = found->canMapHostMemory = found->cooperativeLaunch = 1;
  found->managedMemory = found->concurrentManagedAccess = found->memoryPoolsSupported = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int of) {
  cudaDeviceProp card_of;
  cudaGetDeviceProperties(&card_of, of);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = card_of.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = card_of.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = card_of.multiProcessorCount; break;
    case cudaDevAttrL2CacheSize: *value = card_of.l2CacheSize; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = card_of.memoryBusWidth; break;
    case cudaDevAttrWarpSize: *value = card_of.warpSize; break;
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *value = card_of.maxThreadsPerBlock; break;
    case cudaDevAttrMaxBlockDimZ: *value = card_of.maxThreadsDim[2]; break;
    case cudaDevAttrMaxGridDimX: *value = card_of.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = card_of.maxGridSize[1]; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = card_of.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = card_of.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = card_of.regsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)card_of.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)card_of.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)card_of.sharedMemPerMultiprocessor; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1024; break;
    case cudaDevAttrTotalConstantMemory: *value = 65536; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    case cudaDevAttrMemoryClockRate: *value = 2619000; break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrConcurrentKernels: *value = 1; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetLimit(size_t* value, cudaLimit) {
  *value = 1024;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int of) {
  snprintf(text, size, "0000:%02d:00.0", of + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) { return new_handle(pool); }

// ---- errors ---------------------------------------------------------------------------------------------------------

cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNoKernelImageForDevice: return "no kernel image is available for execution on the device";
    default: return "an error of the null GPU";
  }
}
const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

// ---- memory ---------------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  null_gpu_count("allocation", "on the device");
  std::lock_guard<std::mutex> held(lock);
  *pointer = nullptr;
  if (in_use[device] + bytes + TAKEN > memory()) return fail(cudaErrorMemoryAllocation);
  void* room = map_memory(bytes + 1);
  if (room == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  on_device[(char*)room] = bytes + 1;
  owners[(char*)room] = device;
  in_use[device] += bytes;
  *pointer = room;
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  std::lock_guard<std::mutex> held(lock);
  auto found = on_device.find((char*)pointer);
  if (found == on_device.end()) return cudaSuccess;
  munmap(pointer, found->second);
  in_use[owners[(char*)pointer]] -= found->second - 1;
  owners.erase((char*)pointer);
  on_device.erase(found);
  return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) { return cudaMalloc(pointer, bytes); }
cudaError_t cudaMallocManaged(void** pointer, size_t bytes, unsigned) { return cudaMalloc(pointer, bytes); }
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  std::lock_guard<std::mutex> held(lock);
  *total = memory();
  *free = memory() - TAKEN - in_use[device];
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  null_gpu_count("allocation", "pinned");
  std::lock_guard<std::mutex> held(lock);
  *pointer = map_memory(bytes + 1);
  if (*pointer == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  pinned[(char*)*pointer] = bytes + 1;
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }
cudaError_t cudaFreeHost(void* pointer) {
  std::lock_guard<std::mutex> held(lock);
  auto found = pinned.find((char*)pointer);
  if (found == pinned.end()) return cudaSuccess;
  munmap(pointer, found->second);
  pinned.erase(found);
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** found, void* pointer, unsigned) {
  *found = pointer;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* pointer) {
  memset(found, 0, sizeof *found);
  found->device = device;
  found->devicePointer = (void*)pointer;
  found->type = cudaMemoryTypeUnregistered;
  if (is_on_device(pointer)) found->type = cudaMemoryTypeDevice;
  if (is_pinned(pointer)) {
    found->type = cudaMemoryTypeHost;
    found->hostPointer = (void*)pointer;
  }
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  if (captured && stream == captured) null_gpu_count("node", "copy");  // another thread may copy batches meanwhile
  copy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  null_gpu_count("sync", "cudaMemcpy");
  copy(to, from, bytes);
  return unless_captured(true);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t) {
  copy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
  null_gpu_count("memset", "");
  if (bytes <= LARGEST) memset(pointer, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t) {
  return cudaMemset(pointer, value, bytes);
}
cudaError_t cudaGetSymbolAddress(void** pointer, const void*) {
  static char room[1 << 16];
  *pointer = room;
  return cudaSuccess;
}

// ---- streams and events: all work is done as soon as it is asked for ------------------------------------------------

cudaError_t cudaDeviceSynchronize() {
  null_gpu_count("sync", "cudaDeviceSynchronize");
  return unless_captured(true);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  null_gpu_count("sync", "cudaStreamSynchronize");
  return unless_captured(stream == captured);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return new_handle(stream); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return new_handle(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return new_handle(stream); }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t) {
  null_gpu_count("sync", "cudaEventSynchronize");
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = (cudaEvent_t)calloc(1, sizeof(double));
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  free(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  *(double*)event = milliseconds();
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventElapsedTime(float* found, cudaEvent_t begin, cudaEvent_t end) {
  *found = (float)(*(double*)end - *(double*)begin + 1e-3);  // never nothing, by which somebody may divide
  return cudaSuccess;
}

// ---- graphs: what is captured is launched all the same, and a graph launches nothing --------------------------------

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (captured) return cudaErrorIllegalState;
  captured = stream;
  capture_is_valid = true;
  ++captures;
  null_gpu_count("graph", "captured");
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  if (captured != stream) return cudaErrorStreamCaptureUnmatched;
  captured = nullptr;
  *graph = nullptr;
  return capture_is_valid && !refuses_graph(captures) ? new_handle(graph) : cudaErrorStreamCaptureInvalidated;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = captured && stream == captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                     size_t* dependencies) {
  if (id) *id = captures;
  if (dependencies) *dependencies = 0;
  return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* graph, cudaGraph_t, unsigned long long) { return new_handle(graph); }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* graph, cudaGraph_t, unsigned long long) {
  return new_handle(graph);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  null_gpu_count("graph", "launched");
  return cudaSuccess;
}

// ---- the driver, which torch and Triton ask for by name -------------------------------------------------------------

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  *found = driver ? dlsym(driver, name) : nullptr;
  if (result) *result = *found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
}

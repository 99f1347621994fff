// libnccl.so.2 of the null GPU: every rank is taken to send what this one sends, and a sum is what this one adds to it.
// (The header of NCCL needs files that no wheel has.)
#include "null_gpu.h"

#include <cuda_runtime_api.h>

#include <cstring>

struct Id {
  char bytes[128];
};
struct Group {
  int size, rank;
};

constexpr int VERSION = 22809;
constexpr int BYTES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // of each ncclDataType_t

static int copy(const char* collective, const void* from, void* to, size_t bytes, cudaStream_t stream) {
  null_gpu_count("collective", collective);
  if (from != to) cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
  return 0;
}

extern "C" {
int ncclGetVersion(int* version) {
  *version = VERSION;
  return 0;
}
int ncclGetUniqueId(Id* id) {
  memset(id, 7, sizeof *id);
  return 0;
}
int ncclCommInitRank(Group** made, int size, Id, int rank) {
  *made = new Group{size, rank};
  return 0;
}
int ncclCommInitRankConfig(Group** made, int size, Id id, int rank, void*) {
  return ncclCommInitRank(made, size, id, rank);
}
int ncclCommInitRankScalable(Group** made, int size, int rank, int, Id* ids, void*) {
  return ncclCommInitRank(made, size, ids[0], rank);
}
int ncclCommCount(const Group* group, int* size) {
  *size = group->size;
  return 0;
}
int ncclCommUserRank(const Group* group, int* rank) {
  *rank = group->rank;
  return 0;
}
int ncclCommGetAsyncError(Group*, int* error) {
  *error = 0;
  return 0;
}
const char* ncclGetErrorString(int) { return "an error of the null GPU's NCCL"; }
const char* ncclGetLastError(Group*) { return ""; }

int ncclAllReduce(const void* from, void* to, size_t count, int type, int, Group*, cudaStream_t stream) {
  return copy("ncclAllReduce", from, to, count * BYTES[type], stream);
}
int ncclBroadcast(const void* from, void* to, size_t count, int type, int, Group*, cudaStream_t stream) {
  return copy("ncclBroadcast", from, to, count * BYTES[type], stream);
}
int ncclAllGather(const void* from, void* to, size_t count, int type, Group* group, cudaStream_t stream) {
  size_t bytes = count * BYTES[type];
  for (int rank = 0; rank < group->size; rank++) copy("ncclAllGather", from, (char*)to + rank * bytes, bytes, stream);
  return 0;
}
}

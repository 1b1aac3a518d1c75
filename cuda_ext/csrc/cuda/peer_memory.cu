// Windows of memory that processes of one host share (raylm/cuda/peer.cuh), for raylm/ops/peer_memory.py. They are
// allocated past torch's caching allocator: a block of that one would take all its neighbours along to the peers.
// Each function makes its device the thread's, and returns null or the text of what went wrong.
#include <cuda_runtime.h>

#include <cstring>

#include "raylm/cuda/peer.cuh"

namespace {

// Runs the calls until one fails; its error is not left for the next kernel launch to find.
template <typename... Calls>
const char* run(int device, const Calls&... calls) {
  cudaError_t error = cudaSetDevice(device);
  ((error = error == cudaSuccess ? calls() : error), ...);
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();
  return cudaGetErrorString(error);
}

}  // namespace

#define RAYLM_EXPORT extern "C" __attribute__((visibility("default")))

RAYLM_EXPORT int raylm_peer_handle_bytes() { return sizeof(cudaIpcMemHandle_t); }

// A window with no call counted and no flag raised, and its handle for other processes.
RAYLM_EXPORT const char* raylm_peer_allocate(int device, int64_t capacity, void** window, char* handle) {
  const int64_t bytes = raylm::cuda::peer_window_bytes(capacity);
  cudaIpcMemHandle_t ipc{};
  *window = nullptr;
  const char* error = run(
      device, [&] { return cudaMalloc(window, bytes); }, [&] { return cudaMemset(*window, 0, bytes); },
      [&] { return cudaDeviceSynchronize(); }, [&] { return cudaIpcGetMemHandle(&ipc, *window); });
  if (error != nullptr && *window != nullptr) run(device, [&] { return cudaFree(*window); });
  std::memcpy(handle, &ipc, sizeof(ipc));
  return error;
}

// Another process's window.
RAYLM_EXPORT const char* raylm_peer_open(int device, const char* handle, void** window) {
  cudaIpcMemHandle_t ipc;
  std::memcpy(&ipc, handle, sizeof(ipc));
  return run(device, [&] { return cudaIpcOpenMemHandle(window, ipc, cudaIpcMemLazyEnablePeerAccess); });
}

RAYLM_EXPORT const char* raylm_peer_close(int device, void* window) {
  return run(device, [&] { return cudaIpcCloseMemHandle(window); });
}

RAYLM_EXPORT const char* raylm_peer_free(int device, void* window) {
  return run(device, [&] { return cudaFree(window); });
}

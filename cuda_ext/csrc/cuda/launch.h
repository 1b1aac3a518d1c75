// What the CUDA launchers share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include <array>
#include <atomic>

#include "checks.h"

// It lives in torch's CUDA library; weak, so that this extension also loads into a torch for CPUs only.
#pragma weak aoti_torch_get_current_cuda_stream

namespace raylm::cuda {

inline cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  if (&aoti_torch_get_current_cuda_stream == nullptr) throw std::runtime_error("raylm: this torch has no CUDA");
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

inline void check_launch(const char* op) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) fail(op, "the kernel could not be launched: ", cudaGetErrorString(error));
}

// Calls body(T{}) with the CUDA type of the tensor's dtype, which has been checked to be one of these.
template <typename Body>
void by_dtype(const Tensor& tensor, const Body& body) {
  switch (tensor.scalar_type()) {
    case ScalarType::BFloat16: return body(__nv_bfloat16{});
    case ScalarType::Half: return body(__half{});
    default: return body(float{});
  }
}

template <typename T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

inline bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// Whether kernels that need sm_90a were compiled: they are empty where another architecture was asked for.
#ifdef RAYLM_SM90A
constexpr bool kHopperKernels = true;
#else
constexpr bool kHopperKernels = false;
#endif

inline int device_attribute(cudaDeviceAttr which, int32_t device) {
  int value = 0;
  cudaDeviceGetAttribute(&value, which, device);
  return value;
}

inline int compute_major(int32_t device) { return device_attribute(cudaDevAttrComputeCapabilityMajor, device); }

template <typename A, typename B>
constexpr auto divide_up(A a, B b) {
  return (a + b - 1) / b;
}

// A number that takes long to find out and is each device's own: found out once.
class DeviceNumber {
 public:
  template <typename Find>
  int of(int device, const Find& find) {
    if (device >= kMost) return find();
    if (known_[device] == 0) known_[device] = find() + 1;
    return known_[device] - 1;
  }

 private:
  static constexpr int kMost = 64;
  std::array<std::atomic<int>, kMost> known_{};  // plus one; 0: not yet
};

// Lets a kernel be launched with so many bytes of dynamic shared memory, always the same number for a kernel. False where
// a block of the device cannot have them. The driver is asked once for a kernel and device.
template <auto Kernel>
bool allows_shared(int device, int bytes) {
  static DeviceNumber allowed;
  return allowed.of(device, [&] {
    const bool allows = cudaFuncSetAttribute(Kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) == cudaSuccess;
    cudaGetLastError();  // forgotten, or the next check would find it
    return static_cast<int>(allows);
  });
}

template <auto Kernel>
void allow_shared(const char* op, int device, int bytes) {
  if (!allows_shared<Kernel>(device, bytes)) {
    fail(op, "its kernel needs ", bytes, " bytes of shared memory a block, which this device has not");
  }
}

// Has a grid's blocks run in clusters of `blocks` neighbours in x.
inline cudaLaunchAttribute cluster_attribute(unsigned blocks) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {blocks, 1, 1};
  return attribute;
}

// How many clusters of `blocks` blocks the device runs at a time. A block has `threads` threads and `shared` bytes of
// dynamic shared memory, which become the most that the kernel may be launched with. 0 where it cannot run so.
inline int resident_clusters(const void* kernel, unsigned blocks, unsigned threads, int shared) {
  cudaLaunchAttribute cluster = cluster_attribute(blocks);
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared;
  config.attrs = &cluster;
  config.numAttrs = 1;
  int clusters = 0;
  const bool known = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared) == cudaSuccess &&
                     cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess;
  cudaGetLastError();  // of these two
  return known ? clusters : 0;
}

struct Launch {
  dim3 grid, block;
  cudaStream_t stream;
  size_t shared = 0;     // bytes of dynamic shared memory
  unsigned cluster = 1;  // blocks of a cluster
};

// Launches a kernel that may start while the one before it on the stream drains (programmatic dependent launch, compute
// capability 9.0): the kernel waits for it by itself, see raylm/cuda/ptx/grid.cuh.
template <typename... Params>
void launch_dependent(void (*kernel)(Params...), const Launch& launch, const Params&... params) {
  int device = 0;
  cudaGetDevice(&device);
  cudaLaunchAttribute attributes[2]{{}, cluster_attribute(launch.cluster)};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = launch.grid;
  config.blockDim = launch.block;
  config.dynamicSmemBytes = launch.shared;
  config.stream = launch.stream;
  config.attrs = attributes;
  config.numAttrs = compute_major(device) < 9 ? 0 : launch.cluster > 1 ? 2 : 1;
  cudaLaunchKernelEx(&config, kernel, params...);  // its error is read by check_launch
}

template <typename... Params>
void launch_dependent(void (*kernel)(Params...), dim3 grid, dim3 block, cudaStream_t stream, const Params&... params) {
  launch_dependent(kernel, Launch{grid, block, stream}, params...);
}

constexpr int64_t kMaxGridY = 65535;  // blocks

// Threads for a row of `size` elements: whole warps, at most `most`.
inline unsigned threads_for(int64_t size, int64_t most) {
  const int64_t warps = divide_up(size, 32);
  return static_cast<unsigned>(32 * (warps < 1 ? 1 : warps > most / 32 ? most / 32 : warps));
}

using Guard = torch::stable::accelerator::DeviceGuard;

}  // namespace raylm::cuda

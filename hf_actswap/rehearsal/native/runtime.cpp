// The functions of the CUDA runtime, as PyTorch calls them. Those that are not here are written by build.py: they return 0
// and are counted. Structures of the runtime come from the header in NVIDIA's wheel.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "device.hpp"
#include "driver_types.h"

using namespace rehearsal;

namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local struct {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
} launch_configuration;

cudaError_t failed(cudaError_t error) {
  last_error = error;
  return error;
}

Event& event_of(cudaEvent_t event) { return *(Event*)event; }

// The state of the devices: an error if another rank has ended, or did not come.
cudaError_t state() { return order().failure.empty() ? cudaSuccess : failed(cudaErrorLaunchFailure); }

cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t handle, bool synchronous) {
  if (!bytes) return cudaSuccess;
  int target = memory().device_of(to), source = memory().device_of(from);
  Stream& stream = stream_of(handle);
  counts().copies++;
  Direction direction = Direction::on_device;
  if (target >= 0 && source < 0) direction = Direction::to_device, counts().to_device += bytes;
  else if (source >= 0 && target < 0) direction = Direction::to_host, counts().to_host += bytes;
  else if (source != target) direction = Direction::between_devices;
  // Memory that is not page-locked is copied before the call returns.
  bool pageable = direction == Direction::to_device ? !memory().is_locked(from)
                  : direction == Direction::to_host ? !memory().is_locked(to)
                                                    : false;
  bool at_once = synchronous || pageable || direction == Direction::on_device;
  Guard guard(order().mutex);
  order().enqueue(stream, (char*)to, (const char*)from, bytes, at_once);
  copy_enqueued(stream.times, stream.device, direction, bytes);
  bool host_from = direction == Direction::to_device && pageable, host_to = direction == Direction::to_host && pageable;
  const char* name = direction == Direction::to_device ? "a copy to the device"
                     : direction == Direction::to_host ? "a copy to the host"
                                                       : "a copy";
  if (!host_from) order().touch(stream, from, bytes, false, name);
  if (!host_to) order().touch(stream, to, bytes, true, name);
  if (synchronous || host_to) order().synchronize(stream);
  return state();
}

cudaError_t fill(void* at, int value, size_t bytes, cudaStream_t handle) {
  Stream& stream = stream_of(handle);
  Guard guard(order().mutex);
  order().run_kernel(stream);
  kernel_launched(stream.times);
  order().touch(stream, at, bytes, true, "memset");
  if (bytes <= order().real_bytes) memset(at, value, bytes);
  return cudaSuccess;
}

uint64_t setting(const char* key, uint64_t otherwise) { return settings().number(key, otherwise); }

// The architecture that the program's kernels were compiled for, as 86 for sm_86: the device's own, or an older one.
// 0: the device's own. Settings are read at the first use of the device and not here: a test changes them before.
int& kernel_architecture() {
  static int one = 0;
  return one;
}

}  // namespace

extern "C" {

// Devices

cudaError_t cudaGetDeviceCount(int* count) {
  *count = memory().devices;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= memory().devices) return failed(cudaErrorInvalidDevice);
  current_device() = device;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorString(cudaError_t error) {
  switch ((int)error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorLaunchFailure: return order().failure.c_str();
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered: return "pointer does not correspond to a registered memory region";
    case cudaErrorNotSupported: return "operation not supported in a rehearsal";
    case cudaErrorInvalidDeviceFunction: return "invalid device function";
    default: return "error of the rehearsal's device";
  }
}
const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }
cudaError_t cudaDriverGetVersion(int* version) {
  *version = (int)setting("cuda_version", 13000);
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
  if (device < 0 || device >= memory().devices) return failed(cudaErrorInvalidDevice);
  memset(found, 0, sizeof *found);
  snprintf(found->name, sizeof found->name, "%s", settings().text("name", "NVIDIA H100 80GB HBM3").c_str());
  for (int i = 0; i < 16; i++) found->uuid.bytes[i] = (char)(device * 16 + i + 1);
  found->totalGlobalMem = memory().total;
  found->major = (int)setting("major", 9);
  found->minor = (int)setting("minor", 0);
  found->multiProcessorCount = (int)setting("processors", 132);
  found->warpSize = 32;
  found->maxThreadsPerMultiProcessor = (int)setting("threads", 2048);
  found->maxThreadsPerBlock = 1024;
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerBlockOptin = setting("shared_bytes", 232448);
  found->sharedMemPerMultiprocessor = setting("shared_bytes", 232448) + 1024;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->l2CacheSize = (int)setting("l2_bytes", 50 << 20);
  found->maxBlocksPerMultiProcessor = 32;
  found->unifiedAddressing = found->concurrentKernels = found->canMapHostMemory = 1;
  for (int i = 0; i < 3; i++) found->maxThreadsDim[i] = i < 2 ? 1024 : 64;
  for (int i = 0; i < 3; i++) found->maxGridSize[i] = i ? 65535 : 2147483647;
  found->textureAlignment = 512;
  found->asyncEngineCount = 3;
  found->pciBusID = device + 1;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties_v2(cudaDeviceProp* found, int device) {  // its name in CUDA 12
  return cudaGetDeviceProperties(found, device);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp all;
  cudaError_t error = cudaGetDeviceProperties(&all, device);
  if (error != cudaSuccess) return error;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = all.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = all.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = all.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)all.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)all.sharedMemPerMultiprocessor; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = all.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrL2CacheSize: *value = all.l2CacheSize; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
    case cudaDevAttrMemoryPoolsSupported: *value = 1; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  snprintf(text, length, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  Guard guard(order().mutex);
  order().synchronize_all();
  return state();
}

// Memory

cudaError_t cudaMalloc(void** found, size_t bytes) {
  *found = memory().take(bytes, current_device());
  return *found ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void* at) {
  if (!at) return cudaSuccess;
  Guard guard(order().mutex);
  order().synchronize_all();
  if (size_t bytes = memory().give_back(at)) order().forget(at, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = memory().limit - memory().used(current_device());
  *total_bytes = memory().total;
  return cudaSuccess;
}

// Allocation in the order of a stream: blocks stay mapped until the stream has passed the call.

cudaError_t cudaMallocAsync(void** found, size_t bytes, cudaStream_t handle) {
  cudaError_t error = cudaMalloc(found, bytes);
  if (error == cudaSuccess) fill(*found, 0xff, bytes, handle);
  return error;
}
cudaError_t cudaFreeAsync(void* at, cudaStream_t handle) {
  Guard guard(order().mutex);
  order().synchronize_all();
  if (size_t bytes = memory().give_back(at)) order().forget(at, bytes);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  *pool = (cudaMemPool_t)(size_t)(device + 1);
  return cudaSuccess;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  int device = (int)(size_t)pool - 1;
  bool high = attribute == cudaMemPoolAttrReservedMemHigh || attribute == cudaMemPoolAttrUsedMemHigh;
  *(uint64_t*)value = high ? memory().peak(device) : memory().used(device);
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

// Host memory

cudaError_t cudaHostAlloc(void** found, size_t bytes, unsigned) {
  *found = memory().take_host(bytes);
  pages_locked(bytes);
  return *found ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
// Managed memory is host memory here: what a paged optimizer keeps, where the device has no room for it.
cudaError_t cudaMallocManaged(void** found, size_t bytes, unsigned) { return cudaHostAlloc(found, bytes, 0); }
cudaError_t cudaFreeHost(void* at) {
  Guard guard(order().mutex);
  order().synchronize_all();
  if (size_t bytes = memory().unlock_pages(at, true)) order().forget(at, bytes);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* at, size_t bytes, unsigned) {
  if (!at || !bytes) return failed(cudaErrorInvalidValue);
  if (!memory().lock_pages(at, bytes)) return failed(cudaErrorHostMemoryAlreadyRegistered);
  pages_locked(bytes);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* at) {
  Guard guard(order().mutex);
  order().synchronize_all();
  size_t bytes = memory().unlock_pages(at, false);
  if (!bytes) return failed(cudaErrorHostMemoryNotRegistered);
  order().forget(at, bytes);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* at) {
  memset(found, 0, sizeof *found);
  int device = memory().device_of(at);
  found->device = device < 0 ? current_device() : device;
  found->type = device >= 0                ? cudaMemoryTypeDevice
                : memory().is_locked(at)   ? cudaMemoryTypeHost
                                           : cudaMemoryTypeUnregistered;
  if (device >= 0) found->devicePointer = (void*)at;
  if (found->type == cudaMemoryTypeHost) found->devicePointer = found->hostPointer = (void*)at;
  return cudaSuccess;
}

// Copies

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return copy(to, from, bytes, nullptr, true);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, bytes, stream, false);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return copy(to, from, bytes, stream, false);
}
cudaError_t cudaMemset(void* at, int value, size_t bytes) { return fill(at, value, bytes, nullptr); }
cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
  return fill(at, value, bytes, stream);
}
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
cudaError_t cudaGetSymbolAddress(void** found, const void*) {
  static char* pages = map_pages(1 << 20);
  *found = pages;
  return cudaSuccess;
}

// Streams and events

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* found, unsigned, int priority) {
  Guard guard(order().mutex);
  *found = (cudaStream_t)order().new_stream(current_device(), priority);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* found) { return cudaStreamCreateWithPriority(found, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }  // its place in the clocks stays taken
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream).priority;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  Guard guard(order().mutex);
  if (state() != cudaSuccess) return state();
  return order().query(stream_of(stream)) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Guard guard(order().mutex);
  order().synchronize(stream_of(stream));
  return state();
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Guard guard(order().mutex);
  order().wait(stream_of(stream), event_of(event));
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                        cudaGraph_t*, const cudaGraphNode_t**, size_t*) {  // CUDA 12
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) { return failed(cudaErrorNotSupported); }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaStreamAddCallback(cudaStream_t stream, void (*call)(cudaStream_t, cudaError_t, void*), void* data,
                                  unsigned) {
  launch(stream);
  call(stream, cudaSuccess, data);
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*call)(void*), void* data) {
  launch(stream);
  call(data);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* found) {
  *found = (cudaEvent_t) new Event();
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* found, unsigned) { return cudaEventCreate(found); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete (Event*)event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Guard guard(order().mutex);
  order().record(event_of(event), stream_of(stream));
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  Guard guard(order().mutex);
  if (state() != cudaSuccess) return state();
  return order().query(event_of(event)) ? cudaSuccess : failed(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Guard guard(order().mutex);
  order().synchronize(event_of(event));
  return state();
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  *milliseconds = (float)elapsed_ms(event_of(from).times, event_of(to).times);
  return cudaSuccess;
}

// Kernels: they are put in order and do nothing

cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t stream) {
  launch(stream);
  return state();
}
cudaError_t __cudaLaunchKernel(void*, dim3, dim3, void**, size_t, cudaStream_t stream) {
  launch(stream);
  return state();
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration, const void*, void**) {
  launch(configuration->stream);
  return state();
}
cudaError_t __cudaGetKernel(void** kernel, const void* function) {
  *kernel = (void*)function;
  return cudaSuccess;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  launch_configuration = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = launch_configuration.grid;
  *block = launch_configuration.block;
  *shared = launch_configuration.shared;
  *(cudaStream_t*)stream = launch_configuration.stream;
  return cudaSuccess;
}
void** __cudaRegisterFatBinary(void*) {
  static void* handle[16];
  return handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, dim3*, dim3*, int*) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  int own = (int)(10 * setting("major", 9) + setting("minor", 0));
  found->ptxVersion = found->binaryVersion = kernel_architecture() ? kernel_architecture() : own;
  found->maxDynamicSharedSizeBytes = (int)setting("shared_bytes", 232448);
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 1;
  return cudaSuccess;
}
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

}  // extern "C"

// The driver's virtual memory, which expandable segments use

namespace {

constexpr int kOutOfMemory = 2;

int granularity(size_t* bytes, const void*, int) {
  *bytes = 2 << 20;
  return 0;
}
// The first fields of CUmemAllocationProp: type, handle types, and the location's type and number.
int create(unsigned long long* handle, size_t bytes, const int* properties, unsigned long long) {
  *handle = memory().create(bytes, properties[3]);
  return *handle ? 0 : kOutOfMemory;
}
int release(unsigned long long handle) {
  memory().release(handle);
  return 0;
}
int reserve(unsigned long long* at, size_t bytes, size_t, unsigned long long, unsigned long long) {
  *at = (unsigned long long)memory().reserve(bytes, current_device());
  return *at ? 0 : kOutOfMemory;
}
int unreserve(unsigned long long at, size_t bytes) {
  memory().unreserve((void*)at, bytes);
  return 0;
}
int unmap(unsigned long long at, size_t bytes) {
  Guard guard(order().mutex);
  order().synchronize_all();
  order().forget((void*)at, bytes);
  madvise((void*)at, bytes, MADV_DONTNEED);
  return 0;
}
int error_text(int, const char** text) {
  *text = "error of the rehearsal's driver";
  return 0;
}
int current_context(void** context) {
  *context = (void*)&kOutOfMemory;  // any address: there is one
  return 0;
}
int context_state(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}
int nothing() { return 0; }

const std::map<std::string, void*>& driver_functions() {
  static const auto* all = new std::map<std::string, void*>{
      {"cuMemGetAllocationGranularity", (void*)granularity},
      {"cuMemCreate", (void*)create},
      {"cuMemRelease", (void*)release},
      {"cuMemAddressReserve", (void*)reserve},
      {"cuMemAddressFree", (void*)unreserve},
      {"cuMemUnmap", (void*)unmap},
      {"cuGetErrorString", (void*)error_text},
      {"cuCtxGetCurrent", (void*)current_context},
      {"cuDevicePrimaryCtxGetState", (void*)context_state},
  };
  return *all;
}

}  // namespace

extern "C" {

// For the driver's library that others open by its name.
void* rehearsal_driver_function(const char* name) {
  auto known = driver_functions().find(name);
  return known == driver_functions().end() ? (void*)nothing : known->second;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *found = rehearsal_driver_function(name);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPoint(const char* name, void** found, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(name, found, 0, flags, result);
}

// What the arithmetic and the tests ask the device

void rehearsal_kernels_are_for(int architecture) { kernel_architecture() = architecture; }
// Order work of the arithmetic on a stream; it takes no time of its own.
void rehearsal_launch(const void* stream) {
  Guard guard(order().mutex);
  order().run_kernel(stream_of(stream));
}
void rehearsal_touch(const void* stream, const void* at, size_t bytes, int writes, const char* op) {
  Guard guard(order().mutex);
  order().touch(stream_of(stream), at, bytes, writes, op);
}
void rehearsal_op_ran(const void* stream, double bytes, double attention_flop, double product_flop, int half) {
  Guard guard(order().mutex);
  op_ran(stream_of(stream).times, bytes, attention_flop, product_flop, half);
}
// What the rehearsal itself does between these two is no time of the host.
void* rehearsal_host_stands() { return new HostStands(); }
void rehearsal_host_goes_on(void* stands) { delete (HostStands*)stands; }
// When all that a stream was given is done, and how long its kernels took until now.
void rehearsal_stream_ms(const void* stream, double* done_at, double* worked) {
  Guard guard(order().mutex);
  const StreamTimes& times = stream_of(stream).times;
  *done_at = std::max(times.free_at_ms, host_now_ms());
  *worked = times.worked_ms;
}
// What the machine's clock lacks of the host's time.
double rehearsal_host_shift_ms() { return host_now_ms() - wall_ms(); }
void rehearsal_host_waits(double ms) { host_waits(host_now_ms() + ms); }
// New memory for work on `stream`: whatever was there is gone as soon as the stream may write it. It is NaN where all
// values are computed: who reads what nobody wrote is found. Elsewhere it is 0, which is then the value of small tensors
// that are not computed (a loss).
void rehearsal_new_memory(const void* handle, void* at, size_t bytes) {
  HostStands stands;
  Stream& stream = stream_of(handle);
  Guard guard(order().mutex);
  order().run_kernel(stream);
  order().touch(stream, at, bytes, true, "new memory");
  static const int value = setting("level", 0) == 2 ? 0xff : 0;
  if (bytes <= order().real_bytes) memset(at, value, bytes);
}
uint64_t rehearsal_real_bytes() { return order().real_bytes; }
int rehearsal_checks_races() { return order().checks_races; }
long long rehearsal_count(const char* what) {
  std::string name = what;
  if (name == "launches") return counts().launches;
  if (name == "products") return counts().products;
  if (name == "copies") return counts().copies;
  if (name == "to_device") return counts().to_device;
  if (name == "to_host") return counts().to_host;
  if (name == "host") return (long long)memory().host();
  if (name == "host_peak") return (long long)memory().host_peak();
  return -1;
}
long long rehearsal_device_peak(int device) { return (long long)memory().peak(device); }
void rehearsal_choose_order(const char* name, uint64_t seed) {
  Guard guard(order().mutex);
  order().choose(name, seed);
}
void rehearsal_forget_registered() {
  Guard guard(order().mutex);
  order().synchronize_all();
  memory().forget_registered();
}
size_t rehearsal_races() {
  Guard guard(order().mutex);
  return order().races.size();
}
size_t rehearsal_race(size_t number, char* text, size_t length) {
  Guard guard(order().mutex);
  snprintf(text, length, "%s", order().races[number].c_str());
  return strlen(text);
}
void rehearsal_clear_races() {
  Guard guard(order().mutex);
  order().forget_races();
}

}  // extern "C"

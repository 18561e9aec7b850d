// The functions of cuBLAS that PyTorch's products use: they are put in order, and their sizes are known. Declared without
// NVIDIA's header: only numbers and addresses pass.
#include <cstdlib>
#include <cstring>

#include "device.hpp"

using namespace rehearsal;

namespace {

struct Handle {
  const void* stream = nullptr;
  int math_mode = 0, pointer_mode = 0;
};

// Values of cudaDataType_t of four bytes or more: R_32F, R_64F, C_32F, C_64F.
bool is_half(int type) { return !(type == 0 || type == 1 || type == 4 || type == 5); }

struct Layout {
  int type;
  unsigned long rows, columns;
};

struct Product {
  int transposed[2] = {0, 0};
};

}  // namespace

extern "C" {

int cublasCreate_v2(Handle** found) {
  *found = new Handle();
  return 0;
}
int cublasDestroy_v2(Handle* handle) {
  delete handle;
  return 0;
}
int cublasSetStream_v2(Handle* handle, const void* stream) {
  handle->stream = stream;
  return 0;
}
int cublasSetWorkspace_v2(Handle*, void*, size_t) { return 0; }
int cublasSetMathMode(Handle* handle, int mode) {
  handle->math_mode = mode;
  return 0;
}
int cublasGetMathMode(Handle* handle, int* mode) {
  *mode = handle->math_mode;
  return 0;
}
int cublasSetPointerMode_v2(Handle* handle, int mode) {
  handle->pointer_mode = mode;
  return 0;
}
int cublasGetPointerMode_v2(Handle* handle, int* mode) {
  *mode = handle->pointer_mode;
  return 0;
}

int cublasGemmEx(Handle* handle, int, int, int m, int n, int k, const void*, const void*, int type) {
  launch_product(handle->stream, m, n, k, 1, is_half(type));
  return 0;
}
int cublasSgemmEx(Handle* handle, int, int, int m, int n, int k, const void*, const void*, int type) {
  launch_product(handle->stream, m, n, k, 1, is_half(type));
  return 0;
}
int cublasGemmStridedBatchedEx(Handle* handle, int, int, int m, int n, int k, const void*, const void*, int type, int,
                               long long, const void*, int, int, long long, const void*, void*, int, int, long long,
                               int batch) {
  launch_product(handle->stream, m, n, k, batch, is_half(type));
  return 0;
}
#define GEMM(name)                                                        \
  int name(Handle* handle, int, int, int m, int n, int k) {               \
    launch_product(handle->stream, m, n, k, 1, false);                    \
    return 0;                                                             \
  }
GEMM(cublasSgemm_v2)
GEMM(cublasDgemm_v2)
GEMM(cublasCgemm_v2)
GEMM(cublasZgemm_v2)
#define BATCHED(name)                                                                                              \
  int name(Handle* handle, int, int, int m, int n, int k, const void*, const void*, int, long long, const void*,   \
           int, long long, const void*, void*, int, long long, int batch) {                                        \
    launch_product(handle->stream, m, n, k, batch, false);                                                         \
    return 0;                                                                                                      \
  }
BATCHED(cublasSgemmStridedBatched)
BATCHED(cublasDgemmStridedBatched)
BATCHED(cublasCgemmStridedBatched)
BATCHED(cublasZgemmStridedBatched)
#define GEMV(name)                                            \
  int name(Handle* handle, int, int m, int n) {               \
    launch_product(handle->stream, m, n, 1, 1, false);        \
    return 0;                                                 \
  }
GEMV(cublasSgemv_v2)
GEMV(cublasDgemv_v2)
#define KERNEL(name)                \
  int name(Handle* handle) {        \
    launch(handle->stream);         \
    return 0;                       \
  }
KERNEL(cublasSdot_v2)
KERNEL(cublasDdot_v2)
KERNEL(cublasDotEx)

// cublasLt: a product is described by objects of its own

int cublasLtMatmulDescCreate(Product** found, int, int) {
  *found = new Product();
  return 0;
}
int cublasLtMatmulDescDestroy(Product* product) {
  delete product;
  return 0;
}
int cublasLtMatmulDescSetAttribute(Product* product, int attribute, const void* value, size_t bytes) {
  constexpr int transposes_a = 3, transposes_b = 4;
  if (bytes == 4 && (attribute == transposes_a || attribute == transposes_b))
    product->transposed[attribute - transposes_a] = *(const int*)value;
  return 0;
}
int cublasLtMatrixLayoutCreate(Layout** found, int type, unsigned long rows, unsigned long columns, long) {
  *found = new Layout{type, rows, columns};
  return 0;
}
int cublasLtMatrixLayoutDestroy(Layout* layout) {
  delete layout;
  return 0;
}
int cublasLtMatmulPreferenceCreate(void** found) {
  *found = malloc(64);
  return 0;
}
// How much workspace a kernel may take: no kernel is chosen.
int cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return 0; }
int cublasLtMatmulPreferenceDestroy(void* preference) {
  free(preference);
  return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* result, int* count) {
  memset(result, 0, 64);
  *count = 1;
  return 0;
}
int cublasLtMatmul(void*, Product* product, const void*, const void*, Layout* a, const void*, Layout*, const void*,
                   const void*, Layout*, void*, Layout* d, const void*, void*, size_t, const void* stream) {
  double k = product->transposed[0] ? a->rows : a->columns;
  launch_product(stream, d->rows, d->columns, k, 1, is_half(a->type));
  return 0;
}
size_t cublasLtGetVersion() { return 130000; }

}  // extern "C"

// A libcublasLt that computes on the CPU: compiled against NVIDIA's header, so that every prototype, structure and
// enumerator is the real one. It notes what it is given, by the header's names.
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

namespace {
using Attributes = std::map<int, std::vector<char>>;
struct Desc {
  cublasComputeType_t compute;
  cudaDataType_t scale;
  Attributes set;
};
struct Layout {
  cudaDataType_t type;
  uint64_t rows, cols;
  int64_t ld;
};
struct Preference {
  Attributes set;
};

std::mutex lock;
std::string notes;
int alive = 0, results = 1, bad_results = 0;

template <class T>
T get(const Attributes& set, int which, T otherwise) {
  const auto found = set.find(which);
  if (found == set.end()) return otherwise;
  T value{};
  std::memcpy(&value, found->second.data(), found->second.size() < sizeof value ? found->second.size() : sizeof value);
  return value;
}
cublasStatus_t put(Attributes& set, int which, const void* from, size_t bytes, const std::map<int, size_t>& sizes) {
  const auto known = sizes.find(which);
  if (known == sizes.end() || known->second != bytes) return CUBLAS_STATUS_INVALID_VALUE;
  set[which].assign(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
  return CUBLAS_STATUS_SUCCESS;
}
void note(const std::string& line) {
  const std::lock_guard<std::mutex> hold(lock);
  notes += line + "\n";
}
double load(const void* p, cudaDataType_t type, size_t i) {
  if (type == CUDA_R_16F) return __half2float(static_cast<const __half*>(p)[i]);
  if (type == CUDA_R_16BF) return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
  return static_cast<const float*>(p)[i];
}
void store(void* p, cudaDataType_t type, size_t i, double v) {
  if (type == CUDA_R_16F)
    static_cast<__half*>(p)[i] = __double2half(v);
  else if (type == CUDA_R_16BF)
    static_cast<__nv_bfloat16*>(p)[i] = __double2bfloat16(v);
  else
    static_cast<float*>(p)[i] = static_cast<float>(v);
}
std::string type_name(cudaDataType_t t) {
  return t == CUDA_R_16F ? "R_16F" : t == CUDA_R_16BF ? "R_16BF" : t == CUDA_R_32F ? "R_32F" : "?";
}
std::string epilogue_name(int e) {
  switch (e) {
    case CUBLASLT_EPILOGUE_DEFAULT:
      return "DEFAULT";
    case CUBLASLT_EPILOGUE_RELU:
      return "RELU";
    case CUBLASLT_EPILOGUE_BIAS:
      return "BIAS";
    case CUBLASLT_EPILOGUE_RELU_BIAS:
      return "RELU_BIAS";
    case CUBLASLT_EPILOGUE_GELU:
      return "GELU";
    case CUBLASLT_EPILOGUE_GELU_BIAS:
      return "GELU_BIAS";
    default:
      return "?";
  }
}
std::string mode_name(int m) {
  return m == CUBLASLT_POINTER_MODE_HOST ? "HOST" : m == CUBLASLT_POINTER_MODE_DEVICE ? "DEVICE" : "?";
}
std::string text(const Layout& l) {
  std::ostringstream out;
  out << type_name(l.type) << ":" << l.rows << "x" << l.cols << ":" << l.ld;
  return out.str();
}
const std::map<int, size_t> kDesc{{CUBLASLT_MATMUL_DESC_TRANSA, 4},
                                  {CUBLASLT_MATMUL_DESC_TRANSB, 4},
                                  {CUBLASLT_MATMUL_DESC_POINTER_MODE, 4},
                                  {CUBLASLT_MATMUL_DESC_EPILOGUE, 4},
                                  {CUBLASLT_MATMUL_DESC_BIAS_POINTER, 8}};
const std::map<int, size_t> kPreference{
    {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, 8},   {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, 4},
    {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, 4}, {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, 4},
    {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, 4}, {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, 4}};
Layout& layout(cublasLtMatrixLayout_t l) { return *reinterpret_cast<Layout*>(l); }
Desc& desc(cublasLtMatmulDesc_t d) { return *reinterpret_cast<Desc*>(d); }
template <class Made, class Handle>
cublasStatus_t made(Handle* out, Made* what) {
  ++alive;
  *out = reinterpret_cast<Handle>(what);
  return CUBLAS_STATUS_SUCCESS;
}
}  // namespace

extern "C" {
const char* fake_notes() { return notes.c_str(); }
int fake_alive() { return alive; }
// How many algorithms there are, and how many of the first of them are unusable: in turn by state and by workspace.
void fake_reset(int algorithms, int unusable) {
  notes.clear();
  results = algorithms;
  bad_results = unusable;
}

size_t CUBLASWINAPI cublasLtGetVersion(void) { return 130205; }
const char* CUBLASWINAPI cublasLtGetStatusName(cublasStatus_t s) {
  return s == CUBLAS_STATUS_NOT_SUPPORTED ? "CUBLAS_STATUS_NOT_SUPPORTED" : "CUBLAS_STATUS_INVALID_VALUE";
}
cublasStatus_t CUBLASWINAPI cublasLtCreate(cublasLtHandle_t* h) {
  note("create");
  *h = reinterpret_cast<cublasLtHandle_t>(0x1234);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t CUBLASWINAPI cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* d, cublasComputeType_t compute,
                                                     cudaDataType_t scale) {
  return compute == CUBLAS_COMPUTE_32F && scale == CUDA_R_32F ? made(d, new Desc{compute, scale, {}})
                                                              : CUBLAS_STATUS_INVALID_VALUE;
}
cublasStatus_t CUBLASWINAPI cublasLtMatmulDescDestroy(const cublasLtMatmulDesc_t d) {
  --alive;
  delete &desc(d);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t CUBLASWINAPI cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t which,
                                                           const void* from, size_t bytes) {
  return put(desc(d).set, which, from, bytes, kDesc);
}
cublasStatus_t CUBLASWINAPI cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* l, cudaDataType type, uint64_t rows,
                                                       uint64_t cols, int64_t ld) {
  return made(l, new Layout{type, rows, cols, ld});
}
cublasStatus_t CUBLASWINAPI cublasLtMatrixLayoutDestroy(const cublasLtMatrixLayout_t l) {
  --alive;
  delete &layout(l);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t CUBLASWINAPI cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* p) {
  return made(p, new Preference);
}
cublasStatus_t CUBLASWINAPI cublasLtMatmulPreferenceDestroy(const cublasLtMatmulPreference_t p) {
  --alive;
  delete reinterpret_cast<Preference*>(p);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t CUBLASWINAPI cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                                 cublasLtMatmulPreferenceAttributes_t which,
                                                                 const void* from, size_t bytes) {
  return put(reinterpret_cast<Preference*>(p)->set, which, from, bytes, kPreference);
}
cublasStatus_t CUBLASWINAPI cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t h, cublasLtMatmulDesc_t d,
                                                           cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                           cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t o,
                                                           cublasLtMatmulPreference_t p, int asked,
                                                           cublasLtMatmulHeuristicResult_t found[], int* count) {
  const Attributes& want = reinterpret_cast<Preference*>(p)->set;
  const auto workspace = get<uint64_t>(want, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, 0);
  std::ostringstream out;
  out << "search bias=" << get<uint64_t>(desc(d).set, CUBLASLT_MATMUL_DESC_BIAS_POINTER, 0)
      << " workspace=" << workspace << " reduction=";
  out << (get<uint32_t>(want, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, 7) == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE
              ? "COMPUTE_TYPE"
              : "?");
  for (int which : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    out << (which == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES ? " alignments=" : ",")
        << get<uint32_t>(want, which, 256);
  note(out.str());
  if (!results) return CUBLAS_STATUS_NOT_SUPPORTED;
  *count = results < asked ? results : asked;
  for (int i = 0; i < *count; ++i) {
    found[i] = {};
    found[i].algo.data[0] = 1000 + i;
    found[i].algo.data[7] = 77;
    found[i].state = i < bad_results && i % 2 == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS;
    found[i].workspaceSize = i < bad_results && i % 2 == 1 ? workspace + 1 : 256;
  }
  return c == o && h ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}
cublasStatus_t CUBLASWINAPI cublasLtMatmul(cublasLtHandle_t h, cublasLtMatmulDesc_t d, const void* alpha, const void* a,
                                           cublasLtMatrixLayout_t al, const void* b, cublasLtMatrixLayout_t bl,
                                           const void* beta, const void* c, cublasLtMatrixLayout_t cl, void* o,
                                           cublasLtMatrixLayout_t ol, const cublasLtMatmulAlgo_t* algo, void* workspace,
                                           size_t bytes, cudaStream_t stream) {
  const Attributes& set = desc(d).set;
  const bool ta = get<int32_t>(set, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_N) == CUBLAS_OP_T;
  const bool tb = get<int32_t>(set, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N) == CUBLAS_OP_T;
  const int mode = get<int32_t>(set, CUBLASLT_MATMUL_DESC_POINTER_MODE, CUBLASLT_POINTER_MODE_HOST);
  const int epilogue = get<uint32_t>(set, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_DEFAULT);
  const Layout A = layout(al), B = layout(bl), D = layout(ol);
  const uint64_t m = ta ? A.cols : A.rows, k = ta ? A.rows : A.cols, n = tb ? B.rows : B.cols;
  if (m != D.rows || n != D.cols || (tb ? B.cols : B.rows) != k || A.ld < int64_t(A.rows) || B.ld < int64_t(B.rows) ||
      D.ld < int64_t(D.rows) || c != o || cl != ol || !h || algo->data[7] != 77)
    return CUBLAS_STATUS_INVALID_VALUE;
  usleep(300);  // in which another thread may set what is not guarded
  const void* bias = get<const void*>(set, CUBLASLT_MATMUL_DESC_BIAS_POINTER, nullptr);
  std::ostringstream out;
  out << "matmul " << (ta ? "T" : "N") << (tb ? "T" : "N") << " A=" << text(A) << " B=" << text(B) << " D=" << text(D)
      << " epilogue=" << epilogue_name(epilogue) << " mode=" << mode_name(mode) << " algorithm=" << algo->data[0]
      << " workspace=" << bytes << (reinterpret_cast<size_t>(workspace) % 256 ? "!" : "")
      << " stream=" << reinterpret_cast<size_t>(stream);
  note(out.str());
  for (uint64_t j = 0; j < n; ++j)
    for (uint64_t i = 0; i < m; ++i) {
      double sum = 0;
      for (uint64_t l = 0; l < k; ++l)
        sum += load(a, A.type, ta ? l + i * A.ld : i + l * A.ld) * load(b, B.type, tb ? j + l * B.ld : l + j * B.ld);
      double v = sum * *static_cast<const float*>(alpha);
      if (*static_cast<const float*>(beta) != 0) v = NAN;
      if (epilogue & CUBLASLT_EPILOGUE_BIAS) v += load(bias, D.type, i);
      if (epilogue & CUBLASLT_EPILOGUE_RELU) v = v < 0 ? 0 : v;
      if (epilogue & CUBLASLT_EPILOGUE_GELU)
        v = 0.5 * v * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
      store(o, D.type, i + j * D.ld, v);
    }
  return CUBLAS_STATUS_SUCCESS;
}
}  // extern "C"

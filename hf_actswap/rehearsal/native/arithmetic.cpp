// The values that the device's kernels do not compute. Each op that PyTorch has for CUDA, or a library that is told by
// name, gets another kernel, for all threads: it calls the one that was there (which allocates, and launches kernels that do
// nothing) and computes the values on the CPU over the same memory, which is the process's own.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "attention.hpp"
#include "convolution.hpp"
#include "cpu_memory.hpp"
#include "ledger.hpp"
#include "random.hpp"

extern "C" {
void rehearsal_launch(const void* stream);
void rehearsal_touch(const void* stream, const void* at, size_t bytes, int writes, const char* op);
void rehearsal_op_ran(const void* stream, double bytes, double attention_flop, double product_flop, int half);
void* rehearsal_host_stands();
void rehearsal_host_goes_on(void* stands);
void rehearsal_new_memory(const void* stream, void* at, size_t bytes);
uint64_t rehearsal_real_bytes();
int rehearsal_checks_races();
}

namespace rehearsal {
namespace {

using torch::jit::Stack;

enum class Level { none, small, all };

struct State {
  Level level = Level::none;
  size_t most_bytes = 0;  // in `small`: of the largest tensor of an op that is computed
  std::mutex mutex;
  std::map<std::string, long> left_out;  // op -> calls without arithmetic
};

State& state() {
  static State* one = new State();
  return *one;
}

thread_local int inside = 0;  // PyTorch's kernels that are running: what they call themselves is not computed again

struct Inside {
  Inside() { inside++; }
  ~Inside() { inside--; }
};

// Within this scope ops on CPU tensors go to their kernels: no autograd, no autocast, no modes of Python.
struct OnlyKernels {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard others{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                           c10::DispatchKey::PythonDispatcher, c10::DispatchKey::PreDispatch}) |
      c10::autocast_dispatch_keyset | c10::functorch_transforms_ks};
  Inside no_arithmetic;
};

// What happens in this scope takes the host no time: a GPU's host would not do it.
struct NoTime {
  void* stands = rehearsal_host_stands();
  ~NoTime() { rehearsal_host_goes_on(stands); }
};

// How an op is computed.
enum class Kind {
  plain,         // PyTorch's kernel for memory and order, then the CPU's over the same memory
  values_first,  // its result's shape depends on values: the CPU's alone
  copy,          // between host and device the runtime moves the bytes
  attention,     // fused attention, which the CPU has not in this form
  convolution,   // memory without cuDNN, then the CPU's
  dropout,
  out_dtype,     // products whose result has another type
  softmax,       // half precision in, single precision out
  rms_norm,      // its backward, which the CPU has only op by op
};

const std::map<std::string, Kind>& special_ops() {
  static const auto* all = new std::map<std::string, Kind>{
      {"aten::copy_", Kind::copy},
      {"aten::_foreach_copy_", Kind::copy},
      {"aten::native_dropout", Kind::dropout},
      {"aten::_fused_dropout", Kind::dropout},
      {"aten::_softmax", Kind::softmax},
      {"aten::_log_softmax", Kind::softmax},
      {"aten::_softmax_backward_data", Kind::softmax},
      {"aten::_log_softmax_backward_data", Kind::softmax},
      {"aten::_fused_rms_norm_backward", Kind::rms_norm},
  };
  return *all;
}

bool starts_with(const std::string& text, const char* start) { return text.rfind(start, 0) == 0; }

// Ops whose kernels PyTorch has NVRTC compile when they first run (`AT_USE_JITERATOR`), which needs a GPU.
bool is_compiled(std::string name) {
  static const std::set<std::string> names{"aten::prod",   "aten::gcd",  "aten::lcm",  "aten::digamma", "aten::lgamma",
                                           "aten::polygamma", "aten::i0", "aten::sinc", "aten::exp2",    "aten::erfinv"};
  if (name.back() == '_') name.pop_back();  // in place
  return names.count(name) > 0 || starts_with(name, "aten::special_");
}

Kind kind_of(const std::string& name, const std::string& overload) {
  static const std::set<std::string> values_first{
      "aten::equal",         "aten::nonzero",   "aten::masked_select",     "aten::_unique",
      "aten::_unique2",      "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive",
      "aten::repeat_interleave", "aten::bincount"};
  auto found = special_ops().find(name);
  if (found != special_ops().end()) return found->second;
  bool writes_elsewhere = overload.find("out") != std::string::npos;
  if (!writes_elsewhere && (name == "aten::convolution" || name == "aten::convolution_backward")) return Kind::convolution;
  if (is_compiled(name) || (values_first.count(name) && !writes_elsewhere)) return Kind::values_first;
  if (attention_of(name)) return Kind::attention;
  bool product = name == "aten::mm" || name == "aten::bmm" || name == "aten::addmm" || name == "aten::baddbmm";
  if (product && starts_with(overload, "dtype")) return Kind::out_dtype;
  if ((starts_with(name, "aten::linalg_") || starts_with(name, "aten::_linalg_") || starts_with(name, "aten::_fft_") ||
       starts_with(name, "aten::cholesky") || starts_with(name, "aten::lu_")) &&
      overload.find("out") == std::string::npos && name != "aten::linalg_vector_norm" && name != "aten::linalg_cross")
    return Kind::values_first;
  return Kind::plain;
}

// Ops that compute nothing: they allocate, look at a tensor from another side, or keep books.
bool computes_nothing(const std::string& name, const c10::FunctionSchema& schema) {
  static const std::set<std::string> names{
      "aten::empty",        "aten::empty_strided", "aten::empty_like",    "aten::new_empty", "aten::new_empty_strided",
      "aten::_empty_affine_quantized", "aten::set_", "aten::resize_",     "aten::resize_as_", "aten::record_stream",
      "aten::_pin_memory",  "aten::is_pinned",     "aten::_local_scalar_dense", "aten::_fused_sdp_choice",
      "aten::_resize_output_", "aten::_efficientzerotensor", "aten::_nested_view_from_buffer", "aten::_has_same_storage_numel"};
  if (names.count(name)) return true;
  for (const auto& found : schema.returns())
    if (found.alias_info() && !found.alias_info()->isWrite()) return true;  // a view
  if (schema.is_mutable()) return false;
  for (const auto& found : schema.returns()) {
    auto type = found.type();
    if (type->isSubtypeOf(*c10::TensorType::get()) || type->isSubtypeOf(*c10::ListType::ofTensors())) return false;
  }
  return name != "aten::equal";
}

// Ops that read only as many bytes of their inputs as they return.
bool gathers(const std::string& name) {
  static const std::set<std::string> names{"aten::embedding",        "aten::index_select",   "aten::gather",
                                           "aten::index",            "aten::nll_loss_forward", "aten::slice_backward",
                                           "aten::_index_put_impl_", "aten::index_put_"};
  return names.count(name) > 0;
}

// FLOP of products of groups: of rows, columns or the inner dimension, or batches.
double grouped_flop(const at::Tensor& left, const at::Tensor& right) {
  double batches = left.dim() == 3 && right.dim() == 3 ? left.size(0) : 1;
  return 2 * batches * left.size(-2) * left.size(-1) * right.size(-1);
}

// Ops that write their argument and do not read it.
bool only_writes(const std::string& name) {
  static const std::set<std::string> names{"aten::zero_",    "aten::fill_",   "aten::copy_",    "aten::_foreach_zero_",
                                           "aten::uniform_", "aten::normal_", "aten::random_",  "aten::bernoulli_",
                                           "aten::_foreach_copy_"};
  return names.count(name) > 0;
}

const void* stream_now(c10::DeviceIndex device) { return c10::cuda::getCurrentCUDAStream(device).stream(); }

class Arithmetic : public c10::OperatorKernel {
 public:
  Arithmetic(const c10::OperatorHandle& op, Kind kind)
      : kernel_(op.getComputedKernelForDispatchKey(c10::DispatchKey::CUDA)), kind_(kind) {
    const auto& schema = op.schema();
    name_ = schema.operator_name().name + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
    for (const auto& argument : schema.arguments()) {
      bool writes = argument.alias_info() && argument.alias_info()->isWrite();
      writes_.push_back(writes);
      reads_.push_back(!writes || !(argument.is_out() || only_writes(schema.operator_name().name)));
      is_mutable_ = is_mutable_ || writes;
    }
    const auto& arguments = schema.arguments();
    for (size_t i = 0; i < arguments.size(); i++) {
      std::string type = arguments[i].type()->str();
      if (type == "Generator" || type == "Generator?") generator_ = (int)i;
    }
    takes_ = arguments.size();
    gives_ = schema.returns().size();
    gathers_ = gathers(schema.operator_name().name);
    flash_ = attention_of(schema.operator_name().name);
    needs_values_ = is_compiled(schema.operator_name().name);
    is_of_cudnn_ = is_of_cudnn(schema.operator_name().name);
    is_grouped_ = schema.operator_name().name == "aten::_grouped_mm";
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    if (kind_ == Kind::values_first && (state().level != Level::none || needs_values_)) return values_first(op, stack);
    if (inside && kind_ != Kind::convolution) return kernel_.callBoxed(op, keys, stack);
    if (kind_ == Kind::copy && crosses(*stack)) return kernel_.callBoxed(op, keys, stack);
    Stack given(stack->end() - takes_, stack->end());
    c10::DeviceIndex device = device_of(given);
    std::optional<RandomState> random;
    if (generator_ >= 0 || kind_ == Kind::dropout || kind_ == Kind::attention)
      random = RandomState::before(device, generator_ >= 0 ? given[generator_] : c10::IValue(), generator_);
    {
      Inside no_arithmetic;
      if (is_of_cudnn_) replace(stack, results_of_cudnn(*flash_, given, *random));
      else if (kind_ == Kind::convolution) replace(stack, Convolution(given).results());
      else kernel_.callBoxed(op, keys, stack);
    }
    Stack results(stack->end() - gives_, stack->end());
    if (device < 0) device = device_of(results);
    if (device < 0) return;
    NoTime no_time;
    note(given, results, device);
    if (!is_computed(given, results)) return;
    rehearsal_launch(stream_now(device));
    try {
      OnlyKernels scope;
      compute(op, given, results, random);
    } catch (const c10::Error& error) {
      no_arithmetic_for(error.what_without_backtrace());
    }
  }

 private:
  void replace(Stack* stack, const Stack& results) const {
    stack->erase(stack->end() - takes_, stack->end());
    stack->insert(stack->end(), results.begin(), results.end());
  }

  bool crosses(const Stack& stack) const {
    std::optional<c10::Device> first;
    bool different = false;
    for (auto value = stack.end() - takes_; value != stack.end(); ++value)
      each_tensor(*value, [&](const at::Tensor& tensor) {
        if (!first) first = tensor.device();
        different = different || tensor.device() != *first;
      });
    return different;
  }

  static c10::DeviceIndex device_of(const Stack& values) {
    c10::DeviceIndex device = -1;
    for (const auto& value : values)
      each_tensor(value, [&](const at::Tensor& tensor) {
        if (device < 0 && tensor.is_cuda()) device = tensor.device().index();
      });
    return device;
  }

  // Tell the device which bytes the op reads and writes.
  void note(const Stack& given, const Stack& results, c10::DeviceIndex device) {
    const void* stream = stream_now(device);
    double bytes = 0;
    bool races = rehearsal_checks_races(), half = false;
    auto tell = [&](const at::Tensor& tensor, bool reads, bool writes) {
      if (!tensor.is_cuda() || !tensor.numel()) return;
      // An op that gathers reads as many bytes of its inputs as it returns.
      bytes += (gathers_ ? (writes ? 2 : 0) : reads + writes) * touched_bytes(tensor);
      half = half || tensor.element_size() <= 2;
      if (!races) return;
      auto [at, length] = extent(tensor);
      rehearsal_touch(stream, at, length, writes, name_.c_str());
    };
    if (races) rehearsal_launch(stream);
    for (size_t i = 0; i < given.size(); i++)
      each_tensor(given[i], [&](const at::Tensor& tensor) { tell(tensor, reads_[i], writes_[i]); });
    if (!is_mutable_)
      for (const auto& result : results) each_tensor(result, [&](const at::Tensor& tensor) { tell(tensor, false, true); });
    double product = is_grouped_ ? grouped_flop(given[0].toTensor(), given[1].toTensor()) : 0;
    if (kind_ == Kind::convolution) product = Convolution(given).flop();
    rehearsal_op_ran(stream, bytes, flash_ ? attention_flop(*flash_, given) : 0, product, half);
  }

  bool is_computed(const Stack& given, const Stack& results) const {
    if (state().level == Level::none) return false;
    if (state().level == Level::all) return true;
    bool fits = true;
    auto judge = [&](const at::Tensor& tensor) { fits = fits && tensor.nbytes() <= state().most_bytes; };
    for (const auto& value : given) each_tensor(value, judge);
    for (const auto& value : results) each_tensor(value, judge);
    return fits;
  }

  void no_arithmetic_for(const std::string& why) {
    if (state().level == Level::all)
      TORCH_CHECK_NOT_IMPLEMENTED(false, "rehearsal: ", name_, " has no arithmetic: ", why.substr(0, why.find('\n')));
    std::lock_guard<std::mutex> guard(state().mutex);
    state().left_out[name_]++;
  }

  void compute(const c10::OperatorHandle& op, const Stack& given, const Stack& results,
               const std::optional<RandomState>& random) {
    if (kind_ == Kind::attention) return compute_attention(*flash_, given, results, *random);
    if (kind_ == Kind::dropout) return compute_dropout(given, results, *random);
    if (kind_ == Kind::out_dtype) return compute_product(given, results);
    if (kind_ == Kind::softmax) return compute_softmax(op, given, results);
    if (kind_ == Kind::rms_norm) return compute_rms_norm_backward(given, results);
    Stack found = run_on_cpu(op, on_cpu(given, random));
    if (!is_mutable_)
      for (size_t i = 0; i < gives_; i++) put(results[i], found[i]);
  }

  Stack run_on_cpu(const c10::OperatorHandle& op, const Stack& cpu) {
    Stack found = cpu;
    try {
      op.callBoxed(&found);
    } catch (const c10::Error&) {  // the CPU may lack the op for half precision, or for this mixture of types
      found = widened(cpu, name_ == "aten::histc");  // which counts whole numbers on a GPU alone
      Stack wide = found;
      op.callBoxed(&found);
      for (size_t i = 0; i < cpu.size(); i++)
        if (writes_[i]) put(cpu[i], wide[i]);
    }
    return found;
  }

  void values_first(const c10::OperatorHandle& op, Stack* stack) {
    Stack given(stack->end() - takes_, stack->end());
    c10::DeviceIndex device = device_of(given);
    rehearsal_launch(stream_now(device));
    c10::cuda::getCurrentCUDAStream(device).synchronize();
    NoTime no_time;
    Stack found;
    {
      OnlyKernels scope;
      Stack cpu = on_cpu(given, std::nullopt);
      for (size_t i = 0; i < cpu.size(); i++)  // what is written alone may have another size yet
        if (writes_[i] && !reads_[i]) cpu[i] = at::empty({0}, given[i].toTensor().options().device(c10::kCPU));
      found = run_on_cpu(op, cpu);
      for (size_t i = 0; i < cpu.size(); i++) {
        if (!writes_[i] || reads_[i]) continue;
        at::native::resize_output(given[i].toTensor(), cpu[i].toTensor().sizes());
        put(given[i], cpu[i]);
      }
    }
    Inside no_arithmetic;
    stack->erase(stack->end() - takes_, stack->end());
    if (is_mutable_) {  // it has written through the CPU's views of the device's memory
      for (size_t i = 0; i < given.size(); i++)
        if (writes_[i]) stack->push_back(given[i]);
      return note(given, {}, device);
    }
    for (auto& value : found) {
      if (value.isTensor() && value.toTensor().defined()) {
        at::Tensor on_host = value.toTensor();
        at::Tensor copy = at::empty_strided(on_host.sizes(), on_host.strides(),
                                            on_host.options().device(c10::Device(c10::DeviceType::CUDA, device)));
        OnlyKernels scope;
        cpu_alias(copy).copy_(on_host);
        stack->push_back(copy);
      } else {
        stack->push_back(value);
      }
    }
    note(given, Stack(stack->end() - gives_, stack->end()), device);
  }

  void compute_product(const Stack& given, const Stack& results) {
    Stack cpu = on_cpu(given, std::nullopt);
    size_t sums = name_.find("add") != std::string::npos ? 1 : 0;  // addmm and baddbmm begin with what is added
    at::Tensor out = cpu_alias(is_mutable_ ? given.back().toTensor() : results[0].toTensor());
    c10::ScalarType type = out.scalar_type() == c10::kDouble ? c10::kDouble : c10::kFloat;
    at::Tensor product = at::matmul(cpu[sums].toTensor().to(type), cpu[sums + 1].toTensor().to(type));
    if (sums) product = cpu[0].toTensor().to(type).mul(cpu[4].toScalar()).add(product, cpu[5].toScalar());
    out.copy_(product);
  }

  void compute_softmax(const c10::OperatorHandle& op, const Stack& given, const Stack& results) {
    Stack cpu = widened(on_cpu(given, std::nullopt));
    bool backward = name_.find("backward") != std::string::npos;
    size_t last = backward ? 3 : 2;
    if (backward) cpu[last] = (int64_t)cpu[0].toTensor().scalar_type();
    else cpu[last] = false;
    Stack wide = cpu;
    op.callBoxed(&cpu);
    if (!is_mutable_) return put(results[0], cpu[0]);
    Stack narrow = on_cpu(given, std::nullopt);
    for (size_t i = 0; i < writes_.size(); i++)
      if (writes_[i]) put(narrow[i], wide[i]);
  }

  static void compute_rms_norm_backward(const Stack& given, const Stack& results) {
    Stack cpu = widened(on_cpu(given, std::nullopt));
    at::Tensor gradient = cpu[0].toTensor(), input = cpu[1].toTensor(), scale = cpu[3].toTensor();
    int64_t normalized = (int64_t)cpu[2].toListRef().size();
    std::vector<int64_t> last, first;
    for (int64_t i = 0; i < input.dim(); i++) (i < input.dim() - normalized ? first : last).push_back(i);
    at::Tensor standard = input * scale;
    at::Tensor weighted = cpu[4].isTensor() ? gradient * cpu[4].toTensor() : gradient;
    put(results[0], (weighted - standard * (weighted * standard).mean(last, true)) * scale);
    at::Tensor to_weight = gradient * standard;
    put(results[1], first.empty() ? to_weight : to_weight.sum(first));
  }

  c10::SafeKernelFunction kernel_;
  Kind kind_;
  std::string name_;
  std::vector<bool> reads_, writes_;
  bool is_mutable_ = false, is_of_cudnn_ = false, needs_values_ = false, gathers_ = false, is_grouped_ = false;
  int generator_ = -1;
  size_t takes_ = 0, gives_ = 0;
  const AttentionOp* flash_ = nullptr;
};

void fill_new_memory(const c10::CachingDeviceAllocator::TraceEntry& entry) {
  using Entry = c10::CachingDeviceAllocator::TraceEntry;
  if (entry.action_ == Entry::ALLOC) rehearsal_new_memory(entry.stream_, (void*)entry.addr_, entry.size_);
}

void keep_books(const c10::CachingDeviceAllocator::TraceEntry& entry) {
  using Entry = c10::CachingDeviceAllocator::TraceEntry;
  if (!ledger().on) return;
  switch (entry.action_) {
    case Entry::ALLOC: return ledger().took(entry.device_, entry.addr_, entry.size_);
    case Entry::FREE_REQUESTED: return ledger().gave_back(entry.device_, entry.addr_);
    case Entry::SEGMENT_ALLOC:
    case Entry::SEGMENT_MAP: return ledger().reserved(entry.device_, (int64_t)entry.size_);
    case Entry::SEGMENT_FREE:
    case Entry::SEGMENT_UNMAP: return ledger().reserved(entry.device_, -(int64_t)entry.size_);
    default: return;
  }
}

void watch_allocation(const c10::CachingDeviceAllocator::TraceEntry& entry) {
  fill_new_memory(entry);
  keep_books(entry);
}

// Copy as much of the text as there is room for; return its whole length.
size_t give(const std::string& text, char* to, size_t length) {
  snprintf(to, length, "%s", text.c_str());
  return text.size();
}

// Replace the CUDA kernels of the ops of one library ("aten": PyTorch's own).
void replace_kernels(const std::string& owner) {
  auto* library = new torch::Library(torch::Library::IMPL, owner, c10::DispatchKey::CUDA, __FILE__, __LINE__);
  struct Silent : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (!starts_with(name.name, (owner + "::").c_str())) continue;
    auto op = dispatcher.findSchema(name);
    if (!op) continue;
    Kind kind = kind_of(name.name, name.overload_name);
    bool has_kernel = op->hasKernelForDispatchKey(c10::DispatchKey::CUDA);
    if (!has_kernel && kind != Kind::copy && !starts_with(name.name, "aten::convolution")) continue;
    if (computes_nothing(name.name, op->schema())) continue;
    auto functor = std::make_unique<Arithmetic>(*op, kind);
    std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), torch::dispatch(c10::DispatchKey::CUDA, torch::CppFunction::makeFromBoxedFunctor(
                                                                            std::move(functor))));
  }
}

}  // namespace
}  // namespace rehearsal

extern "C" {

// Give PyTorch's CUDA ops their arithmetic. `level`: 0 none, 1 small, 2 all.
void rehearsal_install(int level, uint64_t most_bytes) {
  using namespace rehearsal;
  state().level = (Level)level;
  state().most_bytes = most_bytes;
  replace_kernels("aten");
}

// The same for the ops that another library has registered for CUDA and for the CPU.
void rehearsal_install_ops_of(const char* owner) { rehearsal::replace_kernels(owner); }

// What a kernel moves that a library launches outside PyTorch's ops.
void rehearsal_kernel_moved(int device, double bytes) {
  rehearsal_op_ran(rehearsal::stream_now((c10::DeviceIndex)device), bytes, 0, 0, 1);
}

// Call when the allocator has been initialized. Memory that is allocated in the order of a stream is filled by the runtime.
void rehearsal_watch_allocations() {
  namespace allocator = c10::cuda::CUDACachingAllocator;
  if (allocator::get()->name() == "native") allocator::attachAllocatorTraceTracker(rehearsal::watch_allocation);
}

// The ops that were called and have no arithmetic, as lines `calls op`.
size_t rehearsal_left_out(char* text, size_t length) {
  using namespace rehearsal;
  std::lock_guard<std::mutex> guard(state().mutex);
  std::string all;
  for (const auto& [name, calls] : state().left_out) all += std::to_string(calls) + " " + name + "\n";
  return give(all, text, length);
}

// What memory holds: see ledger.hpp.
void rehearsal_ledger_begin() { rehearsal::begin_ledger(); }
void rehearsal_ledger_step(int steps) { rehearsal::ledger().steps = steps; }
void rehearsal_ledger_optimizer(int is_running) { rehearsal::ledger().in_optimizer = is_running; }
void rehearsal_ledger_mark(const uint64_t* addresses, size_t count, const char* kind) {
  rehearsal::ledger().mark(addresses, count, kind);
}
size_t rehearsal_ledger(int device, int at_peak, char* text, size_t length) {
  return rehearsal::give(rehearsal::ledger().text(device, at_peak), text, length);
}
// The part of a step and the op that run on this thread.
size_t rehearsal_ledger_now(char* text, size_t length) {
  return rehearsal::give(rehearsal::ledger().phase_now() + "\t" + rehearsal::op_now(), text, length);
}

}  // extern "C"
